"""One token into a cache: the cost does not depend on the capacity, nor on who holds the cache.

    python benchmarks/update.py

Compares the kernel with numpy's slice assignment, and a model of one CacheUpdate with onnxruntime's
session of one node: TensorScatter with one OrtValue bound as input and output (in place, as long as
nobody adds a second node), and not bound (a copy of the cache for every token).
"""

import sys
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import timing

from onnx_inplace import Session
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, kv, model
from onnx_inplace.numba_kernels import dense
from onnx_inplace.numba_kernels.memory import FIELD

HEADS, SIZE = 8, 128
SMALL, LARGE = 1_024, 131_072  # capacities [tokens]
ROUNDS, CALLS = 31, 200


@model
def append(
    cache: Mutable[FLOAT[1, HEADS, "capacity", SIZE]],
    values: FLOAT[1, HEADS, "length", SIZE],
    position: INT64[()],
) -> Alias["cache"]:
    """A model of one node."""
    return kv.CacheUpdate(cache, values, position)


def committed(capacity: int) -> np.ndarray:
    """A cache that has been written: untouched pages of zeros would flatter whoever reads them."""
    return np.ones((1, HEADS, capacity, SIZE), np.float32)


def scatter_session(capacity: int) -> onnxruntime.InferenceSession:
    """A session of one TensorScatter in onnxruntime."""
    shape = [1, HEADS, capacity, SIZE]
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("TensorScatter", ["cache", "values", "position"], ["updated"])],
        "append",
        [
            info("cache", onnx.TensorProto.FLOAT, shape),
            info("values", onnx.TensorProto.FLOAT, [1, HEADS, 1, SIZE]),
            info("position", onnx.TensorProto.INT64, [1]),
        ],
        [info("updated", onnx.TensorProto.FLOAT, shape)],
    )
    opset = [onnx.helper.make_opsetid("", 24)]
    proto = onnx.helper.make_model(graph, opset_imports=opset, ir_version=11)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3  # it warns of every copy
    return onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def one_node_session() -> Callable[[], object]:
    """``session.run`` of the smallest model: what a call of onnxruntime costs at least."""
    info = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 4])
    out = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 4])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["x"], ["y"])], "n", [info], [out])
    opset = [onnx.helper.make_opsetid("", 21)]
    proto = onnx.helper.make_model(graph, opset_imports=opset, ir_version=10)
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    feeds = {"x": np.ones((1, 4), np.float32)}
    return lambda: session.run(None, feeds)


def bound_in_place(
    session: onnxruntime.InferenceSession,
    cache: np.ndarray,
    values: np.ndarray,
    position: np.ndarray,
) -> Callable[[], object]:
    """A run whose output is bound to its input, prepared once."""
    binding = session.io_binding()
    storage = onnxruntime.OrtValue.ortvalue_from_numpy(cache)
    binding.bind_ortvalue_input("cache", storage)
    binding.bind_ortvalue_output("updated", storage)
    for name, array in (("values", values), ("position", position)):
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
    return lambda: session.run_with_iobinding(binding)


def main() -> bool:
    """Measure, print, judge."""
    values = np.random.default_rng(0).standard_normal((1, HEADS, 1, SIZE), dtype=np.float32)
    caches = {capacity: committed(capacity) for capacity in (SMALL, LARGE)}
    token = SIZE * 4

    def kernel(capacity: int) -> Callable[[], object]:
        update = dense.update.ready()
        to, source = id(caches[capacity]) + FIELD, id(values) + FIELD
        return lambda: update(to, source, HEADS, capacity, 1, token, 700)

    def assignment(capacity: int) -> Callable[[], object]:
        cache = caches[capacity]

        def assign() -> None:
            cache[:, :, 700:701] = values

        return assign

    kernels = {f"kernel, capacity {c:,}": kernel(c) for c in caches}
    slices = {f"numpy slice assignment, capacity {c:,}": assignment(c) for c in caches}
    low = timing.interleaved(kernels | slices, ROUNDS, CALLS)
    timing.report("One token of 8 heads of 128 float32, written by", low)

    session = Session(append)
    steps = {c: session.bind(cache=committed(c)) for c in caches}
    position = np.array(700)
    runs: dict[str, Callable[[], object]] = {
        f"step.run, capacity {c:,}": lambda step=step: step.run(values=values, position=position)
        for c, step in steps.items()
    }
    runs["onnxruntime session.run, a model of one Neg"] = one_node_session()
    where = np.array([700])
    for c in caches:
        bound = bound_in_place(scatter_session(c), committed(c), values, where)
        runs[f"onnxruntime TensorScatter bound in place, {c:,}"] = bound
    high = timing.interleaved(runs, ROUNDS, CALLS)

    feeds = {"values": values, "position": where}
    scatters = {c: scatter_session(c) for c in caches}
    copies = {
        f"onnxruntime TensorScatter not bound, {c:,}": lambda c=c: scatters[c].run(
            None, {"cache": caches[c], **feeds}
        )
        for c in caches
    }
    high |= timing.interleaved(copies, 5)
    timing.report("The same as a model", high)
    for step in steps.values():
        step.close()

    return timing.judge(
        [
            ("kernel, capacity 131,072 to 1,024", _ratio(low, "kernel"), 1.2),
            ("kernel to slice assignment, capacity 131,072", _versus(low), 1.0),
            ("step.run, capacity 131,072 to 1,024", _ratio(high, "step.run"), 1.2),
            (
                "step.run to onnxruntime's session.run of one node",
                high["step.run, capacity 131,072"]
                / high["onnxruntime session.run, a model of one Neg"],
                2.0,
            ),
        ]
    )


def _ratio(times: dict[str, float], name: str) -> float:
    return times[f"{name}, capacity {LARGE:,}"] / times[f"{name}, capacity {SMALL:,}"]


def _versus(times: dict[str, float]) -> float:
    kernel = times[f"kernel, capacity {LARGE:,}"]
    return kernel / times[f"numpy slice assignment, capacity {LARGE:,}"]


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
