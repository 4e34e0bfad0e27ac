"""Faults that others had with passes over stateful nodes, and what is lost on the way (B)."""

import tracemalloc
from collections.abc import Callable

import numpy as np
import onnx
import onnx.inliner
import onnx.version_converter
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import onnxscript.optimizer
import pytest
import textual

from onnx_inplace import Session, compiler, errors
from onnx_inplace.dsl import BOOL, FLOAT, INT64, Alias, Mutable, function, kv, model, op, weight

Cache, New = FLOAT["heads", "capacity", 2], FLOAT["heads", 1, 2]
NEW = np.arange(4, dtype=np.float32).reshape(2, 1, 2) + 1


@model
def append(cache: Mutable[Cache], new: New, position: INT64[()]) -> Alias["cache"]:
    return kv.CacheUpdate(cache, new, position)


@function
def update(cache: Mutable[Cache], new: New, position: INT64[()]) -> Alias["cache"]:
    return kv.CacheUpdate(cache, new, position)


@model
def full(
    cache: Mutable[Cache], new: New, steps: INT64[()], flag: BOOL[()]
) -> tuple[Alias["cache"], FLOAT[()]]:
    """A call in a loop in a branch, and an ordinary result: what tools stumble over."""
    if flag:
        for i in range(steps):
            cache = update(cache, new, i)
    return cache, op.ReduceSum(cache, keepdims=0)


def codes(error: errors.ContractError) -> set[str]:
    return {finding.code for finding in error.findings}


def test_equal_writes_of_two_caches_stay_two() -> None:
    """Case 13. Two writes that differ only in whose storage they write are not merged."""

    @model
    def pair(
        keys: Mutable[Cache], values: Mutable[Cache], new: New
    ) -> tuple[Alias["keys"], Alias["values"], Cache]:
        before = kv.Copy(keys)
        keys = kv.CacheUpdate(keys, new, 0)
        values = kv.CacheUpdate(values, new, 0)
        return keys, values, before

    session = Session(pair)
    storage = {n: session.allocate(n, heads=2, capacity=4) for n in ("keys", "values")}
    with session.bind(**storage) as step:
        out = step.run(new=NEW)
    assert out[0] is storage["keys"] and out[1] is storage["values"]
    assert (storage["keys"] == storage["values"]).all() and storage["keys"][:, 0].all()
    assert not out[2].any()


def test_a_merged_write_is_noticed() -> None:
    """Case 13. A foreign pass that makes one node of two loses a write: the file says so."""
    text = """two (float[2,4,2] a, float[2,4,2] b, float[2,1,2] new, int64 p)
        => (float[2,4,2] x, float[2,4,2] y) {
        x = onnx_inplace.CacheUpdate (a, new, p)
        y = onnx_inplace.CacheUpdate (b, new, p)
    }"""
    proto = onnx.load_from_string(textual.build(text, ["a", "b"], ["a", "b"]).serialized)
    proto.graph.node[1].CopyFrom(onnx.helper.make_node("Identity", ["x"], ["y"]))
    with pytest.raises(errors.ContractError):
        Session(compiler.load(proto.SerializeToString()))


def test_a_removed_write_is_noticed() -> None:
    """Case 14. A dead-code pass drops a write, with its facts: nothing may run without it."""
    proto = onnx.load_from_string(append.serialized)
    del proto.graph.node[:]
    proto.graph.node.append(
        onnx.helper.make_node("Identity", ["cache"], [proto.graph.output[0].name])
    )
    with pytest.raises(errors.ContractError):
        Session(compiler.load(proto.SerializeToString()))


def test_our_passes_keep_a_write_that_no_node_reads() -> None:
    """Case 14. The write of a branch whose result only the caller sees."""

    @model
    def unread(cache: Mutable[Cache], new: New, flag: BOOL[()]) -> tuple[New, Alias["cache"]]:
        doubled = new * 2.0
        if flag:
            cache = kv.CacheUpdate(cache, doubled, 0)
        return doubled, cache

    session = Session(unread)
    cache = session.allocate("cache", heads=2, capacity=4)
    with session.bind(cache=cache) as step:
        step.run(new=NEW, flag=True)
    np.testing.assert_array_equal(cache[:, 0], NEW[:, 0] * 2)


def test_a_weight_that_only_a_branch_uses(tmp_path) -> None:
    """Case 16. An initializer of one branch survives folding, or its loss is noticed."""

    @model
    def weighted(cache: Mutable[Cache], new: New, flag: BOOL[()]) -> Alias["cache"]:
        place = weight(np.array(2), "place")
        if flag:
            cache = kv.CacheUpdate(cache, new, place)
        return cache

    def result(source) -> np.ndarray:
        session = Session(source)
        cache = session.allocate("cache", heads=2, capacity=4)
        with session.bind(cache=cache) as step:
            assert step.run(new=NEW, flag=True)[0] is cache
        return cache

    wanted = np.zeros((2, 4, 2), np.float32)
    wanted[:, 2] = NEW[:, 0]
    np.testing.assert_array_equal(result(weighted), wanted)
    folded = ir.from_proto(onnx.load_from_string(weighted.serialized))
    onnxscript.optimizer.fold_constants(folded)
    ir.save(folded, tmp_path / "folded.onnx")
    with pytest.raises(errors.ContractError) as caught:
        Session(tmp_path / "folded.onnx")
    assert codes(caught.value) == {"E113"}
    compiler.restore(tmp_path / "folded.onnx", tmp_path / "restored.onnx")
    np.testing.assert_array_equal(result(tmp_path / "restored.onnx"), wanted)


def test_a_second_compilation_is_the_first(tmp_path) -> None:
    """Case 17. Compiled or loaded again: the same bytes, results and order of results."""
    full.save(tmp_path / "full.onnx")
    found = []
    for source in (full, tmp_path / "full.onnx", tmp_path / "full.onnx"):
        session = Session(source)
        cache = session.allocate("cache", heads=2, capacity=4)
        with session.bind(cache=cache) as step:
            out = step.run(new=NEW, steps=3, flag=True)
            assert out[0] is cache
            found.append((list(out.keys()), cache.copy(), float(out[1])))
    for names, content, total in found:
        assert names == found[0][0] and total == found[0][2]
        np.testing.assert_array_equal(content, found[0][1])


@pytest.mark.parametrize("keep", [0.25, 0.5, 0.9, 0.999])
def test_half_a_file_is_refused(tmp_path, keep: float) -> None:
    """Case 17. A file that was not written to its end is an error of ours, whatever is missing."""
    whole = full.serialized
    (tmp_path / "half.onnx").write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(errors.InplaceError):
        Session(tmp_path / "half.onnx")


SCATTER = """scatter ({shape} cache, {update} new, int64[1,1,2] where) => ({shape} out{more}) {{
    {before}
    out = ScatterElements <axis = 1> ({data}, where, {values})
    {after}
}}"""


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("read", ["", "before", "after"])
def test_a_scatter_copies_nothing(symbolic: bool, through: bool, read: str) -> None:
    """Case 19. "May be in place" must mean: is, for a parameter, a view of one, read or not."""
    shape = "float[1,capacity,2]" if symbolic else "float[1,500000,2]"
    before = ["seen = ReduceMax <keepdims = 0> (cache)"] if read == "before" else []
    before += ["twice = Identity (cache)"] if through else []
    text = SCATTER.format(
        shape=shape,
        update="float[1,1,2]",
        more=", float seen" if read else "",
        before="\n".join(before),
        after="seen = ReduceMax <keepdims = 0> (out)" if read == "after" else "",
        data="twice" if through else "cache",
        values="new",
    )
    session = Session(textual.build(text, ["cache"], ["cache"] + [None] * bool(read)))
    cache = session.allocate("cache", **({"capacity": 500000} if symbolic else {}))
    feeds = dict(new=np.ones((1, 1, 2), np.float32), where=np.full((1, 1, 2), 3))
    with session.bind(cache=cache) as step:
        step.run(**feeds)
        cache[0, 3] = 0
        tracemalloc.start()
        out = step.run(**feeds)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert out[0] is cache and (cache[0, 3] == 1).all() and not cache[0, 4:].any()
    assert peak < cache.nbytes / 20
    if read:
        assert float(out[1]) == (read == "after")


def _through_ir(proto: onnx.ModelProto, run: Callable[[ir.Model], object]) -> onnx.ModelProto:
    loaded = ir.from_proto(proto)
    result = run(loaded)
    return ir.to_proto(result if isinstance(result, ir.Model) else loaded)


def _external(proto: onnx.ModelProto) -> onnx.ModelProto:
    onnx.convert_model_to_external_data(proto, location="weights.bin", size_threshold=0)
    return proto


TOOLS: dict[str, Callable[[onnx.ModelProto], onnx.ModelProto]] = {
    "protobuf": lambda p: onnx.load_from_string(p.SerializeToString()),
    "external data": _external,
    "shape inference": onnx.shape_inference.infer_shapes,
    "text": lambda p: onnx.parser.parse_model(onnx.printer.to_text(p)),
    "C++ inliner": onnx.inliner.inline_local_functions,
    "C++ version converter": lambda p: onnx.version_converter.convert_version(p, 25),
    "onnx-ir": lambda p: _through_ir(p, lambda m: None),
    "onnx-ir inliner": lambda p: _through_ir(p, common_passes.InlinePass()),
    "onnx-ir cse": lambda p: _through_ir(p, common_passes.CommonSubexpressionEliminationPass()),
    "onnxscript optimize": lambda p: _through_ir(p, onnxscript.optimizer.optimize),
    "names": lambda p: onnx.compose.add_prefix(p, "new_"),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_what_a_tool_loses_is_noticed(tool: str, tmp_path) -> None:
    """Case 20. After any tool the model still means the same, or loading says what is missing."""
    path = tmp_path / "changed.onnx"
    try:
        onnx.save(TOOLS[tool](onnx.load_from_string(full.serialized)), path)
    except (RuntimeError, onnx.parser.ParseError, onnx.version_converter.ConvertError) as error:
        pytest.skip(f"the tool itself gives up: {error}")
    try:
        session = Session(path)
    except errors.ContractError as error:
        assert codes(error) <= {"E113", "E124"}
        return
    names = {
        i.name.removeprefix("new_"): i.name for i in (*session.inputs, *session.mutable_inputs)
    }
    cache = session.allocate(names["cache"], heads=2, capacity=4)
    with session.bind(**{names["cache"]: cache}) as step:
        feeds = dict(new=NEW, steps=3, flag=True)
        out = step.run(**{names[k]: v for k, v in feeds.items()})
    assert out[0] is cache
    np.testing.assert_array_equal(cache[:, :3], np.repeat(NEW, 3, 1))
    assert not cache[:, 3:].any() and float(out[1]) == cache.sum()
