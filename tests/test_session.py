"""A loaded model: what it says of itself, storage for it, binding in one call."""

import dataclasses
import gc
import inspect

import ml_dtypes
import numpy as np
import onnxruntime
import pytest

from onnx_inplace import Session, compiler, errors
from onnx_inplace.dsl import BFLOAT16, FLOAT, INT64, Alias, Mutable, kv, model, op
from onnx_inplace.runner import storage

Cache, New = FLOAT[2, "batch", "heads", "capacity", 4], FLOAT[2, "batch", "heads", "n", 4]


@model
def append(
    cache: Mutable[Cache], new: New, position: INT64[()]
) -> tuple[Alias["cache"], FLOAT[()]]:
    updated = kv.CacheUpdate(cache, new, position)
    return updated, op.ReduceSum(new, keepdims=0)


@model
def layers(
    caches: tuple[(Mutable[FLOAT["m", 2]],) * 2], new: FLOAT["n", 2], position: INT64[()]
) -> Alias["caches"]:
    return [kv.CacheUpdate(cache, new, position) for cache in caches]


def test_a_session_describes_the_model() -> None:
    session = Session(append)
    assert [str(p) for p in session.mutable_inputs] == [
        "cache: float32[2, batch, heads, capacity, 4]"
    ]
    assert [str(p) for p in session.inputs] == [
        "new: float32[2, batch, heads, n, 4]",
        "position: int64[]",
    ]
    shapes = [p.shape for p in session.outputs]
    assert shapes == [(2, "batch", "heads", "capacity", 4), ()]


def test_sources_of_a_session(tmp_path) -> None:
    path = tmp_path / "append.onnx"
    append.save(path)
    new = np.ones((2, 1, 1, 1, 4), np.float32)
    for source in (append, path, str(path), compiler.load(path)):
        session = Session(source)
        cache = session.allocate("cache", batch=1, heads=1, capacity=2)
        session.run({"new": new, "position": 1}, writable={"cache": cache})
        assert cache[:, :, :, 1].all() and not cache[:, :, :, 0].any()


def test_threads_are_counted_from_one() -> None:
    assert Session(append, threads=2).threads == 2
    for threads in (0, -1):
        with pytest.raises(errors.BindingError):
            Session(append, threads=threads)


def test_storage_is_allocated_by_names_of_dimensions(address) -> None:
    cache = Session(append).allocate("cache", batch=1, heads=2, capacity=3)
    assert cache.shape == (2, 1, 2, 3, 4) and cache.dtype == np.float32
    assert not cache.any() and address(cache) % 64 == 0 and cache.flags.c_contiguous


@pytest.mark.parametrize(
    "name, dims, wrong",
    [
        ("cache", dict(batch=1, heads=2), "capacity"),
        ("cache", dict(batch=1, heads=2, capacity=3, max_length=3), "max_length"),
        ("cache", dict(batch=1, heads=2, capacity=-1), "capacity"),
        ("cache", dict(batch=1, heads=2, capacity=1.5), "capacity"),
        ("cache", dict(batch=1, heads=2, capacity=True), "capacity"),
        ("cache", dict(batch=1, heads=2, capacity="3"), "capacity"),
        ("new", {}, "new"),
        ("nothing", {}, "nothing"),
    ],
)
def test_sizes_that_are_missing_unknown_or_no_sizes_are_named(name, dims, wrong) -> None:
    with pytest.raises(errors.BindingError) as caught:
        Session(append).allocate(name, **dims)
    assert caught.value.name == wrong and f"{wrong}" in str(caught.value)


def test_storage_that_cannot_exist_is_refused_before_it_is_asked_for() -> None:
    """Case 47."""
    with pytest.raises(errors.BindingError) as caught:
        Session(append).allocate("cache", batch=2**31, heads=2**31, capacity=2**31)
    assert caught.value.name == "cache"


def test_bfloat16_storage(guarded) -> None:
    @model
    def program(
        cache: Mutable[BFLOAT16["m", 2]], new: BFLOAT16["n", 2], position: INT64[()]
    ) -> Alias["cache"]:
        return kv.CacheUpdate(cache, new, position)

    session = Session(program)
    assert session.allocate("cache", m=4).dtype == ml_dtypes.bfloat16
    cache = guarded((4, 2), ml_dtypes.bfloat16)
    new = np.array([[1.5, -2]], ml_dtypes.bfloat16)
    with session.bind(cache=cache) as step:
        assert step.run(new=new, position=3)[0] is cache
    np.testing.assert_array_equal(cache[3], new[0])
    assert np.isnan(cache[:3].astype(np.float32)).all()


def test_writing_needs_consent() -> None:
    session = Session(append)
    cache = session.allocate("cache", batch=1, heads=1, capacity=2)
    feeds = {"new": np.ones((2, 1, 1, 1, 4), np.float32), "position": 0}
    for given in ({**feeds, "cache": cache}, feeds):
        with pytest.raises(errors.BindingError):
            session.run(given)
    assert not cache.any()
    assert session.run(feeds, writable={"cache": cache})["updated"] is cache
    with session.bind(cache=cache):  # it has been given back
        pass


@dataclasses.dataclass
class Two:
    first: np.ndarray
    second: np.ndarray


def test_groups_are_bound_by_sequence_or_by_member() -> None:
    session = Session(layers)
    a, b = (session.allocate(f"caches.{k}", m=3) for k in range(2))
    new = np.ones((1, 2), np.float32)
    for arrays in ({"caches": [a, b]}, {"caches": (a, b)}, {"caches.0": a, "caches.1": b}):
        with session.bind(**arrays) as step:
            assert all(x is y for x, y in zip(step.run(new=new, position=0), (a, b), strict=True))
    session.run({"new": new, "position": 1}, writable={"caches": [a, b]})
    assert a[:2].all() and b[:2].all() and not a[2].any()
    with pytest.raises(errors.BindingError) as caught:
        session.bind(caches=[a])
    assert "caches.1" in str(caught.value)
    with pytest.raises(errors.BindingError):
        session.run({"caches": [a, b], "new": new, "position": 0})


def test_results_are_a_mapping_and_a_sequence() -> None:
    session = Session(append)
    cache = session.allocate("cache", batch=1, heads=1, capacity=2)
    with session.bind(cache=cache) as step:
        out = step.run(new=np.ones((2, 1, 1, 1, 4), np.float32), position=0)
    updated, total = out
    assert updated is cache is out[0] is out["updated"] is out.get("updated")
    assert total is out[-1] is out["output_1"] and len(out) == 2
    assert list(out.keys()) == ["updated", "output_1"] == list(dict(out))
    assert [name for name, _ in out.items()] == list(out.keys())
    assert "updated" in out and "cache" not in out and out.get("cache", 5) == 5
    assert out[:1] == (cache,) and next(iter(out.values())) is cache
    assert repr(out) == "Outputs(updated: float32[2, 1, 1, 2, 4], output_1: float32[])"
    with pytest.raises(KeyError):
        out["cache"]
    with pytest.raises(IndexError):
        out[2]


def test_a_weight_of_the_caller_is_not_lent_for_writing() -> None:
    """A loaded model reads arrays of its author: a cache on them would change the weights."""
    import onnx_ir as ir

    loaded = compiler.load(scaled)
    weight = np.full((2, 2), 3, np.float32)
    (value,) = (v for v in loaded.model.graph.initializers.values() if len(v.shape) == 2)
    value.const_value = ir.Tensor(weight, name=value.name)
    session = Session(loaded)
    with pytest.raises(errors.SharedStorage) as caught:
        session.bind(cache=weight)
    assert caught.value.other == value.name
    del session, caught  # its traceback knows the session
    gc.collect()
    other = Session(scaled)
    other.bind(cache=weight).close()


@model
def scaled(cache: Mutable[FLOAT[2, 2]]) -> Alias["cache"]:
    return kv.Assign(cache, cache * op.Constant(value=np.ones((2, 2), np.float32)))


def test_loading_and_binding_change_no_byte(untouched, tmp_path) -> None:
    cache = np.arange(16, dtype=np.float32).reshape(2, 1, 1, 2, 4)
    with untouched(cache):
        session = Session(append)
        session.bind(cache=cache).close()
        append.save(tmp_path / "append.onnx")
        compiler.plan(append)


def test_sessions_of_one_model_share_nothing_that_is_lent() -> None:
    first, second = Session(append), Session(append)
    a = first.allocate("cache", batch=1, heads=1, capacity=2)
    b = second.allocate("cache", batch=1, heads=1, capacity=2)
    with first.bind(cache=a), second.bind(cache=b):
        assert storage.leases.holder(storage.interval(a)) == "cache"
        with pytest.raises(errors.BindingInUse):
            second.bind(cache=a)


def test_there_is_no_way_to_opt_out() -> None:
    """Case 94. Checks are not a mode; fused steps and all kernels make the same ones."""
    assert list(inspect.signature(Session).parameters) == ["source", "threads", "fuse", "kernels"]
    assert list(inspect.signature(Session.run).parameters) == ["self", "feeds", "writable"]


def test_threads_of_a_session_are_no_business_of_other_sessions() -> None:
    """The pool of the process, once made, is forced upon every session of onnxruntime."""
    session = Session(append, threads=2)
    cache = session.allocate("cache", batch=1, heads=1, capacity=2)
    new = np.ones((2, 1, 1, 1, 4), np.float32)
    with session.bind(cache=cache) as step:
        step.run(new=new, position=0)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        stock = onnxruntime.InferenceSession(
            append.serialized, options, providers=["CPUExecutionProvider"]
        )
        updated, _ = stock.run(None, {"cache": cache, "new": new, "position": np.array(0)})
        np.testing.assert_array_equal(updated, cache)
