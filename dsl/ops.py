"""``op``: ONNX operators. ``kv``: cache operators."""
import onnx
from onnxscript import onnx_opset
from onnxscript.values import Opset

from onnx_inplace.compiler import operators
from onnx_inplace.dsl.trace import Operators

for _schema in operators.SCHEMAS.values():
    if not onnx.defs.has(_schema.name, _schema.domain):
        onnx.defs.register_schema(_schema)

OPSET = getattr(onnx_opset, f"opset{operators.OPSET}")
op = Operators(OPSET)
kv = Operators(Opset(operators.DOMAIN, 1))
