"""Ordinary steps as one session of onnxruntime, which calls the kernels back."""

import gc
import sys
import threading
import weakref

import decoders
import heaps
import numpy as np
import onnx
import pytest
import soundness
import strategies
from decoders import Shape

from onnx_inplace import Session, errors, formats
from onnx_inplace.compiler import joining
from onnx_inplace.compiler.steps import SubSession
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, Paged, kv, model, op
from onnx_inplace.runner import joined, joined_run, library
from onnx_inplace.runner.native import session as native

pytestmark = pytest.mark.skipif(
    native.environment() is None, reason="this onnxruntime comes without its C interface"
)


@pytest.fixture
def loaded(monkeypatch):
    """Makes a session, as one session of onnxruntime or as several."""

    def load(program, one: bool, threads: int = 1) -> Session:
        monkeypatch.setattr(joined, "FEWEST", 1 if one else sys.maxsize)
        session = Session(program, threads=threads, fuse="off")
        assert (session._engine._joined.get() is not None) == one
        return session

    return load


def decode(session: Session, prompts, max_length: int = 128):
    """Logits after each prompt, and the caches at the end."""
    caches = {
        p.name: session.allocate(p.name, max_length=max_length) for p in session.mutable_inputs
    }
    position, logits = 0, []
    with session.bind(**caches) as step:
        for tokens in prompts:
            logits.append(step.run(tokens=[tokens], position=position)["logits"])
            position += len(tokens)
    return logits, list(caches.values())


PROMPTS = [[1, 2, 3, 4, 5], [6], [7], [8], [9], [10, 11], [12], [13]]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cache", ["float32", "float16", "bfloat16"])
def test_one_session_gives_the_bits_of_several(loaded, cache, threads) -> None:
    program = decoders.decoder(Shape(cache=cache, layers=3))
    found, expected = (decode(loaded(program, one, threads), PROMPTS) for one in (True, False))
    for ours, theirs in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert ours.tobytes() == theirs.tobytes()


def test_long_contexts_on_the_threads_of_the_library(loaded) -> None:
    """Attention over so many tokens is shared out; on one thread it gives the same to rounding."""
    program = decoders.decoder(Shape(heads=8, kv_heads=2, size=64, cache="float32", layers=2))
    prompts = [[k % 50 for k in range(100)], *[[k] for k in range(8)]]
    two, one = (decode(loaded(program, True, threads), prompts) for threads in (2, 1))
    for ours, theirs in zip(two[0], one[0], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.seeded
@pytest.mark.slow
def test_one_session_is_the_functional_meaning(seeds, monkeypatch) -> None:
    """Of whatever can be joined among random programs."""
    monkeypatch.setattr(joined, "FEWEST", 1)
    load, made = joined.load, []

    def watched(plan, loader):
        runner = load(plan, loader)
        made.append(runner is not None)
        return runner

    monkeypatch.setattr(joined, "load", watched)
    for seed in seeds(800):
        soundness.judge(strategies.seeded(seed), order=False, fuse=("off",))
    assert sum(made) >= 10  # most have bodies, or nodes of the library that read storage


@model
def doubled(
    first: Mutable[FLOAT["s", 4]],
    second: Mutable[FLOAT["s", 4]],
    values: FLOAT["n", 4],
    position: INT64[()],
    row: INT64[1],
) -> tuple[Alias["first"], Alias["second"], FLOAT[1, 4]]:
    a = kv.CacheUpdate(first, op.Relu(values), position)
    picked = op.Gather(op.Neg(values), row)
    return a, kv.CacheUpdate(second, op.Abs(values) + picked, position), picked


FEEDS = {"values": np.ones((2, 4), np.float32), "position": 1}


def storage() -> dict:
    return {name: np.zeros((4, 4), np.float32) for name in ("first", "second")}


@pytest.mark.parametrize("runs", [0, 1, 4])
def test_what_the_library_refuses_is_refused_before_a_write(loaded, runs) -> None:
    """The row does not exist: the node that says so stands before the first call, in its order."""
    session, arrays = loaded(doubled, one=True), storage()
    with session.bind(**arrays) as step:
        for _ in range(runs):
            step.run(**FEEDS, row=[1])
        before = {name: array.copy() for name, array in arrays.items()}
        with pytest.raises(errors.OperatorError, match="picked"):
            step.run(values=2 * FEEDS["values"], position=1, row=[7])
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, before[name])
        step.run(**FEEDS, row=[0])  # nothing was written: no reset is needed


@model
def late(
    cache: Mutable[FLOAT["s", 4]], values: FLOAT["n", 4], position: INT64[()], row: INT64[1]
) -> tuple[Alias["cache"], FLOAT[1, 4]]:
    updated = kv.CacheUpdate(cache, values, position)
    return updated, op.Gather(op.Relu(kv.Copy(updated)), row)


@pytest.mark.parametrize("runs", [0, 1, 4])
def test_a_failure_behind_a_write_says_what_was_written(loaded, runs) -> None:
    messages = []
    for one in (True, False):
        session, cache = loaded(late, one=one), np.zeros((4, 4), np.float32)
        with session.bind(cache=cache) as step:
            for _ in range(runs):
                step.run(**FEEDS, row=[1])
            with pytest.raises(errors.OperatorError):
                step.run(**FEEDS, row=[7])
            with pytest.raises(errors.DirtyState) as caught:
                step.run(**FEEDS, row=[1])
            messages.append([str(w) for w in caught.value.written])
            step.reset()
            step.run(**FEEDS, row=[1])
    assert messages[0] == messages[1] != []


def test_an_error_of_a_step_is_the_error_of_the_run(loaded) -> None:
    session = loaded(decoders.decoder(Shape()), one=True)
    caches = {p.name: session.allocate(p.name, max_length=16) for p in session.mutable_inputs}
    with session.bind(**caches) as step:
        for position in range(5):
            step.run(tokens=[[1]], position=position)
        with pytest.raises(errors.CapacityError):
            step.run(tokens=[[1, 2]], position=15)
        step.run(tokens=[[1, 2]], position=14)


@model
def repeated(
    cache: Mutable[FLOAT["s", 4]], values: FLOAT["n", 4], position: INT64[()], size: INT64[1]
) -> tuple[Alias["cache"], FLOAT[()]]:
    many = op.Expand(values[0, 0], size)
    return kv.CacheUpdate(cache, values, position), op.ReduceSum(-many, keepdims=0)


def test_a_tensor_without_memory_is_an_error(loaded) -> None:
    """The exception of its arena passes compiled code."""
    session, cache = loaded(repeated, one=True), np.zeros((4, 4), np.float32)
    with session.bind(cache=cache) as step:
        with pytest.raises(errors.OperatorError, match=r"many.*memory"):
            step.run(**FEEDS, size=[1 << 44])
        assert step.run(**FEEDS, size=[3])[-1] == -3


def test_small_tensors_are_given_back(loaded) -> None:
    """Logits of first runs, too, which are tensors of the library."""
    pool = native.environment().allocator.pool
    free = pool.free
    logits, _ = decode(loaded(decoders.decoder(Shape()), one=True), PROMPTS)
    assert free - len(logits) <= pool.free < free
    del logits
    gc.collect()
    assert pool.free == free


HEADS, SIZE = 2, 32
Page = Paged[FLOAT[2, HEADS, 16, SIZE], formats.BUILTIN["INT8"]]


@model
def layer(
    keys: Mutable[FLOAT[1, HEADS, "s", SIZE]],
    values: Mutable[FLOAT[1, HEADS, "s", SIZE]],
    x: FLOAT[1, HEADS, "n", SIZE],
    position: INT64[()],
    row: INT64[1],
) -> tuple[Alias["keys"], Alias["values"], FLOAT[1, 1, "n", SIZE]]:
    length = op.Reshape(position + op.Shape(x)[2], [1])
    new_keys = kv.CacheUpdate(keys, op.Tanh(x), position)
    new_values = kv.CacheUpdate(values, op.Sin(x), position)
    h = op.Attention(op.Cos(x), new_keys, new_values, nonpad_kv_seqlen=length, is_causal=1)
    return new_keys, new_values, op.Gather(op.Relu(h), row, axis=1)


@model
def paged(
    cache: Mutable[Page], x: FLOAT[1, HEADS, "n", SIZE], position: INT64[()], row: INT64[1]
) -> tuple[Alias["cache"], FLOAT[1, 1, "n", SIZE]]:
    new = op.Concat([op.Tanh(x), op.Sin(x)], axis=0)
    updated = kv.PagedCacheUpdate(cache, [0, 1], new, position)
    length = position + op.Shape(x)[2]
    h = kv.PagedAttention(op.Cos(x), updated, [0, 1], length, is_causal=1)
    return updated, op.Gather(op.Relu(h), row, axis=1)


def lent(session: Session) -> dict:
    """Storage for 32 tokens."""
    if session.mutable_inputs[0].name == "keys":
        return {p.name: session.allocate(p.name, s=32) for p in session.mutable_inputs}
    cache = session.allocate("cache")
    for _ in range(2):
        cache.allocate_page("INT8")
    return {"cache": cache}


def inputs(position: int, row: int = 0, tokens: int = 1) -> dict:
    x = np.random.default_rng(position).standard_normal((1, HEADS, tokens, SIZE), np.float32)
    return {"x": x, "position": position, "row": [row]}


MANY = 6  # runs, behind which calls are compiled


@pytest.mark.parametrize("program", [layer, paged])
def test_no_python_stands_between_the_library_and_a_layer(loaded, monkeypatch, program) -> None:
    """Where a layer's tensors stay in place; what it computes is what it computed with Python."""
    found = []
    for one in (True, False):
        session = loaded(program, one=one)
        with session.bind(**lent(session)) as step:
            for position in range(MANY):
                step.run(**inputs(position))
            if one:
                monkeypatch.setattr(joined_run.Run, "call", None)
            found.append([step.run(**inputs(k))[-1].copy() for k in range(MANY, 20)])
            monkeypatch.undo()
    for ours, theirs in zip(*found, strict=True):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("program", [layer, paged])
def test_a_compiled_layer_leaves_to_python_what_is_wrong(loaded, program) -> None:
    """And goes on behind it."""
    session = loaded(program, one=True)
    with session.bind(**lent(session)) as step:
        for position in range(MANY):
            expected = step.run(**inputs(position))[-1]
        with pytest.raises(errors.InplaceError) as caught:
            step.run(**inputs(40))
        assert not isinstance(caught.value, errors.DirtyState)
        found = step.run(**inputs(MANY - 1))[-1]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("program", [layer, paged])
def test_a_failure_behind_a_compiled_layer_says_what_it_wrote(loaded, program) -> None:
    written = []
    for one in (True, False):
        session = loaded(program, one=one)
        with session.bind(**lent(session)) as step:
            for position in range(MANY):
                step.run(**inputs(position))
            with pytest.raises(errors.OperatorError):
                step.run(**inputs(MANY, row=5))
            with pytest.raises(errors.DirtyState) as caught:
                step.run(**inputs(MANY))
            written.append([str(w) for w in caught.value.written])
    assert written[0] == written[1] != []


def test_other_shapes_come_between(loaded) -> None:
    """Each tuple of shapes has calls of its own; tensors move when other shapes have run."""
    found = []
    for one in (True, False):
        session = loaded(layer, one=one)
        with session.bind(**lent(session)) as step:
            for _ in range(4):
                for tokens in (1, 3, 1, 2, 1, 1):
                    outputs = [step.run(**inputs(k, tokens=tokens))[-1].copy() for k in range(3)]
            found.append(outputs)
    for ours, theirs in zip(*found, strict=True):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("fuse", ["auto", "off"])
def test_what_the_library_does_not_take_as_a_whole_runs_in_parts(monkeypatch, fuse) -> None:
    """Each sub-session may be one that it knows."""

    def refuse(*_) -> None:
        raise errors.UnsupportedOperator("", "Call0", "a test")

    program = decoders.decoder(Shape())
    monkeypatch.setattr(joined, "FEWEST", 1)
    expected, _ = decode(Session(program, fuse=fuse), PROMPTS)
    monkeypatch.setattr(library.Library, "load_joined", refuse)
    session = Session(program, fuse=fuse)
    found, _ = decode(session, PROMPTS)
    assert session._engine._joined.get() is None
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tobytes() == theirs.tobytes()


def test_bindings_run_at_the_same_time(loaded) -> None:
    """In two threads; each run is told from the other by what passes from call to call."""
    session = loaded(decoders.decoder(Shape(layers=3)), one=True, threads=2)
    prompts = [[[k + 1, k + 2], *[[t + k] for t in range(20)]] for k in range(2)]
    expected = [decode(session, p) for p in prompts]
    found = [None, None]

    def run(k: int) -> None:
        found[k] = decode(session, prompts[k])

    for _ in range(3):
        workers = [threading.Thread(target=run, args=(k,)) for k in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for k in range(2):
            for ours, theirs in zip(found[k][0], expected[k][0], strict=True):
                assert ours.tobytes() == theirs.tobytes()


def test_a_session_goes_with_its_last_user(loaded) -> None:
    session = loaded(decoders.decoder(Shape()), one=True)
    logits, _ = decode(session, PROMPTS)
    gone = weakref.ref(session._engine._joined.get()._session)
    before = logits[0].copy()
    del session
    gc.collect()
    assert gone() is None
    np.testing.assert_array_equal(logits[0], before)


@model
def looked_at(state: Mutable[FLOAT[1, 4]], x: FLOAT[1, 4]) -> tuple[Alias["state"], FLOAT[1, 4]]:
    y = op.Relu(state) + x
    return kv.Assign(state, y), op.Neg(y)


def test_storage_that_the_library_reads_is_not_joined() -> None:
    """Its reads would not be ordered against the writes."""
    assert joining.join(Session(looked_at).plan) is None


def test_every_call_follows_what_the_library_makes_before_it() -> None:
    plan = Session(decoders.decoder(Shape())).plan
    found = joining.join(plan)
    assert found is not None
    graph = onnx.ModelProto.FromString(found.session.model).graph
    calls = [node for node in graph.node if node.domain == joining.DOMAIN]
    sessions = [step for step in plan.block.steps if isinstance(step, SubSession)]
    assert len(calls) == len(found.calls) == len(sessions) - 1
    token = found.token
    for call, session in zip(calls, sessions, strict=False):
        assert call.input[0] == token
        assert {port.name for port in session.outputs} <= set(call.input)
        token = call.output[0]
    assert token == found.last


ENDS = """
import sys
from decoders import Shape, decoder
from onnx_inplace import Session
kept = []
for seed in range(3):
    session = Session(decoder(Shape(layers=8), seed), threads=2, fuse="off")
    assert session._engine._joined.get() is not None
    caches = {p.name: session.allocate(p.name, max_length=16) for p in session.mutable_inputs}
    step = session.bind(**caches)
    for k in range(5):
        step.run(tokens=[[k]], position=k)
    if sys.argv[1] == "kept":
        kept.append(step)
"""


@pytest.mark.parametrize("kept", ["kept", "gone"])
def test_a_process_ends_with_a_sound_heap(kept) -> None:
    """With sessions that still have threads, and without."""
    heaps.printed(ENDS, kept)
