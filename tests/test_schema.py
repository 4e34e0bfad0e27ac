"""Protobuf classes: both families read each other's bytes, and every form is lossless."""

from __future__ import annotations

import copy
import re
from typing import Any

import file_programs
import numpy as np
import onnx
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from onnx_inplace.compiler import formats, schema, schema_fields


def stock_file() -> Any:
    proto = descriptor_pb2.FileDescriptorProto()
    onnx.ModelProto.DESCRIPTOR.file.CopyToProto(proto)
    return proto


def message(file: Any, name: str) -> Any:
    return next(m for m in file.message_type if m.name == name)


# -- fields

FIELDS = {
    ("NodeProto", "output_alias"): 1050,
    ("FunctionProto", "output_alias"): 1050,
    ("ValueInfoProto", "access"): 1050,
    ("ValueInfoProto", "alias_of"): 1051,
    ("ModelProto", "quantizations"): 1050,
    ("TypeProto", "quantized_tensor"): 1050,
    ("ValueAliasProto", "output_index"): 1,
    ("ValueAliasProto", "input_index"): 2,
    ("ValueAliasProto", "kind"): 3,
    ("QuantizedTensorProto", "dims"): 1,
    ("QuantizedTensorProto", "raw_data"): 2,
    ("QuantizedTensorProto", "quantized_type"): 4,
    ("QuantizedTensorProto", "name"): 5,
    ("QuantizedTensorProto", "external_data"): 6,
    ("QuantizedTensorProto", "crc32"): 7,
}


def test_numbers_are_a_promise() -> None:
    for (owner, name), number in FIELDS.items():
        cls = getattr(schema, owner)
        assert cls.DESCRIPTOR.fields_by_name[name].number == number
    assert (schema.UNDEFINED, schema.MUST_ALIAS) == (0, 1)
    assert (schema.READ_ONLY, schema.READ_WRITE) == (0, 1)
    quantized = schema.TypeProto.QuantizedTensor.DESCRIPTOR.fields_by_name
    assert {n: f.number for n, f in quantized.items()} == {
        "allowed_quantized_type": 1,
        "elem_type": 2,
        "shape": 3,
        "sparse_ids": 4,
    }


def test_stock_classes_keep_what_they_do_not_know() -> None:
    proto = file_programs.loop.proto
    data = proto.SerializeToString(deterministic=True)
    stock = onnx.ModelProto.FromString(data)
    assert schema.ModelProto.FromString(stock.SerializeToString()) == proto
    onnx.checker.check_model(data)


def test_a_quantized_tensor_stands_beside_its_carrier() -> None:
    value = schema.ValueInfoProto(name="pages")
    element = value.type.sequence_type.elem_type
    element.tensor_type.elem_type = onnx.TensorProto.UINT8
    element.quantized_tensor.allowed_quantized_type.append("INT4")
    element.quantized_tensor.elem_type = onnx.TensorProto.FLOAT16
    assert element.WhichOneof("value") == "tensor_type"
    stock = onnx.ValueInfoProto.FromString(value.SerializeToString())
    assert stock.type.sequence_type.elem_type.WhichOneof("value") == "tensor_type"
    assert schema.ValueInfoProto.FromString(stock.SerializeToString()) == value


def test_onnx_itself_is_not_changed() -> None:
    assert "output_alias" not in onnx.NodeProto.DESCRIPTOR.fields_by_name
    assert schema.ModelProto is not onnx.ModelProto


def test_page_formats_survive_text_and_json() -> None:
    protos = [page_format.to_proto() for page_format in formats.BUILTIN.values()]
    model = schema.ModelProto(ir_version=13, quantizations=protos)
    for read in (
        schema.from_text(schema.to_text(model)),
        schema.from_json(schema.to_json(model)),
    ):
        assert read == model
        assert formats.read_table(read.quantizations) == formats.BUILTIN


# -- clashes


def test_a_number_in_use_is_refused() -> None:
    file = stock_file()
    message(file, "NodeProto").field.add(name="theirs", number=1050, type=9, label=1)
    with pytest.raises(schema.SchemaClash, match=r"NodeProto.output_alias.*1050"):
        schema._extended_file(file)


def test_a_reserved_number_is_refused() -> None:
    file = stock_file()
    message(file, "ValueInfoProto").reserved_range.add(start=1051, end=1052)
    with pytest.raises(schema.SchemaClash, match=r"ValueInfoProto.alias_of.*1051"):
        schema._extended_file(file)


def test_a_name_in_use_is_refused() -> None:
    file = stock_file()
    message(file, "ValueInfoProto").field.add(name="access", number=77, type=9, label=1)
    with pytest.raises(schema.SchemaClash, match=r"ValueInfoProto.access"):
        schema._extended_file(file)


def test_a_message_of_ours_in_onnx_is_refused() -> None:
    file = stock_file()
    file.message_type.add(name="ValueAliasProto")
    with pytest.raises(schema.SchemaClash, match=r"ValueAliasProto"):
        schema._extended_file(file)


def test_a_clash_is_an_import_error() -> None:
    assert issubclass(schema.SchemaClash, ImportError)


# -- forms


def difficult() -> Any:
    """Values that text forms like to lose."""
    proto = copy.deepcopy(file_programs.branches.proto)
    node = proto.graph.node.add(op_type="Constant", output=["difficult"])
    node.doc_string = 'quotes " \\ \n \t ü 漢'
    floats = node.attribute.add(name="floats", type=onnx.AttributeProto.FLOATS)
    floats.floats.extend(
        np.array([0.1, -0.0, 1e-45, 3.4028235e38, np.inf, -np.inf, 16777217.0], np.float32)
    )
    text = node.attribute.add(name="bytes", type=onnx.AttributeProto.STRING)
    text.s = bytes(range(256))
    number = node.attribute.add(name="number", type=onnx.AttributeProto.INT)
    number.i = -(2**63)
    tensor = proto.graph.initializer.add(name="weight", data_type=1, dims=[64])
    tensor.raw_data = np.random.default_rng(0).bytes(256)
    return proto


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("name", [*file_programs.ALL, "difficult"])
def test_forms_are_lossless(form: str, name: str) -> None:
    proto = difficult() if name == "difficult" else file_programs.ALL[name].proto
    write, read = getattr(schema, f"to_{form}"), getattr(schema, f"from_{form}")
    again = read(write(proto))
    assert again.SerializeToString(deterministic=True) == proto.SerializeToString(
        deterministic=True
    )
    assert write(again) == write(proto)


@pytest.mark.parametrize("form", ["text", "json"])
def test_not_a_number_survives(form: str) -> None:
    proto = schema.ModelProto(ir_version=10)
    attribute = proto.graph.node.add(op_type="Constant").attribute.add(name="f", type=1)
    attribute.f = float("nan")
    again = getattr(schema, f"from_{form}")(getattr(schema, f"to_{form}")(proto))
    assert np.isnan(again.graph.node[0].attribute[0].f)


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("text", ["{", "no model", '{"no_such_field": 1}', "no_such_field: 1"])
def test_other_texts_are_refused(form: str, text: str) -> None:
    with pytest.raises(ValueError):
        getattr(schema, f"from_{form}")(text)


# -- the fragment


def fragment_fields() -> dict[tuple[str, str], tuple[str, str, int]]:
    """{(message, field): (label, type, number)} as another implementation would read them."""
    found, path = {}, []
    for line in schema.proto_fragment().splitlines():
        line = line.partition("//")[0].strip()
        if opened := re.fullmatch(r"message (\w+) \{", line):
            path.append(opened[1])
        elif line == "}":
            path.pop()
        elif field := re.fullmatch(
            r"(optional|repeated) (\w+) (\w+) = (\d+)(?: \[packed = true\])?;", line
        ):
            found[".".join(path), field[3]] = (field[1], field[2], int(field[4]))
        else:
            assert not line or re.fullmatch(r"(syntax|package|enum) .*", line), line
    assert not path
    return found


def test_the_fragment_says_every_field_and_no_other() -> None:
    scalars = {
        3: "int64",
        5: "int32",
        7: "fixed32",
        8: "bool",
        9: "string",
        12: "bytes",
        2: "float",
    }
    expected = {}
    repeated: dict[str, set[str]] = {}

    def look(proto: Any, path: str) -> None:
        repeated[f"{path}.{proto.name}"] = {f.name for f in proto.field if f.label == 3}
        for inner in proto.nested_type:
            look(inner, f"{path}.{proto.name}")

    for proto in schema._extended_file(stock_file()).message_type:
        look(proto, "onnx")

    def compare(path: str, extended: Any, stock: Any) -> None:
        known = set(stock.fields_by_name) if stock is not None else set()
        for field in extended.fields:
            if field.name in known:
                continue
            kind = field.message_type or field.enum_type
            type_ = kind.name if kind is not None else scalars[field.type]
            label = "repeated" if field.name in repeated[extended.full_name] else "optional"
            expected[path, field.name] = (label, type_, field.number)
        for inner in extended.nested_types:
            theirs = None if stock is None else stock.nested_types_by_name.get(inner.name)
            compare(f"{path}.{inner.name}", inner, theirs)

    stock_messages = onnx.ModelProto.DESCRIPTOR.file.message_types_by_name
    for name, extended in schema.ModelProto.DESCRIPTOR.file.message_types_by_name.items():
        compare(name, extended, stock_messages.get(name))
    assert fragment_fields() == expected
    assert len(expected) > 30


def test_the_fragment_is_enough_for_another_implementation() -> None:
    """Classes made from the fragment alone, on top of stock onnx, read our files."""
    file = stock_file()
    file.name = "another/onnx.proto"
    for (owner, name), (label, type_, number) in fragment_fields().items():
        if owner not in ("NodeProto", "ValueInfoProto", "ValueAliasProto"):
            continue
        target = next((m for m in file.message_type if m.name == owner), None)
        target = target if target is not None else file.message_type.add(name=owner)
        kinds = {"ValueAliasProto": 11, "Access": 5, "Kind": 5, "int32": 5, "string": 9}
        field = target.field.add(name=name, number=number, type=kinds[type_])
        field.label = 3 if label == "repeated" else 1
        if kinds[type_] == 11:
            field.type_name = f".onnx.{type_}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    theirs = message_factory.GetMessageClass(pool.FindMessageTypeByName("onnx.ModelProto"))
    model = theirs.FromString(file_programs.chain.serialized)
    assert [v.access for v in model.graph.input] == [1, 1, 0, 0]
    assert model.graph.node[0].output_alias[0].kind == 1
    assert {v.name: v.alias_of for v in model.graph.output} == {
        v.name: v.alias_of for v in file_programs.chain.proto.graph.output
    }


def test_numbers_stay_in_their_range() -> None:
    stock = onnx.ModelProto.DESCRIPTOR.file.message_types_by_name
    for declared in schema_fields.MESSAGES:
        for field in declared.fields:
            inside = schema_fields.FIRST <= field.number <= schema_fields.LAST
            assert inside == (declared.name in stock)
