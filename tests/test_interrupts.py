"""Ctrl+C behind any call of a run: storage is given back, and what is half written is said."""

import sys
from collections.abc import Callable

import numpy as np
import pytest

from onnx_inplace import PagedCache, Session, errors
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, Paged, kv, model, op
from onnx_inplace.runner import storage

# what comes in a finalizer, Python only reports
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

Page = Paged[FLOAT[2, 1, 16, 32]]


@model
def dense(
    cache: Mutable[FLOAT["s", 4]], values: FLOAT["n", 4], position: INT64[()]
) -> tuple[Alias["cache"], FLOAT["n", 4]]:
    return kv.CacheUpdate(cache, values, position), op.Relu(values)


@model
def pages(
    cache: Mutable[Page], other: Page, values: FLOAT[2, 1, "n", 32], position: INT64[()]
) -> tuple[Alias["cache"], FLOAT[2, 1, 16, 32]]:
    return kv.PagedCacheUpdate(cache, 0, values, position), kv.PageGather(other, 0)


@model
def layer(
    keys: Mutable[FLOAT[1, 1, "s", 16]],
    values: Mutable[FLOAT[1, 1, "s", 16]],
    query: FLOAT[1, 1, 1, 16],
    position: INT64[()],
    lengths: INT64[1],
) -> tuple[FLOAT[1, 1, 1, 16], Alias["keys"], Alias["values"]]:
    new_keys = kv.CacheUpdate(keys, query, position)
    new_values = kv.CacheUpdate(values, query, position)
    attended = op.Attention(query, new_keys, new_values, nonpad_kv_seqlen=lengths)
    return attended, new_keys, new_values


def arrays() -> tuple[Session, dict, dict]:
    feeds = {"values": np.ones((1, 4), np.float32), "position": 1}
    return Session(dense), {"cache": np.zeros((4, 4), np.float32)}, feeds


def paged() -> tuple[Session, dict, dict]:
    caches = [PagedCache((2, 1, 16, 32), np.float32) for _ in range(2)]
    for cache in caches:
        cache.allocate_page("FLOAT16")
    feeds = {"other": caches[1], "values": np.ones((2, 1, 1, 32), np.float32), "position": 1}
    return Session(pages), {"cache": caches[0]}, feeds


def interrupted(act: Callable[[], object], number: int) -> int:
    """Do it, with an interrupt at a place where Python looks for signals, if there are so many.

    They are at the begin of a function, and behind calls of what is written in C.

    Returns:
        How many there were.
    """
    count = 0

    def look(frame, event: str, argument: object) -> None:
        nonlocal count
        if event in ("call", "c_return"):
            count += 1
            if count == number:
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        act()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("make", [arrays, paged])
def test_storage_is_given_back_wherever_an_interrupt_comes(make) -> None:
    session, storage_, feeds = make()

    def cycle() -> None:
        with session.bind(**storage_) as step:
            step.run(**feeds)

    cycle()
    places = interrupted(cycle, 0)
    for number in range(1, places, 1 + places // 500):
        interrupted(cycle, number)
        assert not storage.leases._lock.locked(), number
        cycle()  # nobody holds it any more


@pytest.mark.parametrize("make", [arrays, paged])
def test_a_binding_runs_again_wherever_an_interrupt_comes(make) -> None:
    session, storage_, feeds = make()
    dirty = 0
    with session.bind(**storage_) as step:
        step.run(**feeds)

        def run() -> None:
            step.run(**feeds)

        for number in range(1, interrupted(run, 0)):
            interrupted(run, number)
            try:
                run()
            except errors.DirtyState:
                dirty += 1
                step.reset()
                run()
    assert dirty


def test_what_a_layer_has_written_is_said() -> None:
    """Its steps are one action from the third run on: all of them have run, or it is said."""
    session, dirty = Session(layer), 0
    caches = {name: np.zeros((1, 1, 64, 16), np.float32) for name in ("keys", "values")}

    def feeds(at: int) -> dict:
        query = np.full((1, 1, 1, 16), at + 1, np.float32)
        return {"query": query, "position": at, "lengths": np.array([at + 1])}

    with session.bind(**caches) as step:
        for at in range(4):
            step.run(**feeds(at))
        for number in range(1, interrupted(lambda: step.run(**feeds(4)), 0)):
            for cache in caches.values():
                cache[:, :, 4] = 0
            interrupted(lambda: step.run(**feeds(4)), number)
            changed = {name for name, cache in caches.items() if cache[:, :, 4].any()}
            try:
                step.run(**feeds(5))
                assert changed in (set(), {"keys", "values"}), number
            except errors.DirtyState as error:
                assert changed <= {written.root for written in error.written}, number
                dirty += 1
                step.reset()
    assert dirty
