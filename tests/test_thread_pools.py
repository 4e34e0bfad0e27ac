"""Threads of onnxruntime: where it has some, and whose they are."""

import subprocess
import sys

import heaps
import numpy as np
import onnx
import onnxruntime
import pytest

from onnx_inplace import compiler
from onnx_inplace.compiler.steps import SubSession
from onnx_inplace.dsl import FLOAT, INT64, model, op, weight
from onnx_inplace.runner.library import Library


@model
def positions(length: INT64[()]) -> INT64["n"]:
    return op.Range(0, length, 1) * length


@model
def floats(length: INT64[()]) -> FLOAT["n"]:
    return op.Cast(op.Range(0, length, 1), to=1) * 0.5


@model
def looked_up(length: INT64[()]) -> INT64["n"]:
    table = weight(np.arange(8, dtype=np.float32), "table")
    return op.Cast(op.Gather(table, op.Range(0, length, 1)), to=7)


@pytest.mark.parametrize(("program", "threads"), [(positions, 1), (floats, 2), (looked_up, 2)])
def test_what_only_counts_has_no_pool(program, threads):
    (step,) = compiler.plan(program).block.steps
    assert isinstance(step, SubSession)
    options = Library(2).load(step).get_session_options()
    assert options.intra_op_num_threads == threads


REFUSAL = """
import sys
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import InferenceSession
path, first = sys.argv[1:]
def load(own):
    options = onnxruntime.SessionOptions()
    options.use_per_session_threads = own
    try:
        InferenceSession(options, path, True, False)
    except RuntimeError as error:
        return "use_per_session_threads must be false" in str(error)
    return "loaded"
if first == "caller":
    print(load(True))
onnxruntime.set_global_thread_pool_sizes(2, 1)
print(load(False), load(True))
"""


@pytest.mark.parametrize(("first", "expected"), [("ours", []), ("caller", ["loaded"])])
def test_a_pool_of_the_process_shuts_the_caller_out(tmp_path, first, expected):
    """So no pool is made that the caller has not asked for. Has onnxruntime learned better?"""
    path = tmp_path / "model.onnx"
    graph = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[2] x) => (float[2] y) { y = Neg (x) }'
    )
    onnx.save(graph, path)
    command = [sys.executable, "-c", REFUSAL, str(path), first]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert found == [*expected, "loaded", "True"]


DECODES = """
import sys
import numpy as np, onnxruntime
from decoders import Shape, decoder
from onnx_inplace import Session
if sys.argv[1] == "one pool":
    onnxruntime.set_global_thread_pool_sizes(2, 1)
program = decoder(Shape())
for fuse in ("off", "auto"):
    session = Session(program, threads=2, fuse=fuse)
    caches = {p.name: session.allocate(p.name, max_length=16) for p in session.mutable_inputs}
    with session.bind(**caches) as step:
        for k in range(5):
            logits = step.run(tokens=[[k]], position=k)["logits"]
    print(fuse, logits.tobytes().hex())
"""


def decoded(pools: str) -> str:
    """What a process prints that decodes, and whose heap is checked to the end."""
    return heaps.printed(DECODES, pools)


@pytest.mark.kernel
def test_sub_sessions_use_the_pool_that_the_caller_has_made():
    """Before they could, a model was refused there. Results are the same bits."""
    expected = decoded("own threads")
    assert expected.startswith("off ")
    assert decoded("one pool") == expected


def test_onnxruntime_has_no_other_way_to_share_threads():
    """Neither can a session be told whose threads to use, nor a part of a graph be run alone."""
    names = [name for name in dir(onnxruntime) if "thread" in name.lower()]
    assert names == ["set_global_thread_pool_sizes"]
    graph = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[2] x, float[2] a) => (float[2] y,
        float[2] b) { y = Neg (x) b = Abs (a) }"""
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        graph.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    run = onnxruntime.RunOptions()
    run.only_execute_path_to_fetches = True
    with pytest.raises(Exception, match="Missing Input: x"):
        session._sess.run(["b"], {"a": np.ones(2, np.float32)}, run)
