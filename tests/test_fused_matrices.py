"""Weights of products as fused steps keep them."""

import numpy as np
import pytest

from onnx_inplace.numba_kernels.floats import FLOAT16, FLOAT32
from onnx_inplace.runner.fused import matrices


@pytest.mark.parametrize(("exact", "bits"), [(True, 8), (False, 0)])
def test_large_float32_weights_that_were_codes_are_kept_as_codes(exact, bits):
    rng = np.random.default_rng(0)
    integers = rng.integers(-127, 128, (4096, 256)).astype(np.float32)
    integers[:, ::32] = 127
    weights = integers * np.float32(0.0625) + (0 if exact else np.float32(1e-4))
    packed = matrices._floats([weights], [None], False)
    assert packed.layout.bits == bits
    assert packed.layout.kind == (FLOAT16 if exact else FLOAT32)
    assert packed.outputs == 4096 and packed.bias is None
