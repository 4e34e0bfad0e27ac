"""What people do to models between the author and the runner: bytes of a model in, bytes out.

Every tool is one that reads or writes ONNX files in the wild. Nothing of them is loaded before it
is used.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Tool = Callable[[bytes], bytes]


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _parsed(data: bytes) -> Any:
    return _module("onnx").load_model_from_string(data)


def _bytes(model: Any) -> bytes:
    return bytes(model.SerializeToString())


def _save_and_load(form: str) -> Tool:
    def run(data: bytes) -> bytes:
        onnx = _module("onnx")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model"
            onnx.save(_parsed(data), path, format=form)
            return _bytes(onnx.load(path, format=form))

    return run


def _external_data(data: bytes) -> bytes:
    onnx = _module("onnx")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(_parsed(data), path, save_as_external_data=True, size_threshold=0)
        return _bytes(onnx.load(path))


def _extract(data: bytes) -> bytes:
    model = _parsed(data)
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value.name for value in model.graph.input if value.name not in weights]
    outputs = [value.name for value in model.graph.output]
    return _bytes(_module("onnx.utils").Extractor(model).extract_model(inputs, outputs))


def _next_opset(data: bytes) -> bytes:
    model = _parsed(data)
    opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    newest = _module("onnx").defs.onnx_opset_version()
    convert = _module("onnx.version_converter").convert_version
    return _bytes(convert(model, min(opset + 1, newest)))


def _onnx_ir(data: bytes) -> bytes:
    ir = _module("onnx_ir")
    return _bytes(ir.to_proto(ir.from_proto(_parsed(data))))


def _onnxruntime(level: str) -> Tool:
    def run(data: bytes) -> bytes:
        onnxruntime = _module("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            options.optimized_model_filepath = str(path)
            onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
            return path.read_bytes()

    return run


def _through(module: str, function: str, *arguments: Any) -> Tool:
    """A function of a module that takes a model and gives one."""

    def run(data: bytes) -> bytes:
        return _bytes(getattr(_module(module), function)(_parsed(data), *arguments))

    return run


TOOLS: dict[str, Tool] = {
    "onnx.save, onnx.load": _save_and_load("protobuf"),
    "onnx.save with external data": _external_data,
    "onnx textproto": _save_and_load("textproto"),
    "onnx json": _save_and_load("json"),
    "onnx.shape_inference": _through("onnx.shape_inference", "infer_shapes"),
    "onnx.inliner": _through("onnx.inliner", "inline_local_functions"),
    "onnx.version_converter": _next_opset,
    "onnx.compose.add_prefix": _through("onnx.compose", "add_prefix", "p_"),
    "onnx.utils.Extractor": _extract,
    "onnx_ir": _onnx_ir,
    "onnxscript.optimizer": _through("onnxscript.optimizer", "optimize"),
    "onnxscript.rewriter": _through("onnxscript.rewriter", "rewrite"),
    "onnxruntime, saved, no optimization": _onnxruntime("ORT_DISABLE_ALL"),
    "onnxruntime, saved, basic": _onnxruntime("ORT_ENABLE_BASIC"),
    "onnxruntime, saved, all": _onnxruntime("ORT_ENABLE_ALL"),
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Tools warn and log about what they do not know; the report says what came of it."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
