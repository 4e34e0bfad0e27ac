"""Which values have the same shape in all runs with the same input dimensions.

The buffers of such values can be prepared once; others are allocated by whoever computes them. The
question is answered on the safe side: a value is fixed if inference found each dimension, or if it
comes from fixed values by an operator whose result shapes follow from shapes, or from contents
that are themselves fixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx
import onnx_ir as ir

from onnx_inplace.compiler import control
from onnx_inplace.compiler.knowledge import RANDOM

# Inputs whose content decides the shape of a result. None: any input may.
_CONTENT: dict[str, tuple[int, ...] | None] = {
    "AffineGrid": (1,),
    "BlackmanWindow": (0,),
    "CenterCropPad": (1,),
    "Col2Im": (1, 2),
    "Compress": None,
    "ConcatFromSequence": None,
    "ConstantOfShape": (0,),
    "DFT": (1, 2),
    "Expand": (1,),
    "HammingWindow": (0,),
    "HannWindow": (0,),
    "If": None,
    "ImageDecoder": None,
    "Loop": None,
    "MaxUnpool": (2,),
    "MelWeightMatrix": (0, 1),
    "NonMaxSuppression": None,
    "NonZero": None,
    "OneHot": (1,),
    "OptionalGetElement": None,
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "ReduceL1": (1,),
    "ReduceL2": (1,),
    "ReduceLogSum": (1,),
    "ReduceLogSumExp": (1,),
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceProd": (1,),
    "ReduceSum": (1,),
    "ReduceSumSquare": (1,),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "Scan": None,
    "SequenceAt": None,
    "SequenceMap": None,
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "StringSplit": None,
    "Tile": (1,),
    "TopK": (1,),
    "Unique": None,
    "Unsqueeze": (1,),
    "Upsample": (1,),
}
# Inputs whose shape decides the shapes of all results, where not all of them do.
_SHAPE: dict[str, tuple[int, ...]] = {
    "Attention": (0, 1, 2, 4, 5),
    "BatchNormalization": (0,),
    "Clip": (0,),
    "CumSum": (0,),
    "Dropout": (0,),
    "GroupNormalization": (0,),
    "InstanceNormalization": (0,),
    "LayerNormalization": (0,),
    "QuantizeLinear": (0,),
    "DequantizeLinear": (0,),
    "RMSNormalization": (0,),
    "RotaryEmbedding": (0,),
    "ScatterElements": (0,),
    "ScatterND": (0,),
    "TensorScatter": (0,),
    "Trilu": (0,),
}
_RESULT_FOLLOWS_SHAPES = {
    ("com.microsoft", name)
    for name in (
        "BiasGelu",
        "FastGelu",
        "FusedMatMul",
        "Gelu",
        "GroupQueryAttention",
        "MatMulNBits",
        "MultiHeadAttention",
        "QuickGelu",
        "RotaryEmbedding",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
    )
}


class FixedShapes:
    """The values of a flat graph, bodies included, whose shape the input dimensions decide."""

    def __init__(self, graph: ir.Graph):
        self._dims = {
            d.value for v in graph.inputs for d in (v.shape or ()) if isinstance(d, ir.SymbolicDim)
        }
        self._dims.discard(None)
        self._shape: set[ir.Value] = {*graph.inputs, *graph.initializers.values()}
        self._content: set[ir.Value] = set(graph.initializers.values())
        self._visit(graph)

    def __contains__(self, value: ir.Value) -> bool:
        """Whether the shape of ``value`` follows from the input dimensions."""
        return value in self._shape

    def known(self, value: ir.Value) -> bool:
        """Whether inference found each dimension, as a number or as a dimension of an input."""
        return value.shape is not None and all(
            isinstance(d, int) or d.value in self._dims for d in value.shape
        )

    def _visit(self, graph: ir.Graph) -> None:
        for node in graph:
            bodies = control.bodies(node)
            for body in bodies:  # a formal's shape may change from round to round
                self._shape.update(v for v in body.inputs if self.known(v))
                self._visit(body)
            if not bodies and self._content_follows(node):
                self._content.update(node.outputs)
            follows = self._shape_follows(node)
            self._shape.update(v for v in node.outputs if follows or self.known(v))

    def _shape_follows(self, node: ir.Node) -> bool:
        deciding = _SHAPE.get(node.op_type, range(len(node.inputs)))
        if not all(v is None or v in self._shape for v in _at(node.inputs, deciding)):
            return False
        if node.domain:
            return (node.domain, node.op_type) in _RESULT_FOLLOWS_SHAPES
        ports = _CONTENT.get(node.op_type, ())
        if ports is None:
            return False
        return self._all_content(_at(node.inputs, ports))

    def _content_follows(self, node: ir.Node) -> bool:
        if node.domain == "" and node.op_type in ("Shape", "Size"):
            return node.inputs[0] in self._shape
        if node.domain or node.op_type in RANDOM or not onnx.defs.has(node.op_type):
            return False
        return self._all_content(node.inputs)

    def _all_content(self, values: Iterable[ir.Value | None]) -> bool:
        return all(v is None or v in self._content for v in values)


def _at(values: Sequence[ir.Value | None], ports: Iterable[int]) -> list[ir.Value | None]:
    return [values[p] for p in ports if p < len(values)]
