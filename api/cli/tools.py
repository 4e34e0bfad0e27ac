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


def _by_path(module: str, function: str, *arguments: Any) -> Tool:
    """A function that reads a file and writes another."""

    def run(data: bytes) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "source.onnx", Path(folder) / "target.onnx"
            source.write_bytes(data)
            getattr(_module(module), function)(str(source), str(target), *arguments)
            return target.read_bytes()

    return run


def _copied(data: bytes) -> bytes:
    copy = _module("onnx").ModelProto()
    copy.CopyFrom(_parsed(data))
    return _bytes(copy)


def _checked(data: bytes) -> bytes:
    model = _parsed(data)
    _module("onnx.checker").check_model(model, full_check=True)
    return _bytes(model)


def _container(data: bytes) -> bytes:
    container = _module("onnx.model_container").ModelContainer()
    container.model_proto = _parsed(data)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        container.save(str(path), all_tensors_to_one_file=True)
        return _bytes(_module("onnx").load(path))


def _ports(model: Any) -> tuple[list[str], list[str]]:
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value.name for value in model.graph.input if value.name not in weights]
    return inputs, [value.name for value in model.graph.output]


def _extract(data: bytes) -> bytes:
    model = _parsed(data)
    return _bytes(_module("onnx.utils").Extractor(model).extract_model(*_ports(model)))


def _extract_model(data: bytes) -> bytes:
    return _by_path("onnx.utils", "extract_model", *_ports(_parsed(data)))(data)


def _merge(data: bytes) -> bytes:
    """With a model behind it that says which shape the first result has."""
    onnx, helper = _module("onnx"), _module("onnx.helper")
    model = _parsed(data)
    result = model.graph.output[0]
    taken = onnx.ValueInfoProto(name="in", type=result.type)
    shape = helper.make_tensor_value_info("out", onnx.TensorProto.INT64, [None])
    graph = helper.make_graph([helper.make_node("Shape", ["in"], ["out"])], "g", [taken], [shape])
    opsets = [o for o in model.opset_import if o.domain in ("", "ai.onnx")]
    behind = helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)
    outputs = [*(value.name for value in model.graph.output), "out"]
    pairs = [(result.name, "in")]
    merge = _module("onnx.compose").merge_models
    return _bytes(merge(model, behind, io_map=pairs, outputs=outputs))


def _next_opset(module: str) -> Tool:
    """To the next opset, or to its own where the tool does not know the next."""

    def run(data: bytes) -> bytes:
        convert = _module(module).convert_version
        opset = next(o.version for o in _parsed(data).opset_import if o.domain in ("", "ai.onnx"))
        newest = _module("onnx").defs.onnx_opset_version()
        try:
            return _bytes(convert(_parsed(data), min(opset + 1, newest)))
        except ValueError:
            model = _parsed(data)
            return _bytes(convert(model, opset) or model)  # None: nothing to convert

    return run


def _onnx_ir(data: bytes) -> bytes:
    ir = _module("onnx_ir")
    return _bytes(ir.to_proto(ir.from_proto(_parsed(data))))


def _onnx_ir_files(data: bytes) -> bytes:
    ir = _module("onnx_ir")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "source.onnx", Path(folder) / "target.onnx"
        source.write_bytes(data)
        ir.save(ir.load(source), target)
        return target.read_bytes()


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


def _through(module: str, function: str, *arguments: Any, **named: Any) -> Tool:
    """A function of a module that takes a model and gives one."""

    def run(data: bytes) -> bytes:
        return _bytes(getattr(_module(module), function)(_parsed(data), *arguments, **named))

    return run


TOOLS: dict[str, Tool] = {
    "protobuf: CopyFrom": _copied,
    "onnx.save, onnx.load": _save_and_load("protobuf"),
    "onnx.save with external data": _external_data,
    "onnx.model_container": _container,
    "onnx textproto": _save_and_load("textproto"),
    "onnx json": _save_and_load("json"),
    "onnx text": _save_and_load("onnxtxt"),
    "onnx.checker": _checked,
    "onnx.shape_inference": _through("onnx.shape_inference", "infer_shapes"),
    "onnx.shape_inference, strict": _through(
        "onnx.shape_inference", "infer_shapes", strict_mode=True, data_prop=True
    ),
    "onnx.shape_inference, files": _by_path("onnx.shape_inference", "infer_shapes_path"),
    "onnx.inliner": _through("onnx.inliner", "inline_local_functions"),
    "onnx.inliner, nothing selected": _through("onnx.inliner", "inline_selected_functions", []),
    "onnx.version_converter": _next_opset("onnx.version_converter"),
    "onnx.compose.add_prefix": _through("onnx.compose", "add_prefix", "p_"),
    "onnx.compose.merge_models": _merge,
    "onnx.utils.Extractor": _extract,
    "onnx.utils.extract_model": _extract_model,
    "onnx_ir": _onnx_ir,
    "onnx_ir, files": _onnx_ir_files,
    "onnxscript.optimizer": _through("onnxscript.optimizer", "optimize"),
    "onnxscript.optimizer, no inlining": _through("onnxscript.optimizer", "optimize", inline=False),
    "onnxscript.rewriter": _through("onnxscript.rewriter", "rewrite"),
    "onnxscript.version_converter": _next_opset("onnxscript.version_converter"),
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
