"""What a plan says about memory, before anything is allocated and against what is measured."""

import tracemalloc

import numpy as np
import pytest

from onnx_inplace import Session, compiler, errors
from onnx_inplace.compiler import arena, sizes, workspace
from onnx_inplace.compiler.memory import Allocations, machine
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, kv, model, op
from onnx_inplace.numba_kernels import attention, decode, floats, prefill, specialise
from onnx_inplace.numba_kernels.sharing import Sharing
from onnx_inplace.runner import work

CACHE, NEW, SCALAR = FLOAT["b", "m", 64], FLOAT["b", "n", 64], INT64[()]


@model
def decoder(
    first: Mutable[CACHE], second: Mutable[CACHE], x: NEW, position: SCALAR
) -> tuple[Alias["first"], Alias["second"], NEW]:
    y = op.Relu(x)
    first = kv.CacheUpdate(first, y, position)
    z = op.Tanh(y)
    second = kv.CacheUpdate(second, z, position)
    return first, second, op.Exp(z)


@model
def copying(cache: Mutable[CACHE], x: NEW, position: SCALAR) -> tuple[Alias["cache"], CACHE]:
    before = kv.Copy(cache)
    return kv.CacheUpdate(cache, x, position), before


@model
def looping(cache: Mutable[CACHE], x: NEW, position: SCALAR) -> tuple[Alias["cache"], NEW]:
    state = x
    for _ in range(3):
        state = op.Tanh(state)
        cache = kv.CacheUpdate(cache, state, position)
    return cache, state


@model
def reordered(cache: Mutable[FLOAT["b", 4, 64]], indices: INT64["b"]) -> Alias["cache"]:
    return kv.CacheReorder(cache, indices)


def test_updates_in_place_count_nothing() -> None:
    """However many: the caches are all that there is of their size."""
    memory = compiler.plan(decoder).memory(b=2, m=4096, n=1)
    assert memory.caches == 2 * 2 * 4096 * 64 * 4
    assert memory.extra_cache_bytes == 0 and memory.unknown == ()
    assert memory.values < 8 * 2 * 64 * 4
    assert memory.peak == memory.caches + memory.values + memory.workspace + memory.pages


def test_a_copy_counts() -> None:
    memory = compiler.plan(copying).memory(b=2, m=512, n=1)
    assert memory.extra_cache_bytes == memory.caches == 2 * 512 * 64 * 4
    assert memory.values >= memory.extra_cache_bytes


def test_formulas_are_of_the_dimensions_that_are_left() -> None:
    plan = compiler.plan(decoder)
    assert str(plan.memory().caches) == "512*b*m"
    assert str(plan.memory(b=2).caches) == "1024*m"
    numbers, formulas = plan.memory(b=2, m=96, n=3), plan.memory()
    sizes = {"b": 2, "m": 96, "n": 3}

    def at(formula) -> int:
        return int(formula.subs({s: sizes[s.name] for s in formula.free_symbols}).doit())

    assert at(formulas.caches) == numbers.caches
    assert 0 <= at(formulas.workspace) - numbers.workspace <= numbers.values
    assert 0 <= numbers.values - at(formulas.values) <= 4 * arena.ALIGNMENT


@pytest.mark.parametrize(
    ("dims", "name"), [({"q": 1}, "q"), ({"m": -1}, "m"), ({"m": 1.5}, "m"), ({"m": True}, "m")]
)
def test_sizes_that_are_none_are_named(dims, name) -> None:
    with pytest.raises(errors.BindingError) as caught:
        compiler.plan(decoder).memory(**dims)
    assert caught.value.name == name


@pytest.mark.parametrize("m", range(4))
def test_what_never_fits_is_refused(m: int) -> None:
    plan = compiler.plan(decoder)
    with pytest.raises(errors.ContractError) as caught:
        plan.memory(b=1, m=m, n=4)
    assert {f.code for f in caught.value.findings} == {"E112"}
    assert plan.memory(b=1, m=4, n=4).caches


def test_no_caller_of_a_branch_is_refused_for_what_it_may_not_reach() -> None:
    @model
    def program(cache: Mutable[CACHE], x: NEW, flag: SCALAR) -> Alias["cache"]:
        if flag > 0:
            cache = kv.CacheUpdate(cache, x, 0)
        return cache

    assert compiler.plan(program).memory(b=1, m=2, n=4).caches == 2 * 64 * 4


def test_lives_that_touch_do_not_share() -> None:
    offsets, total = arena.place([(100, (0, 2)), (40, (2, 3)), (100, (3, 4)), (0, (0, 9))])
    assert offsets[0] == offsets[2] == 0 and offsets[1] == 128 and total == 192


@pytest.mark.parametrize("seed", range(50))
def test_an_arena_never_overlaps(seed: int) -> None:
    generator = np.random.default_rng(seed)
    wanted = []
    for _ in range(generator.integers(1, 40)):
        first, size = int(generator.integers(0, 20)), int(generator.integers(0, 1000))
        wanted.append((size, (first, first + int(generator.integers(0, 6)))))
    offsets, total = arena.place(wanted)
    rows = np.zeros((26, total), np.int32)
    for offset, (size, (first, last)) in zip(offsets, wanted, strict=True):
        assert offset % arena.ALIGNMENT == 0
        rows[first : last + 1, offset : offset + size] += 1
    assert rows.max(initial=0) <= 1
    together = max(
        sum(-(-size // 64) * 64 for size, (a, b) in wanted if a <= step <= b) for step in range(26)
    )
    assert together <= total <= sum(-(-size // 64) * 64 for size, _ in wanted)


def measured(program, roots: dict, feeds: dict) -> int:
    """The most bytes that numpy is asked for by a binding, from its first run on."""
    session = Session(program)
    arrays = {name: session.allocate(name, **dims) for name, dims in roots.items()}

    def three_runs(step) -> None:
        for _ in range(2):  # the second one prepares the buffers
            step.run(**feeds)
        tracemalloc.reset_peak()
        step.run(**feeds)

    with session.bind(**arrays) as step:
        tracemalloc.start()
        three_runs(step)  # what Python keeps once is none of the binding's
        tracemalloc.stop()
    with session.bind(**arrays) as step:
        tracemalloc.start()
        try:
            three_runs(step)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


B, M, N = 4, 1024, 512
DIMS = {"b": B, "m": M}
X = np.ones((B, N, 64), np.float32)
ZERO = np.zeros((), np.int64)


@pytest.mark.parametrize(
    ("program", "roots", "feeds", "dims"),
    [
        (decoder, ("first", "second"), {"x": X, "position": ZERO}, {"n": N}),
        (copying, ("cache",), {"x": X, "position": ZERO}, {"n": N}),
        (looping, ("cache",), {"x": X, "position": ZERO}, {"n": N}),
    ],
    ids=lambda p: getattr(p, "name", None),
)
def test_values_agree_with_what_is_measured(program, roots, feeds, dims) -> None:
    found = measured(program, dict.fromkeys(roots, DIMS), feeds)
    plan = compiler.plan(program).memory(**DIMS, **dims)
    assert plan.unknown == ()
    assert found == pytest.approx(plan.values, rel=0.05)


def test_workspace_agrees_with_what_is_measured() -> None:
    rows = 20_000
    feeds = {"indices": np.arange(rows)[::-1].copy()}
    dims = {"b": rows}
    found = measured(reordered, {"cache": dims}, feeds)
    plan = compiler.plan(reordered).memory(**dims)
    assert found == pytest.approx(plan.workspace + plan.values, rel=0.05)


def stated(together: tuple[Allocations, ...], **given: int) -> int:
    sizes_of = machine(given, given.get("threads", 1), bool(given.get("portable")))
    return max(sum(sizes.evaluate(size, sizes_of) for size in one) for one in together)


@pytest.mark.kernel
@pytest.mark.parametrize(("size", "group"), [(64, 3), (128, 1), (16, 16), (32, 8), (64, 20)])
@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 1), (3, 2), (5, 9), (64, 8)])
@pytest.mark.parametrize("tokens", [1, 2, 13, 128, 700])
@pytest.mark.parametrize("threads", [1, 2, 6, 8])
@pytest.mark.parametrize("capacity", [100, 10_000])
def test_workspace_of_attention_is_what_its_kernels_ask_for(
    size, group, batch, kv_heads, tokens, threads, capacity
) -> None:
    """As a call asks for it whose rows are empty but for one, and twice that is a header."""
    if tokens == 1 and group <= 16:
        splits, sharing = 1, Sharing(0, 256, kv_heads, capacity, threads, 0)
        if threads > 1:
            splits = work.most_splits(sharing, capacity)
        kernel = specialise.specialise(decode, floats.FLOAT32, size, group)
        asked = kernel.workspace_size(batch * kv_heads * splits, threads)
    else:
        kernel = specialise.specialise(prefill, floats.FLOAT32, size)
        asked = kernel.workspace_size(tokens * group, batch * kv_heads, threads)
    heads = workspace.Heads(
        "batch", "tokens", "capacity", kv_heads * group, kv_heads, size, size
    ).workspace()
    given = {"batch": batch, "tokens": tokens, "capacity": capacity}
    assert stated(heads, threads=threads, **given) == 16 + asked


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(("size", "value_size", "portable"), [(20, 12, 0), (64, 64, 1)])
def test_workspace_of_the_portable_kernel_is_what_it_asks_for(
    threads: int, size: int, value_size: int, portable: int
) -> None:
    """Where heads are odd, and where there are no kernels for this CPU."""
    heads = workspace.Heads("b", "t", "m", 6, 2, size, value_size).workspace()
    asked = attention.workspace_size(size, value_size) * threads
    given = {"b": 5, "t": 1, "m": 10}
    assert stated(heads, threads=threads, portable=portable, **given) == 16 + asked
