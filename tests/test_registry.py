"""Kernels by operator: what users may add, and what is refused."""

import numpy as np
import pytest

from onnx_inplace.compiler import errors, steps
from onnx_inplace.runner import registry
from onnx_inplace.runner.actions import Settings, result, reusable


def step(domain, op_type, values=None):
    return steps.Kernel(
        domain, op_type, 1, (0,), (1,), {"by": 2.0}, (), {0: "state"}, values or {}, None
    )


@pytest.fixture
def scale(monkeypatch):
    """A user's operator ``test::Scale``, for one test."""
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))

    def factory(step, settings):
        (source,), (target,) = step.inputs, step.outputs
        factor = step.attributes["by"]

        def act(slots):
            slots[source] *= factor
            slots[target] = slots[source]

        return act

    registry.register("test", "Scale", factory)
    return factory


def test_a_registered_operator_runs(scale):
    state = np.ones(3)
    slots = [state, None, []]  # the last one is the journal of a run
    registry.compile_step(step("test", "Scale"), Settings())(slots)
    assert slots[1] is state
    np.testing.assert_array_equal(state, 2)
    assert registry.known("test", "Scale")


def test_an_operator_has_one_kernel(scale):
    registry.register("test", "Scale", scale)  # the same again is no conflict
    with pytest.raises(ValueError, match="test::Scale"):
        registry.register("test", "Scale", lambda step, settings: None)
    with pytest.raises(ValueError, match="CacheUpdate"):
        registry.register("onnx_inplace", "CacheUpdate", scale)


def test_an_operator_without_kernel_is_refused_by_name():
    with pytest.raises(errors.UnsupportedOperator) as caught:
        registry.compile_step(step("test", "Missing"), Settings())
    assert (caught.value.domain, caught.value.op_type) == ("test", "Missing")
    assert not registry.known("test", "Missing")


@pytest.mark.parametrize("storage", steps.Storage)
def test_only_buffers_of_the_runner_are_written_again(storage):
    value = steps.Value(1, "y", None, None, None, storage, True)
    buffer = np.zeros((2, 3), np.float32)
    slots = [None, buffer]
    reuse = reusable(step("test", "Any", {1: value}), 1)
    array = result(slots, 1, reuse, (2, 3), np.dtype(np.float32))
    assert (array is buffer) == (storage is steps.Storage.BUFFER)
    assert slots[1] is array
    assert result(slots, 1, reuse, (3, 3), np.dtype(np.float32)).shape == (3, 3)
