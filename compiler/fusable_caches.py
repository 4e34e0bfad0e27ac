"""Rules of fused steps for storage of the caller: writes, and attention over what is valid."""

from __future__ import annotations

import onnx_ir as ir

from onnx_inplace.compiler import contract
from onnx_inplace.compiler.fusable_context import Context, Rule, given, only


def _update(node: ir.Node, context: Context) -> str | None:
    if not context.root(node.outputs[0]):
        return "it does not write storage of the caller"
    position = given(node, 2)
    shape = () if position is None else context.shape(position)
    if shape not in ((), (1,)):
        return "rows have positions of their own"
    if position is not None and position.dtype != ir.DataType.INT64:
        return "its position is not INT64"
    if shape == (1,) and (context.shape(node.inputs[0]) or (0,))[0] != 1:
        return "one position for several rows"
    return None


def _attention(node: ir.Node, context: Context) -> str | None:
    if not (context.root(given(node, 1)) and context.root(given(node, 2))):
        return "its keys and values are not storage of the caller"
    if not context.facts.is_kernel(node):
        return "without nonpad_kv_seqlen"
    if any(given(node, k) is not None for k in (3, 4, 5)):
        return "with a mask or past values"
    if node.attributes.get("qk_matmul_output_mode") is not None and len(node.outputs) > 1:
        return "its scores are wanted"
    return only(node, 0)


RULES: dict[tuple[str, str], Rule] = {
    ("", "TensorScatter"): _update,
    (contract.DOMAIN, "CacheUpdate"): _update,
    ("", "Attention"): _attention,
}
