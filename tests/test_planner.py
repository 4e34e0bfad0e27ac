"""The plan: order, number of sub-sessions, and what it says about values."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import textual

from onnx_inplace import compiler, errors
from onnx_inplace.compiler import steps
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, function, kv, model, op

CACHE, NEW = FLOAT["h", "m", 4], FLOAT["h", "n", 4]


def all_steps(block: steps.Block) -> Iterator[steps.Step]:
    for step in block.steps:
        yield step
        if isinstance(step, steps.Branch):
            yield from all_steps(step.then)
            yield from all_steps(step.otherwise)
        elif isinstance(step, steps.Repeat | steps.ScanStep):
            yield from all_steps(step.body)


def kinds(plan: steps.ExecutionPlan) -> list[str]:
    return [
        s.op_type if isinstance(s, steps.Kernel | steps.View) else type(s).__name__
        for s in plan.block.steps
    ]


def sub_models(plan: steps.ExecutionPlan) -> list[onnx.ModelProto]:
    found = [s for s in all_steps(plan.block) if isinstance(s, steps.SubSession)]
    return [onnx.ModelProto.FromString(s.model) for s in found]


def operators(plan: steps.ExecutionPlan) -> list[list[str]]:
    return [[n.op_type for n in m.graph.node] for m in sub_models(plan)]


def decoder(layers: int) -> compiler.Program:
    """As in a language model: each layer writes its cache, attends, goes on."""

    @model
    def decode(
        caches: tuple[(Mutable[FLOAT[1, 2, "m", 4]],) * layers],
        x: FLOAT[1, 2, "n", 4],
        position: INT64[1],
    ) -> tuple[FLOAT[1, 2, "n", 4], Alias["caches"]]:
        updated = []
        length = position + op.Shape(x, start=2, end=3)
        for cache in caches:
            keys = op.Relu(x * 2.0)
            cache = op.TensorScatter(cache, keys, position)
            x = x + op.Attention(op.Tanh(x), cache, cache, None, None, None, length)
            updated.append(cache)
        return op.Relu(x), updated

    return decode


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_a_decoder_needs_one_sub_session_more_than_it_has_layers(layers: int) -> None:
    plan = compiler.plan(decoder(layers))
    assert kinds(plan) == [
        "SubSession",
        *["TensorScatter", "Attention", "SubSession"] * layers,
    ]


def test_independent_chains_share_their_sub_sessions() -> None:
    @model
    def program(
        a: Mutable[CACHE], b: Mutable[CACHE], x: NEW, position: INT64[()]
    ) -> tuple[Alias["a"], Alias["b"]]:
        a1 = kv.CacheUpdate(a, op.Relu(x), position)
        a2 = kv.CacheUpdate(a1, op.Tanh(op.ReduceSum(a1, [1], keepdims=1)), 0)
        b1 = kv.CacheUpdate(b, op.Exp(x), position)
        b2 = kv.CacheUpdate(b1, op.Sin(op.ReduceSum(b1, [1], keepdims=1)), 0)
        return a2, b2

    plan = compiler.plan(program)
    assert operators(plan) == [["Relu", "Exp"], ["ReduceSum", "Tanh", "ReduceSum", "Sin"]]
    assert [s for s in kinds(plan) if s == "SubSession"] == kinds(plan)[0::3]


def test_a_reader_of_the_old_version_stays_before_the_write() -> None:
    """Its result is needed only behind the write, and no value connects the two."""

    @model
    def program(cache: Mutable[CACHE], x: NEW, position: INT64[()]) -> tuple[Alias["cache"], NEW]:
        before = op.ReduceSum(cache, [1], keepdims=1)
        updated = kv.CacheUpdate(cache, x, position)
        return updated, x + before

    plan = compiler.plan(program)
    first, write, *_ = plan.block.steps
    assert isinstance(first, steps.SubSession) and isinstance(write, steps.Kernel)
    assert "ReduceSum" in operators(plan)[0]
    assert plan.write_after_read == (steps.WriteAfterRead("cache", "before", "updated"),)


def test_a_reader_inside_a_branch_counts() -> None:
    @model
    def program(
        cache: Mutable[CACHE], x: NEW, flag: INT64[()], position: INT64[()]
    ) -> tuple[Alias["cache"], FLOAT[()]]:
        total = op.ReduceSum(x, keepdims=0)
        if flag > 0:
            total = op.ReduceSum(cache, keepdims=0)
        updated = kv.CacheUpdate(cache, x, position)
        return updated, total

    plan = compiler.plan(program)
    assert kinds(plan) == ["SubSession", "CacheUpdate"]
    assert [(c.root, c.writer) for c in plan.write_after_read] == [("cache", "updated")]


def test_a_loop_that_reads_a_root_natively_is_no_step_of_its_own() -> None:
    @model
    def program(
        cache: Mutable[CACHE], x: NEW, count: INT64[()], position: INT64[()]
    ) -> tuple[Alias["cache"], FLOAT[()]]:
        total = op.ReduceSum(x, keepdims=0)
        for _ in range(count):
            total = total + op.ReduceSum(cache, keepdims=0)
        return kv.CacheUpdate(cache, x, position), total

    plan = compiler.plan(program)
    assert kinds(plan) == ["SubSession", "CacheUpdate"]
    assert [f.root for f in plan.fallbacks] == ["cache"]


def test_what_weights_alone_decide_stays_with_its_user() -> None:
    """Between two sub-sessions it would be a second copy of the weight."""
    weight = np.ones((4, 8), np.float32)

    @model
    def program(
        cache: Mutable[CACHE], x: NEW, position: INT64[()]
    ) -> tuple[Alias["cache"], FLOAT["h", "m", 8]]:
        transposed = op.Transpose(op.Transpose(weight, perm=[1, 0]), perm=[1, 0])
        updated = kv.CacheUpdate(cache, op.Relu(x), position)
        return updated, op.MatMul(updated, transposed)

    assert operators(compiler.plan(program)) == [["Relu"], ["Transpose", "Transpose", "MatMul"]]


def test_a_weight_of_two_sub_sessions_is_shared() -> None:
    """Its payload stands in neither model."""
    shared = np.arange(32768, dtype=np.float32).reshape(1, 8192, 4)
    own = np.ones((8192, 4), np.float32)

    @model
    def program(
        cache: Mutable[FLOAT[1, 8192, 4]], position: INT64[()]
    ) -> tuple[Alias["cache"], FLOAT[1, 8192, 4]]:
        updated = kv.CacheUpdate(cache, op.Slice(op.Relu(shared), [0], [1], [1]), position)
        return updated, updated * shared + own

    plan = compiler.plan(program)
    first, last = (s for s in plan.block.steps if isinstance(s, steps.SubSession))
    assert [w.shared for w in first.weights] == [True]
    assert [w.shared for w in last.weights] == [True, False]
    assert first.weights[0].tensor is last.weights[0].tensor
    assert max(len(first.model), len(last.model)) < 2000


def test_values_say_whose_bytes_they_are() -> None:
    plan = compiler.plan(decoder(2))
    by_name = {v.name: v for v in plan.values}
    storage = {name: v.storage for name, v in by_name.items()}
    assert storage["caches.0"] is steps.Storage.CALLER and storage["x"] is steps.Storage.CALLER
    written = [v for v in plan.values if v.root == "caches.0"]
    assert {m.slot for m in plan.must_alias if m.root == "caches.0"} == {
        v.slot for v in written if v.name != "caches.0"
    }
    assert len({v.version for v in written}) == 2  # as it came, and written once
    assert plan.inplace_reuse  # what sub-sessions hand to kernels
    assert not plan.inplace_reuse & {m.slot for m in plan.must_alias}
    assert not plan.inplace_reuse & {o.slot for o in plan.outputs}
    assert plan.mutable == ("caches.0", "caches.1")


def test_lifetimes_cover_every_use() -> None:
    plan = compiler.plan(decoder(3))
    for slot, (first, last) in plan.block.lifetimes.items():
        uses = [k for k, step in enumerate(plan.block.steps) if slot in _slots(step)]
        assert first == uses[0] and last >= uses[-1]
    made = {slot for step in plan.block.steps for slot in _made(step)}
    assert set(plan.block.lifetimes) == made


def _slots(step: steps.Step) -> set[int | None]:
    if isinstance(step, steps.SubSession):
        return {p.slot for p in (*step.inputs, *step.outputs)}
    assert isinstance(step, steps.Kernel)
    return {*step.inputs, *step.outputs}


def _made(step: steps.Step) -> set[int | None]:
    if isinstance(step, steps.SubSession):
        return {p.slot for p in step.outputs}
    assert isinstance(step, steps.Kernel)
    return set(step.outputs)


def test_a_kernel_step_carries_what_a_kernel_needs() -> None:
    @model
    def program(cache: Mutable[CACHE], x: NEW, position: INT64[()]) -> Alias["cache"]:
        return kv.CacheUpdate(cache, x, position, axis=1, mode="circular")

    (step,) = compiler.plan(program).block.steps
    assert isinstance(step, steps.Kernel)
    assert (step.domain, step.op_type, step.version) == ("onnx_inplace", "CacheUpdate", 1)
    assert step.attributes["mode"] == "circular" and step.attributes["axis"] == 1
    assert step.roots == {0: "cache"} and [a.input_index for a in step.aliases] == [0]
    names = [step.values[s].name for s in step.inputs if s is not None]
    assert names == ["cache", "x", "position"]
    assert step.location is not None and step.location.file == "test_planner.py"


def test_copies_are_listed() -> None:
    @model
    def program(cache: Mutable[CACHE], x: NEW, position: INT64[()]) -> tuple[Alias["cache"], CACHE]:
        before = kv.Copy(cache)
        return kv.CacheUpdate(cache, x, position), before

    plan = compiler.plan(program)
    assert [(c.value, c.root) for c in plan.copies] == [("before", "cache")]
    assert compiler.plan(decoder(2)).copies == ()


def test_conditions_name_the_dimensions() -> None:
    @model
    def program(cache: Mutable[CACHE], x: NEW, position: INT64[()]) -> Alias["cache"]:
        return kv.CacheUpdate(cache, x, position)

    (condition,) = compiler.plan(program).conditions
    assert "position + n <= m" in str(condition) and condition.root == "cache"


def test_sizes_that_need_not_agree_are_conditions() -> None:
    @model
    def program(
        cache: Mutable[FLOAT["heads", "m", 4]],
        x: FLOAT["others", "n", 4],
        position: INT64[()],
        steps: INT64[()],
    ) -> Alias["cache"]:
        cache = kv.CacheUpdate(cache, x, position)
        for i in range(steps):
            cache = kv.CacheUpdate(cache, x, position + i)
        return cache

    found = {str(c): c.location for c in compiler.plan(program).conditions}
    assert set(found) == {
        "0 <= position and position + n <= m (`cache`)",
        "0 <= position and n + position + steps - 1 <= m (`cache`)",
        "others == heads (`cache`)",
        "the shape of values fits `cache`",  # where the loop runs
    }
    assert all(place is not None and place.file == "test_planner.py" for place in found.values())


def test_functions_are_inlined_where_they_are_called() -> None:
    """Twice, nested, and in a branch: no call is left, names stay unique."""

    @function
    def write(cache: Mutable[CACHE], x: NEW, position: INT64[()]) -> Alias["cache"]:
        return kv.CacheUpdate(cache, op.Relu(x), position)

    @function
    def twice(cache: Mutable[CACHE], x: NEW, position: INT64[()]) -> Alias["cache"]:
        return write(write(cache, x, position), op.Tanh(x), position + 1)

    @model
    def program(
        cache: Mutable[CACHE], x: NEW, position: INT64[()], flag: INT64[()]
    ) -> Alias["cache"]:
        if flag > 0:
            cache = twice(cache, x, position)
        return twice(cache, x, position)

    plan = compiler.plan(program)
    writes = [s for s in all_steps(plan.block) if isinstance(s, steps.Kernel)]
    assert [w.op_type for w in writes] == ["CacheUpdate"] * 4
    assert {w.roots[0] for w in writes} == {"cache"}
    assert len({v.name for v in plan.values}) == len(plan.values)
    assert all(not m.functions for m in sub_models(plan))


def test_a_dimension_of_a_function_is_not_one_of_its_caller() -> None:
    """``n`` of the function is ``2 n`` of the model: the value's shape is not taken for known."""

    @function
    def relu(x: FLOAT["n", 4]) -> FLOAT["n", 4]:
        y = op.Relu(x)
        if op.ReduceSum(x, keepdims=0) > 0.0:
            y = y + 1.0
        return y

    @model
    def program(
        cache: Mutable[FLOAT["m", 4]], x: FLOAT["n", 4], position: INT64[()]
    ) -> tuple[Alias["cache"], FLOAT["k", 4]]:
        doubled = relu(op.Concat(x, x, axis=0))
        return kv.CacheUpdate(cache, doubled, position), doubled

    plan = compiler.plan(program)
    for value in plan.values:
        if value.name not in ("x", "cache") and value.shape is not None and value.root is None:
            assert "n" not in value.shape, value


def test_sources_of_a_plan(tmp_path) -> None:
    program = decoder(1)
    program.save(tmp_path / "model.onnx")
    plans = [
        compiler.plan(source)
        for source in (program, compiler.load(program), tmp_path / "model.onnx")
    ]
    assert kinds(plans[0]) == kinds(plans[1]) == kinds(plans[2])
    assert [v.name for v in plans[0].values] == [v.name for v in plans[2].values]


def test_a_result_that_is_a_parameter_of_a_function_keeps_the_inputs_name() -> None:
    program = textual.build(
        """main (float[2,4] cache, float[1,4] x, int64 p) => (float[1,4] y, float[2,4] out) {
            y = local.same(x)
            out = onnx_inplace.CacheUpdate(cache, y, p)
        }
        <domain: "local", opset_import: ["": 24]>
        same (x) => (x) { unused = Relu(x) }""",
        ["cache"],
        [None, "cache"],
        {"same": ([], [None])},
    )
    plan = compiler.plan(program)
    assert [i.name for i in plan.inputs] == ["cache", "x", "p"]
    assert [o.name for o in plan.outputs] == ["y", "out"]


def test_an_unknown_type_is_refused_by_name(monkeypatch) -> None:
    imports = textual.HEADER.replace('"local": 1', '"local": 1, "com.microsoft": 1')
    monkeypatch.setattr(textual, "HEADER", imports)
    program = textual.build(
        """main (float[2,4] cache, float[1,4] x, int64 p) => (float[1,4] y, float[2,4] out) {
            hidden = com.microsoft.Mystery(x)
            r = Relu(x)
            out = onnx_inplace.CacheUpdate(cache, r, p)
            both = com.microsoft.Other(hidden, out)
            y = Cast <to = 1> (both)
        }""",
        ["cache"],
        [None, "cache"],
    )
    with pytest.raises(errors.UnsupportedOperator) as caught:
        compiler.plan(program)
    assert caught.value.op_type == "Mystery"


@pytest.mark.parametrize(("axis", "copies"), [(0, []), (1, [("k", "cache")])])
def test_a_scan_along_an_inner_axis_copies_its_elements(axis, copies) -> None:
    element = ["float[6,4]", "float[2,4]"][axis]
    program = textual.build(
        f"""main (float[2,6,4] cache, float[2,6,4] next) => (float[2,6,4] out, {element} y) {{
            shape = Constant <value_ints = [{",".join(element[6:-1].split(","))}]> ()
            zero = Constant <value = float {{0.0}}> ()
            start = Expand(zero, shape)
            y, all = Scan <num_scan_inputs = 1, scan_input_axes = [{axis}], body = b
                ({element} sum, {element} k) => ({element} more, {element} seen) {{
                    more = Add(sum, k)
                    seen = Neg(k)
                }}> (start, cache)
            out = onnx_inplace.Assign(cache, next)
        }}""",
        ["cache"],
        ["cache", None],
    )
    assert [(c.value, c.root) for c in compiler.plan(program).copies] == copies


@pytest.mark.slow
def test_a_plan_does_not_depend_on_the_hash_seed() -> None:
    script = """
import test_control, test_planner
from onnx_inplace import compiler
for source in (test_planner.decoder(3), test_control.BRANCHES, test_control.LOOP):
    plan = compiler.plan(source)
    print(plan.values, plan.block, plan.write_after_read, plan.outputs, sorted(plan.inplace_reuse))
"""
    folder = Path(__file__).parent
    texts = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=folder,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(folder)},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(texts) == 1


def test_what_may_fail_in_the_library_runs_before_a_write() -> None:
    """As long as it costs no sub-session: a bad index is then refused with no byte changed."""

    @model
    def program(
        cache: Mutable[CACHE], x: NEW, token: INT64[1], position: INT64[()]
    ) -> tuple[Alias["cache"], FLOAT[1, 4]]:
        updated = kv.CacheUpdate(cache, x, position)
        return updated, op.Gather(op.Constant(value=np.ones((8, 4), np.float32)), token)

    assert kinds(compiler.plan(program)) == ["SubSession", "CacheUpdate"]
