"""Calls that share their work out: every kernel is run, whoever runs it."""

import time

import numba
import numpy as np
import pytest

from onnx_inplace.numba_kernels import pace, sharing
from onnx_inplace.numba_kernels.memory import address, fetch_add, load_int64, store_int64
from onnx_inplace.numba_kernels.pace import Pace
from onnx_inplace.numba_kernels.sharing import DONE, LEFT, NEWS, Sharing, Team
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


@numba.cfunc("int64(int64,int64,int64,int64,int64)")
def loops(context, function, count, batches, argument):
    for worker in range(count):
        _call_part(function, argument, worker)
    return 0


@numba.njit
def attend(at, counters, longest, function, join):
    places = counters, 0, 0, 0, 0, counters + 8 * 5, 0, 0, 0
    return sharing.attend(SHARING, at, function, places, longest, join)


def called(words: np.ndarray | None, longest: int = LONG) -> tuple[int, list[int]]:
    """What a call says; workers of its kernel one by one, how many, and those of ``merge``."""
    counters = np.array([0, 0, 0, 0, 0, longest])
    at = 0 if words is None else address(words)
    said = attend(at, address(counters), longest, count.address, merge.address)
    return said, counters[:5].tolist()


ALONE, SHARED, NOTHING = [1, 0, 0, 1, 0], [1, 1, 1, 3, 3], [0, 0, 0, 0, 0]


def test_without_a_team_long_sequences_are_left_to_the_caller() -> None:
    assert called(None) == (LEFT, NOTHING)
    assert called(None, SHARING.most) == (DONE, ALONE)


def test_threads_of_a_library_have_long_sequences() -> None:
    words = team.words(loops.address)
    assert called(words) == (DONE, SHARED)
    assert called(words, SHARING.most) == (DONE, ALONE)


def test_one_thread_does_all_where_a_loop_refuses() -> None:
    assert called(team.words(refuses.address)) == (DONE, ALONE)


@pytest.mark.skipif(not team._possible(), reason="this system has no helpers")
def test_one_thread_does_all_while_another_caller_has_the_helpers() -> None:
    team.ready(SHARING.workers)
    words = team.words(team.team.loop.ready().address, team._team())
    owner = team._words()
    assert called(words) == (DONE, SHARED)
    owner[Words.OWNER] = 1
    try:
        assert called(words) == (DONE, ALONE)
    finally:
        owner[Words.OWNER] = 0
    assert called(words) == (DONE, SHARED)


# -- at a pace: helpers and a clock that stand for those of Linux

PRODUCTS = 7
TIMES = np.zeros(3, np.int64)  # what each call takes, and what time it is: [s], [ns]
TIMES_AT = address(TIMES)


@numba.cfunc("int32(int32,int64)")
def clock(which, place):
    """Another time in each call; as ``clock_gettime`` says it."""
    seconds, rest = load_int64(TIMES_AT + 8), load_int64(TIMES_AT + 16)
    store_int64(place, seconds)
    store_int64(place + 8, rest)
    seconds, rest = seconds + load_int64(TIMES_AT), rest - 250_000_000
    if rest < 0:
        seconds, rest = seconds - 1, rest + 1_000_000_000
    store_int64(TIMES_AT + 8, seconds)
    store_int64(TIMES_AT + 16, rest)
    return 0


class Paced:
    """A call whose sequences are long from 200 tokens on, and what is known of its kernel."""

    def __init__(self, loop: int = loops.address) -> None:
        self.helpers = np.zeros(Words.END, np.int64)
        self.helpers[[Words.HELPERS, Words.CLOCK]] = SHARING.workers - 1, clock.address
        self.known = pace.words(4096)
        self.words = team.words(loop, address(self.helpers))
        numbers = (
            200,
            address(self.known),
            PRODUCTS,
            1,
            1,
            -1,
            0,
            1,
        )  # one row, whose query sees all
        self.words[Team.ALONE : Team.JOB] = numbers

    def __call__(self, seconds: int = 0, longest: int = LONG) -> tuple[int, list[int]]:
        """A call that takes a quarter of a second less than so many."""
        TIMES[0] = seconds
        return called(self.words, longest)


def test_one_thread_shows_first_what_it_takes_for_the_keys_that_are_seen() -> None:
    paced = Paced()
    assert paced(5) == (DONE, ALONE)
    assert paced.known[Pace.SECONDS] == pytest.approx(4.75 / (PRODUCTS * LONG))


def test_several_go_on_until_they_lose() -> None:
    paced = Paced()
    paced(5)
    for _ in range(3):
        assert paced(3) == (DONE, SHARED)
    credit = paced.known[Pace.CREDIT]
    assert credit > pace.words(4096)[Pace.CREDIT]
    while paced.known[Pace.CREDIT] > 1:
        assert paced(9) == (DONE, SHARED)
    assert paced(9) == (DONE, SHARED)
    assert paced(3) == (DONE, ALONE)
    assert paced.known[Pace.PAUSE] == 31
    assert paced.known[Pace.SECONDS] == pytest.approx(2.75 / (PRODUCTS * LONG))


def test_work_is_compared_by_the_keys_that_are_seen() -> None:
    paced = Paced()
    paced(100)
    before = paced.known[Pace.CREDIT]
    assert paced(60, longest=500) == (DONE, SHARED)
    assert paced.known[Pace.CREDIT] == before - 2
    assert paced(40, longest=500) == (DONE, SHARED)
    assert paced.known[Pace.CREDIT] == before - 1


@pytest.mark.parametrize("longest", [SHARING.most, 200])
def test_of_what_one_thread_has_anyway_nothing_is_learned(longest: int) -> None:
    paced = Paced()
    assert paced(5, longest) == (DONE, ALONE)
    np.testing.assert_array_equal(paced.known, pace.words(4096))


def test_a_loop_that_refuses_has_shown_what_one_thread_takes() -> None:
    paced = Paced(refuses.address)
    paced(5)
    assert paced(3) == (DONE, ALONE)
    assert paced.known[Pace.SECONDS] == pytest.approx(2.75 / (PRODUCTS * LONG))
    assert paced.known[Pace.CREDIT] == pace.words(4096)[Pace.CREDIT]


def test_a_helper_in_the_way_is_news() -> None:
    paced = Paced()
    paced.helpers[Words.CROWDED] = 1
    assert paced() == (DONE | NEWS, ALONE)
    assert paced() == (DONE | NEWS, SHARED)
    paced.helpers[Words.CROWDED] = 0
    assert paced() == (DONE, SHARED)


def test_helpers_that_are_missing_are_news() -> None:
    """As in a forked process: nothing is shared out, and nothing is learned."""
    paced = Paced()
    paced.known[Pace.SECONDS] = 1.0
    known = paced.known.copy()
    paced.helpers[Words.HELPERS] = SHARING.workers - 2
    assert paced() == (DONE | NEWS, ALONE)
    np.testing.assert_array_equal(paced.known, known)
    paced.helpers[Words.HELPERS] += 1
    assert paced() == (DONE, SHARED)


@pytest.mark.skipif(not team._possible(), reason="this system has no helpers")
def test_time_is_that_of_the_clock_of_python() -> None:
    before = time.monotonic_ns()
    found = now(team._words()[Words.CLOCK])
    assert before <= found <= time.monotonic_ns()


@numba.njit
def now(function):
    return pace.now(function)
