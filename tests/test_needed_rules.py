"""Rules of the language, of shapes, of capacity and of files: what happens without each of them.

``test_mutations`` takes the rules of storage away, and random programs go wrong. These rules stand
before that: here one of them is taken away too, and a program that breaks it is accepted, and does
what its author did not write, or can never run.
"""

import copy
from collections.abc import Callable, Mapping

import numpy as np
import onnxruntime
import pytest

from onnx_inplace import Session, compiler, errors
from onnx_inplace.compiler import bodies, capacity, comparison, merging
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, kv, model, op
from onnx_inplace.dsl.tensor import Tensor

Patch = pytest.MonkeyPatch


def refused(code: str, declare: Callable[[], object]) -> None:
    with pytest.raises(errors.ContractError) as caught:
        declare()
    assert {f.code for f in caught.value.findings} == {code}


# -- E100: what is no program of the language


def decide(x):
    """A helper: Python runs it once, while the graph is built."""
    return x if x > 0 else 0 - x


def magnitude():
    @model
    def program(x: FLOAT[()]) -> FLOAT[()]:
        return decide(x)

    return program


def test_without_e100_python_decides_once_for_all_runs(monkeypatch: Patch) -> None:
    refused("E100", magnitude)
    monkeypatch.setattr(Tensor, "__bool__", lambda self: True)
    with Session(magnitude()).bind() as step:
        for x in (2.0, -3.0):
            wrong = float(step.run(x=np.float32(x))[0]) != decide(x)
            assert wrong == (x < 0)


# -- E102: types and shapes that cannot be merged


def flattened():
    @model
    def program(cache: Mutable[FLOAT[2, 4]], new: FLOAT[2, 1], p: INT64[()]) -> Alias["cache"]:
        updated = kv.CacheUpdate(cache, new, p, axis=1)
        return op.Reshape(updated, [4, 2])

    return program


def test_without_e102_a_model_that_no_run_can_execute_is_accepted(monkeypatch: Patch) -> None:
    """What the rule says at the author's line, a run's own checks would say every time."""
    refused("E102", flattened)
    monkeypatch.setattr(merging, "agree", lambda *given, **named: merging.Verdict())
    session = Session(flattened())
    cache = session.allocate("cache")
    with session.bind(cache=cache) as step, pytest.raises(errors.StorageMismatch):
        step.run(new=np.ones((2, 1), np.float32), p=1)
    assert not cache.any()


def functional(program: object, feeds: Mapping[str, object]) -> list[np.ndarray]:
    """What the file means: onnxruntime, out of place."""
    data = program.serialized  # type: ignore[attr-defined]
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    types = {i.name: np.float32 if "float" in i.type else np.int64 for i in session.get_inputs()}
    given = {name: np.asarray(value, types[name]) for name, value in feeds.items()}
    return session.run(None, given)


# -- E112: what fits in no run


def too_long():
    @model
    def program(cache: Mutable[FLOAT[2, 4]], new: FLOAT[2, 6], p: INT64[()]) -> Alias["cache"]:
        return kv.CacheUpdate(cache, new, p, axis=1)

    return program


def test_without_e112_a_model_that_no_run_can_execute_is_accepted(monkeypatch: Patch) -> None:
    refused("E112", too_long)
    monkeypatch.setattr(capacity, "findings", lambda judgements, locate: [])
    session = Session(too_long())
    cache = session.allocate("cache")
    with session.bind(cache=cache) as step:
        for position in range(-6, 7):
            with pytest.raises(errors.CapacityError):
                step.run(new=np.ones((2, 6), np.float32), p=position)
    assert not cache.any()


# -- E113, E121: what a file says


@model
def append(
    cache: Mutable[FLOAT["h", "m", 4]],
    other: Mutable[FLOAT["h", "m", 4]],
    new: FLOAT["h", "n", 4],
    p: INT64[()],
) -> tuple[Alias["cache"], Alias["other"]]:
    first = kv.CacheUpdate(cache, new, p)
    return kv.CacheUpdate(first, new, p + 1), kv.CacheUpdate(other, new, p)


def test_without_e113_a_file_promises_less_than_it_does(monkeypatch: Patch) -> None:
    """Whoever reads the fields would keep the old content: the file does not say it is written."""
    file = copy.deepcopy(append.proto)
    file.graph.node[0].ClearField("output_alias")
    for value in file.graph.value_info:
        value.ClearField("alias_of")
    refused("E113", lambda: compiler.load(file.SerializeToString()))
    monkeypatch.setattr(comparison, "derived", lambda proto, follows: iter(()))
    monkeypatch.setattr(comparison, "unmarked", lambda proto: [])
    session = Session(compiler.load(file.SerializeToString()))
    assert written_by_fields(file) != written_by_fields(append.proto)
    cache, other = (session.allocate(name, h=1, m=4) for name in ("cache", "other"))
    with session.bind(cache=cache, other=other) as step:
        step.run(new=np.ones((1, 1, 4), np.float32), p=0)
    assert cache[0, 0].all()  # written by a node that says nothing of it


def written_by_fields(file: object) -> list[str]:
    """Nodes that change storage, for a reader who believes the fields."""
    nodes = file.graph.node  # type: ignore[attr-defined]
    return [n.output[0] for n in nodes if n.op_type == "CacheUpdate" and n.output_alias]


def test_without_e121_other_runtimes_compute_something_else(monkeypatch: Patch) -> None:
    """The functional body gives back the old content; the node, and so this product, does not."""
    file = copy.deepcopy(append.proto)
    (body,) = (f for f in file.functions if f.name == "CacheUpdate")
    (squeeze,) = (n for n in body.node if n.op_type == "Squeeze")
    squeeze.input[0] = "cache_1"
    refused("E121", lambda: compiler.load(file.SerializeToString()))
    monkeypatch.setattr(bodies, "changed", lambda model: [])
    loaded = compiler.load(file.SerializeToString())
    session = Session(loaded)
    cache, other = (session.allocate(name, h=1, m=4) for name in ("cache", "other"))
    new = np.ones((1, 1, 4), np.float32)
    feeds = {"cache": cache.copy(), "other": other.copy(), "new": new, "p": 1}
    with session.bind(cache=cache, other=other) as step:
        step.run(new=new, p=1)
    theirs = functional(loaded.program, feeds)[0]
    assert cache[0, 1:3].all() and not theirs.any()
