"""What is known of every value of a model: element type, symbolic shape, and whose storage it is.

The library's inference and ``extents`` find sizes; here names of one storage are made to agree, in
both directions: what is learnt of an updated cache is known of the cache, and the reverse. So all
names of one class have one shape, with the same symbols, through If, Loop, Scan and calls (which
are inlined: names are those of the flat model). Holds names and constraints only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import onnx_ir as ir

from onnx_inplace.compiler import classes, extents, loader, sizes
from onnx_inplace.compiler.contract import Effect, rule
from onnx_inplace.compiler.control import bodies, is_control
from onnx_inplace.compiler.errors import ContractError, Finding
from onnx_inplace.compiler.sizes import Size


class SymShape(tuple[Size, ...]):
    """Sizes: numbers, names of dimensions, and arithmetic of those."""

    __slots__ = ()

    def __str__(self) -> str:
        """As an author would write it."""
        return f"[{', '.join(map(str, self))}]"


@dataclasses.dataclass(frozen=True, slots=True)
class SymTensor:
    """A tensor. ``dtype`` and ``shape`` are None where nothing is known, not even the rank."""

    dtype: ir.DataType | None
    shape: SymShape | None


@dataclasses.dataclass(frozen=True, slots=True)
class SymSequence:
    """A sequence of tensors."""

    element: SymTensor


@dataclasses.dataclass(frozen=True, slots=True)
class AliasClass:
    """All names of one storage.

    Attributes:
        root: the graph input that owns it.
        versions: names by version, oldest first; the root is in the first.
    """

    root: str
    versions: tuple[tuple[str, ...], ...]

    def __iter__(self) -> Iterator[str]:
        """Names in order of version."""
        return (name for names in self.versions for name in names)


@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """Two sizes that must be equal in every run. ``source`` says which names demand it."""

    left: Size
    right: Size
    source: str

    def __str__(self) -> str:
        return f"{self.left} == {self.right} ({self.source})"


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One fact when it was learnt, and which node or declaration it comes from."""

    name: str
    fact: str
    source: str

    def __str__(self) -> str:
        return f"{self.name}: {self.fact} ({self.source})"


class ShapesContext:
    """Shapes and alias classes of the values of one model, by name.

    Example:
        shapes = ShapesContext()
        shapes.compute("decode.onnx")
        shapes.get("updated").shape, shapes.root("updated")
    """

    def __init__(self, *, log: bool = False):
        """``log``: keep ``events``."""
        self._log = log
        self._clear()

    def _clear(self) -> None:
        self.constraints: list[Constraint] = []
        self.events: list[Event] = []
        self._facts: dict[str, SymTensor | SymSequence] = {}
        self._root: dict[str, str] = {}
        self._classes: dict[str, AliasClass] = {}
        self._same: dict[str, Size] = {}  # a symbol -> what it is, see _resolve

    def names(self) -> tuple[str, ...]:
        """All values of the flat model, in order of the program."""
        return tuple(self._facts)

    def has(self, name: str) -> bool:
        """Whether there is such a value."""
        return name in self._facts

    def get(self, name: str) -> SymTensor | SymSequence:
        """What is known of a value.

        Raises:
            KeyError: there is no such value.
        """
        return self._facts[name]

    def root(self, name: str) -> str | None:
        """The graph input whose storage a value is; None: storage of its own."""
        if name not in self._facts:
            raise KeyError(name)
        return self._root.get(name)

    def alias_class(self, name: str) -> AliasClass:
        """All names of the storage of a value.

        Raises:
            KeyError: there is no such value, or it is storage of its own.
        """
        return self._classes[self._root[name]]

    def compute(self, model: loader.Source) -> None:
        """Find all facts of a model; forgets those of another.

        Raises:
            errors.ContractError: the model breaks a rule; of shapes: E102.
        """
        self._clear()
        loaded = loader.load(model)
        graph, aliases = loaded.model.graph, loaded.aliases
        values = list(_values(graph))
        partials = {v: _whole(v, loaded.extents) for v in values}
        for value, shape in partials.items():
            self._note(str(value.name), str(shape), _origin(value))
        findings = [
            finding
            for one, other in _pairs(graph, aliases.source)
            for finding in self._agree(other, one, partials)
        ]
        if findings:
            raise ContractError(findings)
        for needed in aliases.equalities:
            left, right = partials[needed.left], partials[needed.right]
            if left is not None and right is not None:
                one, other = left[needed.left_axis], right[needed.right_axis]
                if self._resolve(one) != self._resolve(other):
                    text = f"`{needed.left.name}` and `{needed.right.name}`"
                    self.constraints.append(Constraint(one, other, text))
        for value in values:
            self._facts[str(value.name)] = self._fact(value, partials[value])
        self._collect(aliases.root, aliases.version)

    def apply(self, model: loader.Loaded | ir.Model) -> None:
        """Write what is known into the values of a model, where a value of that name is."""
        graph = (model.model if isinstance(model, loader.Loaded) else model).graph
        for value in _values(graph):
            fact = self._facts.get(str(value.name))
            if not isinstance(fact, SymTensor):
                continue
            if fact.dtype is not None and value.type is None:
                value.type = ir.TensorType(fact.dtype)
            if fact.shape is not None:
                value.shape = ir.Shape([s if isinstance(s, int) else str(s) for s in fact.shape])

    # -- agreement of names of one storage

    def _agree(
        self, value: ir.Value, source: ir.Value, partials: dict[ir.Value, SymShape | None]
    ) -> Iterator[Finding]:
        one, other = partials.get(source), partials.get(value)
        if one is None or other is None:
            partials[value] = partials[source] = one if other is None else other
            return
        what = f"`{value.name}` is the storage of `{source.name}`"
        if len(one) != len(other):
            yield Finding("E102", f"{what}, but has {len(other)} dimensions, not {len(one)}.")
            return
        for a, b in zip(one, other, strict=True):
            if not self._unify(a, b, what):
                yield Finding("E102", f"{what}, but has a size of {b} where that has {a}.")

    def _unify(self, a: Size, b: Size, what: str) -> bool:
        """Let two sizes be one; False where they cannot."""
        a, b = self._resolve(a), self._resolve(b)
        if a == b:
            return True
        if isinstance(a, int) and isinstance(b, int):
            return False
        if isinstance(a, str) and isinstance(b, int):
            a, b = b, a
        if isinstance(b, str):
            self._same[b] = a  # the older name stays
        self.constraints.append(Constraint(a, b, what))
        self._note(str(b), f"is {a}", what)
        return True

    def _resolve(self, size: Size) -> Size:
        """A size with all that is known of its symbols put in."""
        if isinstance(size, str):
            return self._resolve(self._same[size]) if size in self._same else size
        if isinstance(size, sizes.Operation):
            left, right = self._resolve(size.left), self._resolve(size.right)
            return sizes.operation(size.operator, left, right)
        return size

    def _fact(self, value: ir.Value, shape: SymShape | None) -> SymTensor | SymSequence:
        resolved = None if shape is None else SymShape(self._resolve(s) for s in shape)
        tensor = SymTensor(value.dtype, resolved)
        return SymSequence(tensor) if isinstance(value.type, ir.SequenceType) else tensor

    def _collect(self, root: dict[ir.Value, ir.Value], version: dict[ir.Value, int]) -> None:
        members: dict[str, dict[int, list[str]]] = {}
        for value, owner in root.items():
            name = str(value.name)
            self._root[name] = str(owner.name)
            members.setdefault(str(owner.name), {}).setdefault(version[value], []).append(name)
        for owner_name, by_version in members.items():
            ordered = tuple(tuple(by_version[k]) for k in sorted(by_version))
            self._classes[owner_name] = AliasClass(owner_name, ordered)

    def _note(self, name: str, fact: str, source: str) -> None:
        if self._log:
            self.events.append(Event(name, fact, source))


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Every value of a graph and of its bodies, in order of the program."""
    yield from graph.inputs
    yield from (v for v in graph.initializers.values() if not v.is_graph_input())
    for node in graph:
        inner: Iterable[ir.Graph] = bodies(node) if is_control(node) else ()
        for body in inner:
            yield from _values(body)
        yield from (v for v in node.outputs if v.name)


def _whole(value: ir.Value, known: extents.Extents) -> SymShape | None:
    """The shape with a symbol of its own for every size that nobody knows."""
    partial = known.partial(value)
    if partial is None:
        return None
    name = str(value.name)
    return SymShape(extents.unnamed(name, k) if s is None else s for k, s in enumerate(partial))


def _pairs(
    graph: ir.Graph, source: Mapping[ir.Value, ir.Value]
) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Names that have one shape because they are one storage, the older one first."""
    for value, older in source.items():
        node = value.producer()
        if node is not None and is_control(node) and node.op_type == "If":
            # The root may have another shape than what both branches return.
            k = node.outputs.index(value)
            yield from ((body.outputs[k], value) for body in bodies(node))
        elif not _reshapes(value):
            yield older, value
    for node in graph.all_nodes():
        if is_control(node) and node.op_type != "If":
            carried = classes.carried_ports(node)
            yield from ((formal, result) for _, formal, result in carried if result in source)


def _reshapes(value: ir.Value) -> bool:
    """Whether a name of storage has a shape of its own."""
    node = value.producer()
    if node is None or node.op_type == "Identity":
        return False
    found = rule(node)
    return found is not None and found.effect is Effect.VIEW


def _origin(value: ir.Value) -> str:
    node = value.producer()
    if node is not None:
        return f"{node.op_type} `{node.outputs[0].name}`"
    return "initializer" if value.is_initializer() else "declaration"
