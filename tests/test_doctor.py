"""Tools of others over a model of ours: what the report says is what happened."""

import json

import onnx
import pytest
from typer.testing import CliRunner

from onnx_inplace.cli import doctor, tools
from onnx_inplace.cli.commands import app
from onnx_inplace.compiler import declarations, loader, recovery
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, kv, model


@model
def append(
    cache: Mutable[FLOAT["heads", "capacity", 4]],
    values: FLOAT["heads", "n", 4],
    position: INT64[()],
) -> Alias["cache"]:
    first = kv.CacheUpdate(cache, values, position)
    second = kv.CacheUpdate(first, values, position + 1)
    return second


@pytest.fixture(scope="module")
def verdicts():
    return {verdict.tool: verdict for verdict in doctor.examine(append)}


def test_every_tool_is_examined(verdicts):
    assert list(verdicts) == list(tools.TOOLS)
    assert not [verdict for verdict in verdicts.values() if verdict.failure]


@pytest.mark.parametrize("tool", tools.TOOLS)
def test_what_is_said_of_loading_is_so(verdicts, tool):
    verdict = verdicts[tool]
    whole = verdict.kept == verdict.total
    assert not verdict.loads or whole or tool == "onnx.inliner"  # that changes what the facts say
    if verdict.restores:
        with tools.quiet():
            changed = tools.TOOLS[tool](append.serialized)
        program = loader.load(recovery.restore(changed)).program
        assert declarations.of_model(program.proto, ()).outputs == {"second": "cache"}
    else:
        assert verdict.reason


def test_tools_that_are_known(verdicts):
    keeps = ["onnx.save, onnx.load", "onnx.save with external data", "onnx.shape_inference"]
    assert all(verdicts[tool].loads for tool in keeps)
    drops = ["onnx textproto", "onnx json", "onnx_ir", "onnxruntime, saved, no optimization"]
    for tool in drops:
        verdict = verdicts[tool]
        assert (verdict.kept, verdict.loads, verdict.restores) == ({}, False, True)
    assert not verdicts["onnx.utils.Extractor"].contract
    assert not verdicts["onnx.compose.add_prefix"].restores


def test_a_tool_that_fails_is_reported(monkeypatch):
    def broken(data):
        raise RuntimeError("out of order")

    monkeypatch.setattr(tools, "TOOLS", {"broken": broken, "nothing": lambda data: b""})
    broken_, nothing = doctor.examine(append)
    assert broken_.failure == "RuntimeError: out of order"
    assert nothing.failure is not None and "ModelFileError" in nothing.failure
    doctor.render([broken_, nothing])


def test_a_model_that_lost_its_contract_without_a_trace_does_not_load(monkeypatch):
    """Of a pure TensorScatter model nothing would be left that misses anything."""

    def forget(data):
        stock = onnx.load_model_from_string(data)
        text = onnx.printer.to_text(stock)
        bare = onnx.parser.parse_model(text)
        del bare.metadata_props[:]
        return bare.SerializeToString()

    monkeypatch.setattr(tools, "TOOLS", {"forget": forget})
    (verdict,) = doctor.examine(append)
    assert not verdict.loads and not verdict.restores and not verdict.contract


def test_command(tmp_path):
    path = tmp_path / "append.onnx"
    append.save(path)
    result = CliRunner().invoke(app, ["doctor", str(path), "--json"])
    assert result.exit_code == 0, result.output
    listed = json.loads(result.stdout)["tools"]
    assert [verdict["tool"] for verdict in listed] == list(tools.TOOLS)
