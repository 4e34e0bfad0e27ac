"""What a model promises: from a declaration to a checked program, to a file, and back."""

from onnx_inplace.compiler.adoption import Adoption, annotate
from onnx_inplace.compiler.errors import explain
from onnx_inplace.compiler.loader import Loaded, load
from onnx_inplace.compiler.planner import plan
from onnx_inplace.compiler.program import CheckedFunction, Declaration, Program, build, save
from onnx_inplace.compiler.recovery import restore
from onnx_inplace.compiler.shapes import ShapesContext
from onnx_inplace.compiler.verifier import verify

__all__ = [
    "Adoption",
    "CheckedFunction",
    "Declaration",
    "Loaded",
    "Program",
    "ShapesContext",
    "annotate",
    "build",
    "explain",
    "load",
    "plan",
    "restore",
    "save",
    "verify",
]
