"""Products of float32, float16 and bfloat16 weights with float32 activations.

``specialise`` makes copies of this file with other values in the line that says so: kind of the
weights, rows of activations, and 1 for code that runs on any CPU.
"""

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.floats import SIZES
from onnx_inplace.numba_kernels.fused import product
from onnx_inplace.numba_kernels.fused.dots import Dots
from onnx_inplace.numba_kernels.fused.kernel import KERNEL
from onnx_inplace.numba_kernels.memory import kernel
from onnx_inplace.numba_kernels.vector import VECTOR

KIND, ROWS, PORTABLE = 0, 1, 0  # specialised

GROUPS = product.PANEL // 16  # vectors of outputs in a panel
STEP = 32  # inputs that are summed before their sum is added to the others: smaller errors
INPUT_BYTES = product.PANEL * SIZES[KIND]  # of a panel, for one input

_I = types.int64


@intrinsic
def _multiply(typing_context, weights, inputs, rows, row, sums, end, following):
    """A panel times ``ROWS`` rows, to ``sums``: (ROWS, 32) float32."""

    def generate(context, builder, signature, arguments):
        e, b = Dots(builder, bool(PORTABLE)), builder
        weights, inputs, rows, row, sums, end, following = arguments
        keys = [(r, g) for r in range(ROWS) for g in range(GROUPS)]
        totals = {key: cgutils.alloca_once(b, VECTOR) for key in keys}
        parts = {key: cgutils.alloca_once(b, VECTOR) for key in keys}
        for key in keys:
            b.store(e.constant(0.0), totals[key])
        starts = [e.add(rows, e.times(row, r)) for r in range(ROWS)]
        with e.loop(e.groups(inputs, STEP)) as step:
            begin = e.times(step, STEP)
            for key in keys:
                b.store(e.constant(0.0), parts[key])
            with e.loop(e.least(e.whole(STEP), b.sub(inputs, begin))) as index:
                number = e.add(begin, index)
                at = e.add(weights, e.times(number, INPUT_BYTES))
                product.ask_ahead(e, at, INPUT_BYTES, end, following)
                values = [e.scales(e.add(at, 16 * g * SIZES[KIND]), KIND) for g in range(GROUPS)]
                for r in range(ROWS):
                    activation = e.load_all(e.add(starts[r], e.times(number, 4)))
                    for g in range(GROUPS):
                        place = parts[r, g]
                        b.store(e.fma(values[g], activation, b.load(place)), place)
            for key in keys:
                b.store(b.fadd(b.load(totals[key]), b.load(parts[key])), totals[key])
        for (r, g), place in totals.items():
            e.store(b.load(place), e.add(sums, 4 * (product.PANEL * r + 16 * g)))
        return context.get_dummy_value()

    return types.void(_I, _I, _I, _I, _I, _I, _I), generate


_sums = product.make_sums(ROWS)


@kernel(KERNEL)
def multiply(arguments, thread, threads):
    """A :class:`product.Product` of ``ROWS`` rows; threads share the panels."""
    x = product.read(arguments)
    first, last = product.part(x, thread, threads)
    rows = x.activations + thread * x.each
    sums = _sums()
    size = x.inputs * INPUT_BYTES
    end, following = x.weights + last * size, product.following(x, thread, threads)
    for panel in range(first, last):
        at = x.weights + panel * size
        _multiply(at, x.inputs, rows, x.activation_row, sums, end, following)
        product.finish(x, panel, ROWS, sums)
