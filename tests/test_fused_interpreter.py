"""The interpreter of fused steps: order, flags, barriers on more threads than there are cores."""

import os
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from fused import run

from onnx_inplace.numba_kernels.floats import floats
from onnx_inplace.numba_kernels.fused import barrier, elementwise, interpreter, kernel
from onnx_inplace.numba_kernels.fused.elementwise import Two
from onnx_inplace.numba_kernels.memory import address as at
from onnx_inplace.numba_kernels.memory import fetch_add, load_int64, on_demand, store_int64
from onnx_inplace.numba_kernels.memory import kernel as compiled_kernel
from onnx_inplace.runner import threads as policy

pytestmark = pytest.mark.kernel
_read = kernel.reader(elementwise.Unary)


@compiled_kernel(kernel.KERNEL)
def reverse(arguments, thread, threads):
    """output = input backwards: a thread reads what another one wrote before."""
    x = _read(arguments)
    begin, end = kernel.share(x.size, thread, threads)
    source, target = floats(x.input, x.size), floats(x.output, x.size)
    for i in range(begin, end):
        target[i] = source[x.size - 1 - i] + 1


@compiled_kernel(kernel.KERNEL)
def record(arguments, thread, threads):
    """Add 1 to the place of the thread, and note how many take part."""
    fetch_add(arguments + 8 * thread, 1)
    if thread == 0:
        store_int64(arguments + 8 * 16, threads)


@pytest.mark.parametrize("threads", [1, 2, 3, 4, 7])
def test_barriers_order_many_short_instructions(threads):
    """4,000 times a thread needs what the others have just written."""
    a = np.arange(16 * 7, dtype=np.float32)
    b = np.empty_like(a)
    there = (reverse, elementwise.Unary(0, at(a), at(b), a.size))
    back = (reverse, elementwise.Unary(0, at(b), at(a), a.size))
    for _ in range(20):
        run([there, back] * 100, threads)
    assert (a == np.arange(16 * 7) + 4000).all()


def test_more_threads_than_cores():
    """The same with 7 threads of numba, whose number is fixed when it is loaded."""
    here = pathlib.Path(__file__)
    name = f"{here}::test_barriers_order_many_short_instructions"
    environment = os.environ | {"NUMBA_NUM_THREADS": "7"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", name]
    done = subprocess.run(command, env=environment, cwd=here.parents[1], capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


def test_instructions_run_in_order():
    x = np.zeros(40, np.float32)
    one = np.ones(1, np.float32)
    block = elementwise.Binary(Two.ADD, at(x), at(one), at(x), 1, 40, 0, 0, 0, 0, 1)
    add = (elementwise.binary, block)
    double = (elementwise.binary, elementwise.Binary(Two.ADD, *[at(x)] * 3, 1, 40, 0, 0, 0, 0, 0))
    run([add, double, add])
    assert (x == 3).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_first_means_the_first_thread_alone(threads):
    counts = np.zeros(17, np.int64)
    table = interpreter.table([(record.ready().address, at(counts), interpreter.FIRST)] * 3)
    state = interpreter.control()
    with policy.region(threads):
        interpreter.run_parallel.ready()(at(table), 3, at(state), threads)
    assert counts[:2].tolist() == [3, 0] and counts[16] == 1


def test_an_empty_table_does_nothing():
    table = interpreter.table([])
    assert table.shape == (0, 3)
    interpreter.run.ready()(at(table), 0)


def test_every_thread_takes_part_once():
    counts, state = np.zeros(17, np.int64), interpreter.control()
    flags = interpreter.BARRIER
    table = interpreter.table([(record.ready().address, at(counts), flags)] * 5)
    with policy.region(2):
        for _ in range(50):
            counts[:] = 0
            interpreter.run_parallel.ready()(at(table), 5, at(state), 2)
            members = interpreter.team(state)
            assert counts[:3].tolist() == [5, 5 * (members == 2), 0]
            assert counts[16] == members


def test_a_region_in_which_threads_run_one_after_the_other_does_not_hang():
    """No thread of numba joins; the only one does all, and comes too late as the second."""
    counts, state = np.zeros(17, np.int64), interpreter.control()
    table = interpreter.table([(record.ready().address, at(counts), interpreter.BARRIER)] * 5)
    with policy.region(1):
        interpreter.run_parallel.ready()(at(table), 5, at(state), 4)
    assert interpreter.team(state) == 1
    assert counts[:4].tolist() == [5, 0, 0, 0]


def test_two_runs_at_a_time_do_not_meet():
    """Each has a state of its own."""
    results = []

    def work(seed):
        a = np.full(64, seed, np.float32)
        b = np.empty_like(a)
        there = (reverse, elementwise.Unary(0, at(a), at(b), 64))
        back = (reverse, elementwise.Unary(0, at(b), at(a), 64))
        for _ in range(5):
            run([there, back] * 100, 2)
        results.append((a == seed + 1000).all())

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == [True] * 3


@compiled_kernel(kernel.KERNEL)
def wait(arguments, thread, threads):
    """(begun, answer, seen), int64: begins, and looks for an answer; a held lock brings none."""
    fetch_add(arguments, 1)
    for _ in range(200_000_000):
        if fetch_add(arguments + 8, 0):
            fetch_add(arguments + 16, 1)
            return


@pytest.mark.parametrize("threads", [1, 2])
def test_other_threads_of_python_go_on_during_a_run(threads):
    """The lock of the interpreter is given back: another thread answers while a kernel waits."""
    words, state = np.zeros(3, np.int64), interpreter.control()
    table = interpreter.table([(wait.ready().address, at(words), interpreter.FIRST)])

    def answer():
        while not words[0]:
            time.sleep(1e-3)
        words[1] = 1

    other = threading.Thread(target=answer)
    other.start()
    if threads == 1:
        interpreter.run.ready()(at(table), 1)
    else:
        with policy.region(threads):
            interpreter.run_parallel.ready()(at(table), 1, at(state), threads)
    other.join()
    assert words.tolist() == [1, 1, 1]


@on_demand("int64(int64,int64)")
def _meet(state, threads):
    barrier.meet(state, threads)
    return 1


def test_waiting_is_reported_when_a_thread_comes_late():
    """Whether it computes or gets no core: the other one says how long."""
    state, meet = interpreter.control(), _meet.ready()

    def come_late():
        while not state[barrier.ARRIVED // 8]:
            time.sleep(0.001)
        time.sleep(0.02)
        meet(at(state), 2)

    late = threading.Thread(target=come_late)
    late.start()
    meet(at(state), 2)
    late.join()
    assert state[barrier.WAITED // 8] > 5_000_000
    assert state[barrier.GENERATION // 8] == 1 and state[barrier.ARRIVED // 8] == 0


def test_one_thread_meets_nobody():
    assert _meet.ready()(0, 1) == 1  # a state at address 0 could not be read


@compiled_kernel(kernel.KERNEL)
def spend(arguments, thread, threads):
    """As many nanoseconds as the argument says."""
    begin = barrier.nanoseconds()
    while barrier.nanoseconds() - begin < load_int64(arguments):
        barrier.pause()


@pytest.mark.parametrize("threads", [1, 2])
def test_clocks_add_up_what_each_instruction_takes(threads):
    times = np.array([1_000_000, 0], np.int64)
    rows = [(spend.ready().address, at(times) + 8 * k, interpreter.BARRIER) for k in (0, 1)]
    table, state = interpreter.table(rows), interpreter.control()
    clocks = interpreter.clocks(2, threads)
    assert not clocks.any()
    with policy.region(threads):
        for runs in (1, 2, 3):
            interpreter.run_clocked.ready()(at(table), 2, at(state), threads, at(clocks))
            assert clocks[0, 0, 0] >= runs * 1_000_000
    assert (clocks[: interpreter.team(state)] > 0).all()
