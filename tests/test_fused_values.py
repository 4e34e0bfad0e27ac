"""Values of fused steps that are parts of other bytes: what was read stays what it was."""

import numpy as np
import pytest

from onnx_inplace import Session
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, kv, model, op, weight

pytestmark = pytest.mark.kernel

MATRIX = np.array([[1, 2, 0], [0, 1, -1], [3, 0, 1]], np.float32)
PARTS = {
    "slice": (lambda x: x[:, 1:2], lambda x: x[:, 1:2]),
    "backwards": (lambda x: op.Transpose(x, perm=[0, 2, 1]), lambda x: x.transpose(0, 2, 1)),
    "split": (lambda x: op.Split(x, [1, 3], axis=1)[0], lambda x: x[:, :1]),
    "place": (lambda x: op.Gather(x, 1, axis=1), lambda x: x[:, 1]),
    "same type": (lambda x: op.Cast(x, to=FLOAT.dtype), lambda x: x),
}


def reader(part):
    """Reads a part of a cache, then writes all of it; the part is used and returned afterwards."""

    @model
    def read(
        cache: Mutable[FLOAT[1, 4, 3]], x: FLOAT[1, 4, 3], position: INT64[()]
    ) -> tuple[FLOAT[...], FLOAT[...], Alias["cache"]]:
        before = part(cache)
        product = op.MatMul(x, weight(MATRIX, "matrix"))
        updated = kv.CacheUpdate(cache, product, position)
        return op.Neg(before), before, updated

    return read


@pytest.mark.parametrize("name", PARTS)
def test_what_was_read_before_a_write_is_as_it_was(name) -> None:
    recorded, meant = PARTS[name]
    session = Session(reader(recorded))
    cache = session.allocate("cache")
    random = np.random.default_rng(0)
    with session.bind(cache=cache) as step:
        for _ in range(3):
            cache[:] = random.integers(-9, 9, cache.shape)
            x = random.integers(-9, 9, cache.shape).astype(np.float32)
            before = meant(cache).copy()
            negative, kept, updated = step.run(x=x, position=0)
            assert step._frame.frame.fused and updated is cache
            np.testing.assert_array_equal(negative, -before)
            np.testing.assert_array_equal(kept, before)
            np.testing.assert_array_equal(cache, x @ MATRIX)
            assert not np.shares_memory(kept, cache)


@model
def parts_of_a_result(
    x: FLOAT[1, "n", 3],
) -> tuple[FLOAT[1, "n", 3], FLOAT[1, "n", 3], FLOAT["n", 3]]:
    whole = op.Neg(op.MatMul(x, weight(MATRIX, "matrix")))
    return whole, op.Identity(whole), op.Squeeze(whole, [0])


def test_a_result_and_its_views_are_returned_by_every_run() -> None:
    session = Session(parts_of_a_result)
    kept = []
    with session.bind() as step:
        for k in range(4):
            x = np.full((1, 2, 3), k, np.float32)
            results = list(step.run(x=x))
            assert step._frame.frame.fused
            for result in results:
                np.testing.assert_array_equal(result, np.reshape(-(x @ MATRIX), result.shape))
            for a in results:
                others = [b for b in (*results, *kept) if b is not a]
                assert not any(np.shares_memory(a, b) for b in others)
            kept += results


@model
def sum_of_products(
    cache: Mutable[FLOAT[1, 4, 3]], x: FLOAT[1, 4, 3], position: INT64[()]
) -> tuple[FLOAT[1, 4, 3], Alias["cache"]]:
    """The sum could be part of the first product, if that stood behind the write."""
    before = op.MatMul(cache, weight(MATRIX, "matrix"))
    updated = kv.CacheUpdate(cache, x, position)
    return before + op.MatMul(updated, weight(MATRIX, "again")), updated


def test_a_product_of_a_cache_is_not_joined_with_what_stands_behind_a_write() -> None:
    session = Session(sum_of_products)
    cache = session.allocate("cache")
    random = np.random.default_rng(0)
    with session.bind(cache=cache) as step:
        for _ in range(2):
            cache[:] = random.integers(-9, 9, cache.shape)
            x = random.integers(-9, 9, cache.shape).astype(np.float32)
            expected = cache @ MATRIX + x @ MATRIX
            total, _ = step.run(x=x, position=0)
            assert step._frame.frame.fused
            np.testing.assert_array_equal(total, expected)


@model
def softmax_of_nothing(x: FLOAT["n", 3]) -> tuple[FLOAT["n", 3], FLOAT["n", 0]]:
    product = op.MatMul(x, weight(MATRIX, "matrix"))
    return product, op.Softmax(product[:, :0])


def test_what_is_empty_is_left_to_ordinary_steps() -> None:
    session = Session(softmax_of_nothing)
    x = np.ones((2, 3), np.float32)
    with session.bind() as step:
        product, nothing = step.run(x=x)
        assert not step._frame.frame.fused
    np.testing.assert_array_equal(product, x @ MATRIX)
    assert nothing.shape == (2, 0)
    assert [refusal.dims for refusal in session.refusals] == [{"n": 2}]


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_an_empty_weight_is_left_to_ordinary_steps(shape) -> None:
    @model
    def product(x: FLOAT["n", shape[0]]) -> FLOAT["n", shape[1]]:
        return op.MatMul(x, weight(np.zeros(shape, np.float32), "matrix"))

    session = Session(product)
    assert [r.reason for r in session.plan.fused.refusals] == ["its weight is empty"]
    with session.bind() as step:
        (result,) = step.run(x=np.ones((2, shape[0]), np.float32))
    np.testing.assert_array_equal(result, np.zeros((2, shape[1])))


@model
def around(
    cache: Mutable[FLOAT[1, 4, 3]], x: FLOAT[1, 1, 3], position: INT64[()]
) -> Alias["cache"]:
    updated = kv.CacheUpdate(
        cache, op.MatMul(x, weight(MATRIX, "matrix")), position, mode="circular"
    )
    return updated


def test_the_largest_position_is_one_of_a_circular_cache() -> None:
    session = Session(around)
    cache, x = session.allocate("cache"), np.ones((1, 1, 3), np.float32)
    with session.bind(cache=cache) as step:
        step.run(x=x, position=2**63 - 1)
        assert step._frame.frame.fused
    np.testing.assert_array_equal(cache[0], np.concatenate([np.zeros((3, 3)), x[0] @ MATRIX]))


HIDDEN, FEATURES = 64, 96


@model
def recurrent(
    x: FLOAT["time", 1, FEATURES], state: Mutable[FLOAT[1, 1, HIDDEN]]
) -> tuple[FLOAT["time", 1, HIDDEN], Alias["state"]]:
    random = np.random.default_rng(5)
    taken, kept, matrix = (
        random.normal(0, 0.3, shape).astype(np.float32)
        for shape in ((1, 4 * HIDDEN, FEATURES), (1, 4 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN))
    )
    found, hidden, _ = op.LSTM(
        x, weight(taken, "W"), weight(kept, "R"), None, None, state, hidden_size=HIDDEN
    )
    y = op.Tanh(op.MatMul(op.Squeeze(found, [1]), weight(matrix, "matrix")))
    return y, kv.Assign(state, hidden)


def test_what_no_template_makes_has_the_bits_of_ordinary_steps() -> None:
    """LSTM sums in another order over weights that onnxruntime does not pack."""
    states = {fuse: np.zeros((1, 1, HIDDEN), np.float32) for fuse in ("off", "auto")}
    for fuse, state in states.items():
        random = np.random.default_rng(6)
        with Session(recurrent, fuse=fuse).bind(state=state) as step:
            for _ in range(20):
                step.run(x=random.standard_normal((1, 1, FEATURES)).astype(np.float32))
            assert bool(step._frame.frame.fused) == (fuse == "auto")
    np.testing.assert_array_equal(states["auto"], states["off"])
