"""Which template writes the instructions of which operation: ``(domain, op_type) -> template``.

A template is called once for each operation of a fused step, when the shapes of a run are known. It
reads arrays (``builder.array``), asks for memory for results (``builder.result``) or names other
bytes (``builder.view``), and emits instructions. What it cannot do with these shapes it refuses:
``table.NotFused``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from onnx_inplace.compiler import contract, fusable, fused
from onnx_inplace.compiler.fusable_context import Rule
from onnx_inplace.compiler.fused import Operation
from onnx_inplace.numba_kernels.memory import OnDemand
from onnx_inplace.runner.fused import (
    attending,
    caches,
    elementwise,
    grouped,
    paging,
    products,
    reducing,
    rows,
    shaping,
)
from onnx_inplace.runner.fused.table import Builder, NotFused
from onnx_inplace.runner.fused.template import Loading, Template, Write

_MICROSOFT = "com.microsoft"

_lock = threading.Lock()
_templates: dict[tuple[str, str], Write] = {
    **{("", name): shaping.reshape for name in ("Identity", "Reshape", "Flatten")},
    **{("", name): shaping.reshape for name in ("Squeeze", "Unsqueeze")},
    ("", "Transpose"): shaping.transpose,
    ("", "Split"): shaping.split,
    ("", "Slice"): shaping.slice_,
    ("", "Concat"): shaping.concat,
    ("", "Cast"): shaping.cast,
    ("", "Gather"): shaping.gather,
    **{("", name): elementwise.binary for name in elementwise.BINARY},
    **{("", name): elementwise.unary for name in elementwise.STANDARD},
    **{(fused.DOMAIN, name): elementwise.unary for name in elementwise.ACTIVATIONS},
    (fused.DOMAIN, "Gated"): elementwise.gated,
    ("", "Swish"): elementwise.swish,
    (_MICROSOFT, "QuickGelu"): elementwise.swish,
    (_MICROSOFT, "BiasGelu"): elementwise.biased_gelu,
    (_MICROSOFT, "FastGelu"): elementwise.biased_gelu,
    ("", "Pow"): elementwise.power,
    ("", "RMSNormalization"): rows.norm,
    ("", "SimplifiedLayerNormalization"): rows.norm,
    ("", "LayerNormalization"): rows.norm,
    (_MICROSOFT, "SkipLayerNormalization"): rows.skip_norm,
    (_MICROSOFT, "SkipSimplifiedLayerNormalization"): rows.skip_norm,
    ("", "RotaryEmbedding"): rows.rotary,
    (_MICROSOFT, "RotaryEmbedding"): rows.rotary,
    (fused.DOMAIN, "Turn"): rows.turn,
    **{("", name): reducing.reduce for name in reducing.REDUCTIONS},
    ("", "Softmax"): reducing.softmax,
    ("", "ArgMax"): reducing.argmax,
    (fused.DOMAIN, "Product"): products.product,
    ("", "TensorScatter"): caches.update,
    (contract.DOMAIN, "CacheUpdate"): caches.update,
    ("", "Attention"): attending.attention,
    (_MICROSOFT, "GroupQueryAttention"): grouped.grouped,
    (contract.DOMAIN, "PagedCacheUpdate"): paging.update,
    (contract.DOMAIN, "PagedAttention"): paging.attention,
}


def register(domain: str, op_type: str, rule: Rule, template: Write) -> None:
    """Teach fused steps an operator: which nodes of it they can execute, and how.

    Args:
        domain: of the operator.
        op_type: its name.
        rule: why a node cannot be executed, or None. It is asked when a plan is made.
        template: writes the instructions of a node that the rule accepts. A plain function does:
            then its kernels are compiled when the first run that needs them begins, not when the
            session loads, as those of a ``Template`` are.

    Raises:
        ValueError: the operator has another rule or template already.
    """
    with _lock:
        fusable.register(domain, op_type, rule)
        if _templates.setdefault((domain, op_type), template) is not template:
            raise ValueError(f"{domain}::{op_type} has another template already")


def operators() -> frozenset[tuple[str, str]]:
    """Operators that have a template; those of ``fused.DOMAIN`` stand for patterns."""
    with _lock:
        return frozenset(_templates)


def write(builder: Builder, operation: Operation) -> None:
    """The instructions of one operation.

    Raises:
        NotFused: there is no template, or not for these shapes.
    """
    _find(operation)(builder, operation)


def kernels(loading: Loading, operation: Operation) -> Iterator[OnDemand]:
    """Kernels that the instructions of one operation may name.

    Raises:
        NotFused: there is no template, or not for these weights.
    """
    template = _find(operation)
    if isinstance(template, Template):
        yield from template.kernels(loading, operation)


def _find(operation: Operation) -> Write:
    template = _templates.get((operation.domain, operation.op_type))
    if template is None:
        raise NotFused(f"{operation.domain}::{operation.op_type} has no template")
    return template
