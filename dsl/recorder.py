"""The graph under construction: blocks, names, places, faults.

Knows ONNX values only. What Python values mean beside them is decided in ``literals`` and
``operations``, what Python objects stand for them in ``tensor``.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import typing
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from onnx_inplace.compiler import operators, program
from onnx_inplace.compiler.diagnosis import VARIABLE
from onnx_inplace.compiler.errors import ContractError, Finding, Location
from onnx_inplace.dsl import inference, places
from onnx_inplace.dsl.names import Names

SOURCE = "onnx_inplace.source"  # key in NodeProto.metadata_props: file.py:line
SMALL = 256  # bytes; larger constants of a model are initializers, which a file may keep outside


_SEE = "`onnx-inplace explain E100` shows what the language has."


class Kind(enum.Enum):
    """What is recorded: a function has no initializers."""

    MODEL = "model"
    FUNCTION = "function"


@dataclasses.dataclass(eq=False)
class Block:
    """One graph that is being recorded: of the model, or of a branch or loop body.

    Attributes:
        graph: its inputs, nodes and outputs.
        constants: small constants by content, so that a block holds each once.
        stacked: what ``stack().append`` collected in a loop body, by the stack.
    """

    graph: ir.Graph
    constants: dict[tuple[object, ...], ir.Value] = dataclasses.field(default_factory=dict)
    stacked: dict[object, ir.Value] = dataclasses.field(default_factory=dict)


class Recorder:
    """Records one model or function."""

    def __init__(self, name: str, kind: Kind, opset: int | None, location: Location) -> None:
        self.name, self.kind, self.location = name, kind, location
        self.declared_opset = opset
        self._has_standard = False
        self.names = Names()
        self.blocks: list[Block] = []
        self.findings: list[Finding] = []
        self.place: Location | None = None
        self._reported: dict[object, str] = {}
        self.functions: dict[ir.OperatorIdentifier, program.Declaration] = {}
        self.returned: tuple[tuple[str | None, ...], bool, Location] | None = None
        self._owner: dict[ir.Value, Block] = {}
        self._unknown: dict[ir.Value, None] = {}
        self._anonymous: dict[ir.Value, None] = {}
        self._weak: dict[ir.Value, None] = {}
        self._initializers: dict[object, tuple[object, ir.Value]] = {}

    # -- faults

    def fault(
        self,
        message: str,
        code: str = "E100",
        location: Location | None = None,
        part: str | None = None,
        repair: str | None = None,
    ) -> None:
        """Note a fault; recording goes on, so that the next one is found as well.

        A call is reported once: a helper that thirty layers use has one fault, not thirty. ``part``
        tells several faults of one call apart. ``repair`` is advice for this fault.
        """
        frame = places.user_frame()
        where: object = (frame.f_lasti, part)
        if location is None and self.place is None:
            location = Location(frame.f_code.co_filename, frame.f_lineno)
        else:
            location, where = location or self.place, message
        if self._reported.setdefault((code, location, where), message) is message:
            repair = repair or (_SEE if code == "E100" else None)
            self.findings.append(Finding(code, message, location, repair))

    @contextlib.contextmanager
    def at(self, location: Location) -> Iterator[None]:
        """What is recorded stands at ``location``, wherever the author's code is."""
        before, self.place = self.place, location
        try:
            yield
        finally:
            self.place = before

    def stop(self, message: str, code: str = "E100", repair: str | None = None) -> typing.NoReturn:
        """Note a fault that Python cannot go on from.

        Raises:
            ContractError: always, with all faults so far.
        """
        self.fault(message, code, repair=repair)
        raise ContractError(self.findings)

    def unknown(self, name: str = "unknown") -> ir.Value:
        """What a faulty expression gives: whatever depends on it is not reported again."""
        value = ir.Value(name=name)
        self._unknown[value] = None
        return value

    def is_unknown(self, value: ir.Value) -> bool:
        """Whether ``value`` came out of a fault."""
        return value in self._unknown

    # -- opset

    @property
    def opset(self) -> int:
        """The version of ONNX's own operators in this graph."""
        return self.declared_opset or operators.OPSET

    @property
    def fixed_opset(self) -> int | None:
        """The version, if it is settled: declared, or used."""
        return self.opset if self.declared_opset or self._has_standard else None

    def use_opset(self, version: int, what: str) -> None:
        """``what`` is of this version: so is everything that is recorded, or it is a fault."""
        if self.declared_opset is None and not self._has_standard:
            self.declared_opset = version
        elif self.opset != version:
            self.fault(
                f"{what} is of opset {version}, and what is recorded before it of {self.opset}.",
                repair=f"Let the decorator say `opset={version}`, or use one opset.",
            )

    # -- names

    def value(
        self, stem: str, type_: ir.TypeProtocol | None = None, shape: ir.Shape | None = None
    ) -> ir.Value:
        """A new value with a name of its own."""
        return self.names.value(stem, type_, shape)

    def call_variable(self, value: ir.Value, variable: str) -> None:
        """The author assigned ``value`` to ``variable``: the first name that it is given stays."""
        if value in self._anonymous and self._owner.get(value) is self.blocks[-1]:
            del self._anonymous[value]
            self.names.rename(value, variable)

    def forget_variable(self, value: ir.Value) -> None:
        """``value`` belongs to no variable so far: it gets the name of the next one."""
        self._anonymous[value] = None
        value.meta[VARIABLE] = ""

    # -- blocks

    @contextlib.contextmanager
    def block(self, label: str) -> Iterator[Block]:
        """Record into a new block."""
        block = Block(ir.Graph([], [], nodes=[], name=label))
        self.blocks.append(block)
        try:
            yield block
        finally:
            self.blocks.pop()

    @contextlib.contextmanager
    def reopened(self, block: Block) -> Iterator[None]:
        """Go on recording into ``block``."""
        self.blocks.append(block)
        try:
            yield
        finally:
            self.blocks.pop()

    def add_input(self, block: Block, value: ir.Value, variable: str | None = None) -> ir.Value:
        """Make ``value`` a parameter of ``block``."""
        block.graph.inputs.append(value)
        self._owner[value] = block
        value.meta[VARIABLE] = variable
        if variable is None:
            self.forget_variable(value)
        return value

    def owner(self, value: ir.Value) -> Block | None:
        """The block that made ``value``."""
        return self._owner.get(value)

    def use(self, value: ir.Value) -> ir.Value:
        """``value`` if it can be named here, else an unknown value, and a fault."""
        if value in self._unknown:
            return value
        owner = self._owner.get(value)
        if owner is None:
            self.fault(f"`{value.name}` belongs to another model or function.")
            return self.unknown()
        if not any(owner is block for block in self.blocks):
            self.fault(
                f"{called(value)} was made inside of a block that depends on a tensor, and has "
                "left it through a list, a nonlocal or an attribute.",
                repair="Assign a variable in the block, and read that variable.",
            )
            return self.unknown()
        return value

    # -- weak values: carried Python numbers while their element type is being found out

    def make_weak(self, value: ir.Value) -> None:
        """``value`` takes the element type of what it meets."""
        self._weak[value] = None

    def is_weak(self, value: ir.Value) -> bool:
        """Whether ``value`` stands for a Python number."""
        return value in self._weak

    @contextlib.contextmanager
    def attempt(self) -> Iterator[Attempt]:
        """Record on approval: unless it is kept, names, faults and functions are as before."""
        attempt = Attempt()
        names, initializers = self.names.copy(), dict(self._initializers)
        before = list(self.findings), dict(self.functions), dict(self._reported)
        yield attempt
        if attempt.kept:
            return
        self.names.restore(names)
        self.findings, self.functions, self._reported = before
        for key in [k for k in self._initializers if k not in initializers]:
            _, value = self._initializers.pop(key)
            self.blocks[0].graph.initializers.pop(str(value.name))

    # -- nodes

    def emit(
        self,
        domain: str,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Sequence[ir.Attr] = (),
        *,
        version: int | None = None,
        outputs: int | Sequence[str] = 1,
        location: Location | None = None,
        infer: bool = True,
    ) -> list[ir.Value]:
        """Append a node. Outputs that are only counted can still get the name of a variable."""
        known = [None if v is None else self.use(v) for v in inputs]
        count = outputs if isinstance(outputs, int) else len(outputs)
        if any(v is not None and v in self._unknown for v in known):
            return [self.unknown() for _ in range(count)]
        location = location or self.place or places.user_line()
        stems = [op_type.lower()] * count if isinstance(outputs, int) else list(outputs)
        results = [self.value(stem) for stem in stems]
        version = version if version is not None else self.opset if domain == "" else 1
        self._has_standard = self._has_standard or domain == ""
        node = ir.Node(
            domain,
            op_type,
            known,
            attributes=attributes,
            outputs=results,
            version=version,
            metadata_props={SOURCE: places.source_place(location)},
        )
        node.meta[program.LOCATION] = location
        block = self.blocks[-1]
        block.graph.append(node)
        for value, stem in zip(results, stems, strict=True):
            self._owner[value] = block
            value.meta[VARIABLE] = stem
            if isinstance(outputs, int):
                self.forget_variable(value)
        if infer:
            try:
                inference.infer(node)
            except inference.Mismatch as error:
                self.fault(str(error), "E102", location)
                return [self._as_unknown(v) for v in results]
        return results

    def _as_unknown(self, value: ir.Value) -> ir.Value:
        self._unknown[value] = None
        return value

    def constant(self, tensor: ir.TensorProtocol) -> ir.Value:
        """A value that is known now. Content that is equal is stored once."""
        if tensor.nbytes > SMALL and self.kind is Kind.MODEL:
            return self.initializer(tensor, "constant")
        block = self.blocks[-1]
        key: tuple[object, ...] = (id(tensor),)
        if tensor.nbytes <= SMALL:
            key = (tensor.dtype, tuple(tensor.shape.numpy()), tensor.tobytes())
        found = block.constants.get(key)
        if found is None:
            attribute = ir.AttrTensor("value", tensor)
            [found] = self.emit("", "Constant", [], [attribute], outputs=1, infer=False)
            self._anonymous.pop(found, None)
            found.type, found.shape = ir.TensorType(tensor.dtype), _shape(tensor)
            found.const_value = tensor
            block.constants[key] = found
        return found

    def initializer(self, tensor: ir.TensorProtocol, name: str, *, exact: bool = False) -> ir.Value:
        """An initializer of the model, one per tensor object.

        ``exact``: the author chose the name, and two tensors cannot share it.
        """
        source = tensor.raw if isinstance(tensor, ir.Tensor) else tensor
        found = self._initializers.get(id(source))
        if found is not None:
            return found[1]
        holder = self.names.holder(name)
        if exact and holder is not None and holder.producer() is None:
            self.fault(f"Two weights, or a weight and a parameter, are called `{name}`.")
            return self.unknown(name)
        value = self.value("constant", ir.TensorType(tensor.dtype), _shape(tensor))
        if exact:
            self.names.take(value, name)  # a variable of that name gives way
        value.const_value = tensor
        self.blocks[0].graph.register_initializer(value)
        self._owner[value] = self.blocks[0]
        value.meta[VARIABLE] = value.name
        self._initializers[id(source)] = (source, value)  # kept: its id must not be given again
        return value


@dataclasses.dataclass
class Attempt:
    """Whether what was recorded on approval stays."""

    kept: bool = False


def _shape(tensor: ir.TensorProtocol) -> ir.Shape:
    return ir.Shape([int(d) for d in tensor.shape.numpy()])


def called(value: ir.Value) -> str:
    """What a message calls ``value``: the author's variable, or the operator that made it."""
    variable, producer = value.meta.get(VARIABLE), value.producer()
    if not variable and producer is not None:
        return f"the result of {producer.op_type}"
    return f"`{variable or value.name}`"


_current: contextvars.ContextVar[Recorder] = contextvars.ContextVar("recorder")


def current() -> Recorder:
    """The recorder of the model that is being recorded.

    Raises:
        ContractError: none is.
    """
    recorder = _current.get(None)
    if recorder is None:
        message = "Tensors can only be used while a @model or @function is recorded."
        raise ContractError([Finding("E100", message, places.user_line())])
    return recorder


def is_recording() -> bool:
    """Whether a model or function is being recorded."""
    return _current.get(None) is not None


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Make ``recorder`` the current one."""
    token = _current.set(recorder)
    try:
        yield recorder
    finally:
        _current.reset(token)
