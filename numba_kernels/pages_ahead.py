"""What a write of a few tokens touches of a head, asked for before: else it waits for each line.

A token has a part of many lines: its codes lie in tiles, beside those of other tokens.
"""

from __future__ import annotations

from numba import njit

from onnx_inplace.numba_kernels.pages_layout import BY_TOKEN
from onnx_inplace.numba_kernels.prefill_parts import LINE, ask

_TILE = 16  # rows


@njit
def _scales(half, at, size):
    ask(at, size)
    if half.midpoint:
        ask(at + half.midpoint, size)


@njit
def ask_for(which, half, region, size, token):
    """Ask for what is read and written when a token joins an integer page.

    Args:
        which: 0 for K, 1 for V.
        half: of the format.
        region: address of the head.
        size: elements of a token.
        token: of the page.
    """
    if half.offsets:
        ask(region + half.offsets, 2 * size)
    if half.grouping == BY_TOKEN:
        for begin in range(0, size, half.group):
            _scales(half, region + begin // half.group * half.step + 2 * token, 2)
    else:
        _scales(half, region + token // half.group * half.step, 2 * size)
    codes = region + half.codes
    if which == 0:
        ask(codes + token // _TILE * half.tile, _TILE * size * half.bits // 8)
        return
    line = codes + token // (32 // half.bits) * LINE
    for tile in range(size // _TILE):
        ask(line + tile * half.tile, LINE)
