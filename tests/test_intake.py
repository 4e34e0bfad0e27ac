"""Inputs that look like those of the run before are taken in one call, and nothing else is."""

from typing import Any

import numpy as np
import pytest

from onnx_inplace import Session, errors
from onnx_inplace.dsl import FLOAT, INT32, INT64, Alias, Mutable, kv, model, op
from onnx_inplace.numba_kernels import intake, objects
from onnx_inplace.numba_kernels.memory import FIELD, address

INT = np.dtype(np.int64)


def taken(
    array: object, like: np.ndarray, lent: list[tuple[int, int]] | None = None, bounds=None
) -> tuple[int, np.ndarray]:
    """What the kernel says of one object, and what it copied."""
    dims, copy = np.array(like.shape, np.int64), np.full(like.nbytes + 16, 0xA5, np.uint8)
    low, high = bounds or (0, 0)
    row = intake.Expected(
        id(like.dtype),
        like.ndim,
        address(dims),
        like.nbytes,
        address(copy) + 8,
        int(bounds is not None),
        low,
        high,
    )
    table, items = intake.table([row]), (array,)
    intervals = intake.lent(*zip(*lent, strict=True) if lent else ([], []), [])
    answer = intake.take.ready()(
        id(items) + objects.ITEMS,
        address(table),
        1,
        id(np.ndarray),
        id(intervals) + FIELD,
    )
    assert (copy[:8] == 0xA5).all() and (copy[-8:] == 0xA5).all()  # nothing beside it
    return answer, copy[8:-8]


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,), (2, 0, 3)])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float32, np.float16, np.bool_])
def test_an_array_as_expected_is_taken_and_copied(dtype, shape) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    answer, copy = taken(array, np.empty(shape, dtype))
    assert answer == 1 and copy.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "other",
    [
        np.zeros((2, 4), np.int64),
        np.zeros((2, 3, 1), np.int64),
        np.zeros(6, np.int64),
        np.zeros((2, 3), np.int32),
        np.zeros((2, 3), np.uint64),
        np.zeros((2, 3), np.dtype(np.int64).newbyteorder()),
        np.zeros((3, 2), np.int64).T,
        np.zeros((2, 6), np.int64)[:, ::2],
        np.broadcast_to(np.int64(0), (2, 3)),
        np.zeros((2, 3), np.int64).view(np.matrix),
        [[0, 0, 0], [0, 0, 0]],
        0,
        None,
        "array",
    ],
    ids=repr,
)
def test_what_looks_otherwise_is_left_to_others(other) -> None:
    assert taken(other, np.zeros((2, 3), np.int64))[0] == 0


@pytest.mark.parametrize("begin, end, answer", [(-9, 0, 1), (24, 40, 1), (-9, 1, 0), (23, 40, 0)])
def test_memory_that_is_lent_is_left_to_others(begin: int, end: int, answer: int) -> None:
    array = np.zeros(3, np.int64)
    at = address(array)
    far = [(at - 1000, at - 900), (at + begin, at + end), (at + 900, at + 1000)]
    assert taken(array, array, far)[0] == answer
    assert taken(array, array, far[1:])[0] == taken(array, array, far[:2])[0] == answer
    assert taken(array, array, [far[0], far[2]])[0] == 1


def test_an_empty_array_overlaps_nothing() -> None:
    array = np.zeros(0, np.int64)
    assert taken(array, array, [(address(array) - 8, address(array) + 8)])[0] == 1


@pytest.mark.parametrize(
    "numbers, answer", [([3, 7], 1), ([2, 7], 0), ([3, 8], 0), ([-(2**63)], 0)]
)
def test_numbers_are_compared_with_their_bounds(numbers, answer) -> None:
    array = np.array(numbers, np.int64)
    assert taken(array, array, bounds=(3, 7))[0] == answer


@model
def append(
    cache: Mutable[FLOAT["s", 2]], values: FLOAT["n", 2], at: INT64[()]
) -> tuple[Alias["cache"], INT64[()], FLOAT["n", 2]]:
    return kv.CacheUpdate(cache, values, at), op.Identity(at), op.Relu(values)


def arguments(at: int, value: float = 1.0) -> dict[str, Any]:
    return {"values": np.full((1, 2), value, np.float32), "at": np.array(at)}


def test_results_of_earlier_runs_stay_what_they_were() -> None:
    cache = np.zeros((8, 2), np.float32)
    with Session(append).bind(cache=cache) as step:
        outputs = [step.run(**arguments(t, t + 1.0)) for t in range(6)]
    assert [int(o[1]) for o in outputs] == list(range(6))
    assert [o[2].tolist() for o in outputs] == [[[t + 1.0] * 2] for t in range(6)]
    assert cache[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 0, 0]


@pytest.fixture
def running():
    """A binding that has seen the shapes of ``arguments`` several times."""
    cache = np.zeros((8, 2), np.float32)
    with Session(append).bind(cache=cache) as step:
        for t in range(4):
            step.run(**arguments(t))
        assert step._intake is not None
        yield step


def test_the_numbers_of_a_run_are_those_at_its_begin(running) -> None:
    at = np.array(4)

    def meddle(slots: object) -> None:
        at[...] = 7

    running._remaining = (*running._remaining, meddle)
    running.run(values=np.full((1, 2), 9, np.float32), at=at)
    assert running.arrays["cache"][:, 0].tolist() == [1, 1, 1, 1, 9, 0, 0, 0]


@pytest.mark.parametrize("at", [8, -1, 2**62])
def test_a_position_out_of_range_is_refused_with_its_numbers(running, at: int) -> None:
    before = running.arrays["cache"].copy()
    with pytest.raises(errors.CapacityError) as caught:
        running.run(**arguments(at))
    assert (caught.value.position, caught.value.capacity) == (at, 8)
    assert np.array_equal(running.arrays["cache"], before)
    running.run(**arguments(5))
    assert running.arrays["cache"][5, 0] == 1


def test_an_input_that_is_lent_is_refused(running) -> None:
    with pytest.raises(errors.SharedStorage):
        running.run(values=running.arrays["cache"][:1], at=np.array(1))
    other = np.zeros((8, 2), np.float32)
    with Session(append).bind(cache=other), pytest.raises(errors.SharedStorage):
        running.run(values=other[3:4], at=np.array(1))
    running.run(values=other[3:4], at=np.array(1))  # given back


@pytest.mark.parametrize(
    "change",
    [
        {"at": 5},
        {"at": np.array([5])},
        {"at": np.int64(5)},
        {"at": np.array(5, np.int32)},
        {"values": np.ones((2, 4), np.float32)[:1, ::2]},
        {"values": [[1.0, 1.0]]},
    ],
    ids=str,
)
def test_other_forms_of_the_same_are_taken_as_before(running, change) -> None:
    running.run(**{**arguments(5), **change})
    assert running.arrays["cache"][:, 0].tolist() == [1, 1, 1, 1, 0, 1, 0, 0]


@pytest.mark.parametrize(
    "change, error",
    [
        ({"at": 1.5}, errors.StorageMismatch),
        ({"values": np.ones((1, 2))}, errors.StorageMismatch),
        ({"values": np.ones((1, 3), np.float32)}, errors.StorageMismatch),
        ({"more": 1}, errors.BindingError),
    ],
    ids=str,
)
def test_what_is_refused_is_refused_as_before(running, change, error) -> None:
    with pytest.raises(error):
        running.run(**{**arguments(5), **change})
    with pytest.raises(errors.BindingError):
        running.run(values=arguments(5)["values"])
    assert running.arrays["cache"][5, 0] == 0


@model
def both(
    cache: Mutable[FLOAT["s", 2]], values: FLOAT["n", 2], at: INT64[()], tag: INT32["k"]
) -> tuple[Alias["cache"], INT32["k"]]:
    return kv.CacheUpdate(cache, values, at), op.Add(tag, tag)


def test_other_shapes_in_between_are_their_own() -> None:
    cache = np.zeros((8, 2), np.float32)
    with Session(both).bind(cache=cache) as step:
        for t, count in enumerate([1, 1, 1, 3, 3, 3, 1, 1]):
            tag = np.arange(count, dtype=np.int32)
            out = step.run(**arguments(t, t), tag=tag)
            assert out[1].tolist() == (2 * tag).tolist()
    assert cache[:, 0].tolist() == list(range(8))
