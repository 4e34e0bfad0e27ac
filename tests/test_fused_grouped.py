"""GroupQueryAttention in fused steps: models of onnxruntime-genai's form, adopted and decoded."""

import functools

import numpy as np
import onnxruntime
import pytest
from genai_form import FLOAT16, Form, decoder
from onnx import helper

from onnx_inplace import Session, compiler, errors

pytestmark = pytest.mark.kernel

CAPACITY = 24
FORMS = {
    "packed, 4 bits": Form(),
    "apart": Form(packed=False, bits=0),
    "no rotation": Form(packed=False, bits=0, rotary=False),
    "packed, no rotation": Form(bits=0, rotary=False, size=24),
    "neighbours": Form(bits=0, grouped=(("rotary_interleaved", 1), ("scale", 0.3))),
    "window": Form(bits=0, grouped=(("local_window_size", 3),)),
    "softcap": Form(bits=0, grouped=(("softcap", 2.0),)),
    "positions, sinks": Form(bits=0, positions=True, sinks=True),
    "smooth": Form(bits=0, grouped=(("smooth_softmax", 1),), kv_heads=4),
    "float16": Form(bits=0, element=FLOAT16, size=16),
    "float16, no rotation": Form(bits=0, element=FLOAT16, packed=False, rotary=False),
}
ERROR = {"packed, 4 bits": 2e-3, "float16": 2e-2, "float16, no rotation": 2e-2}


@functools.cache
def adopted(form: Form) -> compiler.Program:
    return compiler.annotate(decoder(form).SerializeToString()).program


@functools.cache
def stock(form: Form) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    data = decoder(form).SerializeToString()
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def caches(session: Session, batch: int = 1) -> dict[str, np.ndarray]:
    """Not zeros: what is beyond the tokens counts for nothing."""
    found = {}
    for port in session.mutable_inputs:
        cache = session.allocate(port.name, batch_size=batch, max_length=CAPACITY)
        cache[...] = np.nan
        found[port.name] = cache
    return found


def feeds_of(form: Form, tokens: np.ndarray, valid: int) -> dict[str, np.ndarray]:
    batch, count = tokens.shape
    feeds = {"input_ids": tokens, "attention_mask": np.ones((batch, valid), np.int64)}
    if form.positions:
        feeds["position_ids"] = np.tile(np.arange(valid - count, valid), (batch, 1))
    return feeds


def decode(form: Form, pieces, *, batch=1, fuse="auto", threads=1):
    """Logits of pieces of texts, the caches afterwards, and which pieces ran fused."""
    session = Session(adopted(form), fuse=fuse, threads=threads)
    storage, random, valid, logits, fused = (
        caches(session, batch),
        np.random.default_rng(1),
        0,
        [],
        [],
    )
    with session.bind(**storage) as step:
        for count in pieces:
            valid += count
            tokens = random.integers(0, form.vocabulary, (batch, count))
            out = step.run(**feeds_of(form, tokens, valid))
            logits.append(out["logits"].copy())
            fused.append(step._frame.frame.fused)
    assert session.refusals == ()
    return logits, storage, fused


def expected(form: Form, pieces, batch=1):
    """The same in onnxruntime, which makes new caches in every step."""
    session, random, valid, logits = stock(form), np.random.default_rng(1), 0, []
    names = [i.name for i in session.get_inputs() if i.name.startswith("past")]
    dtype = helper.tensor_dtype_to_np_dtype(form.element)
    past = {n: np.zeros((batch, form.kv_heads, 0, form.size), dtype) for n in names}
    for count in pieces:
        valid += count
        tokens = random.integers(0, form.vocabulary, (batch, count))
        first, *present = session.run(None, {**feeds_of(form, tokens, valid), **past})
        logits.append(first)
        past = dict(zip(names, present, strict=True))
    return logits, past


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("pieces", [(5, 1, 1, 3, 1, 4), (2, 1)])
def test_an_adopted_model_decodes_fused_and_equals_onnxruntime(name, pieces):
    form, bound = FORMS[name], ERROR.get(name, 2e-5)
    logits, storage, fused = decode(form, pieces)
    assert fused == [count <= 4 for count in pieces]
    wanted, past = expected(form, pieces)
    for got, want in zip(logits, wanted, strict=True):
        scale = np.abs(want).max().astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=0, atol=bound * scale)
    valid = sum(pieces)
    for cache_name, cache in storage.items():
        want = past[cache_name].astype(np.float64)
        np.testing.assert_allclose(cache[:, :, :valid], want, rtol=0, atol=4 * bound)
        assert np.isnan(cache[:, :, valid:]).all()


@pytest.mark.parametrize("name", ["packed, 4 bits", "positions, sinks", "float16"])
def test_rows_of_a_batch_have_places_of_their_own(name):
    form, bound = FORMS[name], ERROR.get(name, 2e-5)
    pieces = (5, 1, 1, 1)
    logits, _, fused = decode(form, pieces, batch=2)
    assert fused == [False, True, True, True]
    wanted, _ = expected(form, pieces, batch=2)
    for got, want in zip(logits, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=bound * np.abs(want).max())


@pytest.mark.parametrize("mask", [[[1, 1], [1, 0]], [[1, 0], [1, 1]]])
def test_a_padded_prompt_and_what_follows_equal_onnxruntime(mask):
    """Rows of 2 and of 1 tokens: both begin at 0, and the next token stands behind each."""
    form = FORMS["apart"]
    session, peer, results = Session(adopted(form)), stock(form), []
    names = [port.name for port in session.mutable_inputs]
    past = {n: np.zeros((2, form.kv_heads, 0, form.size), np.float32) for n in names}
    mask = np.array(mask)
    more = np.concatenate([mask, [[1], [1]]], 1)
    with session.bind(**caches(session, 2)) as step:
        for tokens, valid in (([[3, 4], [5, 6]], mask), ([[7], [8]], more)):
            feeds = {"input_ids": np.array(tokens), "attention_mask": valid}
            results.append(step.run(**feeds)["logits"].copy())
            assert step._frame.frame.fused
            want, *present = peer.run(None, {**feeds, **past})
            past = dict(zip(names, present, strict=True))
            np.testing.assert_allclose(results[-1], want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("name", ["packed, 4 bits", "window", "float16"])
def test_threads_do_not_change_a_bit_of_attention(name):
    form, pieces = FORMS[name], (5, *[1] * 10, 2)
    one, first, _ = decode(form, pieces)
    two, second, _ = decode(form, pieces, threads=2)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(a).max())
    for key, cache in first.items():
        np.testing.assert_allclose(cache, second[key], rtol=0, atol=1e-5, equal_nan=True)


def test_a_mask_that_grows_makes_no_new_instructions():
    form = FORMS["apart"]
    session = Session(adopted(form))
    with session.bind(**caches(session)) as step:
        regions = set()
        for valid in range(1, 9):
            step.run(**feeds_of(form, np.array([[valid]]), valid))
            regions |= {id(region) for region in step._frame.frame.regions.values()}
    assert len(regions) == 1


def full(step, form: Form) -> None:
    for valid in range(1, CAPACITY + 1):
        step.run(**feeds_of(form, np.array([[1]]), valid))


def test_a_token_beyond_the_capacity_writes_nothing():
    form = FORMS["packed, 4 bits"]
    session = Session(adopted(form))
    storage = caches(session)
    with session.bind(**storage) as step:
        full(step, form)
        before = {name: cache.tobytes() for name, cache in storage.items()}
        with pytest.raises(errors.CapacityError) as caught:
            step.run(**feeds_of(form, np.array([[1]]), CAPACITY + 1))
        e = caught.value
        assert (e.position + e.length, e.capacity) == (CAPACITY + 1, CAPACITY)
        assert {name: cache.tobytes() for name, cache in storage.items()} == before
        step.run(**feeds_of(form, np.array([[1]]), CAPACITY))  # nor is the binding dirty


def test_tokens_that_would_begin_before_the_cache_are_refused():
    """Three new tokens of five, of a sequence that is two tokens long."""
    form = FORMS["apart"]
    session = Session(adopted(form))
    storage = caches(session)
    with session.bind(**storage) as step:
        feeds = {"input_ids": np.array([[1, 2, 3]]), "attention_mask": np.array([[1, 1, 0, 0, 0]])}
        with pytest.raises(errors.CapacityError) as caught:
            step.run(**feeds)
        e = caught.value
        assert step._frame.frame.fused and (e.position, e.length) == (-1, 3)
        assert all(np.isnan(cache).all() for cache in storage.values())


@pytest.mark.parametrize("position", [64, -1])
def test_a_position_without_angles_is_refused_before_a_write(position):
    form = FORMS["positions, sinks"]
    session = Session(adopted(form))
    storage = caches(session)
    with session.bind(**storage) as step:
        feeds = feeds_of(form, np.array([[1]]), 1) | {"position_ids": np.array([[position]])}
        with pytest.raises(errors.CapacityError):
            step.run(**feeds)
        assert all(np.isnan(cache).all() for cache in storage.values())


def test_what_no_template_does_is_said_in_the_plan():
    source = decoder(Form(bits=0))
    (node,) = (n for n in source.graph.node if "attended.0" in n.output)
    node.input.extend([""] * (12 - len(node.input)))
    node.input.append("scale")
    source.graph.initializer.append(helper.make_tensor("scale", 1, [1], [1.0]))
    plan = compiler.plan(compiler.annotate(source.SerializeToString()).program)
    said = [str(r) for r in plan.fused.refusals]
    assert said == ["com.microsoft::GroupQueryAttention `attended.0`: with k_scale"]


def test_decode_only_serves_a_model_of_this_form():
    form = FORMS["packed, 4 bits"]
    pieces = (1, 1, 3)
    (got, _, fused), (want, _, _) = (
        decode(form, pieces, fuse=fuse) for fuse in ("decode-only", "auto")
    )
    assert all(fused)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
