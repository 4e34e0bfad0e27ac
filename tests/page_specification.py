"""What pages hold, in numpy: docs/formats.md ("Writing") as code, and the oracle of the kernels.

Independent of ``numba_kernels`` and of ``PageLayout``. All arithmetic is float32, one operation at
a time in the order of the document, so that a kernel can be held to every bit. ``heads`` may be any
number: many pages of one format can be worked on as one page of many heads, because the regions of
heads do not know each other.

    x = values of n tokens, float32 [2, heads, n, head_size]
    page = encode(INT4, x, page_size=64)                          uint8 [bytes]
    page = write(INT4, page, dims, x, position=20, fill=20)       a new page
    decode(INT4, page, dims)                                      float32 [2, heads, 64, head_size]
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnx_inplace.compiler.encodings import Encoding, Fit, Grouping, Offset
from onnx_inplace.compiler.formats import PageFormat

LARGEST = np.float32(65504)  # of float16
CLIPS, STEP = 5, 0.05  # of the search: each end is clipped by 0, 5, ... 20 % of the range
SMALLEST = np.float32(2**-24)  # ranges below it are one value: scales would be 0
MARGIN = np.float32(0.1)  # by which a range that must grow grows further
FP8_LARGEST = {ir.DataType.FLOAT8E4M3FN: 448, ir.DataType.FLOAT8E5M2: 57344}
NUMPY = {
    ir.DataType.FLOAT: np.float32,
    ir.DataType.FLOAT16: np.float16,
    ir.DataType.BFLOAT16: ml_dtypes.bfloat16,
    ir.DataType.FLOAT8E4M3FN: ml_dtypes.float8_e4m3fn,
    ir.DataType.FLOAT8E5M2: ml_dtypes.float8_e5m2,
}


# -- pages


def encode(page_format: PageFormat, x: np.ndarray, page_size: int) -> np.ndarray:
    """A whole page, from zero bytes: ``x`` [2, heads, n, head_size], n <= page_size."""
    _, heads, _, head_size = x.shape
    dims = (2, heads, page_size, head_size)
    if page_format.is_float:
        return write(page_format, np.zeros(page_format.page_bytes(dims), np.uint8), dims, x, 0, 0)
    halves = unpack(page_format, np.zeros(page_format.page_bytes(dims), np.uint8), dims)
    for half, values in zip(halves, x, strict=True):
        if half.encoding.channel_offset:
            half.channel_offsets[:] = mean(clean(values))
        write_half(half, values, position=0, fill=0)
    return pack(halves)


def write(
    page_format: PageFormat,
    page: np.ndarray,
    dims: tuple[int, int, int, int],
    x: np.ndarray,
    position: int,
    fill: int,
) -> np.ndarray:
    """``page``, whose first ``fill`` tokens are valid, after ``x`` is written at ``position``."""
    if position > fill:
        gap = np.zeros((*x.shape[:2], position - fill, x.shape[3]), np.float32)
        x, position = np.concatenate([gap, x], axis=2), fill
    if page_format.is_float:
        array = page.view(NUMPY[page_format.key.storage]).reshape(dims).copy()
        array[:, :, position : position + x.shape[2]] = cast(x, page_format.key.storage)
        return array.reshape(-1).view(np.uint8)
    halves = unpack(page_format, page, dims)
    for half, values in zip(halves, x, strict=True):
        write_half(half, values, position, fill)
    return pack(halves)


def start_page(
    page_format: PageFormat,
    dims: tuple[int, int, int, int],
    before: PageFormat | None = None,
    page_before: np.ndarray | None = None,
    fill_before: int = 0,
) -> np.ndarray:
    """An empty page that continues a sequence behind another page, or begins one.

    Its channel offsets are the means of the page before, as that page is stored.
    """
    page = np.zeros(page_format.page_bytes(dims), np.uint8)
    if page_format.is_float or before is None or fill_before == 0:
        return page
    halves = unpack(page_format, page, dims)
    stored = decode(before, page_before, dims)[:, :, :fill_before]
    for half, values in zip(halves, stored, strict=True):
        if half.encoding.channel_offset:
            half.channel_offsets[:] = mean(clean(values))
    return pack(halves)


def decode(page_format: PageFormat, page: np.ndarray, dims: tuple[int, ...]) -> np.ndarray:
    """All tokens of a page as float32; those beyond its fill mean nothing."""
    if page_format.is_float:
        return page.view(NUMPY[page_format.key.storage]).reshape(dims).astype(np.float32)
    return np.stack([decode_half(half) for half in unpack(page_format, page, dims)])


def convert(
    source: PageFormat, target: PageFormat, page: np.ndarray, dims: tuple[int, ...], fill: int
) -> np.ndarray:
    """The page in another format: what its valid tokens decode to, encoded as a whole page."""
    return encode(target, decode(source, page, dims)[:, :, :fill], dims[2])


def cast(x: np.ndarray, storage: ir.DataType) -> np.ndarray:
    """As ONNX's Cast: nearest, ties to even; FP8 saturates, the others overflow to infinity."""
    if storage in FP8_LARGEST:
        x = np.clip(x, -FP8_LARGEST[storage], FP8_LARGEST[storage])
    with np.errstate(over="ignore"):
        return x.astype(NUMPY[storage])


# -- halves of integer formats


@dataclasses.dataclass
class Half:
    """K or V of a page. G groups of ``group_size`` along the axis that scales are shared along."""

    encoding: Encoding
    codes: np.ndarray  # uint8 [heads, page_size, head_size]
    scales: np.ndarray  # float16 [heads, G, items]
    midpoints: np.ndarray  # float16 [heads, G, items]; not stored where the encoding has none
    channel_offsets: np.ndarray  # float16 [heads, head_size]; not stored where there are none
    group_size: int
    transposed: bool  # V: rows of the tiles are channels

    @property
    def per_channel(self) -> bool:
        return self.encoding.grouping is Grouping.CHANNEL


def write_half(half: Half, x: np.ndarray, position: int, fill: int) -> None:
    """Write tokens ``x`` [heads, n, head_size] at ``position`` <= ``fill``."""
    x = clean(x)
    if half.encoding.channel_offset:
        x = x - half.channel_offsets.astype(np.float32)[:, None]
    if half.encoding.rotated:
        x = np.clip(rotate(x), -LARGEST, LARGEST)
    if half.per_channel:
        write_channels(half, x, position, fill)
    else:
        write_tokens(half, x, position)


def write_tokens(half: Half, x: np.ndarray, position: int) -> None:
    """Scales of tokens: every token is encoded alone."""
    tokens = slice(position, position + x.shape[1])
    for group in range(half.scales.shape[1]):
        channels = slice(group * half.group_size, (group + 1) * half.group_size)
        values = np.moveaxis(x[:, :, channels], 2, 0)  # [count, heads, n]
        scale, midpoint = fit(half.encoding, values)
        codes = quantize(half.encoding, values, scale, midpoint)
        half.codes[:, tokens, channels] = np.moveaxis(codes, 0, 2)
        half.scales[:, group, tokens], half.midpoints[:, group, tokens] = scale, midpoint


def write_channels(half: Half, x: np.ndarray, position: int, fill: int) -> None:
    """Scales of channels: a group that keeps valid tokens keeps its range, or widens it."""
    encoding, end, page_size = half.encoding, position + x.shape[1], half.codes.shape[1]
    for group in range(half.scales.shape[1]):
        tokens = range(group * half.group_size, min((group + 1) * half.group_size, page_size))
        written = [t for t in tokens if position <= t < end]
        kept = [t for t in tokens if t < fill and t not in written]
        if not written:
            continue
        new = np.moveaxis(x[:, [t - position for t in written]], 1, 0)  # [count, heads, channels]
        old_codes = np.moveaxis(half.codes[:, kept], 1, 0)
        if kept:
            old_scale, old_midpoint = half.scales[:, group], half.midpoints[:, group]
            inside, scale, midpoint = widen(encoding, old_scale, old_midpoint, new)
            old = dequantize(encoding, old_codes, old_scale, old_midpoint)
            recoded = quantize(encoding, old, scale, midpoint)
            half.codes[:, kept] = np.moveaxis(np.where(inside, old_codes, recoded), 0, 1)
        else:
            scale, midpoint = fit(encoding, new)
        half.codes[:, written] = np.moveaxis(quantize(encoding, new, scale, midpoint), 0, 1)
        half.scales[:, group], half.midpoints[:, group] = scale, midpoint


def decode_half(half: Half) -> np.ndarray:
    """float32 [heads, page_size, head_size]."""
    _, page_size, head_size = half.codes.shape
    axis = page_size if half.per_channel else head_size
    scale, midpoint = (
        np.repeat(part, half.group_size, axis=1)[:, :axis]  # [heads, axis, items]
        for part in (half.scales, half.midpoints)
    )
    if not half.per_channel:
        scale, midpoint = scale.swapaxes(1, 2), midpoint.swapaxes(1, 2)
    x = dequantize(half.encoding, half.codes, scale, midpoint)
    if half.encoding.rotated:
        x = rotate(x)
    if half.encoding.channel_offset:
        x = x + half.channel_offsets.astype(np.float32)[:, None]
    return x


# -- numbers


def clean(x: np.ndarray) -> np.ndarray:
    """What can be encoded: NaN becomes 0, everything is in the range of float16."""
    x = x.astype(np.float32)
    return np.clip(np.where(np.isnan(x), np.float32(0), x), -LARGEST, LARGEST)


def half_precision(x: np.ndarray) -> np.ndarray:
    """Clipped, then the nearest float16."""
    return np.clip(x, -LARGEST, LARGEST).astype(np.float16)


def rotate(x: np.ndarray) -> np.ndarray:
    """Orthonormal Hadamard matrices along the last axis, which are their own inverses."""
    size = x.shape[-1] & -x.shape[-1]
    distance = 1
    while distance < size:
        pairs = x.reshape(*x.shape[:-1], -1, 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack([a + b, a - b], axis=-2).reshape(x.shape)
        distance *= 2
    return x * np.float32(1 / np.sqrt(size))


def total(values: np.ndarray) -> np.ndarray:
    """Sum over the first axis, one after the other (numpy's own sum takes another order)."""
    result = np.zeros(values.shape[1:], np.float32)
    for value in values:
        result = result + value
    return result


def mean(x: np.ndarray) -> np.ndarray:
    """Over tokens: float16 [heads, head_size]."""
    return half_precision(total(np.moveaxis(x, 1, 0)) / np.float32(x.shape[1]))


def inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale, or 0 where the scale is 0."""
    scale = scale.astype(np.float32)
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def quantize(
    encoding: Encoding, x: np.ndarray, scale: np.ndarray, midpoint: np.ndarray
) -> np.ndarray:
    """Codes of ``x``; ``scale`` and ``midpoint`` (float16) broadcast to it."""
    scaled = (x - midpoint.astype(np.float32)) * inverse(scale) + np.float32(encoding.center)
    return np.clip(np.rint(scaled), encoding.lowest, encoding.highest).astype(np.uint8)


def dequantize(
    encoding: Encoding, codes: np.ndarray, scale: np.ndarray, midpoint: np.ndarray
) -> np.ndarray:
    centered = codes.astype(np.float32) - np.float32(encoding.center)
    return centered * scale.astype(np.float32) + midpoint.astype(np.float32)


def fit(encoding: Encoding, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and midpoint (float16) of groups: ``x`` [count, ...] has their members on axis 0."""
    low, high = x.min(axis=0), x.max(axis=0)
    if encoding.fit is Fit.RANGE:
        return fit_range(encoding, low, high)
    step, low = search(encoding, x, low, high)
    scale = half_precision(step)
    return scale, half_precision(low + scale.astype(np.float32) * np.float32(encoding.center))


def fit_range(
    encoding: Encoding, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Scale and midpoint of groups whose values lie in [low, high]."""
    center = np.float32(encoding.center)
    if encoding.offset is Offset.NONE:
        largest = np.maximum(np.abs(low), np.abs(high))
        scale = half_precision(largest / (np.float32(encoding.highest) - center))
        return scale, np.zeros_like(scale)
    scale = half_precision((high - low) / np.float32(encoding.highest))
    return scale, half_precision(low + scale.astype(np.float32) * center)


def search(
    encoding: Encoding, x: np.ndarray, least: np.ndarray, most: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(step, low) of the candidate line ``low + step * code`` with the least squared error."""
    count, span = np.float32(len(x)), most - least
    wide = span >= SMALLEST
    best = np.full(span.shape, np.inf, np.float32)
    best_step, best_low = np.zeros_like(span), least

    def codes_and_error(step: np.ndarray, low: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        codes = np.clip(np.rint((x - low) * inverse(step)), 0, encoding.highest)
        residue = x - (codes * step + low)
        return codes, total(residue * residue)

    def offer(step: np.ndarray, low: np.ndarray, error: np.ndarray, valid: np.ndarray) -> None:
        nonlocal best, best_step, best_low
        better = valid & (error < best)
        best = np.where(better, error, best)
        best_step, best_low = np.where(better, step, best_step), np.where(better, low, best_low)

    for a in range(CLIPS):
        for b in range(CLIPS):
            low = least + span * np.float32(a * STEP)
            high = most - span * np.float32(b * STEP)
            step = np.where(wide, (high - low) / np.float32(encoding.highest), np.float32(0))
            q, error = codes_and_error(step, low)
            offer(step, low, error, wide)

            sum_q, sum_qq, sum_x, sum_xq = total(q), total(q * q), total(x), total(x * q)
            t = count * sum_qq - sum_q * sum_q
            valid = wide & (t > 0)
            slope = np.divide(count * sum_xq - sum_x * sum_q, t, out=np.zeros_like(t), where=valid)
            valid &= slope > 0
            slope = np.where(valid, slope, np.float32(0))
            low = (sum_x - slope * sum_q) / count
            _, error = codes_and_error(slope, low)
            offer(slope, low, error, valid)
    return best_step, best_low


def widen(
    encoding: Encoding, scale: np.ndarray, midpoint: np.ndarray, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(unchanged?, scale, midpoint) of groups that must hold ``x`` [count, ...] too."""
    d, m = scale.astype(np.float32), midpoint.astype(np.float32)
    below = np.float32(encoding.center - encoding.lowest)
    above = np.float32(encoding.highest - encoding.center)
    inside = (np.abs(x - m) <= d * (above + np.float32(0.5))).all(axis=0)
    low, high, least, most = m - d * below, m + d * above, x.min(axis=0), x.max(axis=0)
    new_low, new_high = np.minimum(low, least), np.maximum(high, most)
    margin = MARGIN * (new_high - new_low)
    new_low = np.where(least < low, new_low - margin, new_low)
    new_high = np.where(most > high, new_high + margin, new_high)
    wide_scale, wide_midpoint = fit_range(
        encoding, np.clip(new_low, -LARGEST, LARGEST), np.clip(new_high, -LARGEST, LARGEST)
    )
    return inside, np.where(inside, scale, wide_scale), np.where(inside, midpoint, wide_midpoint)


# -- bytes


def unpack(page_format: PageFormat, page: np.ndarray, dims: tuple[int, ...]) -> list[Half]:
    """K and V of a page, as copies."""
    _, heads, page_size, head_size = dims
    regions = page.reshape(heads, -1)
    halves, start = [], 0
    for encoding, transposed in ((page_format.key, False), (page_format.value, True)):
        per_channel = encoding.grouping is Grouping.CHANNEL
        axis, items = (page_size, head_size) if per_channel else (head_size, page_size)
        group_size = min(encoding.group_size or axis, axis)
        shape = (heads, -(-axis // group_size), 1 + (encoding.offset is Offset.MIDPOINT), items)
        count = int(np.prod(shape[1:]))
        parameters = count + (head_size if encoding.channel_offset else 0)
        stored = np.ascontiguousarray(regions[:, start : start + 2 * parameters]).view("<f2")
        pairs = stored[:, :count].reshape(shape)
        offsets = (
            stored[:, count:] if encoding.channel_offset else np.zeros((heads, head_size), "<f2")
        )
        start += -(-2 * parameters // 64) * 64
        size = page_size * head_size * encoding.bits // 8
        codes = untile(regions[:, start : start + size], encoding, dims, transposed)
        start += size
        midpoints = pairs[:, :, 1] if shape[2] == 2 else np.zeros_like(pairs[:, :, 0])
        half = Half(
            encoding,
            codes,
            pairs[:, :, 0].copy(),
            midpoints.copy(),
            offsets.copy(),
            group_size,
            transposed,
        )
        halves.append(half)
    return halves


def pack(halves: list[Half]) -> np.ndarray:
    """The page that ``unpack`` takes apart."""
    parts = []
    for half in halves:
        heads = len(half.codes)
        both = [half.scales, half.midpoints][: 1 + (half.encoding.offset is Offset.MIDPOINT)]
        parameters = [np.stack(both, axis=2).reshape(heads, -1)]
        if half.encoding.channel_offset:
            parameters.append(half.channel_offsets)
        stored = np.concatenate(parameters, axis=1).astype("<f2").view(np.uint8)
        padding = np.zeros((heads, -stored.shape[1] % 64), np.uint8)
        parts += [stored, padding, tile(half.codes, half.encoding, half.transposed)]
    return np.concatenate(parts, axis=1).reshape(-1)


def tile(codes: np.ndarray, encoding: Encoding, transposed: bool) -> np.ndarray:
    """Codes [heads, tokens, channels] as bytes [heads, size]."""
    rows = codes.swapaxes(1, 2) if transposed else codes
    heads, count, columns = rows.shape
    fields = encoding.codes_per_byte
    tiles = rows.reshape(heads, count // 16, 16, columns // 4 // fields, fields, 4)
    result = np.zeros((heads, count // 16, columns // 4 // fields, 16, 4), np.uint8)
    for field in range(fields):
        result |= tiles[:, :, :, :, field].swapaxes(2, 3) << (encoding.bits * field)
    return result.reshape(heads, -1)


def untile(
    data: np.ndarray, encoding: Encoding, dims: tuple[int, ...], transposed: bool
) -> np.ndarray:
    """Bytes [heads, size] as codes [heads, tokens, channels]."""
    _, heads, page_size, head_size = dims
    count, columns = (head_size, page_size) if transposed else (page_size, head_size)
    fields = encoding.codes_per_byte
    tiles = data.reshape(heads, count // 16, columns // 4 // fields, 16, 4).swapaxes(2, 3)
    mask = np.uint8((1 << encoding.bits) - 1)
    parts = [(tiles >> (encoding.bits * field)) & mask for field in range(fields)]
    rows = np.stack(parts, axis=4).reshape(heads, count, columns)
    return np.ascontiguousarray(rows.swapaxes(1, 2) if transposed else rows)
