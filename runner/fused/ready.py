"""Makes fused steps ready while a session loads: kernels are compiled, weights are repacked."""

from __future__ import annotations

from onnx_inplace.compiler.fused import Fusion
from onnx_inplace.numba_kernels.fused import interpreter, moves
from onnx_inplace.runner.fused import templates
from onnx_inplace.runner.fused.template import Loading
from onnx_inplace.runner.fused.weights import Weights


def prepare(fusion: Fusion, weights: Weights, threads: int, portable: bool) -> None:
    """Ask for all that runs with few rows need, so that none of them waits for it.

    Raises:
        NotFused: an operation cannot be fused, whatever the shapes of a run.
    """
    for kernel in (moves.move, moves.moved, interpreter.run):
        kernel.ready()
    if threads > 1:
        interpreter.run_parallel.ready()
    for region in fusion.regions:
        loading = Loading(region, weights, portable)
        for operation in region.operations:
            for kernel in templates.kernels(loading, operation):
                kernel.ready()
