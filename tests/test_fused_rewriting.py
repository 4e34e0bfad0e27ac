"""What graphs write in several nodes is one operation of a fused step, and means the same."""

import numpy as np
import pytest
from test_fused_templates import (
    CASES,
    Case,
    W,
    erf,
    expected,
    gelu,
    gelu_tanh,
    normalized,
    run,
    session,
    swish,
)

from onnx_inplace.compiler import rewriting

pytestmark = pytest.mark.kernel

ERF, TIMES = (f"d = {with_} e = Erf (d) " for with_ in ("Div (x, root2)", "Mul (x, root_half)"))
TANH = "c = Pow (x, n3) m = Mul (c, small) s = Add (x, m) z = Mul (s, factor) t = Tanh (z) "
MEAN = "p = Pow (x, n2) m = ReduceMean (p, minus) e = Add (m, epsilon) r = Sqrt (e) "
CENTER = (
    "c = ReduceMean (x, minus) d = Sub (x, c) p = Pow (d, n2) m = ReduceMean (p, i2) "
    "e = Add (m, epsilon) r = Sqrt (e) q = Div (d, r) s = Mul (q, scale) "
)


def rms(x):
    return normalized(x, W["scale"], centered=False)


ONE = {
    "gelu": (ERF + "a = Add (e, n1) m = Mul (x, a) y = Mul (m, half_of)", gelu),
    "gelu, operands changed": (ERF + "a = Add (n1, e) m = Mul (a, x) y = Mul (half_of, m)", gelu),
    "gelu, half first": (ERF + "h = Mul (half_of, x) a = Add (e, n1) y = Mul (h, a)", gelu),
    "gelu, times": (TIMES + "a = Add (e, n1) m = Mul (x, a) y = Mul (m, half_of)", gelu),
    "gelu, times, half first": (
        TIMES + "h = Mul (x, half_of) a = Add (e, n1) y = Mul (a, h)",
        gelu,
    ),
    "silu": ("g = Sigmoid (x) y = Mul (x, g)", swish),
    "silu, operands changed": ("g = Sigmoid (x) y = Mul (g, x)", swish),
    "steep silu": ("s = Mul (x, n2) g = Sigmoid (s) y = Mul (x, g)", lambda x: swish(x, 2)),
    "gelu by tanh": (TANH + "a = Add (t, n1) h = Mul (x, half_of) y = Mul (h, a)", gelu_tanh),
    "tanh, half last": (TANH + "a = Add (n1, t) h = Mul (x, a) y = Mul (h, half_of)", gelu_tanh),
    "rms norm": (MEAN + "q = Div (x, r) y = Mul (q, scale)", rms),
    "rms norm, reciprocal": (MEAN + "i = Reciprocal (r) q = Mul (x, i) y = Mul (scale, q)", rms),
    "rms norm, one over": (MEAN + "i = Div (n1, r) q = Mul (x, i) y = Mul (q, scale)", rms),
    "layer norm": (
        CENTER + "y = Add (s, bias)",
        lambda x: normalized(x, W["scale"], W["bias"], centered=True),
    ),
}
"""Nodes that are one operation behind the product, or take part in it."""


@pytest.mark.parametrize("name", ONE)
def test_a_pattern_is_one_operation(name):
    case = Case(*ONE[name])
    auto = session(case, "auto")
    (region,) = auto.plan.fused.regions
    assert len(region.operations) <= 2, [o.op_type for o in region.operations]
    result, fused = run(auto)
    assert fused
    meant = expected(case)
    np.testing.assert_allclose(result, meant, rtol=0, atol=1e-5 * np.abs(meant).max())


OTHER = {
    "another number than that of the sigmoid": (
        "n = Neg (x) a = Abs (n) g = Sigmoid (n) y = Mul (a, g)",
        lambda x: abs(x) / (1 + np.exp(x)),
    ),
    "another constant": (
        "d = Div (x, n2) e = Erf (d) a = Add (e, n1) m = Mul (x, a) y = Mul (m, half_of)",
        lambda x: 0.5 * x * (1 + erf(x / 2)),
    ),
    "a mean of another axis": (
        MEAN.replace("minus", "i1") + "q = Div (x, r) y = Mul (q, scale)",
        lambda x: x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * W["scale"],
    ),
    "a scale of rows": (
        MEAN + "q = Div (x, r) y = Mul (q, column)",
        lambda x: normalized(x, W["column"], centered=False),
    ),
    "a value inside is wanted": (
        MEAN + "q = Div (x, r) n = Mul (q, scale) y = Add (n, r)",
        lambda x: rms(x) + np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5),
    ),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_only_looks_like_a_pattern_stays_what_it_is(name):
    case = Case(*OTHER[name])
    auto = session(case, "auto")
    (region,) = auto.plan.fused.regions
    assert len(region.operations) > 3
    result, fused = run(auto)
    assert fused
    meant = expected(case)
    np.testing.assert_allclose(result, meant, rtol=0, atol=1e-5 * np.abs(meant).max())


def test_every_pattern_belongs_to_a_family_of_operators_that_is_looked_for():
    seen = set()
    for text in [*(text for text, _ in ONE.values()), CASES["rotary by slices"].nodes]:
        words = {w for w in text.split() if w[:1].isupper()} - {"Reshape", "Transpose"}
        found = {name for name, of in rewriting.FAMILIES.items() if name in words and words <= of}
        assert found, text
        seen |= found
    assert seen == set(rewriting.FAMILIES)
