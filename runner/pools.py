"""Whose threads the sessions of onnxruntime work with: each has its own, or all share one pool.

A process may give onnxruntime one pool for all sessions (``set_global_thread_pool_sizes``) before
it loads the first one. From then on onnxruntime refuses sessions that want threads of their own, so
that is the caller's to decide, not ours; where it has been done, our sub-sessions use the pool.
"""

from __future__ import annotations

import functools
from typing import Any

import onnx
from onnxruntime.capi import onnxruntime_pybind11_state as ort

_SILENT = 4  # log severity: fatal
# [us] A worker waits awake for the next product of the same sub-session, not longer: kernels of
# ours and other processes need the core. Not to spin at all costs a wake-up for every product.
_SPIN = 50
# [us] In one session for all nodes the next product may come behind an attention of ours.
JOINED = 300


@functools.cache
def shared() -> bool:
    """Whether this process has one pool; what is true when we first ask stays so.

    Only a session shows it. This one is made without the package's wrapper, which would write to
    the standard output that it failed.
    """
    options = ort.SessionOptions()
    options.log_severity_level = _SILENT
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        ort.InferenceSession(options, smallest(), False, False)
    except RuntimeError as error:
        if "use_per_session_threads" in str(error):
            return True
        raise
    return False


def set_threads(options: Any, threads: int) -> None:
    """Let a session have so many threads, or those of the pool where there is one."""
    if shared():
        options.use_per_session_threads = False
        return
    options.inter_op_num_threads = 1
    options.intra_op_num_threads = threads
    for key, text in spinning(threads, _SPIN).items():
        options.add_session_config_entry(key, text)


def spinning(threads: int, microseconds: int) -> dict[str, str]:
    """Entries of a configuration: workers wait awake so long, and never behind a run."""
    if threads == 1:
        return {}
    return {
        "session.force_spinning_stop": "1",
        "session.intra_op.spin_duration_us": str(microseconds),
    }


def smallest() -> bytes:
    """The smallest model that there is."""
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [])
    other = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [])
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "pool", [value], [other])
    imports = [onnx.helper.make_opsetid("", 21)]
    proto = onnx.helper.make_model(graph, ir_version=10, opset_imports=imports)
    return bytes(proto.SerializeToString())
