"""Makes fused steps ready while a session loads: kernels are compiled, weights are repacked."""

from __future__ import annotations

from onnx_inplace.compiler.fused import DOMAIN, Fused, Fusion
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
        _map(region, weights)
        loading = Loading(region, weights, portable)
        for operation in region.operations:
            for kernel in templates.kernels(loading, operation):
                kernel.ready()


def _map(region: Fused, weights: Weights) -> None:
    """Open the weights that runs read as they are: a file that changes later is not theirs."""
    for operation in region.operations:
        if (operation.domain, operation.op_type) == (DOMAIN, "Product"):
            continue  # its weights are copies
        for index in operation.inputs:
            constant = None if index is None else region.values[index].constant
            if constant is not None:
                weights.plain(constant)
