"""Decode attention of the fused step: any length, on any number of threads, to the same bytes."""

import ml_dtypes
import numba
import numpy as np
import pytest
from fused import floats

from onnx_inplace.numba_kernels import layout, specialise, vector
from onnx_inplace.numba_kernels.floats import BFLOAT16, FLOAT16, FLOAT32
from onnx_inplace.numba_kernels.fused import attending, interpreter, kernel
from onnx_inplace.numba_kernels.memory import address as at
from onnx_inplace.runner import threads as policy

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(not vector.available(), reason="needs the vector kernels"),
]
DTYPES = {FLOAT32: np.float32, FLOAT16: np.float16, BFLOAT16: ml_dtypes.bfloat16}


def aligned(size):
    raw = np.full(size + 64, 0xA5, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:size]


def expected(query, key, value, lengths):
    """Query (batch, heads, size), caches (batch, kv heads, capacity, size)."""
    group = query.shape[1] // key.shape[1]
    result = np.zeros(query.shape)
    for b, h in np.ndindex(query.shape[:2]):
        k, v = (c[b, h // group, : lengths[b]].astype(np.float64) for c in (key, value))
        s = k @ query[b, h] / np.sqrt(query.shape[2])
        w = np.exp(s - s.max())
        result[b, h] = w @ v / w.sum()
    return result


def attend(query, key, value, lengths, kind, splits=8, threads=1, tokens_first=False):
    batch, heads, size = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    module = specialise.specialise(attending, kind, size, group)
    output = np.full_like(query, np.nan)
    facts = layout.Layout(
        *(batch, kv_heads, group, 1, size, size, FLOAT32, kind, kind, FLOAT32, -1, -1, 1),
        *(layout.bits(size**-0.5), 0, *query.strides[:2], 0, *key.strides[:3]),
        *(*value.strides[:3], *output.strides[:2], 0, 0, 0, 0, 0, 0),
    )
    memory, state = kernel.block(facts), interpreter.control()
    space = aligned(module.workspace_size(batch * kv_heads, splits, threads))
    block = module.Attend(
        *(at(memory), at(query), at(key), at(value), at(output), at(lengths), 0, 0),
        *(at(space), at(state), splits),
    )
    words = kernel.block(block)
    table = interpreter.table([(module.attend.ready().address, at(words), 0)])
    if threads == 1:
        interpreter.run.ready()(at(table), 1)
        return output
    with policy.region(threads):
        interpreter.run_parallel.ready()(at(table), 1, at(state), threads)
    return output


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize(("batch", "kv_heads", "group", "size"), [(1, 3, 3, 64), (2, 2, 4, 32)])
def test_any_length(kind, batch, kv_heads, group, size):
    rng = np.random.default_rng(size)
    key, value = (floats(rng, batch, kv_heads, 700, size).astype(DTYPES[kind]) for _ in range(2))
    query = floats(rng, batch, kv_heads * group, size)
    for length in (1, 2, 63, 64, 127, 128, 129, 511, 700):
        lengths = np.array([length, max(1, length // 3)][:batch], np.int64)
        key[:, :, length:] = np.nan  # never read
        result = attend(query, key, value, lengths, kind)
        key[:, :, length:] = floats(rng, batch, kv_heads, 700 - length, size).astype(DTYPES[kind])
        want = expected(query, key, value, lengths)
        np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [5, 100, 130, 600])
def test_threads_do_not_change_a_bit(length):
    rng = np.random.default_rng(length)
    key, value = (floats(rng, 1, 3, 700, 64).astype(np.float16) for _ in range(2))
    query, lengths = floats(rng, 1, 9, 64), np.array([length], np.int64)
    alone = attend(query, key, value, lengths, FLOAT16)
    for threads in range(2, numba.config.NUMBA_NUM_THREADS + 1):
        for _ in range(20):
            result = attend(query, key, value, lengths, FLOAT16, threads=threads)
            assert result.tobytes() == alone.tobytes()


def test_heads_may_lie_side_by_side_in_a_token():
    """A cache (batch, capacity, kv heads, size)."""
    rng = np.random.default_rng(0)
    key, value = (floats(rng, 1, 300, 3, 64).astype(np.float16).transpose(0, 2, 1, 3) for _ in "kv")
    query, lengths = floats(rng, 1, 9, 64), np.array([257], np.int64)
    result = attend(query, key, value, lengths, FLOAT16)
    want = expected(query, key, value, lengths)
    np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-5)
