"""Random programs as an author types them, and what Python itself would compute from the text.

The text is compiled by the DSL, which turns ``if``, ``for``, ``while``, ``and``, ``or``, ``not``
and comparisons into nodes. The same text is run by Python, with numpy arrays in place of tensors
and functional operators in place of ``op`` and ``kv``: there every statement means what Python
says. The two must agree, whatever was staged.
"""

from __future__ import annotations

import dataclasses
import linecache
import types
from collections.abc import Mapping, Sequence

import numpy as np
from authoring.block import CACHE, CAPACITY, ROWS, TOKEN
from authoring.choices import Choices
from authoring.values import MODULUS, Values

PRELUDE = f"""
from onnx_inplace.dsl import BOOL, INT64, Alias, Mutable, function, kv, model, op, scan, stack

Cache, Token = INT64[{ROWS}, {CAPACITY}, 2], INT64[{ROWS}, 1, 2]
"""
CACHES, TOKENS, NUMBERS, TRUTHS = ("keys", "values"), ("a", "b"), ("n", "m"), ("p", "q")
PARAMETERS = {
    "keys": "Mutable[Cache]",
    "values": "Mutable[Cache]",
    "a": "Token",
    "n": "INT64[()]",
    "p": "BOOL[()]",
}


@dataclasses.dataclass(frozen=True)
class Script:
    """A text and inputs for it."""

    source: str
    storage: dict[str, np.ndarray]
    feeds: tuple[dict[str, np.ndarray], ...]


class Scribe(Values):
    """Writes one text; a statement is a list of lines."""

    def __init__(self, choices: Choices) -> None:
        super().__init__(choices)
        self.known = {"keys", "values", "a", "n", "p"}
        self.budget = 4 + self.below(8)
        self.loops = 0

    def script(self) -> str:
        body = self.block(3 + self.below(3))
        tokens = [t for t in TOKENS if t in self.known]
        numbers = [n for n in NUMBERS if n in self.known]
        extra = self.pick(tokens), self.pick(numbers)
        results = ["Token", "INT64[()]"]
        hints = ['Alias["keys"]', 'Alias["values"]', *results]
        names = ["keys", "values", *extra]
        if self.slip():
            names[self.below(2)] = self.pick(names)
        arguments = ", ".join(f"{name}: {hint}" for name, hint in PARAMETERS.items())
        lines = [
            "@function",
            'def push(cache: Mutable[Cache], new: Token, place: INT64[()]) -> Alias["cache"]:',
            "    doubled = new + new",
            "    if place > 0:",
            "        cache = kv.CacheUpdate(cache, doubled, place - 1)",
            "    return kv.CacheUpdate(cache, new, place)",
            "",
            "def twice(x):",
            "    return x + x",
            "",
            "@model",
            f"def program({arguments}) -> tuple[{', '.join(hints)}]:",
            *("    " + line for line in body),
            f"    return {', '.join(names)}",
            "",
        ]
        return PRELUDE + "\n".join(lines)

    def block(self, count: int) -> list[str]:
        lines: list[str] = []
        for _ in range(count):
            if self.budget > 0:
                self.budget -= 1
                lines += self.statement()
        return lines or ["pass"]

    def statement(self) -> list[str]:
        kinds = [self.assign, self.assign, self.update, self.update, self.branch, self.branch]
        if self.loops < 2:
            kinds += [self.count, self.count, self.wait, self.unrolled, self.scanned, self.members]
        return self.pick(kinds)()

    def assign(self) -> list[str]:
        kind = self.below(8)
        if kind <= 1:
            name = self.pick(TOKENS)
            line = f"{name} = {self.token_text()}"
        elif kind == 6:
            name = self.pick(TOKENS)
            line = f"{name} = {self.token_text()} if {self.truth_text()} else {self.token_text()}"
        elif kind == 7:
            name = self.pick(TRUTHS)
            line = f"{name} = {self.below(3)} <= {self.number_text()} < {3 + self.below(9)}"
        elif kind == 2:
            name = self.pick([t for t in TOKENS if t in self.known])
            line = f"{name} {self.pick(['+=', '-='])} {self.token_text(1)}"
        elif kind == 3:
            name = self.pick(NUMBERS)
            line = f"{name} = {self.number_text()}"
        elif kind == 4:
            name = self.pick(TRUTHS)
            line = f"{name} = {self.truth_text()}"
        else:
            tokens = [t for t in TOKENS if t in self.known]
            first, second = self.pick(tokens), self.pick(tokens)
            if first == second:
                return [f"{first} = {first} + 1"]
            return [f"{first}, {second} = {second}, {first} + {second}"]
        self.known.add(name)
        return [line]

    def update(self) -> list[str]:
        cache = self.pick(CACHES)
        source = self.pick(CACHES) if self.slip() else cache
        kind = self.below(4)
        if kind == 0:
            call = f"push({source}, {self.token_text()}, {self.place()})"
        elif kind == 1:
            rows = [self.below(2), self.below(2)]
            call = f"kv.CacheReorder({source}, op.Constant(value_ints={rows}))"
        elif kind == 2:
            other = self.pick([c for c in CACHES if c != source])
            call = f"kv.Assign({source}, {other} + {self.token_text(1)})"
        else:
            call = f"kv.CacheUpdate({source}, {self.token_text()}, {self.place()})"
        target = self.pick(CACHES) if self.slip() else cache
        return [f"{target} = {call}"]

    def branch(self) -> list[str]:
        test = self.truth_text()
        before = set(self.known)
        lines = [f"if {test}:", *self.indented(self.block(1 + self.below(2)))]
        then, self.known = self.known, set(before)
        if self.chance(2):
            lines += ["else:", *self.indented(self.block(1 + self.below(2)))]
        self.known &= then
        return lines

    def count(self) -> list[str]:
        """A loop over a number that only a run knows."""
        self.loops += 1
        before, index = set(self.known), f"i{self.loops}"
        bound = f"({self.number_text()}) % 4" if self.chance(2) else "n % 4"
        lines = [f"for {index} in range({bound}):"]
        lines += self.indented(self.block(1 + self.below(3)))
        if self.chance(2):
            lines += self.indented([f"{self.pick(list(NUMBERS[:1]))} = {index} + 1"])
        self.known = before
        self.loops -= 1
        return lines

    def wait(self) -> list[str]:
        """A loop that ends when a number has been counted down."""
        self.loops += 1
        before, left = set(self.known), f"left{self.loops}"
        lines = [f"{left} = ({self.number_text()}) % 3"]
        test = f"{left} > 0 and {self.truth_text()}" if self.chance(3) else f"{left} > 0"
        lines += [f"while {test}:", *self.indented(self.block(1 + self.below(2)))]
        lines += self.indented([f"{left} = {left} - 1"])
        self.known = before
        self.loops -= 1
        return lines

    def unrolled(self) -> list[str]:
        """A loop over Python values: runs while the graph is built."""
        self.loops += 1
        before, index = set(self.known), f"k{self.loops}"
        lines = [f"for {index} in range({1 + self.below(2)}):"]
        lines += self.indented(self.block(1 + self.below(2)))
        lines += self.indented([f"a = a + {index}"])
        self.known = before
        self.loops -= 1
        return lines

    def scanned(self) -> list[str]:
        """A loop along a tensor, which collects one row per step."""
        self.loops += 1
        before, row, rows = set(self.known), f"row{self.loops}", f"rows{self.loops}"
        source = self.pick([t for t in TOKENS if t in self.known])
        lines = [f"{rows} = stack()", f"for {row} in scan({source}):"]
        lines += self.indented(self.block(1 + self.below(2)))
        lines += self.indented([f"{rows}.append({row} + {self.number_text(1)})"])
        self.known = before
        self.loops -= 1
        return [*lines, f"{self.pick([t for t in TOKENS if t in self.known])} = {rows} + 0"]

    def members(self) -> list[str]:
        """A list of both caches, the members of which are assigned in a block."""
        test = self.truth_text()
        k, place = self.below(2), self.place()
        return [
            "both = [keys, values]",
            f"if {test}:",
            *self.indented([f"both[{k}] = push(both[{k}], {self.token_text(1)}, {place})"]),
            "keys, values = both",
        ]

    @staticmethod
    def indented(lines: Sequence[str]) -> list[str]:
        return ["    " + line for line in lines]

    # expressions

    def cache_text(self) -> str:
        return self.pick(CACHES)

    def token_text(self, depth: int = 2) -> str:
        kind = self.below(5) if depth else 0
        if kind == 0:
            return self.pick([t for t in TOKENS if t in self.known])
        if kind == 1:
            return f"op.Gather({self.cache_text()}, [{self.below(CAPACITY)}], axis=1)"
        if kind == 2:
            return f"twice({self.token_text(depth - 1)})"
        other = self.pick([str(self.below(5)), self.token_text(depth - 1), self.number_text(1)])
        operator = self.pick(["+", "*", "-"])
        return f"(({self.token_text(depth - 1)} {operator} {other}) % {MODULUS})"

    def number_text(self, depth: int = 2) -> str:
        kind = self.below(4) if depth else 0
        if kind == 0:
            return self.pick([n for n in NUMBERS if n in self.known])
        if kind == 1:
            return f"op.ReduceSum({self.cache_text()}, keepdims=0)"
        if kind == 2:
            return f"op.ReduceSum({self.token_text(1)}, keepdims=0)"
        operator = self.pick(["+", "-", "*"])
        return f"(({self.number_text(depth - 1)} {operator} {self.below(4)}) % {MODULUS})"

    def place(self) -> str:
        return (
            str(self.below(CAPACITY)) if self.chance(3) else f"({self.number_text()}) % {CAPACITY}"
        )

    def truth_text(self, depth: int = 2) -> str:
        kind = self.below(6) if depth else 0
        if kind == 0:
            return self.pick([p for p in TRUTHS if p in self.known])
        if kind == 1:
            return f"{self.number_text(1)} {self.pick(['<', '<=', '>', '>='])} {self.below(20)}"
        if kind == 2:
            return f"{self.below(3)} < {self.number_text(1)} < {10 + self.below(20)}"
        if kind == 3:
            return f"not ({self.truth_text(depth - 1)})"
        word = "and" if kind == 4 else "or"
        return f"({self.truth_text(depth - 1)} {word} {self.truth_text(depth - 1)})"


def script(choices: Choices) -> Script:
    """A text with storage and inputs for three runs."""
    source = Scribe(choices).script()
    generator = np.random.default_rng(choices.below(1000))
    storage = {name: generator.integers(0, 9, CACHE) for name in CACHES}
    feeds = tuple(
        {
            "a": generator.integers(-9, 9, TOKEN),
            "n": np.asarray(generator.integers(0, 5)),
            "p": np.asarray(bool((k + generator.integers(2)) % 2)),
        }
        for k in range(3)
    )
    return Script(source, storage, feeds)


def load(source: str, name: str) -> Mapping[str, object]:
    """Run a text as a module whose lines can be found again."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    module = types.ModuleType("script")
    exec(compile(source, name, "exec"), module.__dict__)
    return module.__dict__


# What Python says: `op` and `kv` over numpy, nothing written in place.


def _update(cache, values, position):
    new = cache.copy()
    new[:, int(position) : int(position) + 1] = values
    return new


_OP = types.SimpleNamespace(
    Gather=lambda x, i, axis: np.take(x, i, axis),
    ReduceSum=lambda x, keepdims: np.sum(x, keepdims=bool(keepdims)),
    Constant=lambda value_ints: np.array(value_ints),
)
_KV = types.SimpleNamespace(
    CacheUpdate=_update,
    Assign=lambda state, value: np.array(value),
    CacheReorder=lambda cache, indices: np.take(cache, indices, 0),
)


class _Value(np.ndarray):
    """An array as a tensor is: `x += y` makes a new one, and other names of `x` keep theirs."""

    def __iadd__(self, other: object) -> np.ndarray:  # type: ignore[override]
        return self + other

    def __isub__(self, other: object) -> np.ndarray:  # type: ignore[override]
        return self - other


class _Rows(list):
    """What a loop collected, as the tensor that it becomes."""

    def __add__(self, other: object) -> np.ndarray:  # type: ignore[override]
        return np.stack(self).view(_Value) + other


def native(source: str, feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """What Python computes from the text."""
    text = source.replace(PRELUDE, "").replace("@function", "").replace("@model", "")
    names: dict[str, object] = {"op": _OP, "kv": _KV, "scan": list, "stack": _Rows}
    code = compile("from __future__ import annotations\n" + text, "<native>", "exec")
    exec(code, names)
    with np.errstate(all="ignore"):
        results = names["program"](**{k: v.copy().view(_Value) for k, v in feed.items()})  # type: ignore[operator]
    return [np.asarray(r) for r in results]
