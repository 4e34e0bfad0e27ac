"""Sub-sessions and kernels on one pool of threads: the same results, errors, and a quiet end."""

import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import ml_dtypes
import numba
import numpy as np
import onnx
import pytest
from decoders import Shape, decoder

from onnx_inplace import Session, compiler
from onnx_inplace.compiler import errors
from onnx_inplace.compiler.steps import SubSession
from onnx_inplace.dsl import BFLOAT16, FLOAT, INT64, model, op, weight
from onnx_inplace.numba_kernels import shared
from onnx_inplace.numba_kernels.memory import address, fetch_add
from onnx_inplace.runner import library, loaded
from onnx_inplace.runner.native import functions, pool

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(functions.load() is None, reason="no C interface beside onnxruntime"),
]

THREADS = 2
KINDS = np.float32, np.int64
LARGE = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)  # not inside a graph


@model
def products(x: FLOAT["n", 64], count: INT64[()]) -> tuple[FLOAT["n", 96], INT64["m"]]:
    y = op.MatMul(x, weight(LARGE, "large"))
    return y, op.Range(0, count, 1)


@model
def halves(x: BFLOAT16["n"]) -> BFLOAT16["n"]:
    return op.Cast(op.Cast(x, to=1) * 2.0, to=16)


@model
def row(x: FLOAT["n", 2], index: INT64[()]) -> FLOAT[2]:
    return op.Gather(x, index) * 2.0


def sub_session(program: compiler.Program) -> SubSession:
    (step,) = compiler.plan(program).block.steps
    assert isinstance(step, SubSession)
    return step


def load(program: compiler.Program, threads: library.Threads) -> loaded.Loaded:
    return library.Library(THREADS).load(sub_session(program), threads)


def run(session: loaded.Loaded, inputs: dict, outputs: dict[str, type]) -> list[np.ndarray]:
    bound = session.bind()
    for name, (code, array) in inputs.items():
        bound.bind_input(name, code, array.shape, address(array))
    for name in outputs:
        bound.bind_unknown(name)
    bound.runner()()
    return bound.made(0, [np.dtype(kind) for kind in outputs.values()])


@pytest.mark.parametrize("rows", [0, 1, 33])
def test_a_sub_session_computes_the_same_on_the_pool(rows: int) -> None:
    x = np.random.default_rng(1).standard_normal((rows, 64)).astype(np.float32)
    given = {"x": (1, x), "count": (7, np.array(5))}
    names = {out.name: t for out, t in zip(sub_session(products).outputs, KINDS, strict=True)}
    mine = run(load(products, library.Threads.SHARED), given, names)
    theirs = run(load(products, library.Threads.OWN), given, names)
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_results_stay_when_the_next_run_makes_others() -> None:
    session, (output,) = load(halves, library.Threads.SHARED), sub_session(halves).outputs
    first = np.arange(8).astype(ml_dtypes.bfloat16)
    second = np.zeros(8, ml_dtypes.bfloat16)
    kept = run(session, {"x": (16, first)}, {output.name: ml_dtypes.bfloat16})
    run(session, {"x": (16, second)}, {output.name: ml_dtypes.bfloat16})
    np.testing.assert_array_equal(kept[0].astype(np.float32), 2.0 * np.arange(8))


def test_a_run_fails_as_in_the_package() -> None:
    (output,) = sub_session(row).outputs
    given = {"x": (1, np.zeros((3, 2), np.float32)), "index": (7, np.array(7))}
    texts = []
    for threads in library.Threads:
        with pytest.raises(RuntimeError, match="out of data bounds") as found:
            run(load(row, threads), given, {output.name: np.float32})
        texts.append(str(found.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("threads", list(library.Threads))
def test_what_onnxruntime_does_not_know_is_refused_at_load(threads: library.Threads) -> None:
    step = sub_session(row)
    proto = onnx.ModelProto.FromString(step.model)
    proto.graph.node[0].op_type = "Unknown"
    broken = dataclasses.replace(step, model=proto.SerializeToString())
    with pytest.raises(errors.UnsupportedOperator) as found:
        library.Library(THREADS).load(broken, threads)
    assert found.value.op_type == "Unknown"


def test_another_number_of_threads_has_threads_of_its_own() -> None:
    assert pool.get(THREADS) is not None
    session = library.Library(THREADS + 1).load(sub_session(products), library.Threads.SHARED)
    assert isinstance(session, loaded.Packaged)


def decode(session: Session, tokens: int) -> list[np.ndarray]:
    caches = {p.name: session.allocate(p.name, max_length=16) for p in session.mutable_inputs}
    with session.bind(**caches) as step:
        logits = [step.run(tokens=[[k]], position=k)["logits"] for k in range(tokens)]
    return [*logits, *caches.values()]


LAYERS = 8


@pytest.fixture(scope="module")
def many() -> Session:
    session = Session(decoder(Shape(layers=LAYERS)), threads=THREADS, fuse="off")
    assert pool.made() is not None
    return session


def test_a_decoder_gives_the_bits_of_one_whose_sub_sessions_have_own_threads(
    many: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = decode(many, 6)
    monkeypatch.setattr(pool, "get", lambda threads: None)
    other = Session(decoder(Shape(layers=LAYERS)), threads=THREADS, fuse="off")
    for a, b in zip(decode(other, 6), expected, strict=True):
        assert a.tobytes() == b.tobytes()


def test_two_threads_of_the_caller_share_the_pool(many: Session) -> None:
    expected, found = decode(many, 6), {}

    def work(index: int) -> None:
        found[index] = [decode(many, 6) for _ in range(3)]

    workers = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(found) == len(workers)
    for results in (r for several in found.values() for r in several):
        for a, b in zip(results, expected, strict=True):
            assert a.tobytes() == b.tobytes()


@numba.cfunc("void(" + ",".join(["int64"] * 11) + ")")
def count(counters, query, key, value, output, lengths, mask, sinks, space, worker, workers):
    fetch_add(counters + 8 * worker, 1)
    fetch_add(counters + 8 * 7, workers)


@pytest.mark.parametrize("workers", [2, 5])
def test_a_kernel_is_called_once_as_each_of_its_workers(workers: int) -> None:
    found, counters = pool.get(THREADS), np.zeros(8, np.int64)
    assert found is not None
    for _ in range(50):
        found.run(count.address, (address(counters), *[0] * 8), workers)
    expected = [50] * workers + [0] * (7 - workers) + [50 * workers**2]
    assert counters.tolist() == expected


def state(found: pool.Pool) -> int:
    return int(found._parking._facts[shared.Parking._fields.index("state")])


def test_threads_are_awake_in_a_run_and_sleep_behind_it() -> None:
    found, seen = pool.get(THREADS), []
    assert found is not None
    act = found.awake(lambda _: seen.append(state(found)))
    for _ in range(20):
        act(None)
    assert seen == [shared.AWAKE] * 20
    end = time.monotonic() + 30
    while state(found) != shared.ASLEEP and time.monotonic() < end:
        time.sleep(0.001)
    assert state(found) == shared.ASLEEP


def test_threads_sleep_when_a_run_has_failed() -> None:
    found = pool.get(THREADS)
    assert found is not None

    def fail(_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        found.awake(fail)(None)
    assert state(found) in (shared.WANTED, shared.ASLEEP)


ENDS = """
import test_native
from onnx_inplace import Session
from onnx_inplace.runner.native import pool
session = Session(test_native.decoder(test_native.Shape(layers=8)), threads=2, fuse="off")
print(len(test_native.decode(session, 4)), pool.made() is not None)
"""


def child(program: str) -> str:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(here)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_process_ends_while_threads_sleep() -> None:
    assert child(ENDS).split() == [str(1 + 3 + 2 * LAYERS), "True"]


FORKS = """
import os, warnings
import test_native
from onnx_inplace import Session
warnings.simplefilter("ignore", DeprecationWarning)
program = test_native.decoder(test_native.Shape(layers=8))
session = Session(program, threads=2, fuse="off")
expected = [a.tobytes() for a in test_native.decode(session, 4)]
for inherited in (True, False):
    if not (one := os.fork()):
        status = 1
        try:
            mine = session if inherited else Session(program, threads=2, fuse="off")
            status = 0 if [a.tobytes() for a in test_native.decode(mine, 4)] == expected else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) == 0, inherited
print("same")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_processes_decode() -> None:
    assert child(FORKS).split() == ["same"]
