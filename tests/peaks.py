"""Measures what a model takes when it runs, part by part, in processes of their own.

    python tests/peaks.py HOW JOBS.json

prints one JSON document with what one way of measuring sees of each job; ``measure`` starts the
processes and puts the parts together. HOW is one of

    allocations  what malloc hands out, counted by ``allocations.c``; onnxruntime's arena is taken
                 away, so that every allocation of it is one of malloc
    traced       what numpy asks for, by tracemalloc
    resident     memory as Linux counts it, with everything as a user has it
"""

import ctypes
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import allocations
import meter
import numpy as np

from onnx_inplace import Session
from onnx_inplace.compiler import sizes
from onnx_inplace.compiler.memory import BlockUse, machine
from onnx_inplace.compiler.steps import Block, SubSession
from onnx_inplace.runner import library, storage
from onnx_inplace.runner.native import session as native

RUNS = 4  # the first notes shapes, the second prepares buffers
_CACHE_LINE = 64
# Fixed, as glibc's defaults are until the first large array is given back: from then on it keeps
# tens of MiB to itself, or does not, by chance.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 17), "MALLOC_TRIM_THRESHOLD_": str(1 << 17)}


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Bytes, beyond what the process held before; it had run the model once, on other memory.

    Attributes:
        weights: what onnxruntime holds when the model is loaded: packed weights, and small ones.
        caches: arrays that were lent.
        run: peak of what malloc handed out from making the caches to the last run.
        library: peak of what onnxruntime had during a run whose buffers were prepared.
        traced: peak of what numpy was asked for from making the caches to the last run.
        resident: growth of resident memory in the same time, onnxruntime's arena included.
        stated: what the plan says of ``run``, caches included.
        stated_values: what it says of values.
        inside: what it says of ``library``.
        packed: what it says of packed weights, which are most of ``weights``.
    """

    weights: int
    caches: int
    run: int
    library: int
    traced: int
    resident: int
    stated: int
    stated_values: int
    inside: int
    packed: int


@dataclasses.dataclass(frozen=True)
class Job:
    """A model, arrays by name of the input, sizes of all dimensions.

    ``warm``: the same with small sizes, to run before resident memory is looked at.
    """

    model: Path
    feeds: Mapping[str, np.ndarray]
    dims: Mapping[str, int]
    threads: int = 1
    warm: tuple[Mapping[str, np.ndarray], Mapping[str, int]] | None = None


def measure(jobs: Mapping[str, Job], folder: Path, ways: Collection[str] = ()) -> dict[str, Peaks]:
    """Run each job by its name; ``ways``: only these, other numbers are 0."""
    written = {}
    for number, (name, job) in enumerate(jobs.items()):
        runs = []
        for k, (feeds, dims) in enumerate(((job.feeds, job.dims), job.warm or ({}, {}))):
            np.savez(folder / f"feeds{number}.{k}.npz", **feeds)
            runs.append([f"feeds{number}.{k}.npz", dict(dims)])
        written[name] = [str(job.model), job.threads, *runs]
    (folder / "jobs.json").write_text(json.dumps(written))
    zeros = dict.fromkeys((field.name for field in dataclasses.fields(Peaks)), 0)
    found = {name: dict(zeros) for name in jobs}
    for how in ways or WAYS:
        counted = how == "allocations"
        done = subprocess.run(
            [sys.executable, __file__, how, "jobs.json"],
            env=allocations.environment(folder) if counted else os.environ | _MALLOC,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            raise AssertionError(done.stderr)
        for name, numbers in json.loads(done.stdout.splitlines()[-1]).items():
            found[name] |= numbers
    return {name: Peaks(**numbers) for name, numbers in found.items()}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A loaded model and what it is run with."""

    session: Session
    feeds: Mapping[str, Any]
    dims: Mapping[str, int]
    warm: tuple[Mapping[str, Any], Mapping[str, int]]

    def run(self, before_last: Callable[[], None] = lambda: None) -> None:
        """Make caches, written, so that their memory is there; bind them and run."""
        arrays = {}
        for port in self.session.mutable_inputs:
            shape = [d if isinstance(d, int) else self.dims[str(d)] for d in port.shape or ()]
            # of malloc, which the meters count; what `allocate` gives may be mapped
            arrays[port.name] = storage.zeros(shape, port.dtype)
            arrays[port.name][...] = 0
        with self.session.bind(**arrays) as step:
            for k in range(RUNS):
                if k == RUNS - 1:
                    before_last()
                step.run(**self.feeds)


def _quiet() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def take_the_arena_away() -> None:
    """Every allocation of onnxruntime is one of malloc from here on."""
    options = library._options

    def without_arena(threads: int) -> Any:
        found = options(threads)
        found.enable_cpu_mem_arena = False
        found.add_session_config_entry("session.use_env_allocators", "0")
        return found

    library._options = without_arena
    make = native.Options.__init__

    def natively_without_arena(
        self: native.Options, shared: native.Environment, threads: int
    ) -> None:
        make(self, shared, threads)
        shared.functions.call("DisableCpuMemArena", self.at)
        self.set("session.use_env_allocators", "0")

    native.Options.__init__ = natively_without_arena  # type: ignore[method-assign]


def count_allocations(load: Callable[[], Subject]) -> dict[str, int]:
    """Of malloc; and what the plan says."""
    load()  # compiles kernels
    _quiet()
    before = allocations.read()
    subject = load()
    weights = allocations.read().aligned - before.aligned
    subject.run()
    _quiet()
    before, last = allocations.read(), []

    def restart() -> None:
        last.append(allocations.read())
        allocations.restart()

    allocations.restart()
    subject.run(restart)
    after = allocations.read()
    threads, plan = subject.session.threads, subject.session.plan
    memory = plan.memory(threads, **subject.dims)
    return {
        "weights": weights,
        "caches": int(memory.caches),
        "run": max(last[0].all_peak, after.all_peak) - before.all,
        "library": after.aligned_peak - last[0].aligned,
        "stated": int(memory.peak),
        "stated_values": int(memory.values),
        "inside": inside(plan.block, plan.footprint.block, machine(subject.dims, threads)),
        "packed": memory.weights_in.get("packed by onnxruntime", 0),
    }


def trace(load: Callable[[], Subject]) -> dict[str, int]:
    """Of numpy."""
    subject = load()
    tracemalloc.start()
    subject.run()  # what Python keeps once is none of the binding's
    gc.collect()
    tracemalloc.reset_peak()
    start, _ = tracemalloc.get_traced_memory()
    subject.run()
    return {"traced": tracemalloc.get_traced_memory()[1] - start}


def see_resident(load: Callable[[], Subject]) -> dict[str, int]:
    """Of everybody, as soon as it is touched."""
    if not meter.AVAILABLE:
        return {"resident": 0}
    subject = load()
    if subject.warm[0]:
        dataclasses.replace(subject, feeds=subject.warm[0], dims=subject.warm[1]).run()
    _quiet()
    meter.restart()
    before = meter.peak()
    subject.run()
    return {"resident": meter.peak() - before}


WAYS = {"allocations": count_allocations, "traced": trace, "resident": see_resident}


def inside(block: Block, use: BlockUse, given: Mapping[str, int]) -> int:
    """The most that the plan says of the inside of a sub-session, rounded as malloc's caller does.

    The arena rounds more.
    """
    most = 0
    for step, needs in zip(block.steps, use.steps, strict=True):
        if isinstance(step, SubSession):
            for together in needs.workspace:
                bytes_ = (sizes.evaluate(size, given) for size in together)
                most = max(most, sum(-(-b // _CACHE_LINE) * _CACHE_LINE for b in bytes_))
        bodies = [v for v in vars(step).values() if isinstance(v, Block)]
        for body, inner in zip(bodies, needs.blocks, strict=True):
            most = max(most, inside(body, inner, given))
    return most


def main(how: str, jobs: str) -> None:
    """Measure in this process."""
    found = {}
    if how == "allocations":
        take_the_arena_away()
    for name, (model, threads, *runs) in json.loads(Path(jobs).read_text()).items():
        (feeds, dims), warm = ((dict(np.load(path)), sizes_) for path, sizes_ in runs)

        def load(
            model: str = model, given: Any = (feeds, dims, warm), threads: int = threads
        ) -> Any:
            return Subject(Session(model, threads=threads, fuse="off"), *given)

        found[name] = WAYS[how](load)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
