"""Kernels, views and guards of a plan in execution."""

import numpy as np
import onnx
import onnxruntime
import pytest
import textual

from onnx_inplace import Session, errors
from onnx_inplace.compiler import contract, operators, program, steps
from onnx_inplace.runner import registry

RNG = np.random.default_rng(0)


def random(*shape: int) -> np.ndarray:
    return RNG.random(shape, np.float32)


def stock(compiled: program.Program, values: dict) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(compiled.serialized, options)
    return session.run(None, {i.name: values[i.name] for i in session.get_inputs()})


def agree(compiled: program.Program, cache: np.ndarray, **values: np.ndarray) -> list[np.ndarray]:
    """Three runs on one binding against stock onnxruntime; all aliases are the caller's array."""
    session = Session(compiled)
    with session.bind(cache=cache) as step:
        for _ in range(3):
            wanted = stock(compiled, {"cache": cache.copy(), **values})
            results = list(step.run(**values))
            for output, got, expected in zip(session.plan.outputs, results, wanted, strict=True):
                assert (got is cache) == (output.root == "cache")
                np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
    return results


# -- views


@pytest.mark.parametrize(
    ("views", "back", "shape"),
    [
        ("flat = Identity(cache)", "Identity(written)", (6, 4)),
        ("flat = Reshape(cache, target)", "Reshape(written, whole)", (2, 12)),
        ("flat = Reshape(cache, target)", "Reshape(written, all)", (24,)),
        ("flat = Reshape(cache, target)", "Reshape <allowzero = 1> (written, whole)", (3, 8)),
        ("flat = Unsqueeze(cache, axes)", "Squeeze(written, axes)", (1, 6, 1, 4)),
        ("flat = Unsqueeze(cache, axes)", "Squeeze(written)", (1, 6, 1, 4)),
        ("flat = Flatten <axis = 2> (cache)", "Reshape(written, whole)", (24, 1)),
        ("flat = Flatten <axis = 0> (cache)", "Reshape(written, whole)", (1, 24)),
        ("flat = Flatten <axis = -1> (cache)", "Reshape(written, whole)", (6, 4)),
    ],
)
def test_views_are_the_callers_storage(views, back, shape) -> None:
    """Written through a view, returned through a view: the bytes never move."""
    dims = ",".join(map(str, shape))
    target = shape if shape != (24,) else (-1,)
    compiled = textual.build(
        f"""main (float[6,4] cache, float[{dims}] x) => (float[6,4] out, float[{dims}] y) {{
            target = Constant <value_ints = [{",".join(map(str, target))}]> ()
            whole = Constant <value_ints = [6,4]> ()
            all = Constant <value_ints = [-1,4]> ()
            axes = Constant <value_ints = [0,-2]> ()
            {views}
            new = Neg(x)
            written = onnx_inplace.Assign(flat, new)
            y = Abs(written)
            out = {back}
        }}""",
        ["cache"],
        ["cache", None],
    )
    agree(compiled, random(6, 4), x=random(*shape))


def test_a_view_whose_shape_is_an_input() -> None:
    compiled = textual.build(
        """main (float[6,4] cache, int64[2] target) => (float[6,4] out, float[n,1] sums) {
            flat = Reshape(cache, target)
            axes = Constant <value_ints = [1]> ()
            sums = ReduceSum(flat, axes)
            out = onnx_inplace.Assign(cache, cache_values)
        }""".replace("cache, int64", "cache, float[6,4] cache_values, int64"),
        ["cache"],
        ["cache", None],
    )
    cache = random(6, 4)
    for target in ([3, 8], [24, 1], [-1, 2], [0, -1]):
        agree(compiled, cache, cache_values=random(6, 4), target=np.array(target))
    with Session(compiled).bind(cache=cache) as step, pytest.raises(errors.StorageMismatch):
        step.run(cache_values=random(6, 4), target=np.array([5, 5]))


# -- what the library executes over a root


def test_attention_without_a_valid_length_reads_all_of_the_cache() -> None:
    compiled = textual.build(
        """main (float[1,2,6,4] cache, float[1,2,1,4] x, int64 p)
                => (float[1,2,6,4] out, float[1,2,1,4] y) {
            out = onnx_inplace.CacheUpdate(cache, x, p)
            y = Attention(x, out, out)
        }""",
        ["cache"],
        ["cache", None],
    )
    plan = Session(compiled).plan
    assert [(f.node, f.root) for f in plan.fallbacks] == [("Attention", "cache")]
    agree(compiled, random(1, 2, 6, 4), x=random(1, 2, 1, 4), p=np.asarray(2))


# -- kernels of users


SCALE = contract.OperatorRule("test", "Scale", contract.Effect.WRITE, (contract.OutputAlias(0, 0),))
BODY = """
<domain: "test", opset_import: ["": 24]>
Scale (state, factor) => (scaled) { scaled = Mul(state, factor) }
"""


@pytest.fixture
def scale(monkeypatch):
    """``test::Scale``: a rule, a body and a kernel; what the kernel did, by step."""
    monkeypatch.setattr(operators, "_BODIES", dict(operators._BODIES))
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    monkeypatch.setitem(contract._RULES, SCALE.key, SCALE)
    operators.register(SCALE, lambda node, opset: onnx.parser.parse_function(BODY))
    monkeypatch.setattr(
        textual, "HEADER", textual.HEADER.replace('"local": 1', '"local": 1, "test": 1')
    )
    ran: list[str] = []

    def factory(step: steps.Kernel, settings):
        state, factor = step.inputs
        (scaled,) = step.outputs

        def act(slots) -> None:
            slots[state] *= slots[factor]
            slots[scaled] = slots[state]
            ran.append(step.roots[0])

        return act

    registry.register("test", "Scale", factory)
    return ran


def test_a_registered_operator_writes_roots_and_makes_new_values(scale) -> None:
    """Over a root its kernel writes; over another value its body makes a new one."""
    compiled = textual.build(
        """main (float[6,4] cache, float[2,4] x, float factor) => (float[6,4] out, float[2,4] y) {
            y = test.Scale(x, factor)
            out = test.Scale(cache, factor)
        }""",
        ["cache"],
        ["cache", None],
    )
    x = random(2, 4)
    before = x.copy()
    agree(compiled, random(6, 4), x=x, factor=np.asarray(0.5, np.float32))
    assert scale == ["cache"] * 3
    np.testing.assert_array_equal(x, before)


@pytest.mark.parametrize("result", [np.copy, lambda state: None])
def test_a_kernel_that_moves_a_root_is_caught(scale, monkeypatch, result) -> None:
    """Its address is compared with the root's, at its step; to forget it is no better."""

    def elsewhere(step: steps.Kernel, settings):
        def act(slots) -> None:
            slots[step.outputs[0]] = result(slots[step.inputs[0]])

        return act

    monkeypatch.setitem(registry._factories, ("test", "Scale"), elsewhere)
    compiled = textual.build(
        """main (float[6,4] cache, float factor) => (float[6,4] out) {
            out = test.Scale(cache, factor)
        }""",
        ["cache"],
        ["cache"],
    )
    cache = random(6, 4)
    with Session(compiled).bind(cache=cache) as step:
        with pytest.raises(errors.AliasViolation) as caught:
            step.run(factor=np.asarray(2, np.float32))
        assert caught.value.name == "cache"
        assert caught.value.expected == cache.__array_interface__["data"][0]
        assert caught.value.actual != caught.value.expected


def test_a_rule_without_a_kernel_is_refused_at_load(scale, monkeypatch) -> None:
    monkeypatch.delitem(registry._factories, ("test", "Scale"))
    compiled = textual.build(
        """main (float[6,4] cache, float factor) => (float[6,4] out) {
            out = test.Scale(cache, factor)
        }""",
        ["cache"],
        ["cache"],
    )
    with pytest.raises(errors.UnsupportedOperator) as caught:
        Session(compiled)
    assert (caught.value.domain, caught.value.op_type) == ("test", "Scale")
