"""ShapesContext: element types, symbolic shapes and alias classes, by name."""

import onnx
import onnx_ir as ir
import pytest

from onnx_inplace import compiler, errors
from onnx_inplace.dsl import BOOL, FLOAT, INT64, Alias, Mutable, function, kv, model, op

Cache, New, SCALAR = FLOAT["heads", "capacity", 4], FLOAT["heads", "n", 4], INT64[()]


@function
def put(cache: Mutable[Cache], new: New, position: SCALAR) -> Alias["cache"]:
    return kv.CacheUpdate(cache, new, position)


@model
def program(
    cache: Mutable[Cache], new: New, steps: SCALAR, keep: BOOL[()]
) -> tuple[Alias["cache"], FLOAT["heads", "n", 4]]:
    for i in range(steps):
        if keep:
            cache = put(cache, new, i)
    flat = op.Reshape(cache, [-1])
    total = op.ReduceSum(flat, keepdims=0)
    return cache, new + total


@pytest.fixture
def shapes():
    context = compiler.ShapesContext(log=True)
    context.compute(program)
    return context


def named(shapes, part):
    return [name for name in shapes.names() if part in name]


def test_all_names_of_one_class_have_one_shape_through_if_loop_and_function(shapes):
    views = {"flat"}
    members = set(shapes.alias_class("cache")) - views
    assert {"cache", "updated_cache"} < members and len(members) >= 5
    assert {str(shapes.get(name).shape) for name in members} == {"[heads, capacity, 4]"}


def test_a_view_has_a_shape_of_its_own_and_the_root_of_its_source(shapes):
    assert shapes.root("flat") == "cache"
    assert str(shapes.get("flat").shape) == "[(4 * (capacity * heads))]"


def test_versions_are_in_order(shapes):
    versions = shapes.alias_class("updated_cache").versions
    assert versions[0] == ("cache",) and "updated_cache" in versions[-1]


def test_storage_of_its_own_has_no_class(shapes):
    assert shapes.root("new") is None
    with pytest.raises(KeyError):
        shapes.alias_class("new")
    with pytest.raises(KeyError):
        shapes.get("nothing")
    assert shapes.has("new") and not shapes.has("nothing")


def test_ordinary_values_are_inferred(shapes):
    assert shapes.get("output_1").dtype is ir.DataType.FLOAT
    assert str(shapes.get("output_1").shape) == "[heads, n, 4]"


def test_the_log_says_where_facts_come_from(shapes):
    assert any(e.name == "cache" and e.source == "declaration" for e in shapes.events)
    quiet = compiler.ShapesContext()
    quiet.compute(program)
    assert quiet.events == [] and quiet.names() == shapes.names()


def declared(shape):
    """A model whose output is declared with another shape than its root."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 11, opset_import: ["" : 24]>
        g (float[n, m, 4] cache, float[n, k, 4] new, int64[n] position) => (float{shape} updated)
        {{ updated = TensorScatter (cache, new, position) }}"""
    )
    annotated = compiler.schema.ModelProto.FromString(proto.SerializeToString())
    annotated.graph.input[0].access = compiler.schema.READ_WRITE
    annotated.graph.output[0].alias_of = "cache"
    annotated.graph.node[0].output_alias.add(
        output_index=0, input_index=0, kind=compiler.schema.MUST_ALIAS
    )
    return annotated.SerializeToString()


def test_what_is_declared_of_a_result_is_known_of_its_root():
    context = compiler.ShapesContext()
    context.compute(declared("[n, 16, 4]"))
    assert str(context.get("cache").shape) == str(context.get("updated").shape) == "[n, 16, 4]"
    assert [(c.left, c.right) for c in context.constraints] == [(16, "m")]


def test_what_cannot_be_one_shape_is_refused():
    with pytest.raises(errors.ContractError) as caught:
        compiler.ShapesContext().compute(declared("[n, 16, 5]"))
    assert {f.code for f in caught.value.findings} == {"E102"}


def test_apply_writes_shapes_into_a_model(shapes):
    loaded = compiler.load(program)
    for value in loaded.model.graph.outputs:
        value.shape = None
    shapes.apply(loaded)
    assert [str(v.shape) for v in loaded.model.graph.outputs] == [
        "[heads,capacity,4]",
        "[heads,n,4]",
    ]


def test_a_cache_that_grows_is_refused_and_told_what_to_use():
    with pytest.raises(errors.ContractError) as caught:

        @model
        def grows(cache: Mutable[Cache], new: New, steps: SCALAR) -> Alias["cache"]:
            for _ in range(steps):
                cache = op.Concat(cache, new, axis=1)
            return cache

    assert "CacheUpdate" in str(caught.value)
