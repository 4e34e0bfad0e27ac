"""What fused steps need is there when a session is loaded; what cannot be fused is said."""

import cProfile
import logging
import os
import pathlib
import pstats
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
import test_fused_paged
from decoders import Shape, decoder
from numba.core import event
from test_fused_decoders import SHAPES, decode

from onnx_inplace import Session, errors
from onnx_inplace.dsl import BFLOAT16, FLOAT, INT64, Alias, Mutable, kv, model, op, weight
from onnx_inplace.runner import library
from onnx_inplace.runner.fused import templates
from onnx_inplace.runner.fused.table import NotFused
from onnx_inplace.runner.fused.template import Template

pytestmark = pytest.mark.kernel

MATRIX = np.array([[1, 2, 0], [0, 1, -1], [3, 0, 1]], np.float32)
ROWS = np.arange(12, dtype=np.float32).reshape(1, 4, 3)


@model
def quotient(
    cache: Mutable[FLOAT[1, "max_length", 3]],
    x: FLOAT[1, "n", 3],
    position: INT64[()],
    divisor: INT64[()],
) -> tuple[INT64[()], Alias["cache"]]:
    product = op.MatMul(x, weight(MATRIX, "matrix"))
    updated = kv.CacheUpdate(cache, product, position)
    total = op.ReduceSum(op.Cast(updated, to=INT64.dtype), keepdims=0)
    return op.Div(total, divisor), updated


@model
def plain(cache: Mutable[FLOAT["n", 3]], x: FLOAT["n", 3]) -> Alias["cache"]:
    return kv.Assign(cache, x + x)


def bound(session: Session, **dims: int) -> tuple[dict, object]:
    """New caches of a session, and a binding on them."""
    caches = {p.name: session.allocate(p.name, **dims) for p in session.mutable_inputs}
    return caches, session.bind(**caches)


class Compiled(event.Listener):
    """Counts what numba compiles, or reads from its cache: both take its lock."""

    def __init__(self) -> None:
        self.count = 0

    def on_start(self, _: event.Event) -> None:
        self.count += 1

    def on_end(self, _: event.Event) -> None:
        pass


def compiled_by_runs(shape: Shape, threads: int) -> tuple[int, int]:
    """How often numba compiles while a session loads, and in its first runs of 1 to 4 rows."""
    loading, running = Compiled(), Compiled()
    with event.install_listener("numba:compiler_lock", loading):
        session = Session(decoder(shape), threads=threads)
    _, binding = bound(session, max_length=16)
    with binding as step, event.install_listener("numba:compiler_lock", running):
        for rows in (1, 2, 3, 4, 1):
            step.run(tokens=[[1] * rows], position=rows)
            assert step._frame.frame.fused
    return loading.count, running.count


def demand_that_runs_compile_nothing() -> None:
    counts = [compiled_by_runs(shape, 1 + k % 2) for k, shape in enumerate(SHAPES.values())]
    assert all(loading for loading, _ in counts[:2]), counts  # else there was nothing to see
    assert not any(running for _, running in counts), counts


def demand_that_runs_over_pages_compile_nothing(fuse: str) -> None:
    """Pages that are made in a run, of each format, and read beside those of another one."""
    for number, kind in enumerate(test_fused_paged.KINDS):
        loading, running = Compiled(), Compiled()
        with event.install_listener("numba:compiler_lock", loading):
            session = Session(test_fused_paged.decoder(kind), threads=1 + number % 2, fuse=fuse)
        _, binding = bound(session)
        with binding as step, event.install_listener("numba:compiler_lock", running):
            pieces = [1, 2, 3, 4, *[4] * 7, 1]
            for x, table, position in test_fused_paged.steps(pieces, np.arange(3)):
                step.run(x=x, table=table, position=position)
                assert step._frame.frame.fused
        assert loading.count or number, "nothing is compiled here"
        assert not running.count, (kind, running.count)


@pytest.mark.parametrize(
    "demand",
    [
        "demand_that_runs_compile_nothing()",
        "demand_that_runs_over_pages_compile_nothing('auto')",
        "demand_that_runs_over_pages_compile_nothing('decode-only')",
    ],
)
def test_a_fused_run_compiles_nothing(demand) -> None:
    """In a process in which nothing has been compiled before."""
    here = pathlib.Path(__file__)
    lines = f"import test_fused_ready; test_fused_ready.{demand}"
    done = subprocess.run(
        [sys.executable, "-c", lines],
        env=os.environ | {"PYTHONPATH": str(here.parent)},
        cwd=here.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def refuse(*_: object) -> None:
    raise NotFused("products are out today")


def runs_of(session: Session) -> list[tuple[bool, list[np.ndarray]]]:
    """Runs of one and of two rows: whether each was fused, and what it returned."""
    _, binding = bound(session, max_length=4)
    found = []
    with binding as step:
        for n in (1, 2):
            out = step.run(x=ROWS[:, :n], position=0, divisor=1)
            expected = ROWS[:, :n] @ MATRIX
            np.testing.assert_array_equal(out["updated"][:, :n], expected)
            assert out[0] == expected.sum()
            found.append(step._frame.frame.fused)
    return found


def test_a_refusal_is_said_once_and_the_ordinary_steps_run(monkeypatch, caplog) -> None:
    session = Session(quotient)
    assert runs_of(session) == [True, True] and session.refusals == ()
    monkeypatch.setitem(templates._templates, ("onnx_inplace.fused", "Product"), refuse)
    with caplog.at_level(logging.WARNING, "onnx_inplace"):
        assert runs_of(session) == [False, False]
    (refusal,) = session.refusals
    assert refusal.reason == "products are out today"
    assert dict(refusal.dims) == {"max_length": 4, "n": 1}
    assert [r.getMessage() for r in caplog.records] == [
        "not fused, the ordinary steps run: with max_length=4, n=1: products are out today"
    ]


def test_a_refusal_may_be_known_when_the_session_loads(monkeypatch, caplog) -> None:
    never = Template(refuse, (refuse,))
    monkeypatch.setitem(templates._templates, ("onnx_inplace.fused", "Product"), never)
    with caplog.at_level(logging.WARNING, "onnx_inplace"):
        session = Session(quotient)
    assert [str(r) for r in session.refusals] == ["products are out today"]
    assert [r.dims for r in session.refusals] == [None]
    assert len(caplog.records) == 1
    assert runs_of(session) == [False, False]


def test_no_rows_and_many_rows_take_the_ordinary_steps() -> None:
    session = Session(quotient)
    _, binding = bound(session, max_length=8)
    with binding as step:
        for n in (0, 5):
            x = np.ones((1, n, 3), np.float32)
            out = step.run(x=x, position=0, divisor=1)
            assert not step._frame.frame.fused
            assert out[0] == (x @ MATRIX).sum() == out["updated"].sum()
    assert session.refusals == ()


@pytest.fixture
def loaded(monkeypatch) -> list[int]:
    """An entry for each sub-session that onnxruntime loads."""
    counts: list[int] = []
    load = library.Library.load

    def count(self, step):
        counts.append(1)
        return load(self, step)

    monkeypatch.setattr(library.Library, "load", count)
    return counts


def test_sub_sessions_of_prompts_are_loaded_with_the_first_prompt(loaded) -> None:
    session = Session(decoder(Shape()))
    _, binding = bound(session, max_length=16)
    with binding as step:
        step.run(tokens=[[1]], position=0)
        few = len(loaded)
        step.run(tokens=[[1] * 5], position=1)
        assert len(loaded) > few == 1, "the positions alone"
        many = len(loaded)
        step.run(tokens=[[1] * 6], position=6)
        assert len(loaded) == many


def test_threads_that_need_sub_sessions_at_once_load_them_once(loaded) -> None:
    session = Session(decoder(Shape()))
    results, together = {}, threading.Barrier(4)

    def prompt(number: int) -> None:
        _, binding = bound(session, max_length=16)
        with binding as step:
            together.wait()
            results[number] = step.run(tokens=[[1, 2, 3, 4, 5]], position=0)["logits"].copy()

    work = [threading.Thread(target=prompt, args=(k,)) for k in range(4)]
    for one in work:
        one.start()
    for one in work:
        one.join()
    assert all(np.array_equal(results[0], results[k]) for k in range(4))
    count = len(loaded)
    prompt_again = Session(decoder(Shape()), fuse="off")
    assert len(loaded) - count == count - 1, "all but the positions of fused steps"
    del prompt_again


def test_decode_only_loads_no_sub_session_of_prompts(loaded) -> None:
    shape, program = Shape(), decoder(Shape())
    expected, old, _ = decode(program, shape, "auto", pieces=(1, 1, 4))
    loaded.clear()
    got, new, fused = decode(program, shape, "decode-only", pieces=(1, 1, 4))
    assert len(loaded) == 1 and all(fused)
    np.testing.assert_array_equal(got, expected)
    assert all(np.array_equal(old[name], new[name]) for name in old)


def test_decode_only_refuses_other_runs_before_they_write() -> None:
    session = Session(decoder(Shape()), fuse="decode-only")
    caches, binding = bound(session, max_length=16)
    with binding as step:
        step.run(tokens=[[1]], position=0)
        before = {name: cache.tobytes() for name, cache in caches.items()}
        with pytest.raises(errors.BindingError, match=r"new_length=5.*1 to 4.*fewer tokens"):
            step.run(tokens=[[1, 2, 3, 4, 5]], position=1)
        assert {name: cache.tobytes() for name, cache in caches.items()} == before
        step.run(tokens=[[2]], position=1)


@model
def bfloat16_product(
    cache: Mutable[FLOAT[1, "max_length", 3]], x: BFLOAT16[1, "n", 3], position: INT64[()]
) -> Alias["cache"]:
    matrix = weight(MATRIX.astype(ml_dtypes.bfloat16), "matrix")
    return kv.CacheUpdate(cache, op.Cast(op.MatMul(x, matrix), to=FLOAT.dtype), position)


def test_what_the_library_cannot_run_is_refused_at_load_or_not_needed() -> None:
    """onnxruntime has no product of bfloat16 on a CPU; fused steps have one."""
    with pytest.raises(errors.UnsupportedOperator, match="MatMul"):
        Session(bfloat16_product)
    session = Session(bfloat16_product, fuse="decode-only")
    caches, binding = bound(session, max_length=4)
    with binding as step:
        step.run(x=ROWS.astype(ml_dtypes.bfloat16), position=0)
    np.testing.assert_allclose(caches["cache"], ROWS @ MATRIX, rtol=0.02)


def test_decode_only_says_why_it_was_refused(monkeypatch) -> None:
    session = Session(quotient, fuse="decode-only")
    monkeypatch.setitem(templates._templates, ("onnx_inplace.fused", "Product"), refuse)
    with pytest.raises(errors.BindingError, match="products are out today"):
        runs_of(session)


def test_decode_only_needs_something_to_fuse() -> None:
    with pytest.raises(errors.BindingError, match="nothing of this model can be fused") as info:
        Session(plain, fuse="decode-only")
    assert info.value.name == "fuse"


def test_a_word_that_is_no_way_to_fuse() -> None:
    with pytest.raises(errors.BindingError, match='"decode-only"') as info:
        Session(plain, fuse="always")
    assert info.value.name == "fuse"


@pytest.mark.parametrize("fuse", ["auto", "off"])
def test_a_failure_behind_a_fused_write_leaves_a_dirty_binding(fuse) -> None:
    session = Session(quotient, fuse=fuse)
    caches, binding = bound(session, max_length=4)
    with binding as step:
        step.run(x=ROWS[:, :1], position=0, divisor=1)
        with pytest.raises(errors.OperatorError):
            step.run(x=ROWS[:, 1:3], position=1, divisor=0)
        with pytest.raises(errors.DirtyState) as info:
            step.run(x=ROWS[:, :1], position=0, divisor=1)
        (written,) = info.value.written
        assert (written.root, written.position, written.length) == ("cache", 1, 2)
        step.reset()
        assert step.run(x=ROWS[:, :1], position=3, divisor=1)["updated"] is caches["cache"]
        np.testing.assert_array_equal(caches["cache"][:, :3], ROWS[:, :3] @ MATRIX)


def test_two_bindings_run_in_two_threads() -> None:
    shape = Shape(hidden=512)
    session = Session(decoder(shape), threads=2)
    texts = {seed: np.random.default_rng(seed).integers(0, 50, 40) for seed in range(3)}

    def decoded(seed: int) -> list[np.ndarray]:
        _, binding = bound(session, max_length=40)
        with binding as step:
            return [
                step.run(tokens=[[token]], position=k)["logits"].copy()
                for k, token in enumerate(texts[seed])
            ]

    expected = {seed: decoded(seed) for seed in texts}
    results: dict[int, list[np.ndarray]] = {}
    work = [
        threading.Thread(target=lambda seed=seed: results.update({seed: decoded(seed)}))
        for seed in texts
    ]
    for one in work:
        one.start()
    for one in work:
        one.join()
    for seed, logits in expected.items():
        np.testing.assert_array_equal(results[seed], logits)


def calls_of_a_run(layers: int) -> int:
    """How many functions, Python's and others, a fused run calls."""
    session = Session(decoder(Shape(layers=layers)))
    _, binding = bound(session, max_length=16)
    tokens = np.array([[1]])
    with binding as step:
        for position in range(3):
            step.run(tokens=tokens, position=position)
        profile = cProfile.Profile()
        profile.runcall(step.run, tokens=tokens, position=3)
        assert step._frame.frame.fused
    return sum(calls for _, calls, *_ in pstats.Stats(profile).stats.values())


def test_a_fused_run_calls_nothing_for_each_layer() -> None:
    """Storage, results and notes of all layers are looked at in one native call, or in none."""
    assert calls_of_a_run(1) == calls_of_a_run(4)
