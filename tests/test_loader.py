"""A file is believed when everything in it follows from its declarations, and refused otherwise."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import file_programs
import numpy as np
import onnx
import pytest
import strategies

from onnx_inplace import compiler
from onnx_inplace.compiler import contract, errors, program, schema
from onnx_inplace.compiler.contract import DOMAIN
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, kv, model

STATEFUL = pytest.mark.parametrize("name", file_programs.STATEFUL)


def annotated(name: str) -> Any:
    """A fresh message of a program."""
    return copy.deepcopy(file_programs.ALL[name].proto)


def codes(proto: Any) -> set[str]:
    """Codes that loading reports; the messages name what they are about."""
    with pytest.raises(errors.ContractError) as caught:
        compiler.load(proto.SerializeToString())
    assert all(f.message for f in caught.value.findings)
    return {f.code for f in caught.value.findings}


def messages(proto: Any) -> str:
    with pytest.raises(errors.ContractError) as caught:
        compiler.load(proto.SerializeToString())
    return "\n".join(f.message for f in caught.value.findings)


# -- what is believed


@pytest.mark.parametrize("name", file_programs.ALL)
def test_what_was_emitted_is_loaded(name: str) -> None:
    built = file_programs.ALL[name]
    loaded = compiler.load(built.serialized)
    assert loaded.program.proto == built.proto
    assert [v.name for v in loaded.mutable] == [
        v.name for v in built.proto.graph.input if v.access == schema.READ_WRITE
    ]


@pytest.mark.parametrize("seed", range(40))
def test_every_accepted_program_is_loaded(seed: int) -> None:
    try:
        built = program.build(strategies.seeded(seed).declaration)
    except errors.ContractError:
        return  # refused by the rules: nothing was emitted
    assert compiler.load(built.serialized).program.proto == built.proto


@STATEFUL
def test_facts_of_another_producer_need_no_json(name: str) -> None:
    proto = annotated(name)
    del proto.metadata_props[:]
    assert compiler.load(proto.SerializeToString()).mutable


def test_sources_are_read(tmp_path: Path) -> None:
    built = file_programs.plain
    for name in ("m.onnx", "m.textproto", "m.json"):
        built.save(tmp_path / name)
        loaded = compiler.load(tmp_path / name)
        assert loaded.program.proto == built.proto
        assert compiler.load(str(tmp_path / name)).program.proto == built.proto
    assert compiler.load(built).program is built
    assert compiler.load(loaded) is loaded


# -- what is refused (one fact changed: ``test_annotations``)


@STATEFUL
def test_inputs_swapped_under_the_facts(name: str) -> None:
    original = annotated(name)
    count = 0
    for k, node in enumerate(original.graph.node):
        if not node.output_alias or node.op_type in ("Identity", "Loop"):
            continue
        changed = copy.deepcopy(original)
        node = changed.graph.node[k]
        node.input[0], node.input[1] = node.input[1], node.input[0]
        with pytest.raises(errors.InplaceError):
            compiler.load(changed.SerializeToString())
        count += 1
    assert count or name == "loop"


# -- what is refused: the declarations


@STATEFUL
def test_json_without_typed_fields(name: str) -> None:
    proto = onnx.ModelProto.FromString(annotated(name).SerializeToString())
    stripped = onnx.ModelProto()
    stripped.CopyFrom(proto)
    stripped.DiscardUnknownFields()
    assert codes(stripped) == {"E113"}


def test_roots_of_functions_in_the_json() -> None:
    proto = annotated("calls")
    text = proto.metadata_props[0].value
    proto.metadata_props[0].value = text.replace('"0":1,"1":0', '"0":0,"1":1')
    assert proto.metadata_props[0].value != text
    assert "local:twice:" in messages(proto)


def test_read_write_with_an_initializer() -> None:
    proto = annotated("plain")
    tensor = onnx.helper.make_tensor("cache", onnx.TensorProto.FLOAT, [1, 1, 4], [0.0] * 4)
    proto.graph.initializer.add().ParseFromString(tensor.SerializeToString())
    assert codes(proto) == {"E106"}


def test_alias_of_a_read_only_input() -> None:
    proto = annotated("stateless")
    proto.graph.output[0].alias_of = "x"
    del proto.metadata_props[:]
    assert codes(proto) == {"E117"}


def test_alias_of_names_an_output() -> None:
    proto = annotated("chain")
    next(v for v in proto.graph.value_info if v.name == "view").alias_of = "second"
    assert codes(proto) == {"E119"}


def test_access_dropped_everywhere() -> None:
    proto = annotated("plain")
    del proto.metadata_props[:]
    proto.graph.input[0].ClearField("access")
    proto.graph.output[0].ClearField("alias_of")
    assert codes(proto) == {"E106"}  # a node that writes, and nothing that may be written


# -- unknown fields


@pytest.mark.parametrize(
    ("path", "data"),
    [
        (lambda p: p.graph.input[1], b"\xd0\x41\x07"),  # access = 7 reads as READ_ONLY
        (lambda p: p.graph.node[0].output_alias[0], b"\x20\x01"),  # field 4 of our message
        (lambda p: p.graph.node[0], b"\xe0\x41\x01"),  # number 1052 of NodeProto
        (lambda p: p, b"\xe0\x41\x01"),
        (lambda p: p.graph.input[0].type, b"\xe0\x41\x01"),
        (
            lambda p: next(n for n in p.graph.node if n.op_type == "If").attribute[0],
            b"\xe0\x41\x01",
        ),
        (lambda p: p.quantizations.add(name="q"), b"\x78\x01"),
    ],
)
def test_what_this_version_does_not_know_is_refused(path: Callable, data: bytes) -> None:
    proto = annotated("branches")
    path(proto).MergeFromString(data)
    assert codes(proto) == {"E126"}
    assert "known" in messages(proto)


def test_unknown_fields_of_others_do_not_matter() -> None:
    proto = annotated("plain")
    proto.graph.node[0].MergeFromString(b"\xc0\x3e\x01")  # number 1000
    assert compiler.load(proto.SerializeToString()).mutable


# -- operators without a rule of ours


def foreign(*, alias: bool) -> Any:
    """A model around an operator that nobody here has a rule for."""
    text = """
        <ir_version: 10, opset_import: ["" : 24, "their.domain" : 1]>
        m (float[4] state, float[4] x) => (float[4] updated) {
            updated = their.domain.Accumulate (x, state)
        }"""
    proto = schema.ModelProto.FromString(onnx.parser.parse_model(text).SerializeToString())
    proto.graph.input[0].access = schema.READ_WRITE
    proto.graph.output[0].alias_of = "state"
    if alias:
        proto.graph.node[0].output_alias.add(output_index=0, input_index=1, kind=schema.MUST_ALIAS)
    return proto


def test_the_file_is_the_contract_of_a_foreign_operator() -> None:
    loaded = compiler.load(foreign(alias=True).SerializeToString())
    (node,) = loaded.model.graph
    assert loaded.aliases.root[node.outputs[0]].name == "state"


def test_a_foreign_operator_without_contract_makes_new_storage() -> None:
    assert codes(foreign(alias=False)) == {"E110"}


def test_a_standard_operator_cannot_be_declared_to_alias() -> None:
    proto = annotated("stateless")
    proto.graph.input[0].access = schema.READ_WRITE
    proto.graph.output[0].alias_of = "x"
    proto.graph.node[0].output_alias.add(output_index=0, input_index=0, kind=schema.MUST_ALIAS)
    del proto.metadata_props[:]
    assert codes(proto) == {"E110"}  # Relu makes new storage, whatever the file says


# -- bodies


def body_of(proto: Any) -> Any:
    return next(f for f in proto.functions if f.domain == contract.DOMAIN)


def test_another_body_is_another_contract() -> None:
    proto = annotated("plain")
    body = body_of(proto)
    scatter = next(n for n in body.node if n.op_type == "TensorScatter")
    next(a for a in scatter.attribute if a.name == "axis").i = 1
    assert codes(proto) == {"E121"}


def test_a_node_that_calls_the_body_of_another() -> None:
    """One body is right for the first node that calls it, and wrong for the second."""
    proto = annotated("chain")
    node = [n for n in proto.graph.node if n.op_type == "CacheUpdate"][-1]
    node.attribute.add(name="axis", i=-3, type=onnx.AttributeProto.INT)
    assert codes(proto) == {"E121"}
    assert "not what this node means" in messages(proto)


@pytest.mark.parametrize(
    ("domain", "name"), [("", "Identity"), ("", "Loop"), ("", "TensorScatter"), (DOMAIN, "Erase")]
)
def test_functions_in_the_name_of_operators(domain: str, name: str) -> None:
    proto = annotated("chain")
    function = proto.functions.add(domain=domain, name=name, input=["x"], output=["y"])
    function.opset_import.add(domain="", version=25)
    function.node.add(op_type="Neg", input=["x"], output=["y"])
    assert codes(proto) == {"E121"}


def test_an_operator_of_ours_that_is_newer() -> None:
    proto = annotated("stateless")
    proto.opset_import.add(domain=DOMAIN, version=1)
    proto.graph.node[0].domain, proto.graph.node[0].op_type = DOMAIN, "Erase"
    assert codes(proto) == {"E126"}
    assert "Erase" in messages(proto)


def test_a_version_of_our_domain_that_is_newer() -> None:
    proto = annotated("calls")
    for imported in proto.opset_import:
        if imported.domain == DOMAIN:
            imported.version = 2
    assert codes(proto) == {"E126"}
    assert "onnx_inplace 2" in messages(proto)


def test_names_in_a_body_do_not_matter() -> None:
    proto = annotated("plain")
    body = body_of(proto)
    for names in (body.output, *(x for n in body.node for x in (n.input, n.output))):
        for k, name in enumerate(names):
            if name not in body.input:
                names[k] = f"{name}_renamed"
    assert compiler.load(proto.SerializeToString()).mutable


# -- files that are no models


@pytest.mark.parametrize("data", [b"", b"\x08", b"not a model", b"\xff" * 64, bytes(64)])
def test_other_bytes(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(data)
    with pytest.raises(errors.ModelFileError) as caught:
        compiler.load(tmp_path / "m.onnx")
    assert caught.value.path == str(tmp_path / "m.onnx")
    with pytest.raises(errors.ModelFileError):
        compiler.load(data)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (b"plain", "model.graph.name"),
        (b"position", "model.graph.node.input"),
        (b"capacity", "model.graph.input.type.tensor_type.shape.dim.dim_param"),
        (b"CacheUpdate", "model.graph.node.op_type"),
    ],
)
def test_strings_that_are_no_text_are_found(text: bytes, where: str) -> None:
    data = annotated("plain").SerializeToString()
    with pytest.raises(errors.ModelFileError, match=f"{where} is no UTF-8 text") as caught:
        compiler.load(data.replace(text, b"\xc3" * len(text)))
    assert caught.value.path == "model"


@pytest.mark.parametrize("name", ["m.textproto", "m.json", "absent.onnx"])
def test_other_texts(name: str, tmp_path: Path) -> None:
    if not name.startswith("absent"):
        (tmp_path / name).write_bytes(b"\xffno model")
    with pytest.raises(errors.ModelFileError):
        compiler.load(tmp_path / name)


def test_truncated_at_every_length() -> None:
    data = annotated("plain").SerializeToString()
    for length in range(0, len(data), 7):
        with pytest.raises(errors.InplaceError):
            compiler.load(data[:length])


def unsorted(proto: Any) -> None:
    nodes = [copy.deepcopy(n) for n in proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend(reversed(nodes))


def undefined(proto: Any) -> None:
    proto.graph.node[0].input[1] = "no_such_value"


def duplicate(proto: Any) -> None:
    proto.graph.node.add().CopyFrom(proto.graph.node[0])


def no_producer(proto: Any) -> None:
    proto.graph.output[0].name = "no_such_value"


def left_out(proto: Any) -> None:
    proto.graph.node[0].input[1] = ""


def call_without_an_input(proto: Any) -> None:
    append = next(f for f in proto.functions if f.name == "twice").node[1]
    assert append.op_type == "append"
    append.input[0] = ""


def test_a_call_that_leaves_out_what_is_needed() -> None:
    proto = annotated("calls")
    call_without_an_input(proto)
    with pytest.raises(errors.InplaceError):
        compiler.load(proto.SerializeToString())


@pytest.mark.parametrize("breaks", [left_out, unsorted, undefined, duplicate, no_producer])
def test_invalid_graphs(breaks: Callable[[Any], None]) -> None:
    proto = annotated("chain")
    breaks(proto)
    with pytest.raises(errors.InplaceError):
        compiler.load(proto.SerializeToString())


def test_a_function_that_calls_itself() -> None:
    proto = annotated("calls")
    f = next(f for f in proto.functions if f.name == "append")
    f.node.add().CopyFrom(proto.graph.node[0])
    with pytest.raises(errors.InplaceError):
        compiler.load(proto.SerializeToString())


# -- places


def test_findings_name_the_line_of_the_author() -> None:
    @model
    def located(
        cache: Mutable[FLOAT[2, "m", 4]], new: FLOAT[2, "n", 4], position: INT64[()]
    ) -> Alias["cache"]:
        return kv.CacheUpdate(cache, new, position)

    proto = copy.deepcopy(located.proto)
    proto.graph.node[0].ClearField("output_alias")
    with pytest.raises(errors.ContractError) as caught:
        compiler.load(proto.SerializeToString())
    (finding,) = caught.value.findings
    assert finding.location is not None and finding.location.file == "test_loader.py"
    line = Path(__file__).read_text().splitlines()[finding.location.line - 1]
    assert "kv.CacheUpdate(cache, new, position)" in line


# -- files that chance has changed


@pytest.mark.parametrize("name", file_programs.STATEFUL)
def test_a_damaged_file_never_gives_a_traceback(name: str) -> None:
    """Bits flipped, bytes lost, bytes added: loaded, or refused in our words."""
    data = file_programs.ALL[name].serialized
    random = np.random.default_rng(len(data))
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(random.integers(1, 4)):
            at = int(random.integers(len(damaged)))
            match random.integers(3):
                case 0:
                    damaged[at] ^= 1 << int(random.integers(8))
                case 1:
                    del damaged[at : at + int(random.integers(1, 9))]
                case 2:
                    damaged[at:at] = random.bytes(int(random.integers(1, 4)))
        try:
            compiler.load(bytes(damaged))
        except errors.InplaceError as error:
            assert str(error)


def loop_of(proto: Any) -> Any:
    return next(n for n in proto.graph.node if n.op_type == "Loop")


def fewer_results(proto: Any) -> None:
    del loop_of(proto).attribute[0].g.output[-1]


def more_parameters(proto: Any) -> None:
    loop_of(proto).attribute[0].g.input.add(name="another").type.tensor_type.elem_type = 1


def no_body(proto: Any) -> None:
    loop_of(proto).ClearField("attribute")


def one_branch(proto: Any) -> None:
    body = loop_of(proto).attribute[0].g
    del next(n for n in body.node if n.op_type == "If").attribute[1]


def nothing_carried(proto: Any) -> None:
    loop_of(proto).input[2] = ""


@pytest.mark.parametrize(
    "breaks", [fewer_results, more_parameters, no_body, one_branch, nothing_carried]
)
def test_blocks_that_do_not_fit_their_node(breaks: Callable[[Any], None]) -> None:
    proto = annotated("loop")
    breaks(proto)
    with pytest.raises(errors.ModelFileError, match=r"no valid ONNX model"):
        compiler.load(proto.SerializeToString())


def test_one_loaded_model_serves_many() -> None:
    loaded = compiler.load(file_programs.loop)
    plans = [compiler.plan(loaded) for _ in range(2)]
    assert str(plans[0]) == str(plans[1])
    assert loaded.program.proto == file_programs.loop.proto
