"""Storage that is lent: the lease, the order of checks, runs, failures, threads."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from onnx_inplace import Session, errors
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, kv, model, op
from onnx_inplace.runner import journal, registry, storage

Cache, New = FLOAT["heads", "capacity", 4], FLOAT["heads", "n", 4]
TIMEOUT = 30  # seconds until a test of threads has failed


@model
def append(cache: Mutable[Cache], new: New, position: INT64[()]) -> tuple[Alias["cache"], New]:
    return kv.CacheUpdate(cache, new, position), new * 2.0


@pytest.fixture
def session() -> Session:
    return Session(append)


@pytest.fixture
def cache(session: Session) -> np.ndarray:
    return session.allocate("cache", heads=2, capacity=8)


def tokens(length: int = 1, value: float = 1.0) -> np.ndarray:
    return np.full((2, length, 4), value, np.float32)


# -- the lease


def test_the_lease_begins_with_bind_and_ends_with_close(session, cache) -> None:
    step = session.bind(cache=cache)
    with pytest.raises(errors.BindingInUse) as caught:
        session.bind(cache=cache)
    assert (caught.value.name, caught.value.holder) == ("cache", "cache")
    step.close()
    step.close()
    assert step.closed
    with session.bind(cache=cache) as again:
        assert not again.closed
    with pytest.raises(errors.BindingError):
        again.run(new=tokens(), position=0)
    with pytest.raises(errors.BindingError):
        step.run(new=tokens(), position=0)


def test_the_lease_ends_with_an_error_in_the_block(session, cache) -> None:
    with pytest.raises(ZeroDivisionError), session.bind(cache=cache):
        1 // 0  # noqa: B018
    session.bind(cache=cache).close()


def test_the_lease_ends_when_the_binding_is_forgotten(session, cache) -> None:
    step = session.bind(cache=cache)
    step.run(new=tokens(), position=0)
    del step
    gc.collect()
    session.bind(cache=cache).close()


def test_leases_do_not_pile_up(session, cache) -> None:
    held = len(storage.leases._table.leases)
    for _ in range(20):
        session.bind(cache=cache).close()
        with pytest.raises(errors.StorageMismatch):
            session.bind(cache=cache[:, :, ::2])
    assert len(storage.leases._table.leases) == held


def test_the_binding_keeps_its_storage(session, cache) -> None:
    step = session.bind(cache=cache)
    place = cache.__array_interface__["data"]
    del cache
    gc.collect()
    out = step.run(new=tokens(), position=0)
    assert out[0].__array_interface__["data"] == place and out[0][0, 0, 0] == 1


def test_a_refused_binding_leases_nothing(session, cache) -> None:
    for arrays in ({"cache": cache, "other": cache}, {}, {"cache": cache.T}):
        with pytest.raises(errors.BindingError):
            session.bind(**arrays)
    session.bind(cache=cache).close()


@model
def pair(
    a: Mutable[FLOAT["m", 2]], b: Mutable[FLOAT["m", 2]], x: FLOAT[1, 2]
) -> tuple[Alias["a"], Alias["b"]]:
    return kv.CacheUpdate(a, x, 0), kv.CacheUpdate(b, x, 1)


def test_two_caches_do_not_overlap() -> None:
    session, whole = Session(pair), np.zeros((8, 2), np.float32)
    for a, b in ((whole, whole), (whole[:4], whole[3:7]), (whole[2:4], whole[1:3])):
        with pytest.raises(errors.SharedStorage) as caught:
            session.bind(a=a, b=b)
        assert {caught.value.name, caught.value.other} == {"a", "b"}
    with session.bind(a=whole[:4], b=whole[4:]) as step:  # neighbours are no overlap
        step.run(x=np.ones((1, 2), np.float32))
    assert whole[:, 0].tolist() == [1, 0, 0, 0, 0, 1, 0, 0]


def test_dimensions_are_one_size_over_all_storage() -> None:
    with pytest.raises(errors.StorageMismatch) as caught:
        Session(pair).bind(a=np.zeros((4, 2), np.float32), b=np.zeros((5, 2), np.float32))
    assert (caught.value.name, caught.value.given) == ("b", (5, 2))


def test_checks_of_storage_have_an_order(session) -> None:
    """Writable, byte order, type, shape, layout: the first that is wrong is named."""
    frozen = np.zeros((3, 2), ">f8").T
    frozen.flags.writeable = False
    order = [
        (frozen, errors.ImmutableStorage, ""),
        (np.zeros((3, 2), ">f4").T, errors.StorageMismatch, "byte order"),
        (np.zeros((3, 2), np.float64).T, errors.StorageMismatch, "float64"),
        (np.zeros((3, 2), np.float32).T, errors.StorageMismatch, "axes"),
        (np.zeros((4, 8, 2), np.float32).T, errors.StorageMismatch, "contiguous"),
    ]
    for wrong, error, word in order:
        with pytest.raises(error) as caught:
            session.bind(cache=wrong)
        assert word in str(caught.value)


def test_empty_storage_is_lent_freely() -> None:
    session = Session(append)
    empty = np.zeros((2, 0, 4), np.float32)
    with session.bind(cache=empty) as first, session.bind(cache=empty) as second:
        for step in (first, second):
            assert step.run(new=tokens(0), position=0)[0] is empty
        with pytest.raises(errors.CapacityError):
            first.run(new=tokens(), position=0)


# -- ordinary inputs


def test_inputs_stay_away_from_all_lent_storage(session, cache) -> None:
    """Case 95: refused, not treated as a move, also for storage of another binding."""
    other = session.allocate("cache", heads=2, capacity=8)
    with session.bind(cache=cache) as step, session.bind(cache=other):
        for new in (cache[:, 1:3], other[:, 1:3], other[:, ::2], cache[::-1]):
            with pytest.raises(errors.SharedStorage) as caught:
                step.run(new=new, position=0)
            assert (caught.value.name, caught.value.other) == ("new", "cache")
    with session.bind(cache=cache) as step:
        step.run(new=other[:, 1:3], position=0)  # it has been given back


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_position_in_lent_storage_is_an_overlap_too(session, cache, shape) -> None:
    place = np.zeros(2, np.int64)
    counter = Session(counted)
    with session.bind(cache=cache) as step, counter.bind(cache=place):
        with pytest.raises(errors.SharedStorage) as caught:
            step.run(new=tokens(), position=place[:1].reshape(shape))
        assert caught.value.name == "position"
    assert not cache.any()


def test_any_layout_of_an_input_is_read_as_it_says(session, cache) -> None:
    """Case 95. What is only read may be read-only, strided or repeated."""
    base = np.arange(48, dtype=np.float32).reshape(4, 3, 4)
    frozen = base[:2].copy()
    frozen.flags.writeable = False
    views = [
        frozen,
        base[::2],
        base[1::-1],
        np.asfortranarray(base[:2]),
        np.broadcast_to(base[:1], (2, 3, 4)),
        base[:2, :, ::-1],
    ]
    with session.bind(cache=cache) as step:
        for view in views:
            step.run(new=view, position=2)
            np.testing.assert_array_equal(cache[:, 2:5], view)


def test_missing_and_unknown_inputs_are_named(session, cache) -> None:
    with session.bind(cache=cache) as step:
        for given, name in (
            ({"new": tokens()}, "position"),
            ({"new": tokens(), "position": 0, "extra": 1}, "extra"),
            ({"new": tokens(), "pos": 0}, "position"),
            ({"new": tokens(), "position": 0, "cache": cache}, "cache"),
        ):
            with pytest.raises(errors.BindingError) as caught:
                step.run(**given)
            assert name in str(caught.value)
    assert not cache.any()


def test_dimensions_of_inputs_and_storage_are_one(session, cache, untouched) -> None:
    with session.bind(cache=cache) as step, untouched(cache):
        for new in (np.ones((4, 1, 4), np.float32), np.ones((2, 1, 5), np.float32), np.ones(3)):
            with pytest.raises(errors.StorageMismatch):
                step.run(new=new, position=0)


def test_inputs_are_not_kept_alive(session, cache) -> None:
    class Watched(np.ndarray):
        pass

    alive = []
    with session.bind(cache=cache) as step:
        for _ in range(3):
            new = tokens().view(Watched)
            alive.append(weakref.ref(new))
            step.run(new=new, position=0)
            del new
        gc.collect()
        assert not any(ref() is not None for ref in alive)


# -- runs


@pytest.mark.parametrize("position, length", [(0, 8), (7, 1), (8, 0), (0, 0)])
def test_what_fits_is_written_and_nothing_else(session, guarded, position, length) -> None:
    """Cases 35, 43."""
    cache = guarded((2, 8, 4))
    with session.bind(cache=cache) as step:
        out = step.run(new=tokens(length), position=position)
    assert out[0] is cache
    written = np.zeros(8, bool)
    written[position : position + length] = True
    assert (cache[:, written] == 1).all() and np.isnan(cache[:, ~written]).all()


@pytest.mark.parametrize(
    "position, length",
    [(8, 1), (7, 2), (0, 9), (9, 0), (-1, 1), (-(2**63), 2), (2**31, 1), (2**63 - 1, 8)],
)
def test_what_does_not_fit_changes_no_byte(session, guarded, untouched, position, length) -> None:
    """Cases 35, 40, 44."""
    cache = guarded((2, 8, 4))
    with session.bind(cache=cache) as step, untouched(cache):
        with pytest.raises(errors.CapacityError) as caught:
            step.run(new=tokens(length), position=position)
        error = caught.value
        assert (error.cache, error.position, error.length) == ("cache", position, length)
        assert (error.capacity, error.batch) == (8, None)
        step.run(new=tokens(0), position=0)  # no run has failed half-way


@pytest.mark.parametrize("position", [1023, 1024, 1025, 1026, 1027])
def test_the_capacity_is_not_rounded(session, guarded, position) -> None:
    """Case 37."""
    cache = guarded((2, 1026, 4))
    with session.bind(cache=cache) as step:
        if position < 1026:
            step.run(new=tokens(), position=position)
            assert (cache[:, position] == 1).all()
        else:
            with pytest.raises(errors.CapacityError):
                step.run(new=tokens(), position=position)


def test_capacity_and_valid_length_are_two_numbers(session, cache) -> None:
    """Cases 38, 46. A stream of n tokens leaves n valid ones; the capacity never changes."""
    with session.bind(cache=cache) as step:
        length = 0
        for n in (3, 1, 1, 2):
            out = step.run(new=tokens(n, length + 1), position=length)
            assert out[0].shape == cache.shape == (2, 8, 4)
            length += n
    assert length == 7
    assert cache[0, :, 0].tolist() == [1, 1, 1, 4, 5, 6, 6, 0]


@model
def two_layers(
    first: Mutable[Cache], second: Mutable[FLOAT["heads", "small", 4]], new: New, p: INT64["heads"]
) -> tuple[Alias["first"], Alias["second"]]:
    a = kv.CacheUpdate(first, new, p, axis=1, batch_axis=0)
    b = kv.CacheUpdate(second, new, p, axis=1, batch_axis=0)
    return a, b


def test_the_last_layer_decides_about_the_first(guarded, untouched) -> None:
    """Case 49, over layers and rows."""
    first, second = guarded((2, 8, 4)), guarded((2, 5, 4))
    with Session(two_layers).bind(first=first, second=second) as step:
        with untouched(first, second), pytest.raises(errors.CapacityError) as caught:
            step.run(new=tokens(2), p=np.array([0, 4]))
        assert (caught.value.cache, caught.value.batch, caught.value.capacity) == ("second", 1, 5)
        step.run(new=tokens(2), p=np.array([0, 3]))


def test_rebinding_writes_to_the_new_storage(session) -> None:
    """Case 101."""
    caches = [session.allocate("cache", heads=2, capacity=8) for _ in range(3)]
    for k, cache in enumerate(caches):
        with session.bind(cache=cache) as step:
            for position in range(3):
                step.run(new=tokens(value=k + 1), position=position)
    assert [c[0, 0, 0] for c in caches] == [1, 2, 3]


def test_new_storage_behaves_as_reset_storage(session, cache) -> None:
    """Case 62."""
    fresh = session.allocate("cache", heads=2, capacity=8)
    with session.bind(cache=cache) as step:
        step.run(new=tokens(5, 7), position=2)
        cache[:] = 0  # between runs the storage is the caller's
        out = step.run(new=tokens(2, 3), position=0)
        assert out[0] is cache
    session.run({"new": tokens(2, 3), "position": 0}, writable={"cache": fresh})
    np.testing.assert_array_equal(cache, fresh)


def test_results_belong_to_the_caller(session, cache) -> None:
    """Cases 2, 106: no later run and no edit of an input changes a result."""
    results = []
    with session.bind(cache=cache) as step:
        new = tokens()
        for k in range(4):
            new[:] = k
            out = step.run(new=new, position=k)
            assert out[0] is cache
            assert not np.shares_memory(out[1], new) and not np.shares_memory(out[1], cache)
            results.append(out[1])
        new[:] = 99
    for k, result in enumerate(results):
        assert (result == 2 * k).all()


@model
def passing(
    cache: Mutable[FLOAT[4]], x: FLOAT[4]
) -> tuple[Alias["cache"], FLOAT[4], FLOAT[4], FLOAT[4]]:
    constant = op.Constant(value=np.arange(4, dtype=np.float32))
    y = x * 1.0
    return kv.Assign(cache, x), op.Identity(x), constant, y


def test_undeclared_results_share_nothing(untouched) -> None:
    """Case 106: every pair of an undeclared result with anything else."""
    session = Session(passing)
    cache, x = session.allocate("cache"), np.ones(4, np.float32)
    with session.bind(cache=cache) as step:
        for _ in range(3):
            updated, *others = step.run(x=x)
            assert updated is cache
            for k, result in enumerate(others):
                for other in (x, cache, *others[:k]):
                    assert not np.shares_memory(result, other)
                result[:] = -1  # the caller may scribble over it
            again = step.run(x=x)
            assert again[2].tolist() == [0, 1, 2, 3] and (again[1] == 1).all() and (x == 1).all()


def test_the_generation_tells_what_is_old(session, cache) -> None:
    """Case 98."""
    with session.bind(cache=cache) as step:
        assert step.generation == 0
        step.run(new=tokens(), position=0)
        snapshot = step.generation
        with pytest.raises(errors.CapacityError):
            step.run(new=tokens(), position=8)
        assert step.generation == snapshot  # nothing has changed
        step.run(new=tokens(), position=1)
        assert step.generation == snapshot + 1


# -- failures after a write


@model
def counted(cache: Mutable[INT64["m"]], new: INT64["n"], start: INT64[()]) -> Alias["cache"]:
    first = kv.CacheUpdate(cache, new, start, axis=0)
    position = op.ReduceMax(first, keepdims=0)  # of what has just been written
    return kv.CacheUpdate(first, new, position, axis=0)


def test_a_failure_after_a_write_is_told_until_reset() -> None:
    session = Session(counted)
    cache = session.allocate("cache", m=8)
    with session.bind(cache=cache) as step:
        with pytest.raises(errors.CapacityError) as caught:
            step.run(new=np.array([1, 8]), start=2)
        assert (caught.value.position, caught.value.length) == (8, 2)
        assert cache[2:4].tolist() == [1, 8]
        for _ in range(2):
            with pytest.raises(errors.DirtyState) as dirty:
                step.run(new=np.array([1, 2]), start=0)
        (written,) = dirty.value.written
        assert (written.root, written.position, written.length) == ("cache", 2, 2)
        assert "test_binding.py" in str(written.location)
        assert dirty.value.__cause__ is caught.value
        step.reset()
        cache[:] = 0
        step.run(new=np.array([1, 2]), start=0)
        assert cache.tolist() == [1, 2, 1, 2, 0, 0, 0, 0]


@model
def chase(cache: Mutable[INT64["m"]], new: INT64[1], steps: INT64[()]) -> Alias["cache"]:
    for _ in range(steps):
        cache = kv.CacheUpdate(cache, new, op.ReduceSum(cache, keepdims=0), axis=0)
    return cache


def test_every_round_of_a_loop_that_has_written_is_told() -> None:
    session = Session(chase)
    cache = session.allocate("cache", m=8)
    with session.bind(cache=cache) as step:
        step.run(new=[3], steps=3)
        assert cache.tolist() == [3, 0, 0, 3, 0, 0, 3, 0]
        cache[:] = 0
        with pytest.raises(errors.CapacityError) as caught:
            step.run(new=[3], steps=4)
        assert (caught.value.position, caught.value.capacity) == (9, 8)
        with pytest.raises(errors.DirtyState) as dirty:
            step.run(new=[3], steps=1)
        assert [w.position for w in dirty.value.written] == [0, 3, 6]


def test_rounds_of_a_long_loop_share_what_is_told() -> None:
    session, capacity = Session(chase), 3 * journal.MOST
    cache = session.allocate("cache", m=capacity)
    with session.bind(cache=cache) as step:
        with pytest.raises(errors.CapacityError) as caught:
            step.run(new=[1], steps=capacity + 1)  # one token behind the other
        assert caught.value.position == capacity
        with pytest.raises(errors.DirtyState) as dirty:
            step.run(new=[1], steps=1)
    ranges = [(w.position, w.position + w.length) for w in dirty.value.written]
    assert len(ranges) <= journal.MOST + 1
    assert ranges[0] == (0, ranges[1][0]) and ranges[0][1] > journal.MOST
    assert {t for first, end in ranges for t in range(first, end)} == set(range(capacity))


def test_ranges_of_rows_are_covered_by_one_length() -> None:
    step = object()
    entries = [(step, [4, 0], 2), (step, [1, 7], 1), (step, [1, 7], 1)]
    assert journal._shared(entries) == [(step, [1, 0], 8)]
    assert journal._shared([*entries, (step, None, None)]) == [(step, None, None)]
    other = object()
    assert journal._shared([(other, 5, 1), *entries, (other, 3, 1)])[0] == (other, 3, 3)


def test_a_failure_before_any_write_leaves_the_binding_clean() -> None:
    session = Session(counted)
    cache = session.allocate("cache", m=8)
    with session.bind(cache=cache) as step:
        with pytest.raises(errors.CapacityError):
            step.run(new=np.array([1, 2]), start=7)
        step.run(new=np.array([1, 2]), start=0)


# -- threads


class Gate:
    """A kernel that waits inside of a run until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.inside, self.go = threading.Event(), threading.Event()
        original = registry._factories["onnx_inplace", "CacheUpdate"]

        def factory(step: Any, settings: Any) -> Any:
            action = original(step, settings)

            def act(slots: Any) -> None:
                self.inside.set()
                assert self.go.wait(TIMEOUT)
                action(slots)

            return act

        monkeypatch.setitem(registry._factories, ("onnx_inplace", "CacheUpdate"), factory)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_a_second_run_is_refused_at_once(gate, untouched) -> None:
    """Cases 97, 98: no waiting, no damage; the binding cannot be closed under a run either."""
    session = Session(append)
    cache = session.allocate("cache", heads=2, capacity=8)
    step = session.bind(cache=cache)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(step.run, new=tokens(), position=0)
        try:
            assert gate.inside.wait(TIMEOUT)
            with untouched(cache):
                for call in (lambda: step.run(new=tokens(), position=4), step.close):
                    with pytest.raises(errors.BindingInUse):
                        call()
        finally:
            gate.go.set()
        assert running.result(TIMEOUT)[0] is cache
    assert cache[:, 0].all() and not cache[:, 1:].any()
    step.close()


def test_the_same_storage_in_two_threads_is_refused(session, cache) -> None:
    """Case 97."""
    with session.bind(cache=cache), ThreadPoolExecutor(1) as pool:
        refused = pool.submit(session.bind, cache=cache[:1].copy().repeat(2, 0))
        refused.result(TIMEOUT).close()  # other storage is fine
        with pytest.raises(errors.BindingInUse):
            pool.submit(session.bind, cache=cache).result(TIMEOUT)


def test_two_bindings_of_one_session_run_in_parallel(session) -> None:
    """Case 97: a hundred runs in each of two threads equal the same runs one after the other."""

    def stream(seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        cache = session.allocate("cache", heads=2, capacity=8)
        with session.bind(cache=cache) as step:
            for _ in range(100):
                n = int(rng.integers(1, 4))
                new = rng.standard_normal((2, n, 4)).astype(np.float32)
                out = step.run(new=new, position=int(rng.integers(0, 9 - n)))
                np.testing.assert_array_equal(out[1], new * 2)
        return cache

    expected = [stream(seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = [f.result(TIMEOUT) for f in [pool.submit(stream, seed) for seed in range(2)]]
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_interleaved_sessions_keep_their_state(session) -> None:
    """Case 100."""
    other = Session(pair)
    cache = session.allocate("cache", heads=2, capacity=8)
    a, b = (other.allocate(n, m=8) for n in "ab")
    with session.bind(cache=cache) as first, other.bind(a=a, b=b) as second:
        for k in range(4):
            first.run(new=tokens(value=k), position=k)
            second.run(x=np.full((1, 2), 10 + k, np.float32))
    assert cache[0, :4, 0].tolist() == [0, 1, 2, 3]
    assert a[0, 0] == b[1, 0] == 13 and not a[1:].any()


def test_a_fork_is_independent(session, cache) -> None:
    """Case 55: a copied cache and its position have nothing to do with the original."""
    position = np.array(3)
    with session.bind(cache=cache) as step:
        step.run(new=tokens(3), position=0)
        child, there = cache.copy(), position.copy()
        with session.bind(cache=child) as forked:
            forked.run(new=tokens(value=9), position=there)
            there += 1
        assert int(position) == 3 and not np.shares_memory(position, there)
        assert not cache[:, 3].any() and (child[:, 3] == 9).all()


# -- reads of what is valid


@model
def attend(
    keys: Mutable[FLOAT[1, 2, "m", 16]],
    values: Mutable[FLOAT[1, 2, "m", 16]],
    query: FLOAT[1, 4, "n", 16],
    key: FLOAT[1, 2, "n", 16],
    value: FLOAT[1, 2, "n", 16],
    position: INT64[1],
) -> tuple[FLOAT[1, 4, "n", 16], Alias["keys"], Alias["values"]]:
    keys = op.TensorScatter(keys, key, position)
    values = op.TensorScatter(values, value, position)
    length = position + op.Shape(key, start=2, end=3)
    return op.Attention(query, keys, values, None, None, None, length, is_causal=1), keys, values


def attention_inputs(n: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    heads = {"query": 4, "key": 2, "value": 2}
    return {k: rng.standard_normal((1, h, n, 16)).astype(np.float32) for k, h in heads.items()}


def test_what_lies_behind_the_valid_length_does_not_matter(guarded) -> None:
    """Case 52: after truncation stale rows may hold anything."""
    session = Session(attend)
    caches = {name: guarded((1, 2, 16, 16)) for name in ("keys", "values")}
    with session.bind(**caches) as step:
        step.run(**attention_inputs(6, seed=0), position=[0])
        for cache in caches.values():
            cache[:, :, 4:] = np.nan  # the caller takes two tokens back
        out = step.run(**attention_inputs(1, seed=1), position=[4])
    fresh = {name: session.allocate(name, m=16) for name in caches}
    first = {k: v[:, :, :4] for k, v in attention_inputs(6, seed=0).items()}
    with session.bind(**fresh) as step:
        step.run(**first, position=[0])
        expected = step.run(**attention_inputs(1, seed=1), position=[4])
    np.testing.assert_array_equal(out[0], expected[0])


def test_one_input_decides_about_writes_and_reads(untouched) -> None:
    session = Session(attend)
    assert not session.checks.late and session.checks.sliced is None
    caches = {name: session.allocate(name, m=4) for name in ("keys", "values")}
    with session.bind(**caches) as step, untouched(*caches.values()):
        for position in (3, -1, 2**63 - 1):
            with pytest.raises(errors.CapacityError) as caught:
                step.run(**attention_inputs(2, seed=0), position=[position])
            assert (caught.value.cache, caught.value.position) == ("keys", position)
