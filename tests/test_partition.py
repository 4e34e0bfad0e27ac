"""The order of a block: valid, with as few sub-sessions as any order has."""

import itertools
import random
from collections.abc import Iterator

import pytest

from onnx_inplace.compiler import partition


def topological_orders(before: list[set[int]]) -> Iterator[tuple[int, ...]]:
    for order in itertools.permutations(range(len(before))):
        place = {k: at for at, k in enumerate(order)}
        if all(place[earlier] < place[k] for k in place for earlier in before[k]):
            yield order


def sub_sessions(special: list[bool], order: tuple[int, ...]) -> int:
    kinds = [kind for kind, _ in itertools.groupby(special[k] for k in order)]
    return kinds.count(False)


def example(seed: int) -> tuple[list[bool], list[set[int]]]:
    """Up to six nodes, some special, each behind some of those before it."""
    rng = random.Random(seed)
    count = rng.randint(1, 6)
    special = [rng.random() < 0.5 for _ in range(count)]
    before = [{j for j in range(k) if rng.random() < 0.35} for k in range(count)]
    return special, before


@pytest.mark.parametrize("seed", range(60))
def test_no_order_has_fewer_sub_sessions(seed: int) -> None:
    special, before = example(seed)
    after: list[list[int]] = [[] for _ in special]
    for k, needed in enumerate(before):
        for earlier in needed:
            after[earlier].append(k)
    found = []
    for start in (False, True):
        runs = partition._take_turns(special, before, after, start)
        order = tuple(k for run in runs for k in run.nodes)
        assert order in set(topological_orders(before))
        assert all(special[k] == run.special for run in runs for k in run.nodes)
        found.append(sum(bool(run.nodes) and not run.special for run in runs))
    assert min(found) == min(sub_sessions(special, o) for o in topological_orders(before))


def test_the_order_is_program_order_where_nothing_else_decides() -> None:
    runs = partition._take_turns([False] * 4, [set(), set(), {0}, set()], [[2], [], [], []], False)
    assert [run.nodes for run in runs if run.nodes] == [[0, 1, 2, 3]]
