"""Runs that differ in a size that nobody notices share what is prepared for them."""

import numpy as np
import pytest
from genai_form import Form, decoder

from onnx_inplace import Session, compiler
from onnx_inplace.compiler import unnoticed
from onnx_inplace.dsl import BOOL, FLOAT, INT64, Alias, Mutable, kv, model, op
from onnx_inplace.runner import joined, joined_call

CAPACITY = 24


def free(program, fuse: str = "off") -> dict[str, tuple[int, ...]]:
    """Axes that nobody notices, by name of the input."""
    plan = Session(program, fuse=fuse).plan
    names = {i.slot: i.name for i in plan.inputs}
    return {names[slot]: axes for slot, axes in unnoticed.axes(plan).items()}


@model
def counted(
    cache: Mutable[FLOAT["s", 4]], values: FLOAT["n", 4], mask: INT64["total"]
) -> tuple[Alias["cache"], FLOAT["n", 4]]:
    position = op.ReduceSum(mask, keepdims=0) - op.Shape(values)[0]
    updated = kv.CacheUpdate(cache, op.Relu(values), position)
    return updated, op.Neg(values)


@model
def returned(
    cache: Mutable[FLOAT["s", 4]], values: FLOAT["n", 4], mask: INT64["total"]
) -> tuple[Alias["cache"], INT64["total"]]:
    position = op.ReduceSum(mask, keepdims=0) - op.Shape(values)[0]
    return kv.CacheUpdate(cache, op.Relu(values), position), -mask


@model
def attended(
    cache: Mutable[FLOAT[1, 1, "s", 4]], values: FLOAT[1, 1, "n", 4], mask: BOOL["n", "total"]
) -> tuple[Alias["cache"], FLOAT[1, 1, "n", 4]]:
    """Attention is a kernel of ours, which reads the mask."""
    length = op.Shape(mask)[1]
    updated = kv.CacheUpdate(cache, values, length - op.Shape(values)[2])
    lengths = op.Reshape(length, [1])
    return updated, op.Attention(values, updated, updated, mask, nonpad_kv_seqlen=lengths)


@model
def measured(
    cache: Mutable[FLOAT["s", 4]], values: FLOAT["n", 4], mask: INT64["total"]
) -> Alias["cache"]:
    """What is written has as many rows as the mask has numbers, less one."""
    rows = op.Expand(op.Relu(values)[:1], op.Concat(op.Shape(mask) - 1, [4], axis=0))
    return kv.CacheUpdate(cache, rows, 0)


@pytest.mark.parametrize("fuse", ["off", "auto"])
def test_a_mask_that_is_only_counted_may_have_any_length(fuse) -> None:
    assert free(counted, fuse) == {"mask": (0,)}


@pytest.mark.parametrize("program", [returned, attended, measured])
def test_a_size_of_what_others_see_is_noticed(program) -> None:
    assert "mask" not in free(program)


def test_sizes_that_the_caller_lends_are_noticed() -> None:
    @model
    def as_long(cache: Mutable[FLOAT["s", 4]], mask: INT64["s"]) -> Alias["cache"]:
        row = op.Cast(op.ReduceSum(mask), to=FLOAT.dtype)
        return kv.CacheUpdate(cache, op.Expand(row, [1, 4]), 0)

    assert free(as_long) == {}


def test_a_longer_mask_takes_the_frame_of_the_last_one() -> None:
    cache = np.zeros((CAPACITY, 4), np.float32)
    expected = cache.copy()
    with Session(counted).bind(cache=cache) as step:
        for length in (3, 5, 6, 7, 8, 9, 12):
            count = length - int(expected.any(1).sum())
            values = np.full((count, 4), length, np.float32)
            expected[length - count : length] = values
            _, negative = step.run(values=values, mask=np.ones(length, np.int64))
            np.testing.assert_array_equal(negative, -values)
            np.testing.assert_array_equal(cache, expected)
        assert len(step._execution._frames) == 3  # one, two and three rows


@pytest.mark.parametrize("one", [True, False], ids=["joined", "apart"])
@pytest.mark.parametrize("form", [Form(), Form(bits=0, packed=False)], ids=["4 bits", "floats"])
def test_a_decoder_whose_mask_grows(form, one, monkeypatch) -> None:
    """Each token by a binding of its own gives the same bits, and has nothing prepared."""
    monkeypatch.setattr(joined, "FEWEST", 1 if one else 1000)
    program = compiler.annotate(decoder(form).SerializeToString()).program
    session = Session(program, fuse="off")

    def caches():
        return {
            p.name: session.allocate(p.name, batch_size=1, max_length=CAPACITY)
            for p in session.mutable_inputs
        }

    kept, others = caches(), caches()
    with session.bind(**kept) as step:
        for valid in range(4, 16):
            tokens = np.array([[1, 2, 3, 4]] if valid == 4 else [[valid]])
            feeds = {"input_ids": tokens, "attention_mask": np.ones((1, valid), np.int64)}
            found = step.run(**feeds)[0]
            with session.bind(**others) as fresh:
                assert found.tobytes() == fresh.run(**feeds)[0].tobytes()
        assert len(step._execution._frames) == 2
    for name, cache in kept.items():
        assert cache.tobytes() == others[name].tobytes()


def test_python_stands_between_no_layers_of_a_decoder_whose_mask_grows(monkeypatch) -> None:
    monkeypatch.setattr(joined, "FEWEST", 1)
    session = Session(compiler.annotate(decoder(Form()).SerializeToString()).program, fuse="off")
    if session._engine._joined.get() is None:
        pytest.skip("this onnxruntime comes without its C interface")
    calls = []
    call = joined_call.Prepared.__call__
    monkeypatch.setattr(
        joined_call.Prepared, "__call__", lambda self, *rest: (calls.append(1), call(self, *rest))
    )
    caches = {
        p.name: session.allocate(p.name, batch_size=1, max_length=CAPACITY)
        for p in session.mutable_inputs
    }
    counts = []
    with session.bind(**caches) as step:
        for valid in range(1, 12):
            step.run(input_ids=[[valid]], attention_mask=np.ones((1, valid), np.int64))
            counts.append(len(calls))
    assert counts[-1] == counts[-5] > 0
