"""What a caller may hand over, and how it becomes arrays."""

import dataclasses
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from onnx_inplace.compiler import errors
from onnx_inplace.runner import inputs
from onnx_inplace.runner.inputs import Port

Shape = tuple[int | str | None, ...] | None


def port(dtype: Any, shape: Shape = ()) -> Port:
    return Port("x", np.dtype(dtype), shape)


@pytest.mark.parametrize(
    "dtype, value, expected",
    [
        (np.int64, 5, 5),
        (np.int64, -(2**63), -(2**63)),
        (np.int64, np.int32(5), 5),
        (np.int64, np.uint8(200), 200),
        (np.int64, np.array(7, np.int16), 7),
        (np.int8, 127, 127),
        (np.uint64, 2**64 - 1, 2**64 - 1),
        (np.float32, 2, 2.0),
        (np.float32, 0.1, np.float32(0.1)),
        (np.float32, np.float64(0.5), 0.5),
        (np.float16, np.inf, np.inf),
        (ml_dtypes.bfloat16, 1.5, 1.5),
        (np.float32, 2**24, 2.0**24),
        (np.bool_, True, True),
        (np.bool_, np.False_, False),
    ],
)
def test_a_scalar_becomes_an_array_of_the_declared_type(dtype, value, expected) -> None:
    array = inputs.array(port(dtype), value)
    assert array.dtype == dtype and array.shape == () and array[()] == expected


@pytest.mark.parametrize(
    "dtype, value",
    [
        (np.int64, 1.0),
        (np.int64, 1.5),
        (np.int64, np.float64(1.0)),
        (np.int64, True),
        (np.int64, 2**63),
        (np.int64, -(2**63) - 1),
        (np.int64, np.uint64(2**63)),
        (np.int64, "5"),
        (np.int64, None),
        (np.int64, 1j),
        (np.int8, 128),
        (np.uint8, -1),
        (np.float32, 2**24 + 1),
        (np.float16, 1e6),
        (np.float16, 70000),
        (np.float32, True),
        (np.float32, 1j),
        (np.bool_, 1),
        (np.bool_, 0.0),
    ],
)
def test_a_scalar_that_would_be_changed_is_refused(dtype, value) -> None:
    with pytest.raises(errors.StorageMismatch) as caught:
        inputs.array(port(dtype), value)
    assert (caught.value.name, caught.value.expected) == ("x", np.dtype(dtype))


def test_lists_are_converted_like_scalars() -> None:
    array = inputs.array(port(np.int64, ("n",)), [1, 2, 3])
    assert array.dtype == np.int64 and array.tolist() == [1, 2, 3]
    assert inputs.array(port(np.float32, (2, 2)), [[1, 2], [3, 0.5]]).tolist() == [[1, 2], [3, 0.5]]
    assert inputs.array(port(np.int64, ("n",)), []).shape == (0,)
    for wrong in ([1, 2.5], [[1], [2, 3]], [None], ["1"], [2**63]):
        with pytest.raises(errors.StorageMismatch):
            inputs.array(port(np.int64, ("n",)), wrong)


def test_an_array_must_have_the_type() -> None:
    for wrong in (np.zeros(3, np.int32), np.zeros(3), np.zeros(3, ">i8"), np.zeros(3, object)):
        with pytest.raises(errors.StorageMismatch) as caught:
            inputs.array(port(np.int64, ("n",)), wrong)
        assert caught.value.given == wrong.dtype


def test_an_array_of_the_type_is_not_copied() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert inputs.array(port(np.float32, ("a", "b")), array) is array


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_position_may_stand_in_brackets(shape: tuple[int, ...]) -> None:
    """Case 41: the documented set."""
    array = inputs.array(port(np.int64), np.full(shape, 5))
    assert array.shape == () and int(array) == 5


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_a_position_for_each_row_may_be_a_column(shape: tuple[int, ...]) -> None:
    """Case 41: the documented set."""
    array = inputs.array(port(np.int64, ("batch",)), np.arange(3).reshape(shape))
    array_dims: inputs.Dims = {}
    port(np.int64, ("batch",)).unify(array.shape, array_dims)
    assert array.tolist() == [0, 1, 2] and array_dims == {"batch": 3}


@pytest.mark.parametrize(
    "declared, given", [((), (2,)), ((), (1, 1, 1)), ((), (0,)), (("b",), ()), (("b",), (1, 3))]
)
def test_other_shapes_of_positions_are_refused_with_both_shapes(declared, given) -> None:
    """Case 41: the others."""
    p = port(np.int64, declared)
    with pytest.raises(errors.StorageMismatch) as caught:
        p.unify(inputs.array(p, np.zeros(given, np.int64)).shape, {})
    assert (caught.value.expected, caught.value.given) == (declared, given)
    assert str(given) in str(caught.value)


def test_floats_keep_their_axes() -> None:
    with pytest.raises(errors.StorageMismatch):
        p = port(np.float32)
        p.unify(inputs.array(p, np.zeros((1,), np.float32)).shape, {})


def test_a_name_stands_for_one_size() -> None:
    dims: inputs.Dims = {}
    port(np.int64, ("a", "b", 4)).unify((2, 3, 4), dims)
    assert dims == {"a": 2, "b": 3}
    port(np.int64, ("b", None)).unify((3, 9), dims)
    for wrong in ((2, 9), (3,), (3, 1, 1)):
        with pytest.raises(errors.StorageMismatch) as caught:
            port(np.int64, ("b", None)).unify(wrong, dict(dims))
        assert caught.value.given == wrong
    with pytest.raises(errors.StorageMismatch):
        port(np.int64, ("a", "a")).unify((1, 2), {})
    port(np.int64, None).unify((1, 2, 3), dims)


class Pair(NamedTuple):
    k: Any
    v: Any


@dataclasses.dataclass
class Record:
    k: Any
    v: Any


def test_groups_are_named_after_their_members() -> None:
    """Case 11. A named tuple is a group of fields, not a pair."""
    assert inputs.flatten(["c.0", "c.1", "x"], {"c": ["a", "b"], "x": 1}) == {
        "c.0": "a",
        "c.1": "b",
        "x": 1,
    }
    for group in (Pair(1, 2), Record(1, 2), {"v": 2, "k": 1}):
        assert inputs.flatten(["c.k", "c.v"], {"c": group}) == {"c.k": 1, "c.v": 2}
    nested = inputs.flatten(
        ["l.0.k", "l.0.v", "l.1.k", "l.1.v"], {"l": [Pair(1, 2), {"k": 3, "v": 4}]}
    )
    assert list(nested.values()) == [1, 2, 3, 4]
    assert inputs.flatten(["c.0"], {"c.0": "a"}) == {"c.0": "a"}
    assert inputs.flatten(["c"], {"c": [1, 2]}) == {"c": [1, 2]}


@pytest.mark.parametrize(
    "given, words",
    [
        ({"a": 1}, ["missing", "`b`"]),
        ({"a": 1, "b": 2, "z": 3}, ["unknown", "`z`"]),
        ({"a": 1, "c": 2}, ["missing", "`b`", "unknown", "`c`"]),
        ({"a": 1, "b": 2, "g": [1]}, ["unknown", "`g`"]),
    ],
)
def test_missing_and_unknown_arguments_are_named(given, words) -> None:
    with pytest.raises(errors.BindingError) as caught:
        inputs.flatten(["a", "b"], given)
    assert all(word in str(caught.value) for word in words)


def test_a_group_of_another_size_is_refused() -> None:
    for group, name in (([1], "c.1"), ([1, 2, 3], "c.2"), ({"0": 1, "x": 2}, "c.1")):
        with pytest.raises(errors.BindingError) as caught:
            inputs.flatten(["c.0", "c.1"], {"c": group})
        assert name in str(caught.value)
    with pytest.raises(errors.BindingError, match="twice"):
        inputs.flatten(["c.0", "c.1"], {"c": [1, 2], "c.0": 1})
