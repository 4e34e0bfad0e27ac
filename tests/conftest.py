"""Storage, meters and examples.

Where an array lies, what stands around it, what a call allocates; and which random examples the
tests see: the same in every run on every machine, or others with ``--fuzz`` (``make fuzz``).
"""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis.internal.conjecture import providers

# Every run sees the same examples, however slow the machine is; --fuzz: others.
hypothesis.settings.register_profile(
    "fresh",
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
)
hypothesis.settings.register_profile(
    "same", hypothesis.settings.get_profile("fresh"), derandomize=True
)
hypothesis.settings.load_profile("same")

Array = np.ndarray[Any, Any]

MARGIN = 256  # bytes before and after
GUARD = 0xA5
POISON = 0x5A

FIRST = 200_000  # seed of every run, but with --fuzz
SEED = pytest.StashKey[int]()  # of a test: the one that it looks at


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz", type=int, metavar="SEED", help="random examples from SEED on, not those of always"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fuzz") is not None:
        hypothesis.settings.load_profile("fresh")
    # hypothesis also draws the constants of whatever modules of a project are loaded: the examples
    # of a test would depend on the tests before it, and on where the package is installed
    if hasattr(providers, "_get_local_constants"):
        nothing = providers._local_constants
        providers._get_local_constants = lambda: nothing


@pytest.fixture
def seeds(request: pytest.FixtureRequest) -> Callable[[int], Iterator[int]]:
    """Makes so many seeds; where a test fails at one of them, its report says which."""
    given = request.config.getoption("--fuzz")
    first = FIRST if given is None else given

    def make(count: int) -> Iterator[int]:
        for seed in range(first, first + count):
            request.node.stash[SEED] = seed
            yield seed

    return make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed and SEED in item.stash:
        report.sections.append(("seed", f"it fails at once with --fuzz={item.stash[SEED]}"))
    return report


@pytest.fixture
def address() -> Callable[[Array], int]:
    """Place of an array's first byte."""
    return lambda array: array.__array_interface__["data"][0]


def poison(array: Array) -> Array:
    """Fill storage with what nobody would write: NaN, or 0x5A bytes."""
    if array.dtype.kind in "fc" or "float" in array.dtype.name:
        array[...] = np.nan
    else:
        array.reshape(-1).view(np.uint8)[...] = POISON
    return array


@pytest.fixture
def guarded() -> Iterator[Callable[..., Array]]:
    """Makes poisoned storage with guard bytes on both sides, which are compared in the end."""
    made: list[tuple[Array, int]] = []

    def make(shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = np.full(MARGIN + size + MARGIN, GUARD, np.uint8)
        made.append((raw, size))
        return poison(raw[MARGIN : MARGIN + size].view(dtype).reshape(shape))

    yield make
    for raw, size in made:
        assert (raw[:MARGIN] == GUARD).all(), "bytes before the storage have changed"
        assert (raw[MARGIN + size :] == GUARD).all(), "bytes after the storage have changed"


@pytest.fixture
def untouched() -> Callable[..., contextlib.AbstractContextManager[None]]:
    """A block after which arrays hold the bytes that they held before."""

    @contextlib.contextmanager
    def block(*arrays: Array) -> Iterator[None]:
        before = [array.tobytes() for array in arrays]
        yield
        for array, held in zip(arrays, before, strict=True):
            assert array.tobytes() == held, "storage has changed"

    return block


@pytest.fixture
def peak_bytes() -> Callable[[Callable[[], object]], int]:
    """Most bytes that Python and numpy hold at a time during a call, beyond those before."""

    def measure(call: Callable[[], object]) -> int:
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            call()
            return tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()

    return measure
