"""What findings say: the author's names, the line where a name went stale, and a repair.

Decides words only. Which rule is broken is decided by the walk in ``alias``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from onnx_inplace.compiler.classes import Restriction
from onnx_inplace.compiler.contract import OutputAlias
from onnx_inplace.compiler.errors import Finding, Location
from onnx_inplace.compiler.paged_types import is_paged

# Key in ir.Value.meta: the author's variable, "" for what was assigned to none. Names of values are
# the variables with a number behind them, and say less.
VARIABLE = "onnx_inplace.variable"

Locate = Callable[["ir.Node | None"], "Location | None"]
Live = Mapping[ir.Value, int]


@dataclasses.dataclass(slots=True)
class _Version:
    """How a version came about: its first name, if it has one yet, and the node that made it."""

    node: ir.Node | None
    name: ir.Value | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """A loop whose body overwrites a root: what is older than ``version`` is stale inside."""

    version: int
    writer: ir.Node


def called(value: ir.Value) -> str:
    """What a finding calls a value: the author's variable, if it has one."""
    variable, producer = value.meta.get(VARIABLE), value.producer()
    if variable == "" and producer is not None:
        return f"the result of `{producer.op_type}`"
    return f"`{variable or value.name}`"


_FIXED_CAPACITY = (
    "Storage does not grow: give the cache all of its capacity, and write with "
    "`kv.CacheUpdate(cache, values, position)`."
)


def _grows(value: ir.Value) -> bool:
    """Whether a value is longer than what it was made from: a cache as it is without capacity."""
    node = value.producer()
    return node is not None and node.domain == "" and node.op_type == "Concat"


def _copy(value: ir.Value) -> str:
    """How the author writes a copy of it."""
    variable = value.meta.get(VARIABLE, value.name)
    return f"`kv.Copy({variable or '...'})`"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _node_name(node: ir.Node) -> str:
    return node.name or next((v.name for v in node.outputs if v.name), node.op_type)


def _operator(node: ir.Node) -> str:
    return f"`{node.op_type}`"


class Diagnosis:
    """Remembers what happened to every version, and makes findings of it."""

    def __init__(self, locate: Locate, returned: Location | None) -> None:
        self._locate, self._returned = locate, returned
        self._versions: dict[tuple[ir.Value, int], _Version] = {}
        self._replaced: dict[tuple[ir.Value, int], ir.Node] = {}
        self._entries: dict[ir.Value, list[_Entry]] = {}

    # -- what happened

    def made(self, root: ir.Value, version: int, node: ir.Node | None) -> None:
        """``node`` made a version; None: it was there from the start."""
        self._versions[root, version] = _Version(node)

    def named(self, root: ir.Value, version: int, value: ir.Value) -> None:
        """A version got its first name."""
        known = self._versions[root, version]
        if known.name is None:
            known.name = value

    def replaced(self, root: ir.Value, version: int, writer: ir.Node) -> None:
        """``writer`` overwrote a version; the first one counts."""
        self._replaced.setdefault((root, version), writer)

    def entered(self, root: ir.Value, version: int, writer: ir.Node) -> None:
        """A loop carries ``root``, and ``writer`` in its body overwrites it."""
        self._entries.setdefault(root, []).append(_Entry(version, writer))

    def left(self, root: ir.Value) -> None:
        """The innermost such loop has ended."""
        self._entries[root].pop()

    # -- findings

    def _result(self, code: str, value: ir.Value, message: str, repair: str) -> Finding:
        """About a result of the whole: where it is returned, or else where it is made."""
        if self._returned is not None:
            return Finding(code, _sentence(message), self._returned, repair)
        return self._finding(code, value.producer(), message, repair)

    def _finding(self, code: str, node: ir.Node | None, message: str, repair: str) -> Finding:
        location = self._locate(node)
        if location is None and node is not None:
            message = f"{message} (In node `{_node_name(node)}`.)"
        return Finding(code, _sentence(message), location, repair)

    def _line(self, node: ir.Node, seen_from: ir.Node | None) -> str:
        location, here = self._locate(node), self._locate(seen_from)
        if location is None:
            return f"node `{_node_name(node)}`"
        if here is not None and here.file == location.file:
            return f"line {location.line}"
        return str(location)

    def _now(self, value: ir.Value, root: ir.Value, live: Live) -> str | None:
        """The name of what ``value`` was; the same variable, assigned again, would help nobody."""
        name = self._versions[root, live[root]].name
        return None if name is None or called(name) == called(value) else called(name)

    def _overwritten(
        self, value: ir.Value, root: ir.Value, version: int, live: Live, node: ir.Node | None
    ) -> tuple[str, str | None, str]:
        """What happened to a stale name; what to take instead; where it was still right."""
        entries = self._entries.get(root)
        if entries and version < entries[-1].version:
            entry = entries[-1]
            line = self._line(entry.writer, node)
            text = (
                f"{called(value)} comes from outside of a loop whose body overwrites it in place "
                f"at {line}: it holds something else from the second iteration on."
            )
            return text, self._now(value, root, live), "the loop"
        writer = self._replaced.get((root, version))
        line = "this line" if writer is None else self._line(writer, node)
        now = self._now(value, root, live)
        text = f"{called(value)} was overwritten in place at {line}"
        return f"{text} and is now called {now}." if now else f"{text}.", now, line

    def stale(
        self, value: ir.Value, root: ir.Value, version: int, live: Live, node: ir.Node, write: bool
    ) -> Finding:
        """E104 or E105: ``node`` takes a name that is no longer live."""
        text, now, line = self._overwritten(value, root, version, live, node)
        if write:
            text = f"{text} A second write to the old content would fork it."
            return self._finding("E105", node, text, f"Write to {now or 'the new version'}.")
        before = f"read {called(value)} before {line}"
        repair = f"Read {now}, or {before}." if now else f"{before[0].upper()}{before[1:]}."
        return self._finding("E104", node, text, repair)

    def stale_result(
        self, value: ir.Value, root: ir.Value, version: int, live: Live, node: ir.Node | None
    ) -> Finding:
        """E104: a block, function or graph returns a name that is no longer live."""
        where = node if node is not None else value.producer()
        text, now, _ = self._overwritten(value, root, version, live, where)
        text = f"{text} It cannot be returned any more."
        repair = f"Return {now or 'the new version'}, or {_copy(value)} from before it."
        if node is None:
            return self._result("E104", value, text, repair)
        return self._finding("E104", node, text, repair)

    def not_carried(self, value: ir.Value, node: ir.Node, loop: ir.Node) -> Finding:
        """E105: a loop's body writes what the loop does not carry."""
        text = (
            f"{_operator(node)} overwrites {called(value)} in the body of a loop "
            f"({self._line(loop, node)}) that does not carry it: the second iteration would "
            "write to an old version."
        )
        repair = f"Assign the result to {called(value)} in the body, so that it is carried."
        return self._finding("E105", node, text, repair)

    def immutable(
        self, node: ir.Node, value: ir.Value, root: ir.Value | None, sliced: bool
    ) -> Finding:
        """E106: a write to what nobody lent."""
        if sliced:
            what, repair = f"a slice of {called(root)}", "Carry the whole and write to it."  # type: ignore[arg-type]
        elif root is not None:
            what = "READ_ONLY" if root is value else f"the storage of {called(root)}, READ_ONLY"
            repair = f"Declare {called(root)} as `Mutable[...]`."
        elif value.is_initializer():
            what, repair = "an initializer", "Make it a parameter that is `Mutable[...]`."
        elif (producer := value.producer()) is not None and producer.op_type == "Constant":
            what, repair = "a constant", "Write to a parameter that is `Mutable[...]`."
        else:
            what, repair = "no parameter's storage", "Write to a parameter that is `Mutable[...]`."
        text = f"{_operator(node)} writes {called(value)}, which is {what}."
        return self._finding("E106", node, text, repair)

    def misplaced(self, value: ir.Value) -> Finding:
        """E106: READ_WRITE where it may not stand."""
        what = "has an initializer" if value.is_initializer() else "is no parameter"
        text = f"{called(value)} is READ_WRITE but {what}."
        return self._finding("E106", None, text, "Only parameters without a default are mutable.")

    def restricted(
        self, node: ir.Node, value: ir.Value, formal: ir.Value, restriction: Restriction
    ) -> Finding:
        """A function does to its READ_ONLY parameter what it must not do to mutable storage."""
        text = (
            f"{called(value)} is mutable storage, and {_operator(node)} takes it as "
            f"{called(formal)}. There, {restriction.reason}"
        )
        return self._finding(restriction.code, node, text, f"Pass {_copy(value)}.")

    def would_write(self, node: ir.Node, value: ir.Value) -> str:
        """Why a parameter that a standard operator scatters into must not be mutable storage."""
        return f"{_operator(node)} would write {called(value)}, which is READ_ONLY."

    def overlap(self, node: ir.Node, value: ir.Value, other: ir.Value) -> Finding:
        """E116: the node reads what it writes."""
        names = called(value) if other is value else f"{called(value)} and {called(other)}"
        text = f"{_operator(node)} writes to storage that it takes twice: {names}."
        return self._finding("E116", node, text, f"Pass {_copy(other)} as the other one.")

    def unmergeable(
        self,
        node: ir.Node | None,
        value: ir.Value,
        faults: Sequence[str],
        repair: str,
        code: str = "E102",
    ) -> Finding:
        """E102, of pages E115: types or shapes differ. Without a node ``value`` is a result."""
        text = " ".join(f"{_sentence(fault)}." for fault in faults)
        if node is None:
            return self._result(code, value, text, repair)
        return self._finding(code, node, text, repair)

    def no_port(self, node: ir.Node, a: OutputAlias) -> Finding:
        """E101: an alias of ports that the node does not have."""
        text = (
            f"{_operator(node)} has {len(node.inputs)} inputs and {len(node.outputs)} outputs: "
            f"output {a.output_index} cannot be input {a.input_index}."
        )
        return self._finding("E101", node, text, "Compile the model again.")

    def branches(
        self, node: ir.Node, output: ir.Value, then: ir.Value | None, other: ir.Value | None
    ) -> Finding:
        """E107: ``then`` and ``other`` are the roots of a result, None for new storage."""
        a, b = _storage(then), _storage(other)
        text = f"{called(output)} is {a} in one branch and {b} in the other."
        repair = "Let both branches return the same storage, or `kv.Copy` in each of them."
        if is_paged(then) or is_paged(other):
            repair = "Pages are not copied: let both branches return the same paged cache."
        return self._finding("E107", node, text, repair)

    def carries(
        self,
        node: ir.Node,
        initial: ir.Value,
        start: ir.Value | None,
        result: ir.Value,
        end: ir.Value | None,
    ) -> Finding:
        """E108: ``start`` and ``end`` are the roots of a carried value."""
        text = (
            f"{called(initial)} enters the loop as {_storage(start)} and comes back from its body "
            f"as {_storage(end)}."
        )
        repair = "Carry every state as itself: `kv.Assign` replaces its content."
        if is_paged(start) or is_paged(end):
            repair = "Pages are not copied: carry every paged cache as itself."
        elif _grows(result):
            repair = _FIXED_CAPACITY
        elif end is None:
            repair = f"Write the state with `kv.Assign`, or begin with {_copy(initial)}."
        elif start is None:
            repair = f"Carry {_copy(result)}, or begin with {called(end)}."
        return self._finding("E108", node, text, repair)

    def stacked(self, value: ir.Value, root: ir.Value, node: ir.Node) -> Finding:
        """E108: a stacked output is an alias."""
        text = f"{called(value)} is the storage of {called(root)}: a loop cannot stack it."
        return self._finding("E108", node, text, f"Stack {_copy(value)}.")

    def lost(self, root: ir.Value, version: int, inner: bool) -> Finding:
        """E109: nobody returns the last version."""
        known = self._versions[root, version]
        text = f"the last version of {called(root)}"
        if known.name is not None:
            text = f"{called(known.name)}, {text},"
        text = f"{text} is not returned{' by its block' if inner else ''}."
        repair = f'Return it as `Alias["{root.name}"]`.'
        if inner:
            repair = f"Assign it to the variable of {called(root)}, so that it leaves the block."
        return self._finding("E109", known.node, text, repair)

    def new_storage(self, value: ir.Value, root: ir.Value, other: ir.Value | None) -> Finding:
        """E110: declared as an alias, but no mutable storage."""
        what = "new storage" if other is None else f"the READ_ONLY {called(other)}"
        text = f'{called(value)} is declared as `Alias["{root.name}"]` but is {what}.'
        repair = f"Write it with `kv.Assign({root.name}, ...)`, or declare its type instead."
        if _grows(value):
            repair = _FIXED_CAPACITY
        return self._result("E110", value, text, repair)

    def undeclared(self, value: ir.Value, root: ir.Value) -> Finding:
        """E111: mutable storage would leave without a word."""
        text = f"{called(value)} is the storage of {called(root)}, but is not declared so."
        repair = (
            f'Declare this result as `Alias["{root.name}"]` behind the `->` of the function, or '
            f"return {_copy(value)}."
        )
        return self._result("E111", value, text, repair)

    def returned_pages(self, value: ir.Value) -> Finding:
        """E111: pages would have to be copied to be a result of their own."""
        text = f"{called(value)} is a paged cache, and is not declared as an alias of one."
        repair = "Declare its parameter as `Mutable[...]` and the result as its `Alias[...]`."
        return self._result("E111", value, text, repair)

    def sliced_pages(self, value: ir.Value, node: ir.Node) -> Finding:
        """E102: a Scan takes tensors apart."""
        text = f"{_operator(node)} takes tensors apart, and {called(value)} is a paged cache."
        repair = "Loop over page ids, and read pages with `kv.PageGather`."
        return self._finding("E102", node, text, repair)

    def another_root(self, value: ir.Value, declared: ir.Value, root: ir.Value) -> Finding:
        """E101: declared as one root, is another."""
        text = (
            f'{called(value)} is declared as `Alias["{declared.name}"]` but is the storage of '
            f"{called(root)}."
        )
        return self._result("E101", value, text, f'Declare it as `Alias["{root.name}"]`.')

    def no_parameter(self, value: ir.Value, declared: ir.Value) -> Finding:
        """E117: what is declared as a root is no mutable parameter."""
        text = f'`Alias["{declared.name}"]` names no mutable parameter.'
        repair = f"Declare {called(declared)} as `Mutable[...]`, or {called(value)} by its type."
        return self._result("E117", value, text, repair)

    def hidden(self, value: ir.Value, node: ir.Node | None) -> Finding:
        """E114: one name for two values in reach of each other."""
        text = f"{called(value)} is defined again where the first one can still be named."
        return self._finding("E114", node, text, "Give one of them another name.")


def _storage(root: ir.Value | None) -> str:
    return "new storage" if root is None else f"the storage of {called(root)}"
