"""A run that is refused has changed no byte, wherever in the control flow the fault would come."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onnx_inplace import Session, errors
from onnx_inplace.dsl import BOOL, FLOAT, INT64, Alias, Mutable, function, kv, model, op, weight

Cache, New = FLOAT["heads", "capacity", 2], FLOAT["heads", "n", 2]
CAPACITY = 8


@function
def append(cache: Mutable[Cache], new: New, position: INT64[()]) -> Alias["cache"]:
    return kv.CacheUpdate(cache, new, position)


@model
def nested(
    cache: Mutable[Cache], new: New, steps: INT64[()], inner: INT64[()], mask: BOOL["k"]
) -> tuple[Alias["cache"], INT64[()]]:
    position = op.Constant(value_int=0)
    for i in range(steps):
        if op.Gather(mask, i):
            for _ in range(inner):
                cache = append(cache, new + op.Cast(position, to=1), position)
                position = position + op.Shape(new, start=1, end=2)[0]
        else:
            position = position + 1
    return cache, position


@model
def until(
    cache: Mutable[Cache], new: New, limit: INT64[()], stride: INT64[()]
) -> tuple[Alias["cache"], INT64[()]]:
    position = op.Constant(value_int=0)
    while position < limit:
        cache = append(cache, new, position)
        position = position + stride
    return cache, position


@model
def branch(
    cache: Mutable[Cache], other: Mutable[Cache], new: New, position: INT64[()], keep: BOOL[()]
) -> tuple[Alias["cache"], Alias["other"]]:
    cache = append(cache, new, 0)
    if keep:
        other = append(other, new, position)
    else:
        other = append(other, new, position - 1)
    return cache, other


NESTED, UNTIL, BRANCH = Session(nested), Session(until), Session(branch)
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def attempt(
    session: Session, caches: dict[str, np.ndarray], **given: Any
) -> tuple[int, int] | None:
    """Position and length of a refusal after which every byte is what it was; None: accepted."""
    before = {name: cache.tobytes() for name, cache in caches.items()}
    with session.bind(**caches) as step:
        try:
            step.run(**given)
        except errors.CapacityError as error:
            assert {name: cache.tobytes() for name, cache in caches.items()} == before
            return error.position, error.length
    return None


@given(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3), st.lists(st.booleans(), min_size=4))
@quick
def test_nested_loops_and_branches(steps: int, inner: int, n: int, mask: list[bool]) -> None:
    expected, position, writes = None, 0, []
    for i in range(steps):
        if not mask[i]:
            position += 1
            continue
        for _ in range(inner):
            if expected is None and position > CAPACITY - n:
                expected = position, n
            writes.append(position)
            position += n
    cache = np.full((2, CAPACITY, 2), np.nan, np.float32)
    new = np.zeros((2, n, 2), np.float32)
    found = attempt(
        NESTED, {"cache": cache}, new=new, steps=steps, inner=inner, mask=np.array(mask)
    )
    assert found == expected
    if expected is None:
        model = np.full(CAPACITY, np.nan, np.float32)
        for p in writes:
            model[p : p + n] = p
        np.testing.assert_array_equal(cache[1, :, 1], model)


@given(st.integers(-1, 12), st.integers(1, 5), st.integers(0, 9))
@quick
def test_while(limit: int, stride: int, n: int) -> None:
    positions = list(range(0, limit, stride))
    expected = next(((p, n) for p in positions if p > CAPACITY - n), None)
    cache = np.zeros((2, CAPACITY, 2), np.float32)
    new = np.ones((2, n, 2), np.float32)
    assert attempt(UNTIL, {"cache": cache}, new=new, limit=limit, stride=stride) == expected


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("position", [-(2**63), -1, 0, 1, 7, 8, 9, 2**63 - 1])
def test_a_branch_behind_a_write(position: int, keep: bool, guarded) -> None:
    """The write before the branch has been checked and is not done either."""
    caches = {name: guarded((2, CAPACITY, 2)) for name in ("cache", "other")}
    new = np.zeros((2, 1, 2), np.float32)
    taken = position if keep else (position - 1 + 2**63) % 2**64 - 2**63  # int64 wraps
    expected = None if 0 <= taken <= CAPACITY - 1 else (taken, 1)
    assert attempt(BRANCH, caches, new=new, position=position, keep=keep) == expected
    assert bool(caches["cache"][0, 0, 0] == 0) is (expected is None)


def test_a_position_from_a_weight_that_stands_in_another_file(tmp_path: Path) -> None:
    table = np.arange(20_000) % 7  # large enough for the file beside the model

    @model
    def program(
        cache: Mutable[FLOAT["m", 4]], new: FLOAT["n", 4], row: INT64[()]
    ) -> Alias["cache"]:
        return kv.CacheUpdate(cache, new, op.Gather(weight(table, "table"), row))

    program.save(tmp_path / "program.onnx")
    session = Session(tmp_path / "program.onnx")
    cache = session.allocate("cache", m=8)
    with session.bind(cache=cache) as step:
        step.run(new=np.ones((2, 4), np.float32), row=10)
        assert cache[:, 0].tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
        with pytest.raises(errors.CapacityError):
            step.run(new=np.ones((3, 4), np.float32), row=6)
        assert cache.sum() == 8
