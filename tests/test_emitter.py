"""What stands in a file: every fact in its place, and nothing that depends on chance."""

import json
from typing import Any

import file_programs
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from onnx_inplace import compiler
from onnx_inplace.compiler import alias, contract, errors, facts, program, schema
from onnx_inplace.compiler.contract import Access
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, function, kv, model, op, opset


def said(name: str) -> dict[str, str]:
    """All facts of a program's file, as text."""
    return {str(k): str(v) for k, v in facts.stored(file_programs.ALL[name].proto).items()}


def test_a_chain_of_writes() -> None:
    assert said("chain") == {
        "input `cache`": "READ_WRITE",
        "input `other`": "READ_WRITE",
        "output `updated_other`": "alias_of `other`",
        "output `second`": "alias_of `cache`",
        "value `first`": "alias_of `cache`",
        "value `view`": "alias_of `first`",
        "node `first`": "output 0 is input 0",
        "node `view`": "output 0 is input 0",
        "node `second`": "output 0 is input 0",
        "node `updated_other`": "output 0 is input 0",
    }


def find(name: str, start: str) -> dict[str, str]:
    return {k: v for k, v in said(name).items() if k.startswith(start)}


def test_an_if_is_named_and_has_no_port() -> None:
    proto = file_programs.branches.proto
    (branch,) = (n for n in proto.graph.node if n.op_type == "If")
    assert not branch.output_alias
    (info,) = (v for v in proto.graph.value_info if v.name == branch.output[0])
    assert info.alias_of == "cache"
    for attribute in branch.attribute:
        (output,) = attribute.g.output
        assert output.alias_of == "cache"
        assert attribute.g.node[-1].output_alias[0].kind == schema.MUST_ALIAS


def test_a_loop_says_what_it_carries() -> None:
    proto = file_programs.loop.proto
    (loop,) = (n for n in proto.graph.node if n.op_type == "Loop")
    ports = {a.output_index: a.input_index for a in loop.output_alias}
    assert {loop.output[o]: loop.input[i] for o, i in ports.items()} == {
        "updated_cache": "cache",
        "updated_other": "other",
    }
    body = loop.attribute[0].g
    carried = {v.name: v.alias_of for v in body.input if v.alias_of}
    assert sorted(carried.values()) == ["cache", "other"]
    results = [v.alias_of for v in body.output if v.alias_of]
    assert results == [body.input[i].name for i in sorted(ports.values())]


def test_a_call_says_what_the_function_does() -> None:
    proto = file_programs.calls.proto
    calls = [n for n in proto.graph.node if n.op_type == "twice"]
    assert len(calls) == 2
    for call in calls:
        assert [(a.output_index, a.input_index) for a in call.output_alias] == [(0, 1), (1, 0)]
    twice = next(f for f in proto.functions if f.name == "twice")
    assert [(a.output_index, a.input_index) for a in twice.output_alias] == [(0, 1), (1, 0)]
    infos = {v.name: v for v in twice.value_info}
    assert [infos[n].access for n in twice.input] == [1, 1, 0]
    assert [infos[n].alias_of for n in twice.output] == ["second", "first"]


def test_types_of_parameters_and_results() -> None:
    for built in file_programs.ALL.values():
        for f in built.proto.functions:
            if f.domain != contract.DOMAIN:
                infos = {v.name: v for v in f.value_info}
                for name in (*f.input, *f.output):
                    assert infos[name].type.tensor_type.elem_type, (f.name, name)


def test_the_declarations_are_canonical_json() -> None:
    (entry,) = file_programs.calls.proto.metadata_props
    assert entry.key == "onnx_inplace.contract"
    content = {
        "version": 1,
        "inputs": {"left": "READ_WRITE", "right": "READ_WRITE", "new": "READ_ONLY"},
        "outputs": {"updated_left": "left", "updated_right": "right"},
        "functions": {
            "local:append:": {
                "access": ["READ_WRITE", "READ_ONLY", "READ_ONLY"],
                "alias": {"0": 0},
            },
            "local:twice:": {
                "access": ["READ_WRITE", "READ_WRITE", "READ_ONLY"],
                "alias": {"0": 1, "1": 0},
            },
        },
    }
    assert entry.value == json.dumps(content, sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize("name", file_programs.ALL)
def test_every_domain_is_imported(name: str) -> None:
    proto = file_programs.ALL[name].proto
    imported = {o.domain for o in proto.opset_import}
    for f in proto.functions:
        assert f.domain in imported
        assert {o.domain for o in f.opset_import} <= imported


@pytest.mark.parametrize("name", file_programs.ALL)
def test_stock_tools_accept_the_file(name: str) -> None:
    data = file_programs.ALL[name].serialized
    onnx.checker.check_model(data, full_check=True)
    onnx.shape_inference.infer_shapes(onnx.ModelProto.FromString(data), strict_mode=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def test_facts_are_written_once_and_last() -> None:
    for built in file_programs.ALL.values():
        places = [place for place, _ in facts._stored(built.proto)]
        assert len(places) == len(set(places))
        names = [v.name for v in built.proto.graph.value_info]
        assert len(names) == len(set(names))


def test_places_have_no_folder() -> None:
    nodes = file_programs.chain.proto.graph.node
    for node in nodes:
        (source,) = (p.value for p in node.metadata_props if p.key == facts.SOURCE)
        file, _, line = source.partition(":")
        assert file == "file_programs.py" and line.isdecimal()
    assert __file__.rpartition("/")[0].encode() not in file_programs.chain.serialized


def build() -> Any:
    @function
    def inner(a: Mutable[FLOAT[4]], x: FLOAT[4]) -> Alias["a"]:
        return kv.Assign(a, x)

    @model
    def outer(
        a: Mutable[FLOAT[4]], b: Mutable[FLOAT[4]], x: FLOAT[4]
    ) -> tuple[Alias["a"], Alias["b"]]:
        return inner(a, x), inner(b, x)

    return outer


def test_the_same_source_gives_the_same_bytes() -> None:
    assert build().serialized == build().serialized


# -- names


def test_intermediate_values_never_name_an_output() -> None:
    """A view of what is returned says its root: an output is not a name that others may use."""

    @model
    def view(
        cache: Mutable[FLOAT[2, 8, 4]], new: FLOAT[2, "n", 4], position: INT64[()]
    ) -> tuple[Alias["cache"], FLOAT[2, 32]]:
        updated = kv.CacheUpdate(cache, new, position)
        flat = op.Identity(updated)
        return updated, op.Reshape(flat + 0.0, op.Constant(value_ints=[2, 32]))

    infos = {v.name: v.alias_of for v in view.proto.graph.value_info if v.alias_of}
    assert infos == {"flat": "cache"}
    compiler.load(view)


def test_two_functions_of_one_name_in_two_domains() -> None:
    @function(domain="one")
    def write(a: Mutable[FLOAT[4]], x: FLOAT[4]) -> Alias["a"]:
        return kv.Assign(a, x)

    first = write

    @function(domain="two")
    def write(x: FLOAT[4], a: Mutable[FLOAT[4]]) -> Alias["a"]:
        return kv.Assign(a, x * 2.0)

    second = write

    @model
    def both(a: Mutable[FLOAT[4]], x: FLOAT[4]) -> Alias["a"]:
        return second(x, first(a, x))

    assert set(json.loads(both.proto.metadata_props[0].value)["functions"]) == {
        "one:write:",
        "two:write:",
    }
    compiler.load(both)


def test_an_opset_that_is_too_old() -> None:
    """The meaning of CacheUpdate cannot be written in it; that of Assign can."""
    old = opset(17)
    with pytest.raises(errors.ContractError) as caught:

        @model
        def program(a: Mutable[FLOAT[4]], x: FLOAT[4]) -> tuple[Alias["a"], FLOAT[4]]:
            y = old.Relu(x)
            return kv.CacheUpdate(a, x, 0, axis=0), y

    @model
    def assigns(a: Mutable[FLOAT[4]], x: FLOAT[4]) -> tuple[Alias["a"], FLOAT[4]]:
        return kv.Assign(a, x), old.Relu(x)

    (finding,) = caught.value.findings
    assert finding.code == "E100" and "opset 18" in finding.message


def test_functions_with_overloads() -> None:
    """Two functions that only their overload tells apart, with different contracts."""

    def write(overload: str, state: int) -> program.Declaration:
        values = [ir.val(n, ir.DataType.FLOAT, [4]) for n in "ab"]
        node = ir.Node("onnx_inplace", "Assign", [values[state], values[1 - state]], version=1)
        node.outputs[0].name = "updated"
        access = [Access.READ_ONLY, Access.READ_ONLY]
        access[state] = Access.READ_WRITE
        imports = {"": 24, "onnx_inplace": 1}
        graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports=imports)
        function = ir.Function("local", "write", overload, graph=graph, attributes=[])
        place = errors.Location(__file__, 1)
        return program.Declaration(function, tuple(access), ("ab"[state],), (), place)

    functions = write("first", 0), write("second", 1)
    s, x = (ir.val(n, ir.DataType.FLOAT, [4]) for n in "sx")
    one = ir.Node("local", "write", [s, x], overload="first", version=1)
    two = ir.Node("local", "write", [x, one.outputs[0]], overload="second", version=1)
    for node, name in ((one, "one"), (two, "two")):
        node.outputs[0].name = name
    graph = ir.Graph(
        [s, x], two.outputs, nodes=[one, two], opset_imports={"": 24, "local": 1}, name="both"
    )
    built = compiler.build(
        program.Declaration(
            ir.Function("model", "both", graph=graph, attributes=[]),
            (Access.READ_WRITE, Access.READ_ONLY),
            ("s",),
            functions,
            errors.Location(__file__, 1),
        )
    )
    assert {
        str(v) for k, v in facts.stored(built.proto).items() if k.where is facts.Where.NODE
    } == {
        "output 0 is input 0",
        "output 0 is input 1",
    }
    assert set(json.loads(built.proto.metadata_props[0].value)["functions"]) == {
        "local:write:first",
        "local:write:second",
    }
    assert compiler.load(built.serialized).program.proto == built.proto


def test_a_function_is_analysed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of functions, each of which calls the one before twice."""
    count = 0
    analyze = alias.analyze

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return analyze(*args, **kwargs)

    monkeypatch.setattr(alias, "analyze", counting)

    def make(index: int, previous: Any) -> Any:
        @function(domain=f"level.{index}")
        def write(a: Mutable[FLOAT[4]], x: FLOAT[4]) -> Alias["a"]:
            return previous(previous(a, x), x) if index else kv.Assign(a, x)

        return write

    depth, previous = 12, None
    for index in range(depth):
        previous = make(index, previous)

    @model
    def deep(a: Mutable[FLOAT[4]], x: FLOAT[4]) -> Alias["a"]:
        return previous(a, x)

    # alone, and once more for all callers that import its opset
    assert count <= 2 * (depth + 1)
    assert len(deep.proto.functions) == depth + 1  # and the body of Assign
