"""What calls have taken decides about those that follow: compiled, and as Python has it."""

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnx_inplace.numba_kernels import pace
from onnx_inplace.numba_kernels.pace import Pace
from onnx_inplace.runner.threads import Policy


@dataclasses.dataclass
class Model:
    """The rules, one by one; losses that are forgiven are counted as halves of them."""

    longest: int
    pace: float | None = None
    left_alone: int = 0
    in_a_row: int = 0
    next_pause: int = 32
    forgiven: float = 1.0

    def decide(self) -> bool:
        if self.pace is None:
            return False
        if self.left_alone:
            self.left_alone -= 1
            return False
        self.in_a_row += 1
        if self.in_a_row == 128:
            self.in_a_row = 0
        return self.in_a_row > 0

    def one(self, work: float, seconds: float) -> None:
        now = seconds / work
        if self.pace is None or now < self.pace:
            self.pace = now
        else:
            self.pace += 0.1 * (now - self.pace)  # to the last bit, for ties decide

    def several(self, work: float, seconds: float) -> None:
        if self.pace is None or seconds < self.pace * work:
            self.next_pause = max(self.next_pause - 1, 32)
            self.forgiven = min(self.forgiven + 0.5, 3.0)
        elif self.forgiven >= 1:
            self.forgiven -= 1
        else:
            self.forgiven = 0.5
            self.left_alone = min(self.next_pause, self.longest)
            self.next_pause = max(32, min(self.next_pause * 2, self.longest))


class Words:
    """Compiled."""

    def __init__(self, longest: int) -> None:
        self.words = pace.words(longest)

    def decide(self) -> bool:
        return pace.decide(self.words)

    def one(self, work: float, seconds: float) -> None:
        pace.one_took(self.words, work, seconds)

    def several(self, work: float, seconds: float) -> None:
        pace.several_took(self.words, work, seconds)


class Face:
    """As the runner has it."""

    def __init__(self, longest: int) -> None:
        policy = Policy(longest)
        self.words = policy.words
        self.decide, self.one, self.several = (
            policy.parallel, policy.serial_took, policy.parallel_took,
        )  # fmt: skip


TIMES = st.floats(0.01, 100.0)  # [s] for one unit of work
CALLS = st.tuples(st.integers(1, 10**12), st.sampled_from([1.0, 2.0, 50.0]) | TIMES)
RUNS = st.lists(st.tuples(st.lists(CALLS, min_size=1, max_size=3), st.integers(1, 60)))


@pytest.mark.parametrize("way", [Words, Face])
@given(runs=RUNS, longest=st.sampled_from([0, 32, 128, 4096]))
def test_any_calls(way: Callable[[int], Words | Face], runs, longest: int) -> None:
    """Several calls in turns, again and again: the same decisions, and the same is known."""
    model, found = Model(longest), way(longest)
    for calls, times in runs:
        for work, seconds in calls * times:
            several = model.decide()
            assert found.decide() == several
            for one in (model, found):
                (one.several if several else one.one)(work, work * seconds)
        wanted = [model.pace, model.left_alone, model.in_a_row, model.next_pause]
        assert found.words[: Pace.CREDIT].tolist() == wanted
        assert found.words[Pace.CREDIT] == 2 * model.forgiven


def test_before_one_thread_has_shown_what_it_takes_several_win() -> None:
    words = pace.words(4096)
    pace.several_took(words, 1, 1e9)
    assert words[Pace.CREDIT] == pace.words(4096)[Pace.CREDIT] + 1
