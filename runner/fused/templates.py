"""Which template writes the instructions of which operation: ``(domain, op_type) -> template``.

A template is called once for each operation of a fused step, when the shapes of a run are known. It
reads arrays (``builder.array``), asks for memory for results (``builder.result``) or names other
bytes (``builder.view``), and emits instructions. What it cannot do with these shapes it refuses:
``table.NotFused``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from onnx_inplace.compiler import contract, fused
from onnx_inplace.compiler.fused import Operation
from onnx_inplace.runner.fused import attending, caches, elementwise, products, rows, shaping
from onnx_inplace.runner.fused.table import Builder, NotFused

Template = Callable[[Builder, Operation], None]

_lock = threading.Lock()
_templates: dict[tuple[str, str], Template] = {
    ("", "Identity"): shaping.reshape,
    ("", "Reshape"): shaping.reshape,
    ("", "Flatten"): shaping.reshape,
    ("", "Squeeze"): shaping.reshape,
    ("", "Unsqueeze"): shaping.reshape,
    ("", "Transpose"): shaping.transpose,
    ("", "Split"): shaping.split,
    ("", "Slice"): shaping.slice_,
    ("", "Concat"): shaping.concat,
    ("", "Cast"): shaping.cast,
    ("", "Gather"): shaping.gather,
    ("", "RMSNormalization"): rows.norm,
    ("", "SimplifiedLayerNormalization"): rows.norm,
    ("", "LayerNormalization"): rows.norm,
    ("", "RotaryEmbedding"): rows.rotary,
    (fused.DOMAIN, "Product"): products.product,
    ("", "TensorScatter"): caches.update,
    (contract.DOMAIN, "CacheUpdate"): caches.update,
    ("", "Attention"): attending.attention,
    **{("", name): elementwise.binary for name in elementwise.BINARY},
    **{("", name): elementwise.unary for name in elementwise.UNARY},
    **{(fused.DOMAIN, name): elementwise.unary for name in elementwise.UNARY},
    (fused.DOMAIN, "Gated"): elementwise.gated,
}


def register(domain: str, op_type: str, template: Template) -> None:
    """Teach fused steps an operator; ``compiler.fusable`` needs a rule for it.

    Raises:
        ValueError: the operator has another template already.
    """
    with _lock:
        if _templates.setdefault((domain, op_type), template) is not template:
            raise ValueError(f"{domain}::{op_type} has another template already")


def write(builder: Builder, operation: Operation) -> None:
    """The instructions of one operation.

    Raises:
        NotFused: there is no template, or not for these shapes.
    """
    template = _templates.get((operation.domain, operation.op_type))
    if template is None:
        raise NotFused(f"{operation.domain}::{operation.op_type} has no template")
    template(builder, operation)
