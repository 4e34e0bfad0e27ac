"""Calls that share their work out: every kernel is run, whoever runs it."""

import numba
import numpy as np
import pytest

from onnx_inplace.numba_kernels import sharing
from onnx_inplace.numba_kernels.memory import address, fetch_add, store_int64
from onnx_inplace.numba_kernels.sharing import Sharing
from onnx_inplace.numba_kernels.team import Words, _call_part
from onnx_inplace.runner import team

pytestmark = pytest.mark.kernel

KERNEL = "void(" + ",".join(["int64"] * 11) + ")"
LONG = 1000
SHARING = Sharing(most=100, shortest=16, items=1, reach=LONG, workers=3, merge=0)


@numba.cfunc(KERNEL)
def count(counters, query, key, value, output, lengths, mask, sinks, space, worker, workers):
    fetch_add(counters + 8 * worker, 1)
    store_int64(counters + 8 * 3, workers)


@numba.cfunc(KERNEL)
def merge(counters, query, key, value, output, lengths, mask, sinks, space, worker, workers):
    fetch_add(counters + 8 * 4, workers)


@numba.cfunc("int64(int64,int64,int64,int64,int64)")
def refuses(context, function, count, batches, argument):
    return 1


@numba.njit
def attend(at, counters, longest, function, join):
    places = counters, 0, 0, 0, 0, counters + 8 * 5, 0, 0, 0
    return sharing.attend(SHARING, at, function, places, longest, join)


def called(words: np.ndarray | None, longest: int = LONG) -> tuple[bool, list[int]]:
    """Whether a kernel has been run; its workers one by one, how many, and those of ``merge``."""
    counters = np.array([0, 0, 0, 0, 0, longest])
    at = 0 if words is None else address(words)
    done = attend(at, address(counters), longest, count.address, merge.address)
    return done, counters[:5].tolist()


ALONE, SHARED, NOTHING = [1, 0, 0, 1, 0], [1, 1, 1, 3, 3], [0, 0, 0, 0, 0]


@pytest.fixture
def of_library() -> np.ndarray:
    """A team of threads that a loop of three parts stands for."""
    return team.words(loops.address)


@numba.cfunc("int64(int64,int64,int64,int64,int64)")
def loops(context, function, count, batches, argument):
    for worker in range(count):
        _call_part(function, argument, worker)
    return 0


def test_without_a_team_long_sequences_are_left_to_the_caller() -> None:
    assert called(None) == (False, NOTHING)
    assert called(None, SHARING.most) == (True, ALONE)


def test_threads_of_a_library_have_long_sequences(of_library) -> None:
    assert called(of_library) == (True, SHARED)
    assert called(of_library, SHARING.most) == (True, ALONE)


def test_one_thread_does_all_where_a_loop_refuses() -> None:
    assert called(team.words(refuses.address)) == (True, ALONE)


@pytest.mark.skipif(not team._possible(), reason="this system has no helpers")
def test_one_thread_does_all_while_another_caller_has_the_helpers() -> None:
    team.ready(SHARING.workers)
    words = team.words(team.team.loop.ready().address, team._team())
    owner = team._words()
    assert called(words) == (True, SHARED)
    owner[Words.OWNER] = 1
    try:
        assert called(words) == (True, ALONE)
    finally:
        owner[Words.OWNER] = 0
    assert called(words) == (True, SHARED)
