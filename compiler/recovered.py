"""Float weights that were 8-bit codes before: a quarter of the bytes, and no number changes.

Exporters write quantized weights as float32 where their target has no such operator, embeddings
that are also the last product above all. The codes can be found again when every block of 32
inputs is a scale times integers up to 127, one of which is 127 or -127.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BLOCK = 32
"""Inputs that share a scale; a larger block of a model is several."""

_LARGEST = 127
_ROWS = 256  # that are tried at once: most other weights fail with the first ones


@dataclasses.dataclass(frozen=True, slots=True)
class Codes:
    """A matrix of 4- or 8-bit codes with a scale for each block of inputs.

    ``weight = scale * (code - zero point)``, or ``scale * code + minimum``.

    Attributes:
        bits: 4 or 8.
        codes: (outputs, blocks, block * bits / 8) uint8; with 4 bits, code 2 j is in the low half
            of byte j. The block is 32 or a multiple.
        scales: (outputs, blocks) float32 or float16.
        zero_points: (outputs, blocks) uint8, one a byte; None: 2**(bits - 1).
        minimums: (outputs, blocks) float32 or float16, instead of zero points.
    """

    bits: int
    codes: Array
    scales: Array
    zero_points: Array | None = None
    minimums: Array | None = None


def recover(weights: Array) -> Codes | None:
    """The same weights, (outputs, inputs) float32 or float16, as codes; None: they are others."""
    outputs, inputs = weights.shape
    if inputs % BLOCK or not outputs:
        return None
    found = np.empty((outputs, inputs // BLOCK, BLOCK), np.uint8)
    scales = np.empty((outputs, inputs // BLOCK), np.float32)
    for begin in range(0, outputs, _ROWS):
        end = min(outputs, begin + _ROWS)
        part = weights[begin:end].astype(np.float32).reshape(end - begin, -1, BLOCK)
        scale = np.abs(part).max(2, keepdims=True) / np.float32(_LARGEST)
        divisor = np.where(scale == 0, np.float32(1), scale)
        with np.errstate(over="ignore", invalid="ignore"):
            integers = np.rint(part / divisor)
            if not (integers * scale == part).all():  # NaN and infinity are not equal either
                return None
        found[begin:end] = (integers + 128).astype(np.uint8)
        scales[begin:end] = scale[..., 0]
    return Codes(8, found, scales)
