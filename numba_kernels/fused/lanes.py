"""Functions of numbers on vectors of 16 float32, and loops over rows of any length.

Code that LLVM writes as vectors on any CPU: what needs an instruction set stands in ``dots``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.vector import LANES, VECTOR, Emitter, Value

BYTES = 4 * LANES  # of a vector

_I = types.int64
_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_BYTE = ir.IntType(8).as_pointer()
_INTS = ir.VectorType(_INT32, LANES)
_LOG2_E = 1.4426950408889634


class Lanes(Emitter):
    """Writes vectors of 16 float32. Errors are absolute, for results of size 1."""

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """``a * b + c``, rounded once where the CPU can."""
        return self._intrinsic(f"llvm.fmuladd.v{LANES}f32", VECTOR, [a, b, c])

    def absolute(self, x: Value) -> Value:
        """Without sign."""
        return self._intrinsic(f"llvm.fabs.v{LANES}f32", VECTOR, [x])

    def root(self, x: Value) -> Value:
        """Square root, correctly rounded."""
        return self._intrinsic(f"llvm.sqrt.v{LANES}f32", VECTOR, [x])

    def with_sign(self, x: Value, of: Value) -> Value:
        """``x`` with the sign of another one."""
        return self._intrinsic(f"llvm.copysign.v{LANES}f32", VECTOR, [x, of])

    def minimum(self, a: Value, b: Value) -> Value:
        """The smaller numbers; those of ``b`` where ``a`` is NaN."""
        return self.builder.select(self.builder.fcmp_ordered("<", a, b), a, b)

    def nonnegative(self, x: Value) -> Value:
        """Which lanes are at least 0."""
        return self.builder.fcmp_ordered(">=", x, self.constant(0.0))

    def over(self, a: Value, b: Value) -> Value:
        """Quotient."""
        return self.builder.fdiv(a, b)

    def polynomial(self, x: Value, coefficients: Sequence[float]) -> Value:
        """The coefficient of the highest power stands first."""
        result = self.constant(coefficients[0])
        for coefficient in coefficients[1:]:
            result = self.fma(result, x, self.constant(coefficient))
        return result

    def decay(self, x: Value, factor: float = 1.0) -> Value:
        """``exp(-factor * abs(x))``; 0 below 2**-126, so that an infinity times it is NaN."""
        b = self.builder
        power = b.fmul(self.absolute(x), self.constant(-factor * _LOG2_E))
        gone = b.fcmp_ordered("<", power, self.constant(-126.0))
        return b.select(gone, self.constant(0.0), self.exp2(power))

    def exp(self, x: Value) -> Value:
        """e**x; relative error 4e-7 + 1e-7 * abs(x).

        The square of a root, because 1 / e**-x would end at e**87.
        """
        b, e = self.builder, self.decay(x, 0.5)
        root = b.select(self.nonnegative(x), self.over(self.constant(1.0), e), e)
        return b.fmul(root, root)

    def relu(self, x: Value) -> Value:
        """The larger one of ``x`` and 0; NaN stays NaN."""
        return self.maximum(self.constant(0.0), x)

    def sigmoid(self, x: Value) -> Value:
        """Error 2e-7, and relative to the result 1e-7 * abs(x)."""
        b, e, one = self.builder, self.decay(x), self.constant(1.0)
        return self.over(b.select(self.nonnegative(x), one, e), b.fadd(one, e))

    def silu(self, x: Value) -> Value:
        """``x * sigmoid(x)``."""
        return self.builder.fmul(x, self.sigmoid(x))

    def tanh(self, x: Value) -> Value:
        """Relative error 1e-6."""
        b, one, e = self.builder, self.constant(1.0), self.decay(x, 2.0)
        far = self.with_sign(self.over(b.fsub(one, e), b.fadd(one, e)), x)
        square = b.fmul(x, x)  # near 0, where the quotient would cancel
        series = self.polynomial(square, [62 / 2835, -17 / 315, 2 / 15, -1 / 3, 0.0])
        near = self.fma(x, series, x)
        return b.select(b.fcmp_ordered("<", self.absolute(x), self.constant(0.25)), near, far)

    def erf(self, x: Value) -> Value:
        """Error 5e-7 (Abramowitz and Stegun 7.1.26)."""
        b, one, a = self.builder, self.constant(1.0), self.absolute(x)
        t = self.over(one, self.fma(self.constant(0.3275911), a, one))
        terms = [1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592, 0.0]
        rest = b.fmul(self.polynomial(t, terms), self.decay(b.fmul(a, a)))
        return self.with_sign(b.fsub(one, rest), x)

    def gelu(self, x: Value) -> Value:
        """``x * P(X <= x)`` for a normal X; error 3e-7 * abs(x)."""
        b = self.builder
        half = b.fmul(x, self.constant(0.5))
        return self.fma(half, self.erf(b.fmul(x, self.constant(0.5**0.5))), half)

    def gelu_tanh(self, x: Value) -> Value:
        """The approximation by tanh: 1 + tanh(z) is 2 * sigmoid(2 z), without cancellation."""
        b = self.builder
        cubic = self.polynomial(b.fmul(x, x), [0.0713548162726, 1.5957691216057308])
        return b.fmul(x, self.sigmoid(b.fmul(x, cubic)))

    def softplus(self, x: Value) -> Value:
        """``log(1 + exp(x))``; error 1e-6."""
        logarithm = self._log1p(self.decay(x))
        return self.builder.fadd(self.maximum(x, self.constant(0.0)), logarithm)

    def _log1p(self, x: Value) -> Value:
        """For 0 <= x <= 1, by 2 atanh(x / (x + 2)); the sixth term is below 2e-7."""
        b = self.builder
        s = self.over(x, b.fadd(x, self.constant(2.0)))
        terms = [2 / 13, 2 / 11, 2 / 9, 2 / 7, 2 / 5, 2 / 3, 2.0]
        return b.fmul(s, self.polynomial(b.fmul(s, s), terms))

    def part(self, address: Value, count: Value, fill: float = 0.0) -> Value:
        """``count`` < 16 float32, and ``fill`` in the other lanes; reads nothing behind them."""
        place = cgutils.alloca_once(self.builder, VECTOR)
        self.builder.store(self.constant(fill), place)
        self.copy(self.builder.ptrtoint(place, _INT64), address, count)
        return self.builder.load(place)

    def store_part(self, vector: Value, address: Value, count: Value) -> None:
        """Write the first ``count`` lanes."""
        place = cgutils.alloca_once(self.builder, VECTOR)
        self.builder.store(vector, place)
        self.copy(address, self.builder.ptrtoint(place, _INT64), count)

    def copy(self, target: Value, source: Value, count: Value) -> None:
        """Copy float32."""
        b = self.builder
        target, source = b.inttoptr(target, _BYTE), b.inttoptr(source, _BYTE)
        cgutils.raw_memcpy(b, target, source, self.times(count, 4), 1)

    def rows(self, count: Value, body: Callable[[Value, Value | None], None]) -> None:
        """``body(offset in bytes, lanes)`` for ``count`` numbers; lanes is None for all 16."""
        b = self.builder
        with self.loop(b.ashr(count, self.whole(4))) as index:
            body(self.times(index, BYTES), None)
        rest = b.and_(count, self.whole(LANES - 1))
        with b.if_then(b.icmp_signed("!=", rest, self.whole(0)), likely=False):
            body(self.times(b.sub(count, rest), 4), rest)

    def read(self, address: Value, lanes: Value | None, fill: float = 0.0) -> Value:
        """16 float32, or ``lanes`` of them."""
        return self.load(address) if lanes is None else self.part(address, lanes, fill)

    def write(self, vector: Value, address: Value, lanes: Value | None) -> None:
        """16 float32, or ``lanes`` of them."""
        if lanes is None:
            self.store(vector, address)
        else:
            self.store_part(vector, address, lanes)

    def operand(self, address: Value, single: Value) -> tuple[Value, Value]:
        """(address, mask for offsets) of a row; where ``single`` is 1 it is one number."""
        b = self.builder
        alone = b.icmp_signed("!=", single, self.whole(0))
        place = cgutils.alloca_once(b, VECTOR)
        b.store(self.load_all(address), place)
        where = b.select(alone, b.ptrtoint(place, _INT64), address)
        return where, b.select(alone, self.whole(0), self.whole(-1))


def make_unary(function: Callable[[Lanes, Value], Value]) -> Any:
    """``apply(output, input, count)``."""

    @intrinsic
    def apply(typing_context, output, input, count):
        def generate(context, builder, signature, arguments):
            e = Lanes(builder)
            output, input, count = arguments

            def body(offset, lanes):
                result = function(e, e.read(e.add(input, offset), lanes))
                e.write(result, e.add(output, offset), lanes)

            e.rows(count, body)
            return context.get_dummy_value()

        return types.void(_I, _I, _I), generate

    return apply


def make_binary(function: Callable[[Lanes, Value, Value], Value]) -> Any:
    """``apply(output, a, b, count, a_single, b_single)``."""

    @intrinsic
    def apply(typing_context, output, a, b, count, a_single, b_single):
        def generate(context, builder, signature, arguments):
            e = Lanes(builder)
            output, a, b, count, a_single, b_single = arguments
            a, a_mask = e.operand(a, a_single)
            b, b_mask = e.operand(b, b_single)

            def body(offset, lanes):
                first = e.add(a, builder.and_(offset, a_mask))
                second = e.add(b, builder.and_(offset, b_mask))
                result = function(e, e.read(first, lanes), e.read(second, lanes))
                e.write(result, e.add(output, offset), lanes)

            e.rows(count, body)
            return context.get_dummy_value()

        return types.void(_I, _I, _I, _I, _I, _I), generate

    return apply


def make_reduction(
    start: float,
    step: Callable[[Lanes, Value, Value, Value], Value],
    combine: Callable[[Lanes], Callable[[Value, Value], Value]],
) -> Any:
    """``reduce(input, count, number)``: ``step(sum so far, values, number)``, then over the lanes.

    Lanes without a value hold ``number``; ``step`` must not change the sum there, or the sum must
    bear it.
    """

    @intrinsic
    def reduce(typing_context, input, count, number):
        def generate(context, builder, signature, arguments):
            e = Lanes(builder)
            input, count, number = arguments
            numbers = e.splat(number, VECTOR)
            total = cgutils.alloca_once_value(builder, e.constant(start))
            builder.store(e.constant(start), total)

            def body(offset, lanes):
                if lanes is None:
                    values = e.load(e.add(input, offset))
                else:
                    place = cgutils.alloca_once(builder, VECTOR)
                    builder.store(numbers, place)
                    e.copy(builder.ptrtoint(place, _INT64), e.add(input, offset), lanes)
                    values = builder.load(place)
                builder.store(step(e, builder.load(total), values, numbers), total)

            e.rows(count, body)
            result = e.across(combine(e), builder.load(total), LANES)
            return builder.extract_element(result, ir.Constant(_INT32, 0))

        return types.float32(_I, _I, types.float32), generate

    return reduce
