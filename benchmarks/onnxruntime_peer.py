"""Peers in onnxruntime: one node with prepared inputs, the cache bound as input and output.

Workers spin while a run lasts and stop when it ends (``force_spinning_stop``): onnxruntime keeps
its speed, and the next variant gets the cores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (bfloat16 in numpy)
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from problem import Array, Batch, Problem

Run = Callable[[], Array]


class CacheType(NamedTuple):
    """How GroupQueryAttention keeps a cache: type of the array, and bits where it is quantized."""

    dtype: type[np.generic]
    bits: int = 0


GROUP_QUERY_TYPES = {
    "float32": CacheType(np.float32),
    "float16": CacheType(np.float16),
    "int8": CacheType(np.int8, 8),
    "int4": CacheType(np.uint8, 4),
}


def session(
    node: onnx.NodeProto, feeds: Mapping[str, Array], outputs: Mapping[str, Any], threads: int
) -> onnxruntime.InferenceSession:
    """A session of one node; ``outputs`` are element types by name."""
    element, info = onnx.helper.np_dtype_to_tensor_dtype, onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node],
        "one",
        [info(name, element(array.dtype), array.shape) for name, array in feeds.items()],
        [info(name, element(np.dtype(dtype)), None) for name, dtype in outputs.items()],
    )
    opsets = [onnx.helper.make_opsetid("", 24), onnx.helper.make_opsetid("com.microsoft", 1)]
    proto = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=11)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # it warns of every copy
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def prepared(
    node: onnx.NodeProto,
    several: Sequence[Mapping[str, Array]],
    shared: Mapping[str, str],
    dtype: type[np.generic],
    threads: int,
) -> list[Run]:
    """Bound runs of a node; ``shared`` says which output is stored where an input is.

    Returns:
        A run for each of ``several`` feeds, which are of the same types and shapes; all of one
        session. It gives the first output that is not shared, of element type ``dtype``.
    """
    feeds = several[0]
    outputs = {name: feeds[shared[name]].dtype if name in shared else dtype for name in node.output}
    made = session(node, feeds, outputs, threads)
    return [_bound(made, node, feeds, shared) for feeds in several]


def _bound(
    made: onnxruntime.InferenceSession,
    node: onnx.NodeProto,
    feeds: Mapping[str, Array],
    shared: Mapping[str, str],
) -> Run:
    """One run of ``prepared``."""
    binding = made.io_binding()
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(x) for name, x in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name, source in shared.items():
        binding.bind_ortvalue_output(name, values[source])
    for name in node.output:
        if name not in shared:
            binding.bind_output(name)

    def run() -> Array:
        made.run_with_iobinding(binding)
        return binding.get_outputs()[len(shared)].numpy()  # in order of binding

    return run


def quantized(several: Sequence[Array], bits: int) -> tuple[list[Array], NDArray[np.float32]]:
    """Codes with one scale for all, and the scale; two 4-bit codes a byte, low one first."""
    most = 2 ** (bits - 1) - 1
    scale = np.float32(max(np.abs(x).max() for x in several) / most)
    codes = [np.clip(np.rint(x / scale), -most, most).astype(np.int8) for x in several]
    if bits == 4:
        nibbles = [(x + 8).astype(np.uint8) for x in codes]
        codes = [x[..., ::2] | x[..., 1::2] << 4 for x in nibbles]
    return codes, scale[np.newaxis]


def group_query_attention(
    batches: Sequence[Batch], kind: str, threads: int, spare: int = 0
) -> list[Run]:
    """The operator that is made for this, past and present in one buffer.

    Args:
        batches: of one shape; what is attended to; the newest tokens are written. All sequences
            of a batch have buffers as long as the longest one needs.
        kind: one of ``GROUP_QUERY_TYPES``.
        threads: of onnxruntime.
        spare: tokens of the buffers beyond those of the longest sequence.

    Returns:
        A run for each of the batches, all of one session: (batch, heads, new, head_size).
    """
    bits, asked = GROUP_QUERY_TYPES[kind].bits, batches[0][0]
    names = ["query", "key", "value", "past_key", "past_value", "lengths", "total"]
    attributes: dict[str, object] = {}
    if bits:
        attributes = {
            "k_quant_type": "PER_TENSOR",
            "v_quant_type": "PER_TENSOR",
            "kv_cache_bit_width": bits,
        }
        names += ["", "", "", "", "", "key_scale", "value_scale"]
    node = onnx.helper.make_node(
        "GroupQueryAttention",
        names,
        ["output", "present_key", "present_value"],
        domain="com.microsoft",
        num_heads=asked.heads,
        kv_num_heads=asked.kv_heads,
        **attributes,
    )
    shared = {"present_key": "past_key", "present_value": "past_value"}
    several = [_group_query_feeds(batch, kind, spare) for batch in batches]
    shape = len(batches[0]), asked.new, asked.heads, asked.size
    runs = prepared(node, several, shared, several[0]["query"].dtype.type, threads)
    return [lambda run=run: run().reshape(shape).swapaxes(1, 2) for run in runs]


def _group_query_feeds(batch: Batch, kind: str, spare: int) -> dict[str, Array]:
    """Inputs of ``group_query_attention`` by name; see there."""
    cache_type, new = GROUP_QUERY_TYPES[kind], batch[0].new
    dtype = np.float16 if cache_type.dtype is np.float16 else np.float32

    def flat(several: Sequence[Array]) -> Array:
        tokens = np.stack([x[:, -new:].swapaxes(0, 1) for x in several])
        return np.ascontiguousarray(tokens.reshape(len(batch), new, -1).astype(dtype))

    halves = {"key": [p.keys for p in batch], "value": [p.values for p in batch]}
    feeds = {"query": flat([p.query for p in batch])}
    feeds |= {name: flat(several) for name, several in halves.items()}
    capacity = max(p.tokens for p in batch) + spare
    for name, several in halves.items():
        if cache_type.bits:
            several, feeds[f"{name}_scale"] = quantized(several, cache_type.bits)
        heads, _, size = several[0].shape
        room = np.ones((len(batch), heads, capacity, size), cache_type.dtype)
        for row, cache in zip(room, several, strict=True):
            row[:, : cache.shape[1]] = cache
        feeds[f"past_{name}"] = room
    lengths = [p.tokens for p in batch]
    feeds["lengths"] = np.array(lengths, np.int32) - 1
    feeds["total"] = np.array(max(lengths), np.int32)
    return feeds


def attention(
    problems: Sequence[Problem], dtype: type[np.generic], threads: int, spare: int = 0
) -> list[Run]:
    """Attention of opset 24 over a cache that is written already; it reads the whole capacity.

    Returns:
        A run for each of the problems, which are of one shape; all of one session.
    """

    def feeds(problem: Problem) -> dict[str, Array]:
        found = {"query": problem.query[np.newaxis].astype(dtype)}
        for name, x in zip(("key_cache", "value_cache"), problem.kv, strict=True):
            cache = np.ones((1, x.shape[0], x.shape[1] + spare, x.shape[2]), dtype)
            cache[0, :, : problem.tokens] = x
            found[name] = cache
        return {**found, "length": np.array([problem.tokens])}

    names = ["query", "key_cache", "value_cache", "", "", "", "length"]
    node = onnx.helper.make_node("Attention", names, ["output"], is_causal=1)
    return prepared(node, [feeds(problem) for problem in problems], {}, dtype, threads)


def tensor_scatter(
    cache: Array, values: Array, position: int, threads: int, *, in_place: bool
) -> Run:
    """TensorScatter into ``cache`` (batch, heads, capacity, head_size); a copy if not in place."""
    node = onnx.helper.make_node("TensorScatter", ["cache", "values", "position"], ["updated"])
    feeds = {"cache": cache, "values": values, "position": np.array([position])}
    if not in_place:
        made = session(node, feeds, {"updated": cache.dtype}, threads)
        return lambda: made.run(None, feeds)[0]
    bound = session(node, feeds, {"updated": cache.dtype}, threads)
    binding = bound.io_binding()
    storage = onnxruntime.OrtValue.ortvalue_from_numpy(cache)
    binding.bind_ortvalue_input("cache", storage)
    binding.bind_ortvalue_output("updated", storage)
    for name in ("values", "position"):
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(feeds[name]))

    def run() -> Array:
        bound.run_with_iobinding(binding)
        return cache

    return run
