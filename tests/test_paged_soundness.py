"""Random programs on paged caches: in place, they do what their lines say, or nothing at all.

The oracle is a Python interpreter of the same statements on dictionaries of arrays. Pages are
float32 or float16 and values are small whole numbers, so that every format keeps them exactly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnx_inplace import Session, errors

PAGE, SIZE = 16, 32
HEADER = """
from onnx_inplace import formats
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, Paged, function, kv, model, op

Pages = Paged[FLOAT[2, 1, 16, 32], formats.FLOAT32, formats.FLOAT16]


@function
def put(c: Mutable[Pages], p: INT64[()], x: FLOAT[2, 1, 1, 32], at: INT64[()]) -> Alias["c"]:
    return kv.PagedCacheUpdate(c, p, x, at, quantized_type="FLOAT16")


@model
def program(
    a: Mutable[Pages], b: Mutable[Pages], x: FLOAT[2, 1, 1, 32], t: INT64[()], total: FLOAT[()]
) -> tuple[Alias["a"], Alias["b"], FLOAT[()]]:
"""


class Refused(Exception):
    """The oracle's page table or page has no such place."""


@dataclasses.dataclass
class State:
    """What a program works on."""

    caches: dict[str, dict[int, tuple[str, np.ndarray]]]
    x: np.ndarray
    t: int
    total: float
    counters: dict[str, int] = dataclasses.field(default_factory=dict)

    def number(self, terms: tuple[str | int, ...]) -> int:
        """A sum of a number, the input ``t`` and counters of loops."""
        names = {"t": self.t, **self.counters}
        return sum(names[k] if isinstance(k, str) else k for k in terms)


def text(terms: tuple[str | int, ...]) -> str:
    return " + ".join(map(str, terms))


@dataclasses.dataclass(frozen=True)
class Update:
    cache: str
    page: tuple[str | int, ...]
    position: tuple[str | int, ...]
    format: str
    scale: int
    called: bool

    def lines(self) -> Iterator[str]:
        c, where = self.cache, f"{text(self.page)}, x * {self.scale}.0, {text(self.position)}"
        if self.called:
            yield f"{c} = put({c}, {where})"
        else:
            yield f'{c} = kv.PagedCacheUpdate({c}, {where}, quantized_type="{self.format}")'

    def run(self, s: State) -> None:
        pages, page, at = s.caches[self.cache], s.number(self.page), s.number(self.position)
        if not 0 <= at < PAGE or not 0 <= page <= len(pages):
            raise Refused
        if page == len(pages):
            pages[page] = "FLOAT16" if self.called else self.format, np.zeros((2, 1, PAGE, SIZE))
        pages[page][1][:, :, at : at + 1] = s.x * self.scale


@dataclasses.dataclass(frozen=True)
class Span:
    """Two tokens along a block table of two pages."""

    cache: str
    pages: tuple[int, int]
    position: tuple[str | int, ...]

    def lines(self) -> Iterator[str]:
        c = self.cache
        yield (
            f"{c} = kv.PagedCacheUpdate({c}, {list(self.pages)}, op.Concat(x, x, axis=2), "
            f'{text(self.position)}, quantized_type="FLOAT32")'
        )

    def run(self, s: State) -> None:
        pages, at = s.caches[self.cache], s.number(self.position)
        if not 0 <= at <= 2 * PAGE - 2:
            raise Refused
        for token in (at, at + 1):
            page = self.pages[token // PAGE]
            if page > len(pages):
                raise Refused
            if page == len(pages):
                pages[page] = "FLOAT32", np.zeros((2, 1, PAGE, SIZE))
            pages[page][1][:, :, token % PAGE] = s.x[:, :, 0]


@dataclasses.dataclass(frozen=True)
class Convert:
    cache: str
    page: tuple[str | int, ...]
    format: str

    def lines(self) -> Iterator[str]:
        c = self.cache
        yield f'{c} = kv.PagedCacheConvert({c}, {text(self.page)}, quantized_type="{self.format}")'

    def run(self, s: State) -> None:
        pages, page = s.caches[self.cache], s.number(self.page)
        if page not in pages:
            raise Refused
        pages[page] = self.format, pages[page][1]


@dataclasses.dataclass(frozen=True)
class Gather:
    cache: str
    page: tuple[str | int, ...]

    def lines(self) -> Iterator[str]:
        read = f"kv.PageGather({self.cache}, {text(self.page)})"
        yield f"total = total + op.ReduceSum({read}, keepdims=0)"

    def run(self, s: State) -> None:
        pages, page = s.caches[self.cache], s.number(self.page)
        if page not in pages:
            raise Refused
        s.total += float(pages[page][1].sum())


@dataclasses.dataclass(frozen=True)
class If:
    test: str  # "t" or "total"
    limit: int
    then: tuple[Statement, ...]
    otherwise: tuple[Statement, ...]

    def lines(self) -> Iterator[str]:
        yield f"if {self.test} > {self.limit}{'.0' if self.test == 'total' else ''}:"
        yield from indented(self.then)
        if self.otherwise:
            yield "else:"
            yield from indented(self.otherwise)

    def run(self, s: State) -> None:
        given = s.t if self.test == "t" else s.total
        for statement in self.then if given > self.limit else self.otherwise:
            statement.run(s)


@dataclasses.dataclass(frozen=True)
class Loop:
    counter: str
    body: tuple[Statement, ...]

    def lines(self) -> Iterator[str]:
        yield f"for {self.counter} in range(t):"
        yield from indented(self.body)

    def run(self, s: State) -> None:
        for k in range(s.t):
            s.counters[self.counter] = k
            for statement in self.body:
                statement.run(s)


Statement = Update | Span | Convert | Gather | If | Loop


def indented(statements: tuple[Statement, ...]) -> Iterator[str]:
    return (f"    {line}" for statement in statements for line in statement.lines())


@st.composite
def statements(draw: st.DrawFn, depth: int = 2, counters: tuple[str, ...] = ()) -> Statement:
    cache = st.sampled_from(["a", "b"])
    format_ = st.sampled_from(["FLOAT32", "FLOAT16"])

    def terms(most: int) -> tuple[str | int, ...]:
        names = draw(st.lists(st.sampled_from(["t", *counters]), max_size=1))
        return (*names, draw(st.integers(0, most)))

    kinds = ["update"] * 3 + ["span", "convert", "gather", "gather"]
    kinds += ["if", "loop"] * bool(depth)
    match draw(st.sampled_from(kinds)):
        case "update":
            scale, called = draw(st.integers(1, 4)), draw(st.booleans())
            return Update(draw(cache), terms(2), terms(14), draw(format_), scale, called)
        case "span":
            return Span(draw(cache), draw(st.sampled_from([(0, 1), (1, 0), (1, 2)])), terms(28))
        case "convert":
            return Convert(draw(cache), terms(1), draw(format_))
        case "gather":
            return Gather(draw(cache), terms(1))
        case "if":
            inner = st.lists(statements(depth - 1, counters), min_size=1, max_size=2).map(tuple)
            test = draw(st.sampled_from(["t", "t", "total"]))
            return If(test, draw(st.integers(0, 2)), draw(inner), draw(st.just(()) | inner))
        case _:
            counter = f"i{depth}"
            body = st.lists(statements(depth - 1, (*counters, counter)), min_size=1, max_size=2)
            return Loop(counter, tuple(draw(body)))


def is_late(program: tuple[Statement, ...]) -> bool:
    """Whether a branch depends on what pages hold: then a run may fail in the middle."""
    return any(
        (isinstance(s, If) and (s.test == "total" or is_late(s.then) or is_late(s.otherwise)))
        or (isinstance(s, Loop) and is_late(s.body))
        for s in program
    )


def compiled(program: tuple[Statement, ...], folder: object) -> Session | None:
    """None: a write that fits in no run is refused when it is compiled."""
    source = HEADER + "\n".join(indented(program)) + "\n    return a, b, total\n"
    path = f"{folder}/program.py"
    with open(path, "w") as file:
        file.write(source)
    namespace = {"__name__": "program"}
    try:
        exec(compile(source, path, "exec"), namespace)
        return Session(namespace["program"])
    except errors.ContractError as error:
        assert {f.code for f in error.findings} == {"E112"}, f"{source}\n{error}"
        return None


def content(cache: object) -> dict[int, tuple[str, np.ndarray]]:
    return {k: (cache.page(k).quantized_type, cache.page(k).decode()) for k in range(len(cache))}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    program=st.lists(statements(), min_size=1, max_size=4).map(tuple),
    runs=st.lists(st.integers(0, 3), min_size=1, max_size=3),
    filled=st.sampled_from([0, 1, 3, 4]),
)
def test_a_program_does_what_its_lines_say_or_nothing(program, runs, filled, tmp_path_factory):
    session = compiled(program, tmp_path_factory.mktemp("program"))
    if session is None:
        return
    caches = {name: session.allocate(name) for name in "ab"}
    for cache in caches.values():
        for _ in range(filled):
            cache.allocate_page("FLOAT32")
    x = np.arange(2 * SIZE, dtype=np.float32).reshape(2, 1, 1, SIZE)
    with session.bind(**caches) as step:
        for t in runs:
            before = {name: cache.snapshot() for name, cache in caches.items()}
            now = {
                name: {k: (kind, page.astype(np.float64)) for k, (kind, page) in content(c).items()}
                for name, c in caches.items()
            }
            expected = State(now, x, t, 1.0)
            inputs = {"x": x, "t": t, "total": np.float32(1.0)}
            try:
                for statement in program:
                    statement.run(expected)
            except Refused:
                with pytest.raises((errors.CapacityError, errors.PageError)):
                    step.run(**inputs)
                if is_late(program):
                    return
                assert {name: c.snapshot() for name, c in caches.items()} == before
                continue
            out = step.run(**inputs)
            assert out[0] is caches["a"] and out[1] is caches["b"]
            np.testing.assert_allclose(out[2], expected.total, rtol=1e-6)
            for name, cache in caches.items():
                found = content(cache)
                assert {k: kind for k, (kind, _) in found.items()} == {
                    k: kind for k, (kind, _) in now[name].items()
                }
                for k, (_, page) in found.items():
                    np.testing.assert_array_equal(page, now[name][k][1])
