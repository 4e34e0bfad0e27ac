"""Attention over bound caches as a user meets it, with stock onnxruntime beside."""

import numpy as np
import onnxruntime
import pytest

from onnx_inplace import Session, errors
from onnx_inplace.dsl import BOOL, FLOAT, INT32, INT64, Alias, Mutable, domain, model, op

pytestmark = pytest.mark.kernel
microsoft = domain("com.microsoft", 1)
HEADS, KV_HEADS, SIZE = 9, 3, 64


@model
def grouped(
    keys: Mutable[FLOAT["batch", KV_HEADS, "capacity", SIZE]],
    values: Mutable[FLOAT["batch", KV_HEADS, "capacity", SIZE]],
    qkv: FLOAT["batch", "new", (HEADS + 2 * KV_HEADS) * SIZE],
    lengths: INT32["batch"],
    total: INT32[()],
    cos: FLOAT["positions", SIZE // 2],
    sin: FLOAT["positions", SIZE // 2],
) -> tuple[FLOAT["batch", "new", HEADS * SIZE], Alias["keys"], Alias["values"]]:
    output, new_keys, new_values = microsoft.GroupQueryAttention(
        qkv,
        None,
        None,
        keys,
        values,
        lengths,
        total,
        cos,
        sin,
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        do_rotary=1,
        _outputs=3,
    )
    return output, new_keys, new_values


@model
def packed(
    keys: Mutable[FLOAT["batch", "capacity", KV_HEADS * SIZE]],
    values: Mutable[FLOAT["batch", "capacity", KV_HEADS * SIZE]],
    query: FLOAT["batch", "new", HEADS * SIZE],
    key: FLOAT["batch", "new", KV_HEADS * SIZE],
    value: FLOAT["batch", "new", KV_HEADS * SIZE],
    position: INT64["batch"],
    mask: BOOL["new", "seen"],
) -> tuple[FLOAT["batch", "new", HEADS * SIZE], Alias["keys"], Alias["values"]]:
    new_keys = op.TensorScatter(keys, key, position)
    new_values = op.TensorScatter(values, value, position)
    length = position + op.Shape(key)[1]
    output = op.Attention(
        query,
        new_keys,
        new_values,
        mask,
        nonpad_kv_seqlen=length,
        q_num_heads=HEADS,
        kv_num_heads=KV_HEADS,
    )
    return output, new_keys, new_values


def stock(program):
    """The same file in onnxruntime, out of place."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        program.serialized, options, providers=["CPUExecutionProvider"]
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_grouped_query_attention_in_place(threads):
    rng = np.random.default_rng(0)
    peer, capacity = stock(grouped), 40
    angles = rng.random((capacity, SIZE // 2), dtype=np.float32) * 6
    caches = [np.full((1, KV_HEADS, capacity, SIZE), np.nan, np.float32) for _ in "kv"]
    copies = [np.zeros_like(c) for c in caches]
    length = 0
    with Session(grouped, threads=threads).bind(keys=caches[0], values=caches[1]) as step:
        for new in (11, 1, 1, 6, 1):
            length += new
            feeds = {
                "qkv": rng.standard_normal((1, new, 15 * SIZE), dtype=np.float32),
                "lengths": np.array([length - 1], np.int32),
                "total": np.array(length, np.int32),
                "cos": np.cos(angles),
                "sin": np.sin(angles),
            }
            expected, *copies = peer.run(None, {"keys": copies[0], "values": copies[1], **feeds})
            output, keys, values = step.run(**feeds)
            assert keys is caches[0] and values is caches[1]
            np.testing.assert_allclose(output, expected, atol=2e-5)
    for cache, copy in zip(caches, copies, strict=True):
        np.testing.assert_allclose(cache[:, :, :length], copy[:, :, :length], atol=1e-6)
        assert np.isnan(cache[:, :, length:]).all()


def test_a_grouped_query_step_that_does_not_fit_changes_nothing():
    caches = [np.ones((2, KV_HEADS, 4, SIZE), np.float32) for _ in "kv"]
    angles = np.ones((9, SIZE // 2), np.float32)
    with Session(grouped).bind(keys=caches[0], values=caches[1]) as step:
        with pytest.raises(errors.CapacityError):
            step.run(
                qkv=np.zeros((2, 1, 15 * SIZE), np.float32),
                lengths=np.array([2, 4], np.int32),
                total=np.array(5, np.int32),
                cos=angles,
                sin=angles,
            )
        assert all((c == 1).all() for c in caches)


def test_packed_heads_with_a_mask():
    rng = np.random.default_rng(0)
    peer, capacity = stock(packed), 24
    caches = [np.zeros((2, capacity, KV_HEADS * SIZE), np.float32) for _ in "kv"]
    copies = [c.copy() for c in caches]
    position = np.array([0, 3])
    with Session(packed).bind(keys=caches[0], values=caches[1]) as step:
        for new in (5, 1, 2):
            seen = int(position.max()) + new
            feeds = {
                "query": rng.standard_normal((2, new, HEADS * SIZE), dtype=np.float32),
                "key": rng.standard_normal((2, new, KV_HEADS * SIZE), dtype=np.float32),
                "value": rng.standard_normal((2, new, KV_HEADS * SIZE), dtype=np.float32),
                "position": position,
                "mask": np.tri(new, seen, seen // 2, dtype=bool),
            }
            expected, *copies = peer.run(None, {"keys": copies[0], "values": copies[1], **feeds})
            output, keys, values = step.run(**feeds)
            assert keys is caches[0] and values is caches[1]
            np.testing.assert_allclose(output, expected, atol=2e-5)
            np.testing.assert_array_equal(keys, copies[0])
            position = position + new


def test_a_model_that_no_kernel_runs_is_refused_at_load():
    @model
    def quantized(
        keys: Mutable[FLOAT[1, 1, "capacity", 8]],
        values: Mutable[FLOAT[1, 1, "capacity", 8]],
        query: FLOAT[1, 1, 8],
        lengths: INT32[1],
        total: INT32[()],
    ) -> tuple[FLOAT[1, 1, 8], Alias["keys"], Alias["values"]]:
        output, new_keys, new_values = microsoft.GroupQueryAttention(
            query,
            query,
            query,
            keys,
            values,
            lengths,
            total,
            num_heads=1,
            kv_num_heads=1,
            sliding_window_cache=1,
            local_window_size=4,
            _outputs=3,
        )
        return output, new_keys, new_values

    with pytest.raises(errors.UnsupportedOperator) as caught:
        Session(quantized)
    assert caught.value.op_type == "GroupQueryAttention"
    assert "sliding_window_cache" in caught.value.reason
