"""ONNX's own node tests of TensorScatter and Attention, on our runner.

TensorScatter is annotated: the cache is updated where it stands. Attention is run twice: as it
stands, where onnxruntime computes it like every ordinary operator, and with K and V assigned to
storage of the caller first, where our kernels read them in place.
"""

import functools
import importlib
import warnings

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from onnx_inplace import Session, compiler
from onnx_inplace.compiler import adoption, contract

_MASKED = "onnxruntime's qk_matmul_output with bias leaves out the causal mask"
_BFLOAT16 = "onnxruntime has no bfloat16 on CPU for this operator, nor for its body"
# onnxruntime alone cannot; a sub-session holds nodes that can in their place.
SUBSTITUTED = {
    "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal": _MASKED,
    "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal": _MASKED,
    "test_attention_4d_causal_bf16": _BFLOAT16,
    "test_attention_4d_attn_mask_causal_bf16": _BFLOAT16,
    "test_attention_3d_causal_bf16": _BFLOAT16,
}
# Our kernels do these, where K and V stand in caches; onnxruntime alone cannot.
ONLY_IN_PLACE = {
    "test_attention_4d_diff_heads_mask4d_padded_kv": "onnxruntime wants a mask of the capacity",
    "test_attention_4d_padded_kv_bf16": _BFLOAT16,
    "test_attention_4d_causal_padded_kv_bf16": _BFLOAT16,
}


@functools.cache
def cases():
    """Name -> case. onnx computes them when it is asked; some divide by zero on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        node = importlib.import_module("onnx.backend.test.case.node")
        for operator in ("tensorscatter", "attention"):  # importing a module makes its cases
            importlib.import_module(f"{node.__name__}.{operator}")
        found = node.collect_testcases("Attention")
    return {
        c.name: c
        for c in found
        if c.name.startswith(("test_tensorscatter", "test_attention"))
        and not c.name.endswith("_expanded")  # the function body: ordinary operators
    }


def ports(case):
    (inputs, outputs), *rest = case.data_sets
    assert not rest
    names = [v.name for v in case.model.graph.input]
    results = [v.name for v in case.model.graph.output]
    return dict(zip(names, inputs, strict=True)), dict(zip(results, outputs, strict=True))


def compare(case, results, expected):
    for name, value in expected.items():
        result = np.asarray(results[name])
        assert result.dtype == value.dtype and result.shape == value.shape
        both = (array.astype(np.float64) for array in (result, value))
        half = value.dtype != np.float32 and value.dtype != np.float64
        np.testing.assert_allclose(
            *both,
            rtol=max(case.rtol, 1e-2 if half else 0),
            atol=max(case.atol, 1e-3 if half else 1e-5),
        )


def lent(model):
    """With K and V assigned to mutable inputs of their type first."""
    model = onnx.ModelProto.FromString(model.SerializeToString())
    (node,) = model.graph.node
    nodes = []
    for port in (1, 2):
        name = node.input[port]
        info = next(v for v in model.graph.input if v.name == name)
        storage, result = model.graph.input.add(), model.graph.output.add()
        storage.CopyFrom(info)
        result.CopyFrom(info)
        storage.name, result.name = f"{name}_storage", f"{name}_stored"
        taken = [storage.name, name]
        nodes.append(helper.make_node("Assign", taken, [result.name], domain=contract.DOMAIN))
        node.input[port] = result.name
    nodes.append(onnx.NodeProto.FromString(node.SerializeToString()))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.opset_import.append(helper.make_opsetid(contract.DOMAIN, contract.VERSION))
    model.ir_version = max(model.ir_version, 10)
    return model


def failing(run):
    """Names of the cases that ``run`` does not pass, with what happened."""
    found = {}
    for name, case in cases().items():
        try:
            run(case)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def as_it_stands(case):
    adopted = compiler.annotate(case.model.SerializeToString())
    inputs, expected = ports(case)
    storage = {pair.root: np.array(inputs.pop(pair.root)) for pair in adopted.pairs}
    results = Session(adopted.program).run(inputs, writable=storage)
    compare(case, results, expected)
    for pair in adopted.pairs:
        assert results[pair.output] is storage[pair.root]


def in_caches(case):
    adopted = compiler.annotate(lent(case.model).SerializeToString())
    inputs, expected = ports(case)
    storage = {
        pair.root: np.zeros_like(inputs[pair.root.removesuffix("_storage")])
        for pair in adopted.pairs
    }
    assert len(storage) == 2
    compare(case, Session(adopted.program).run(inputs, writable=storage), expected)


def alone(case):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    data = case.model.SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    inputs, expected = ports(case)
    names = [output.name for output in session.get_outputs()]
    compare(case, dict(zip(names, session.run(None, inputs), strict=True)), expected)


@pytest.mark.kernel
def test_tensor_scatter_updates_in_place():
    scatters = [case for name, case in cases().items() if "scatter" in name]
    assert len(scatters) >= 3
    for case in scatters:
        adopted = compiler.annotate(case.model.SerializeToString())
        assert [pair.way for pair in adopted.pairs] == [adoption.Way.OPERATOR]
        as_it_stands(case)


@pytest.mark.slow
def test_every_case_as_it_stands():
    found = failing(as_it_stands)
    assert found.keys() == ONLY_IN_PLACE.keys(), found


@pytest.mark.slow
def test_what_is_special_to_us_onnxruntime_cannot():
    special = {*SUBSTITUTED, *ONLY_IN_PLACE}
    found = failing(lambda case: None if case.name not in special else alone(case))
    assert found.keys() == special, found


@pytest.mark.parametrize("name", SUBSTITUTED)
def test_what_stands_for_a_node(name):
    as_it_stands(cases()[name])


@pytest.mark.slow
@pytest.mark.kernel
def test_attention_over_caches():
    found = failing(lambda case: None if "scatter" in case.name else in_caches(case))
    assert not found, found
