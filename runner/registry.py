"""Which kernel executes which operator: ``(domain, op_type) -> factory``.

A factory is called once, at load. It returns the action of its step, or refuses the step by name
and attribute (``UnsupportedOperator``); nothing falls back in silence.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from onnx_inplace.compiler import errors, steps
from onnx_inplace.runner import (
    journal,
    operators,
    operators_attention,
    operators_gqa,
    operators_paged_attention,
    operators_pages,
    operators_scatter,
)
from onnx_inplace.runner.actions import Action, Factory, Settings

_lock = threading.Lock()
_factories: dict[tuple[str, str], Factory] = {
    ("onnx_inplace", "CacheUpdate"): operators.cache_update,
    ("onnx_inplace", "Assign"): operators.assign,
    ("onnx_inplace", "CacheReorder"): operators.cache_reorder,
    ("onnx_inplace", "Copy"): operators.copy,
    ("onnx_inplace", "PagedCacheUpdate"): operators_pages.paged_cache_update,
    ("onnx_inplace", "PagedCacheConvert"): operators_pages.paged_cache_convert,
    ("onnx_inplace", "PagedAttention"): operators_paged_attention.paged_attention,
    ("onnx_inplace", "PageGather"): operators_pages.page_gather,
    ("", "TensorScatter"): operators.tensor_scatter,
    ("", "ScatterND"): operators_scatter.scatter_nd,
    ("", "ScatterElements"): operators_scatter.scatter_elements,
    ("", "Attention"): operators_attention.attention,
    ("com.microsoft", "GroupQueryAttention"): operators_gqa.group_query_attention,
}

_NEW = {
    ("onnx_inplace", "Copy"),
    ("onnx_inplace", "PagedAttention"),
    ("onnx_inplace", "PageGather"),
    ("", "Attention"),
    ("com.microsoft", "GroupQueryAttention"),
}


def makes_new(step: steps.Kernel) -> Iterator[int]:
    """Slots whose arrays a step makes in each run: nobody else has them."""
    if (step.domain, step.op_type) not in _NEW:
        return
    for index, slot in enumerate(step.outputs):
        value = None if slot is None else step.values.get(slot)
        if value is None or index in step.roots or value.storage is not steps.Storage.FRESH:
            continue
        assert slot is not None
        yield slot


def register(domain: str, op_type: str, factory: Factory) -> None:
    """Teach the runner an operator.

    ``factory(step, settings)`` is called once for every node of the operator, when a session loads;
    the action that it returns is called with the slots of a run, possibly in several threads at
    once. It reads ``slots[i] for i in step.inputs`` and sets ``slots[i] for i in step.outputs``. An
    aliased output must be the very array of its input, written in place.

    Raises:
        ValueError: the operator has another kernel already. Sessions that are loaded use it.
    """
    with _lock:
        if _factories.setdefault((domain, op_type), factory) is not factory:
            raise ValueError(f"{domain}::{op_type} has another kernel already")


def known(domain: str, op_type: str) -> bool:
    """Whether an operator has a kernel."""
    return (domain, op_type) in _factories


def compile_step(step: steps.Kernel, settings: Settings) -> Action:
    """The action of a step.

    Raises:
        UnsupportedOperator: no kernel is known, or it does not support an attribute or an input of
            this node.
    """
    factory = _factories.get((step.domain, step.op_type))
    if factory is None:
        raise errors.UnsupportedOperator(step.domain, step.op_type, "no kernel is registered")
    return journal.noted(step, factory(step, settings))
