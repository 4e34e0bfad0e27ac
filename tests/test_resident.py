"""What a plan says of weights is what a loaded session holds."""

import numpy as np
import pytest
from decoders import Shape, decoder
from test_fused_decoders import SHAPES

from onnx_inplace import Session, compiler
from onnx_inplace.compiler import errors
from onnx_inplace.compiler.resident import GIVEN, PACKED, REPACKED
from onnx_inplace.dsl import FLOAT, model, op, weight

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("name", SHAPES)
def test_repacked_weights_are_as_large_as_stated(name):
    program = decoder(SHAPES[name])
    held = compiler.plan(program).memory(max_length=8, new_length=1).weights_in
    assert held[REPACKED] == Session(program, fuse="auto")._engine.fused.weights.nbytes > 0


def test_what_is_stated_depends_on_how_a_session_is_loaded():
    plan = compiler.plan(decoder(Shape(bits=0, layers=1)))
    dims = {"max_length": 8, "new_length": 1}
    auto, off, fused = (plan.memory(1, f, **dims) for f in ("auto", "off", "decode-only"))
    assert plan.memory(**dims) == auto
    assert set(auto.weights_in) >= {GIVEN, PACKED, REPACKED}
    assert off.weights_in == {f: n for f, n in auto.weights_in.items() if f != REPACKED}
    assert set(fused.weights_in) == {GIVEN, REPACKED}
    assert fused.weights_in[REPACKED] == auto.weights_in[REPACKED]
    assert auto.total - off.total == auto.weights_in[REPACKED]
    assert auto.peak == off.peak == fused.peak


def test_steps_that_are_fused_alone_read_what_they_do_not_repack():
    """Of the decoder: the embedding, the tables of angles, factors of norms; not the matrices."""
    shape = Shape(bits=0, layers=1)
    graph = compiler.load(decoder(shape)).model.graph
    every = {v.const_value.nbytes for v in graph.initializers.values()}
    plan = compiler.plan(decoder(shape))
    given = plan.memory(1, "decode-only", max_length=8, new_length=1).weights_in[GIVEN]
    matrix = 4 * shape.width * shape.hidden
    assert matrix in every
    embedding, angles = 4 * shape.vocabulary * shape.width, 2 * 4 * 128 * shape.size // 2
    assert embedding + angles < given < embedding + angles + 4096


def test_a_model_without_fused_steps_holds_nothing_more():
    table = np.eye(16, dtype=np.float32)

    @model
    def plain(x: FLOAT["rows", 16]) -> FLOAT["rows", 16]:
        y = op.CumSum(x, 0) + weight(table[:1], "row")
        return y

    plan = compiler.plan(plain)
    assert plan.fused.block is None
    assert plan.memory(1, "decode-only", rows=1).weights == 0
    assert plan.memory(rows=1) == plan.memory(1, "off", rows=1)
    assert dict(plan.memory(rows=1).weights_in) == {GIVEN: 64 + 8}, "the row, and an axis"


def test_another_word_is_refused():
    plan = compiler.plan(decoder(Shape(layers=1)))
    with pytest.raises(errors.BindingError, match="'on', not one of") as error:
        plan.memory(1, "on", max_length=8, new_length=1)
    assert error.value.name == "fuse"
