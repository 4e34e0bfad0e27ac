"""Pages written, read and converted in place: every format, by its description.

A table of pages is three arrays: addresses (int64), formats (int32, rows of the table of
descriptions, see ``pages_layout``) and fills (int32, valid tokens from a page's begin on). A block
table names pages by their place in these arrays. No kernel writes to a byte outside the pages that
it is told, and what a write does not touch keeps its bits.

Danger: nothing is checked here. The caller has checked pages, formats, positions and sizes.
"""

from __future__ import annotations

from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from onnx_inplace.numba_kernels import pages_encode
from onnx_inplace.numba_kernels.floats import int32_at, int64_at
from onnx_inplace.numba_kernels.memory import kernel, on_demand
from onnx_inplace.numba_kernels.pages_ahead import ask_for
from onnx_inplace.numba_kernels.pages_heads import (
    clear,
    continue_head,
    load,
    read_values,
    save,
    set_offsets,
    target_of,
    write_half,
)
from onnx_inplace.numba_kernels.pages_lanes import clean
from onnx_inplace.numba_kernels.pages_layout import INTEGER, read_half, read_page
from onnx_inplace.numba_kernels.pages_numbers import LARGEST, narrow_row

_FEW = 16  # tokens: less than a tile, so that lines are read before they are written


@njit
def _write_page(to, source, x, first, count, space):
    """``count`` tokens of all heads, K and V, into a ``Target``; how many numbers were clipped.

    ``source``: address of the first token's first element.
    """
    page, clipped = read_page(to.description), 0
    asks = page.kind == INTEGER and count < _FEW
    value = read_half(to.description, 1)
    for which in range(2):
        half = read_half(to.description, which)
        for h in range(page.heads):
            region = to.address + half.at + h * half.head
            taken = source + which * x.half_step + h * x.head_step
            following = taken + x.head_step
            if h + 1 == page.heads:  # then V; behind it, nothing is asked for
                following = source + (x.half_step if which == 0 else 0)
            if asks and h + 1 < page.heads:
                ask_for(which, half, region + half.head, page.head_size, first)
            elif asks and which == 0:
                ask_for(1, value, to.address + value.at, page.head_size, first)
            clipped += write_half(
                page, half, which, region, taken, following, x, first, count, to.fill, space
            )
    return clipped


@njit
def write_tokens(descriptions, layout, values, addresses, formats, fills, blocks, positions, space):
    """Write new tokens into the pages of each row of the batch; how many numbers were clipped.

    A finite number is clipped when it becomes the largest one of its format, or an infinity; an
    infinity or NaN where the format has none. An empty page takes its channel offsets, where its
    format has them, from the page before it in its row, if there is one that is not empty.

    Shapes:
        descriptions: (formats, WORDS) int64
        layout:       Values as int64
        values:       address of the first element
        addresses:    (pages) int64
        formats:      (pages) int32
        fills:        (pages) int32, become the fills after the write
        blocks:       (batch, Values.blocks) int64, places in the three arrays before; negative:
                      no page, where none is written
        positions:    (batch) int64: the token of the sequence that ``values`` begins with
        space:        ``workspace_size`` bytes
    """
    x = read_values(layout)
    page_size = read_page(descriptions).page_size
    clipped = 0
    for b in range(x.batch):
        position, done = carray(int64_at(positions), (x.batch,))[b], 0
        row = blocks + 8 * b * x.blocks
        while done < x.tokens:
            place = position + done
            block, first = place // page_size, place % page_size
            count = min(page_size - first, x.tokens - done)
            to = target_of(descriptions, addresses, formats, fills, row, block)
            if to.valid > 0:
                for h in range(read_page(to.description).heads):
                    continue_head(to, h, space)
            source = values + b * x.batch_step + done * x.token_step
            clipped += _write_page(to, source, x, first, count, space)
            fill = carray(int32_at(to.fill_at), (1,))
            fill[0] = max(fill[0], first + count)
            done += count
    return clipped


@kernel("int64(" + ",".join(["int64"] * 9) + ")")
def writer(descriptions, layout, values, addresses, formats, fills, blocks, positions, space):
    """:func:`write_tokens`, for calls by address: it takes long to compile."""
    return write_tokens(
        descriptions, layout, values, addresses, formats, fills, blocks, positions, space
    )


@intrinsic
def call_writer(typing_context, function, arguments):
    """Call :data:`writer`, which is at an address."""

    def generate(context, builder, signature, values):
        types_ = [ir.IntType(64)] * 9
        kernel_ = ir.FunctionType(ir.IntType(64), types_).as_pointer()
        inputs = [builder.extract_value(values[1], k) for k in range(9)]
        return builder.call(builder.inttoptr(values[0], kernel_), inputs)

    return types.int64(types.int64, arguments), generate


@on_demand("int64(" + ",".join(["int64"] * 10) + ")")
def write(
    function, descriptions, layout, values, addresses, formats, fills, blocks, positions, space
):
    """:func:`write_tokens`, called from outside of kernels; ``function``: address of ``writer``."""
    return call_writer(
        function,
        (descriptions, layout, values, addresses, formats, fills, blocks, positions, space),
    )


@on_demand("void(" + ",".join(["int64"] * 10) + ")")
def read(description, page_at, first, count, target, kind, half_step, head_step, token_step, space):
    """Tokens ``first .. first + count`` of a page, as an array (2, heads, count, head_size).

    ``kind``: of the elements at ``target``: ``floats.FLOAT32``, FLOAT16, BFLOAT16. Steps: bytes.
    """
    page = read_page(description)
    size = page.head_size
    rest = space + page.page_size * size * 4
    for which in range(2):
        half = read_half(description, which)
        for h in range(page.heads):
            load(page, half, which, page_at + half.at + h * half.head, space, first, count, rest)
            to = target + which * half_step + h * head_step
            for j in range(count):
                narrow_row(to + j * token_step, size, space + j * size * 4, kind)


@on_demand("int64(" + ",".join(["int64"] * 6) + ")")
def convert(source_description, source, target_description, target, count, space):
    """Write the first ``count`` tokens of a page into another one; how many numbers were clipped.

    The pages do not overlap. All other bytes of the target become zero.
    """
    page, to = read_page(source_description), read_page(target_description)
    size = page.head_size
    rest = space + page.page_size * size * 4
    clear(target, to.size)
    clipped = 0
    for which in range(2):
        half, to_half = read_half(source_description, which), read_half(target_description, which)
        for h in range(page.heads):
            load(page, half, which, source + half.at + h * half.head, space, 0, count, rest)
            region = target + to_half.at + h * to_half.head
            if to_half.offsets:
                clipped += clean(space, count * size // 16, LARGEST)
                set_offsets(region, to_half, space, count, size)
            begin = 0
            while begin < count:
                end = min(pages_encode.piece_end(to_half, begin), count)
                rows = space + begin * size * 4
                clipped += save(to, to_half, which, region, rows, begin, end - begin, 0, rest)
                begin = end
    return clipped
