"""Kernels that write into dense arrays: bytes outside of the range stay, whatever the type."""

import math

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from numba.core import event
from onnx.reference import ReferenceEvaluator

from onnx_inplace.compiler import errors, steps
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import operators, registry
from onnx_inplace.runner.actions import Settings

pytestmark = pytest.mark.kernel
few = limits(max_examples=80, deadline=None)

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int64, np.uint8, np.bool_]
GUARD = 64  # bytes on both sides of an array that is written


class Guarded:
    """A cache between guard bytes, full of random bytes."""

    def __init__(self, rng, shape, dtype):
        size = math.prod(shape) * np.dtype(dtype).itemsize
        self.raw = rng.integers(0, 256, size + 2 * GUARD, dtype=np.uint8)
        if dtype == np.bool_:
            self.raw &= 1
        self.array = self.raw[GUARD : GUARD + size].view(dtype).reshape(shape)
        self.before = self.raw.copy()

    def check(self, expected):
        """The array is ``expected`` by bytes, its guards are as they were."""
        assert self.array.tobytes() == np.ascontiguousarray(expected).tobytes()
        assert (self.raw[:GUARD] == self.before[:GUARD]).all()
        assert (self.raw[-GUARD:] == self.before[-GUARD:]).all()

    def check_untouched(self):
        assert (self.raw == self.before).all()


def random(rng, shape, dtype):
    return Guarded(rng, shape, dtype).array


def prepared(op_type, inputs, attributes=None, domain="onnx_inplace"):
    """One step, loaded, and slots for it."""
    step = steps.Kernel(
        domain=domain,
        op_type=op_type,
        version=1,
        inputs=tuple(None if x is None else i for i, x in enumerate(inputs)),
        outputs=(len(inputs),),
        attributes=attributes or {},
        aliases=(),
        roots={0: "cache"},
        values={},
        location=None,
    )
    slots = [*inputs, None, []]  # the last one is the journal of a run
    return registry.compile_step(step, Settings()), slots


def act(op_type, inputs, attributes=None, domain="onnx_inplace"):
    """Run one step on slots; the result is the array of the first input, or new."""
    action, slots = prepared(op_type, inputs, attributes, domain)
    action(slots)
    return slots[len(inputs)]


@st.composite
def updates(draw):
    """(cache, values, position, attributes): any rank, axis, batch axis, mode and element type."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    axis = draw(st.integers(0, len(shape) - 1))
    capacity = shape[axis] = draw(st.integers(1, 12))
    length = draw(st.integers(0, capacity))
    circular = draw(st.booleans())
    highest = 3 * capacity if circular else capacity - length
    others = [d for d in range(len(shape)) if d != axis]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(DTYPES))
    attributes = {
        "axis": axis - len(shape) * draw(st.booleans()),
        "mode": "circular" if circular else "linear",
    }
    if others and draw(st.booleans()):
        batch_axis = attributes["batch_axis"] = draw(st.sampled_from(others))
        position = rng.integers(0, highest + 1, shape[batch_axis])
    else:
        position = np.asarray(rng.integers(0, highest + 1))
    values = random(rng, [length if d == axis else n for d, n in enumerate(shape)], dtype)
    if draw(st.booleans()):  # a view that is not contiguous
        values = np.repeat(values, 2, axis=-1)[..., ::2]
    return Guarded(rng, shape, dtype), values, position, attributes


def updated(cache, values, position, axis, batch_axis=0, mode="linear"):
    """CacheUpdate, element by element."""
    result = cache.copy()
    for index in np.ndindex(values.shape):
        start = position if position.ndim == 0 else position[index[batch_axis]]
        target = list(index)
        target[axis] += int(start)
        if mode == "circular":
            target[axis] %= cache.shape[axis]
        result[tuple(target)] = values[index]
    return result


@few
@given(case=updates())
def test_update_writes_the_range_and_nothing_else(case):
    cache, values, position, attributes = case
    expected = updated(cache.array, values, position, **attributes)
    result = act("CacheUpdate", [cache.array, values, position], attributes)
    assert result is cache.array
    cache.check(expected)


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize(
    ("position", "length", "row"), [(-1, 2, None), ([0, -3], 2, 1), ([1, 0], 6, 0), (0, 6, None)]
)
def test_update_out_of_range_writes_nothing(mode, position, length, row):
    rng = np.random.default_rng(0)
    cache, values = Guarded(rng, (2, 5, 3), np.float32), random(rng, (2, length, 3), np.float32)
    with pytest.raises(errors.CapacityError) as caught:
        act("CacheUpdate", [cache.array, values, np.array(position)], {"axis": 1, "mode": mode})
    e = caught.value
    bad = position if row is None else position[row]
    assert (e.cache, e.position, e.length, e.capacity, e.batch) == ("cache", bad, length, 5, row)
    cache.check_untouched()


@pytest.mark.parametrize(("position", "row"), [(4, None), ([3, 4], 1)])
def test_linear_update_beyond_the_end_writes_nothing(position, row):
    rng = np.random.default_rng(0)
    cache, values = Guarded(rng, (2, 5, 3), np.float32), random(rng, (2, 2, 3), np.float32)
    with pytest.raises(errors.CapacityError) as caught:
        act("CacheUpdate", [cache.array, values, np.array(position)], {"axis": 1})
    assert (caught.value.position, caught.value.batch) == (4, row)
    cache.check_untouched()


def test_the_largest_position_does_not_wrap_around():
    rng = np.random.default_rng(0)
    cache, values = Guarded(rng, (5, 3), np.float32), random(rng, (2, 3), np.float32)
    with pytest.raises(errors.CapacityError):
        act("CacheUpdate", [cache.array, values, np.array(2**63 - 1)])
    cache.check_untouched()


@pytest.mark.parametrize("shape", [(1, 4, 2, 3), (2, 2, 2, 3), (2, 4, 2), (2, 4, 2, 4)])
def test_values_of_another_shape_are_refused(shape):
    cache = Guarded(np.random.default_rng(0), (2, 4, 5, 3), np.float32)
    with pytest.raises(errors.StorageMismatch):
        act("CacheUpdate", [cache.array, np.zeros(shape, np.float32), np.array(0)])
    cache.check_untouched()


@pytest.mark.parametrize("with_indices", [False, True])
@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_tensor_scatter_agrees_with_onnx(mode, with_indices):
    rng = np.random.default_rng(0)
    cache, update = Guarded(rng, (3, 2, 7, 4), np.float32), random(rng, (3, 2, 4, 4), np.float32)
    cache.array[:] = rng.random(cache.array.shape)
    indices = np.array([2, 0, 3]) if mode == "linear" else np.array([5, 20, 6])
    inputs = {"cache": cache.array, "update": update} | (
        {"indices": indices} if with_indices else {}
    )
    expected = reference("TensorScatter", inputs, 24, mode=mode, axis=2)
    given = [cache.array, update, indices if with_indices else None]
    assert act("TensorScatter", given, {"mode": mode, "axis": 2}, "") is cache.array
    cache.check(expected)


def reference(op_type, inputs, opset, **attributes):
    node = onnx.helper.make_node(op_type, list(inputs), ["y"], **attributes)
    infos = [
        onnx.helper.make_tensor_value_info(
            n, onnx.helper.np_dtype_to_tensor_dtype(x.dtype), x.shape
        )
        for n, x in inputs.items()
    ]
    first = onnx.helper.np_dtype_to_tensor_dtype(next(iter(inputs.values())).dtype)
    graph = onnx.helper.make_graph(
        [node], "g", infos, [onnx.helper.make_tensor_value_info("y", first, None)]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    return ReferenceEvaluator(model).run(None, inputs)[0]


@st.composite
def scatters(draw):
    """(data, indices, updates) of ScatterND."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    depth = draw(st.integers(1, len(shape)))
    count = draw(st.lists(st.integers(0, 4), max_size=2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    columns = [rng.integers(-n, n, [*count, 1]) for n in shape[:depth]]
    return (
        Guarded(rng, shape, np.float16),
        np.concatenate(columns, -1),
        random(rng, [*count, *shape[depth:]], np.float16),
    )


@few
@given(case=scatters())
def test_scatter_nd(case):
    data, indices, updates = case
    expected = data.array.copy()
    for index in np.ndindex(indices.shape[:-1]):
        expected[tuple(indices[index])] = updates[index]
    assert act("ScatterND", [data.array, indices, updates], {}, "") is data.array
    data.check(expected)


@few
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([np.int32, np.int64]),
)
def test_scatter_elements(shape, seed, dtype):
    rng = np.random.default_rng(seed)
    axis = int(rng.integers(-len(shape), len(shape)))
    inner = [int(rng.integers(1, n + 1)) for n in shape]
    inner[axis] = int(rng.integers(0, shape[axis] + 3))
    data, updates = Guarded(rng, shape, np.uint8), random(rng, inner, np.uint8)
    indices = rng.integers(-shape[axis], shape[axis], inner).astype(dtype)
    expected = data.array.copy()
    for index in np.ndindex(indices.shape):
        target = list(index)
        target[axis] = indices[index]
        expected[tuple(target)] = updates[index]
    given = [data.array, indices, updates]
    assert act("ScatterElements", given, {"axis": axis}, "") is data.array
    data.check(expected)


@pytest.mark.parametrize("index", [-4, 3, 2**40, -(2**63)])
@pytest.mark.parametrize("op_type", ["ScatterND", "ScatterElements"])
def test_a_scatter_index_out_of_range_writes_nothing(op_type, index):
    data = Guarded(np.random.default_rng(0), (3, 4), np.float32)
    if op_type == "ScatterND":
        indices, updates = np.array([[0], [index]]), np.zeros((2, 4), np.float32)
    else:
        indices, updates = np.array([[0], [index]]), np.zeros((2, 1), np.float32)
    with pytest.raises(errors.CapacityError) as caught:
        act(op_type, [data.array, indices, updates], {}, "")
    assert (caught.value.position, caught.value.capacity, caught.value.batch) == (index, 3, 1)
    data.check_untouched()


def test_scatters_that_reduce_are_refused_at_load():
    for op_type in ("ScatterND", "ScatterElements"):
        with pytest.raises(errors.UnsupportedOperator) as caught:
            act(op_type, [np.zeros(1)] * 3, {"reduction": "add"}, "")
        assert 'reduction="add"' in caught.value.reason


@few
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 40),
    shuffled=st.booleans(),
)
def test_reorder_is_gather_in_place(shape, seed, rows, shuffled):
    rng = np.random.default_rng(seed)
    axis = int(rng.integers(0, len(shape)))
    shape[axis] = rows
    cache = Guarded(rng, shape, np.float16)
    indices = rng.permutation(rows) if shuffled else rng.integers(0, rows, rows)
    expected = cache.array.take(indices, axis)
    result = act("CacheReorder", [cache.array, indices], {"batch_axis": axis - len(shape)})
    assert result is cache.array
    cache.check(expected)


def test_long_rows_are_reordered_in_pieces():
    rng = np.random.default_rng(0)
    cache = Guarded(rng, (5, operators.WORKSPACE + 1000), np.uint8)
    expected = cache.array[[1, 2, 0, 0, 3]]
    act("CacheReorder", [cache.array, np.array([1, 2, 0, 0, 3])])
    cache.check(expected)


@pytest.mark.parametrize("indices", [[0, 3, 0], [0, -1, 0]])
def test_a_row_that_is_not_there_is_refused(indices):
    cache = Guarded(np.random.default_rng(0), (3, 4), np.float32)
    with pytest.raises(errors.CapacityError) as caught:
        act("CacheReorder", [cache.array, np.array(indices)])
    assert (caught.value.position, caught.value.capacity, caught.value.batch) == (indices[1], 3, 1)
    cache.check_untouched()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 3), (2, 3, 4)])
def test_assign_and_copy(dtype, shape):
    rng = np.random.default_rng(0)
    state, value = Guarded(rng, shape, dtype), random(rng, shape, dtype)
    expected = value.copy()
    assert act("Assign", [state.array, value.T.copy().T]) is state.array
    state.check(expected)
    twin = act("Copy", [state.array])
    assert not np.shares_memory(twin, state.array) and twin.dtype == state.array.dtype
    assert twin.shape == shape and twin.tobytes() == expected.tobytes()


def test_assign_of_another_shape_is_refused():
    state = Guarded(np.random.default_rng(0), (2, 3), np.float32)
    with pytest.raises(errors.StorageMismatch):
        act("Assign", [state.array, np.zeros((3, 2), np.float32)])
    state.check_untouched()


def test_address_is_that_of_numpy():
    array = np.zeros((4, 6), np.float32)
    for view in (array, array[1:, 2:], array.T, array[::2], np.zeros(0), np.asarray(3)):
        assert address(view) == view.__array_interface__["data"][0]


@pytest.mark.parametrize("position", [np.array(2), np.array([2, 0])], ids=["one", "rows"])
@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_nothing_is_compiled_when_a_kernel_is_called(position, mode):
    inputs = [np.zeros((2, 4, 3), np.uint8), np.ones((2, 1, 3), np.uint8), position]
    action, slots = prepared("CacheUpdate", inputs, {"mode": mode})
    with event.install_recorder("numba:compile") as found:
        action(slots)
    assert inputs[0].any() and not found.buffer
