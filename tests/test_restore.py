"""What tools lose is noticed, and comes back where it can be proven. Nothing is invented."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import file_programs
import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
import onnxruntime
import onnxscript.optimizer
import onnxscript.rewriter
import onnxscript.version_converter
import pytest
import strategies

from onnx_inplace import compiler
from onnx_inplace.compiler import contract, declarations, errors, facts, program, schema

Tool = Callable[[onnx.ModelProto, Path], onnx.ModelProto]


# -- what tools do to a file


def stock(name: str) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(file_programs.ALL[name].serialized)


def save_and_load(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    onnx.save(model, folder / "m.onnx")
    return onnx.load(folder / "m.onnx")


def external_data(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    onnx.save(
        model,
        folder / "m.onnx",
        save_as_external_data=True,
        location="theirs.data",
        size_threshold=0,
    )
    return onnx.load(folder / "m.onnx")


def shape_inference(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(model)


def onnx_ir_round_trip(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    ir.save(ir.serde.deserialize_model(model), folder / "m.onnx")
    return onnx.load(folder / "m.onnx")


def stock_text(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    onnx.save(model, folder / "m.textproto")
    return onnx.load(folder / "m.textproto")


def stock_json(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    onnx.save(model, folder / "m.json")
    return onnx.load(folder / "m.json")


def constant_folding(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    converted = ir.serde.deserialize_model(model)
    onnxscript.optimizer.fold_constants(converted)
    return ir.serde.serialize_model(converted)


def rewriting(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return onnxscript.rewriter.rewrite(model)


def optimizing(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return onnxscript.optimizer.optimize(model, inline=False)


def optimizing_and_inlining(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return onnxscript.optimizer.optimize(model)


def onnx_inliner(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return onnx.inliner.inline_local_functions(model)


def selective_inliner(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    ours = [(f.domain, f.name) for f in model.functions if f.domain == "local"]
    return onnx.inliner.inline_selected_functions(model, ours)


def prefix(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return onnx.compose.add_prefix(model, "p_")


def version_converter(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    return onnx.version_converter.convert_version(model, 26)


def script_version_converter(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    converted = ir.serde.deserialize_model(model)
    onnxscript.version_converter.convert_version(converted, 25)
    return ir.serde.serialize_model(converted)


def onnxruntime_optimized(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folder / "m.onnx")
    data = model.SerializeToString()
    onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return onnx.load(folder / "m.onnx")


def extractor(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    names = ([v.name for v in model.graph.input], [v.name for v in model.graph.output])
    return onnx.utils.Extractor(model).extract_model(*names)


KEEP: list[Tool] = [save_and_load, external_data, shape_inference]
LOSE: list[Tool] = [
    onnx_ir_round_trip,
    stock_text,
    stock_json,
    constant_folding,
    rewriting,
    optimizing,
    selective_inliner,
]
INLINE: list[Tool] = [script_version_converter, optimizing_and_inlining, onnx_inliner]
DESTROY: list[Tool] = [
    prefix,
    version_converter,
    onnxruntime_optimized,
    extractor,
]
STATEFUL = pytest.mark.parametrize("name", file_programs.STATEFUL)


def roots(model: compiler.Loaded) -> dict[str, str | None]:
    """What a loaded model promises about its results."""
    found = {v: model.aliases.root.get(v) for v in model.model.graph.outputs}
    return {str(v.name): None if root is None else str(root.name) for v, root in found.items()}


def promised(name: str) -> list[str | None]:
    return list(roots(compiler.load(file_programs.ALL[name])).values())


@STATEFUL
@pytest.mark.parametrize("tool", KEEP)
def test_tools_that_keep_everything(tool: Tool, name: str, tmp_path: Path) -> None:
    model = tool(stock(name), tmp_path)
    assert list(roots(compiler.load(model.SerializeToString())).values()) == promised(name)


@STATEFUL
@pytest.mark.parametrize("tool", LOSE)
@pytest.mark.filterwarnings("ignore")
def test_what_a_tool_loses_is_restored(tool: Tool, name: str, tmp_path: Path) -> None:
    model = tool(stock(name), tmp_path)
    if tool is not selective_inliner:
        with pytest.raises(errors.ContractError) as caught:
            compiler.load(model.SerializeToString())
        assert {f.code for f in caught.value.findings} == {"E113"}
    (tmp_path / "theirs.onnx").write_bytes(model.SerializeToString())
    compiler.restore(tmp_path / "theirs.onnx", tmp_path / "ours.onnx")
    assert list(roots(compiler.load(tmp_path / "ours.onnx")).values()) == promised(name)


@STATEFUL
@pytest.mark.parametrize("tool", INLINE)
@pytest.mark.filterwarnings("ignore")
def test_inlined_bodies_are_proven(tool: Tool, name: str, tmp_path: Path) -> None:
    """What is left of CacheUpdate are views and a scatter, which write where they stand.

    What is left of Assign and CacheReorder, Identity and Gather, writes nothing.
    """
    model = tool(stock(name), tmp_path)
    assert not any(n.domain == contract.DOMAIN for n in model.graph.node)
    if name in ("recurrent", "variants"):
        with pytest.raises(errors.ContractError):
            compiler.restore(model.SerializeToString())
        return
    restored = compiler.restore(model.SerializeToString())
    assert list(roots(compiler.load(restored)).values()) == promised(name)


@STATEFUL
@pytest.mark.parametrize("tool", DESTROY)
@pytest.mark.filterwarnings("ignore")
def test_nothing_is_lost_in_silence(tool: Tool, name: str, tmp_path: Path) -> None:
    """The contract holds, is restored and holds, or the file is refused, with a reason."""
    try:
        model = tool(stock(name), tmp_path)
    except Exception as error:
        pytest.skip(f"the tool itself refuses: {error}")
    for attempt in (compiler.load, compiler.restore):
        try:
            loaded = compiler.load(attempt(model.SerializeToString()))
        except errors.InplaceError as error:
            assert str(error)
        else:
            assert list(roots(loaded).values()) == promised(name)


# -- what is restored


@STATEFUL
def test_everything_comes_back(name: str) -> None:
    """All facts but the types of parameters, when only typed fields are lost."""
    original = file_programs.ALL[name].proto
    stripped = onnx.ModelProto.FromString(original.SerializeToString())
    stripped.DiscardUnknownFields()
    restored = compiler.restore(stripped.SerializeToString())
    assert facts.stored(restored.proto) == facts.stored(original)
    assert restored.proto.metadata_props == original.metadata_props


@STATEFUL
def test_restoring_what_is_whole_changes_nothing(name: str) -> None:
    built = file_programs.ALL[name]
    assert compiler.restore(built).proto == built.proto


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_come_back(seed: int) -> None:
    try:
        built = program.build(strategies.seeded(seed).declaration)
    except errors.ContractError:
        return
    stripped = onnx.ModelProto.FromString(built.serialized)
    stripped.DiscardUnknownFields()
    restored = compiler.restore(stripped.SerializeToString())
    assert facts.stored(restored.proto) == facts.stored(built.proto)


def test_weights_stay_beside_the_restored_model(tmp_path: Path) -> None:
    array = np.arange(1 << 20, dtype=np.float32)
    model = stock("plain")
    model.graph.initializer.append(onnx.numpy_helper.from_array(array, "weight"))
    model.DiscardUnknownFields()
    onnx.save(model, tmp_path / "m.onnx")
    restored = compiler.restore(tmp_path / "m.onnx", tmp_path / "r.onnx")
    assert set(restored.weights) == {"weight"}
    assert len([p for p in tmp_path.iterdir() if p.suffix == ".data"]) == 1
    loaded = compiler.load(tmp_path / "r.onnx")
    np.testing.assert_array_equal(
        loaded.model.graph.initializers["weight"].const_value.numpy(), array
    )


def test_restoring_in_place(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    ir.save(ir.serde.deserialize_model(stock("chain")), path)
    compiler.restore(path, path)
    assert compiler.load(path).mutable


# -- what is not


def codes(proto: Any) -> set[str]:
    with pytest.raises(errors.ContractError) as caught:
        compiler.restore(proto.SerializeToString())
    return {f.code for f in caught.value.findings}


def stripped(name: str) -> Any:
    proto = onnx.ModelProto.FromString(file_programs.ALL[name].serialized)
    proto.DiscardUnknownFields()
    return schema.ModelProto.FromString(proto.SerializeToString())


def test_without_the_json_nothing_is_known() -> None:
    proto = stripped("plain")
    del proto.metadata_props[:]
    assert codes(proto) == {"E113"}


@pytest.mark.parametrize(
    ("text", "code"),
    [("", "E131"), ("{}", "E131"), ("[1]", "E131"), ("null", "E131"), ('{"version":9}', "E126")],
)
def test_another_json(text: str, code: str) -> None:
    proto = stripped("plain")
    proto.metadata_props[0].value = text
    assert codes(proto) == {code}


def test_a_declared_value_that_is_gone() -> None:
    proto = stripped("plain")
    for node in proto.graph.node:
        node.input[0] = "renamed"
    proto.graph.input[0].name = "renamed"
    assert codes(proto) == {"E124"}


def test_a_write_that_is_gone() -> None:
    proto = stripped("plain")
    node = proto.graph.node[0]
    node.CopyFrom(schema.NodeProto(op_type="Neg", input=["cache"], output=list(node.output)))
    assert codes(proto) == {"E110"}


def test_inputs_that_were_swapped() -> None:
    proto = stripped("plain")
    node = proto.graph.node[0]
    node.input[0], node.input[1] = node.input[1], node.input[0]
    assert codes(proto) & {"E106", "E110", "E102"}


def test_a_contract_that_nothing_proves() -> None:
    """The alias of an operator without a rule of ours stood in its typed fields alone."""
    text = """
        <ir_version: 10, opset_import: ["" : 24, "their.domain" : 1]>
        m (float[4] state, float[4] x) => (float[4] updated) {
            updated = their.domain.Accumulate (x, state)
        }"""
    proto = schema.ModelProto.FromString(onnx.parser.parse_model(text).SerializeToString())
    declared = declarations.Declarations(
        {"state": "READ_WRITE", "x": "READ_ONLY"}, {"updated": "state"}, {}
    )
    proto.metadata_props.add(key=declarations.CONTRACT, value=declared.to_json())
    assert codes(proto) == {"E110"}
    kept = copy.deepcopy(proto)
    kept.graph.node[0].output_alias.add(output_index=0, input_index=1, kind=schema.MUST_ALIAS)
    assert compiler.load(compiler.restore(kept.SerializeToString())).mutable
