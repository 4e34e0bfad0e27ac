"""Helpers of kernels: every worker is called once, whoever comes, and nobody is waited for."""

import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numba
import numpy as np
import pytest

from onnx_inplace.numba_kernels.memory import address, fetch_add, load_int64
from onnx_inplace.numba_kernels.team import Words
from onnx_inplace.runner import team, threads
from onnx_inplace.runner.work import Clock

pytestmark = pytest.mark.kernel

KERNEL = "void(" + ",".join(["int64"] * 11) + ")"
HELPERS = pytest.mark.skipif(not team._possible(), reason="this system has no helpers")
NOWHERE = (0,) * 8  # arguments that the kernels here do not look at


@numba.cfunc(KERNEL)
def count(counters, query, key, value, output, lengths, mask, sinks, space, worker, workers):
    fetch_add(counters + 8 * worker, 1)
    fetch_add(counters + 8 * 7, workers)


@numba.cfunc(KERNEL)
def last(counters, query, key, value, output, lengths, mask, sinks, space, worker, workers):
    """What is run behind ``count``: notes how many workers had been called by then."""
    seen = load_int64(counters)
    for k in range(1, workers):
        seen += load_int64(counters + 8 * k)
    fetch_add(counters + 8 * 8, seen)


@numba.cfunc(KERNEL)
def work(counters, query, key, value, output, lengths, mask, sinks, space, worker, workers):
    """Takes items from a counter until there are none, as kernels of attention do."""
    while True:
        item = fetch_add(counters, 1)
        if item >= 1000:
            return
        fetch_add(counters + 8 * (1 + item), 1)


@pytest.fixture(params=["helpers", "threads of numba"])
def way(request, monkeypatch):
    """How workers get threads: systems without unnamed semaphores go the second way."""
    if request.param == "helpers":
        if not team._possible():
            pytest.skip("this system has no helpers")
    else:
        monkeypatch.setattr(team, "_possible", lambda: False)


@pytest.mark.parametrize("workers", [2, 5])
def test_a_kernel_is_called_once_as_each_of_its_workers(workers: int, way: None) -> None:
    team.ready(workers)
    counters = np.zeros(9, np.int64)
    for _ in range(200):
        team.run(count.address, (address(counters), *NOWHERE), workers)
    expected = [200] * workers + [0] * (7 - workers) + [200 * workers**2, 0]
    assert counters.tolist() == expected


def test_what_follows_sees_all_that_workers_have_done(way: None) -> None:
    team.ready(3)
    counters = np.zeros(9, np.int64)
    for k in range(1, 100):
        counters[8] = 0
        team.run(count.address, (address(counters), *NOWHERE), 3, last.address)
        assert counters[8] == 3 * k


def test_items_are_done_once_by_whoever_comes() -> None:
    team.ready(4)
    for _ in range(100):
        counters = np.zeros(1001, np.int64)
        team.run(work.address, (address(counters), *NOWHERE), 4)
        assert counters[0] >= 1000
        assert (counters[1:] == 1).all()


@HELPERS
def test_a_caller_who_finds_the_helpers_taken_does_the_work_alone() -> None:
    team.ready(2)
    found = []

    def call() -> None:
        for _ in range(300):
            counters = np.zeros(1001, np.int64)
            team.run(work.address, (address(counters), *NOWHERE), 2)
            found.append((counters[1:] == 1).all())

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 1200
    assert all(found)


@HELPERS
def test_helpers_sleep_between_two_calls() -> None:
    """They are no reason why a process that does nothing takes time of a core."""
    team.ready(2)
    counters = np.zeros(9, np.int64)
    team.run(count.address, (address(counters), *NOWHERE), 2)
    helpers = [t.native_id for t in threading.enumerate() if t.name == "onnx-inplace"]
    assert helpers
    end = time.monotonic() + 30
    while any(state(helper) == "R" for helper in helpers) and time.monotonic() < end:
        time.sleep(0.001)
    assert {state(helper) for helper in helpers} <= {"S", "D"}


def helpers_for(workers: int, policy: threads.Policy) -> team.Helpers:
    """For calls of one row, whose query sees all keys."""
    window = types.SimpleNamespace(tokens=1, left=-1, right=0)
    clock = Clock(policy, products=7, window=window, at_end=True, least=200)
    found = team.helpers(clock, workers, rows=1)
    assert found is not None
    return found


@HELPERS
def test_helpers_leave_the_core_on_which_they_were_in_the_way() -> None:
    team.ready(2)
    looked_after = helpers_for(2, threads.Policy())
    cores = os.sched_getaffinity(0)
    words = team._words()
    words[Words.CORE], words[Words.CROWDED] = min(cores), 1
    ids = [helper.native_id or 0 for helper in team._helpers]
    try:
        looked_after.look_after()
        assert not words[Words.CROWDED]
        for helper in ids:
            assert os.sched_getaffinity(helper) == (cores - {min(cores)} or cores)
    finally:
        for helper in ids:
            os.sched_setaffinity(helper, cores)


@HELPERS
def test_helpers_that_are_missing_are_started_but_not_where_there_are_no_threads(
    monkeypatch, caplog
) -> None:
    looked_after = helpers_for(len(team._helpers) + 2, threads.Policy())
    before = len(team._helpers)
    monkeypatch.setattr(threads, "_forked", True)
    monkeypatch.setattr(threads, "_said", False)
    for _ in range(2):
        looked_after.look_after()
    assert len(team._helpers) == before
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    monkeypatch.setattr(threads, "_forked", False)
    looked_after.look_after()
    assert len(team._helpers) == team._words()[Words.HELPERS] == before + 1


def state(thread: int | None) -> str:
    """What Linux says of a thread of this process: R, it runs or would; S, it sleeps."""
    text = Path(f"/proc/self/task/{thread}/stat").read_text()
    return text.rpartition(")")[2].split()[0]


def child(program: str) -> str:
    """What a process prints that runs ``program`` with checks of its heap."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(here), "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "165"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


ENDS = """
import numpy as np, test_team
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import team
team.ready(2)
counters = np.zeros(9, np.int64)
team.run(test_team.count.address, (address(counters), *test_team.NOWHERE), 2)
print(counters[:2].sum())
"""

FORKS = """
import os, numpy as np, test_team
from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import team
def used():
    counters = np.zeros(9, np.int64)
    for _ in range(20):
        team.run(test_team.count.address, (address(counters), *test_team.NOWHERE), 3)
    return counters[:3].tolist() == [20] * 3
team.ready(3)
assert used()
if not (one := os.fork()):
    os._exit(0 if used() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) == 0
print(used())
"""


COMPILED = """
import os, test_sharing, test_team
from onnx_inplace.numba_kernels.sharing import DONE, NEWS
from onnx_inplace.runner import team, threads
team.ready(3)
policy = threads.Policy()
policy.serial_took(1, 1e9)
helpers = test_team.helpers_for(3, policy)
def called():
    return test_sharing.called(helpers._words)
said, workers = called()
assert said & DONE and workers == test_sharing.SHARED
if not (one := os.fork()):
    right = called() == (DONE | NEWS, test_sharing.ALONE)
    helpers.look_after()
    for _ in range(20):
        right &= called()[1] == test_sharing.SHARED
    os._exit(0 if right else 1)
print(os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]), called()[1] == test_sharing.SHARED)
"""


def test_a_process_with_sleeping_helpers_ends() -> None:
    assert child(ENDS).split() == ["2"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_has_helpers_of_its_own() -> None:
    assert child(FORKS).split() == ["True"]


@HELPERS
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_call_in_a_forked_process_asks_for_helpers_of_its_own() -> None:
    assert child(COMPILED).split() == ["0", "True"]
