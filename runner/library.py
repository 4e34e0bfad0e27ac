"""Loading of sub-sessions into onnxruntime: threads, and one copy of every weight."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import onnx
import onnx_ir as ir
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as ort

from onnx_inplace.compiler import errors
from onnx_inplace.compiler.steps import SubSession, Weight
from onnx_inplace.runner import pools
from onnx_inplace.runner.native import session
from onnx_inplace.runner.native.operators import Domain

T = TypeVar("T", covariant=True)
_SILENT = 4  # log severity: fatal
_NO_PACKING = "session.disable_prepacking"
_INTEGERS = {
    onnx.TensorProto.DataType.Value(name)
    for name in ("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
}
# Where the bytes of a weight in memory would stand: beyond the end of a file that exists. So an
# optimizer that asks the model for them, not the session, fails; it must not read something else.
_NOWHERE = {"location": Path(__file__).name, "offset": str(1 << 48)}


@functools.cache
def _share_arena() -> None:
    """One arena for the sub-sessions of the process, made once, in one region of addresses.

    Sub-sessions run one after the other and hold nothing between runs, so one arena holds what the
    largest needs, and ``compiler.subsession_memory`` can say what that is; with an arena each, the
    31 sub-sessions of a decoder held more than a gigabyte. For prompts of 512 tokens 28 MB are
    stated; resident memory of a warmed process grew by 26 MB so, by 20 to 41 with a region for
    every request that finds no room, and by 112 without an arena, because malloc finds no room for
    large blocks among small ones. None of them is faster than another.
    """
    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    ort.create_and_register_allocator(memory, ort.OrtArenaCfg(session.REGION))


class _Load(Protocol[T]):
    def __call__(self, step: SubSession, *, copied: bool) -> T:
        """Load a model; with ``copied``, onnxruntime may copy weights."""


class Library:
    """Loads the sub-sessions of one session.

    Each sub-session has threads of its own, which sleep when it is not running: sub-sessions of one
    session run one after the other, so at most ``threads`` are awake. If the caller has given
    onnxruntime one pool for the process, they use that: see ``pools``.
    """

    def __init__(self, threads: int):
        self._threads = threads
        self._values: dict[int, tuple[ir.TensorProtocol, onnxruntime.OrtValue]] = {}
        self._files: dict[Path, tuple[int, ...] | None] = {}

    def expect(self, step: SubSession) -> None:
        """Remember how the files of a sub-session's weights are, because it is loaded later."""
        for path in _files(step):
            self._files.setdefault(path, _state(path))

    def load(self, step: SubSession) -> onnxruntime.InferenceSession:
        """A session that is ready to run.

        Raises:
            errors.UnsupportedOperator: onnxruntime does not know an operator, or not for these
            types and shapes.
            errors.WeightsError: a file of weights is another one since :meth:`expect`.
        """
        return self._tried(step, self._load)

    def load_joined(
        self,
        step: SubSession,
        shared: session.Environment,
        operators: Callable[[], Domain],
    ) -> session.Session:
        """A session with operators of ours, through the C interface.

        Args:
            step: with nodes of a custom domain.
            shared: where sessions of that interface live.
            operators: makes that domain, for one session.

        Raises:
            errors.InplaceError: as :meth:`load`.
        """

        def load(step: SubSession, *, copied: bool) -> session.Session:
            proto, entries, given = self._declare(step)
            options = session.Options(shared, self._threads)
            try:
                for key, text in (entries | pools.spinning(self._threads, pools.JOINED)).items():
                    options.set(key, text)
                weights = {w.name: _place(self._value(w)) for w in given}
                if copied:
                    options.copy(weights)
                else:
                    options.share(weights)
                    if not step.packs:
                        options.set(_NO_PACKING, "1")
                domain = operators()
                domain.register(options.at)
            except BaseException:
                options.release()
                raise
            model = proto.SerializeToString()
            return session.Session(shared, options, model, domain.at, domain.kept, self._values)

        return self._tried(step, load)

    def _tried(self, step: SubSession, load: _Load[T]) -> T:
        for path in _files(step):
            if _state(path) != self._files.get(path, _state(path)):
                raise errors.WeightsError(
                    f"`{path}` has changed since the session was loaded, and this run is the first "
                    "one that needs weights of it: make a new session of the model"
                )
        try:
            try:
                return load(step, copied=False)
            except ort.Fail:
                # an optimizer asked for the content of a weight that is in memory only
                return load(step, copied=True)
        except (ort.Fail, ort.NotImplemented, ort.InvalidGraph) as error:
            raise _unsupported(step, str(error)) from None

    def _declare(self, step: SubSession) -> tuple[onnx.ModelProto, dict[str, str], list[Weight]]:
        """The model, entries of the configuration, and the weights that we have to bring."""
        proto = onnx.ModelProto.FromString(step.model)
        folders = {
            os.fspath(w.tensor.base_dir) if isinstance(w.tensor, ir.ExternalTensor) else None
            for w in step.weights
        }
        mapped = len(folders) == 1 and None not in folders
        folder = str(folders.pop() if mapped else Path(__file__).parent)
        entries = {"session.model_external_initializers_file_folder_path": folder}
        # what stands in one file and is used once, onnxruntime maps itself
        given = [w for w in step.weights if w.shared or not mapped]
        if not mapped:
            _refer_nowhere(proto, {w.name for w in given})
        return proto, entries, given

    def _load(self, step: SubSession, *, copied: bool) -> onnxruntime.InferenceSession:
        proto, entries, given = self._declare(step)
        options = _options(1 if _counts_only(proto.graph) else self._threads)
        for key, text in entries.items():
            options.add_session_config_entry(key, text)
        values = [self._value(w) for w in given]
        if copied:
            options.add_external_initializers([w.name for w in given], values)
        else:
            for weight, value in zip(given, values, strict=True):
                options.add_initializer(weight.name, value)
            if not step.packs:
                options.add_session_config_entry(_NO_PACKING, "1")
        return onnxruntime.InferenceSession(
            proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def _value(self, weight: Weight) -> onnxruntime.OrtValue:
        """The OrtValue over the one array of a weight; onnxruntime keeps no reference to it."""
        tensor = weight.tensor
        held = self._values.get(id(tensor))
        if held is None:
            value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
                tensor.numpy(), tensor.dtype.value
            )
            held = self._values[id(tensor)] = tensor, value
        return held[1]


def _files(step: SubSession) -> set[Path]:
    return {Path(w.tensor.path) for w in step.weights if isinstance(w.tensor, ir.ExternalTensor)}


def _state(path: Path) -> tuple[int, ...] | None:
    """What tells a file from another one in its place; None: it is not there."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


def _options(threads: int) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = _SILENT
    pools.set_threads(options, threads)
    _share_arena()
    options.add_session_config_entry("session.use_env_allocators", "1")
    # No block for all of a run, as the last run with these shapes needed it: it would stand
    # beside what the first one left behind.
    options.enable_mem_pattern = False
    return options


def _place(value: onnxruntime.OrtValue) -> session.Weight:
    return session.Weight(value.element_type(), tuple(value.shape()), value.data_ptr())


def _counts_only(graph: onnx.GraphProto) -> bool:
    """Whether all that goes in and out are integers: positions, lengths, masks, indices.

    Nothing of it is worth waking a second thread for.
    """
    ports = {v.type.tensor_type.elem_type for v in (*graph.input, *graph.output)}
    return ports | {t.data_type for t in graph.initializer} <= _INTEGERS


def _unsupported(step: SubSession, message: str) -> errors.UnsupportedOperator:
    """Which node onnxruntime means; its names are those that the plan gave.

    Of an operator that it does not know it says domain and type.
    """
    nodes = list(_nodes(onnx.ModelProto.FromString(step.model).graph))
    named = (n for n in nodes if n.name and n.name in message)
    typed = (n for n in nodes if f"{n.domain or 'ai.onnx'}:{n.op_type}(" in message)
    found = next(named, None) or next(typed, onnx.NodeProto())
    reason = message.split(" : ")[-1]
    return errors.UnsupportedOperator(found.domain, found.op_type, f"onnxruntime: {reason}")


def _refer_nowhere(proto: onnx.ModelProto, names: set[str]) -> None:
    for tensor in proto.graph.initializer:
        if tensor.name in names:
            del tensor.external_data[:]
            for key, text in _NOWHERE.items():
                tensor.external_data.add(key=key, value=text)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _nodes(attribute.g)
