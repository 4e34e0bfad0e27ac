"""``op``: ONNX operators. ``kv``: cache operators."""
from onnxscript import onnx_opset
from onnxscript.values import Opset

from onnx_inplace.compiler import operators
from onnx_inplace.dsl.trace import Operators

OPSET = getattr(onnx_opset, f"opset{operators.OPSET}")
op = Operators(OPSET)
kv = Operators(Opset(operators.DOMAIN, 1))
