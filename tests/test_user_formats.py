"""Formats of a user's own, made of the vocabulary of ``encodings``: fields count, not names."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir
import page_specification as spec
import pytest
from paged_tables import Table
from test_page_specification import bounds, tokens

from onnx_inplace import formats
from onnx_inplace.compiler import schema
from onnx_inplace.compiler.encodings import Encoding, Fit, Grouping, Offset
from onnx_inplace.compiler.formats import PageFormat

pytestmark = pytest.mark.kernel


def vocabulary() -> list[Encoding]:
    """All that can be said about integers, with a few sizes of groups."""
    choices = itertools.product(
        (ir.DataType.UINT8, ir.DataType.UINT4, ir.DataType.UINT2),
        (Grouping.TOKEN, Grouping.CHANNEL),
        (0, 16, 32, 64, 128),
        Offset,
        (False, True),
        Fit,
        (False, True),
    )
    found = []
    for choice in choices:
        try:
            found.append(Encoding(*choice))
        except ValueError:
            continue  # has no meaning: see test_formats
    return found


ENCODINGS = vocabulary()


@pytest.mark.parametrize("seed", range(8))
def test_kernels_agree_with_the_specification_on_any_format(seed: int) -> None:
    """Bytes after writes here and there, numbers, and bytes after conversion, of drawn formats."""
    rng = np.random.default_rng(seed)
    dims = [(2, 2, 64, 64), (2, 1, 128, 80), (2, 2, 32, 96), (2, 1, 16, 48)][seed % 4]
    for _ in range(12):
        key, value, other = (ENCODINGS[i] for i in rng.integers(len(ENCODINGS), size=3))
        mine, target = PageFormat("MINE", key, value), PageFormat("OTHER", other, key)
        try:
            table = Table(dims, ["MINE", "OTHER"], [mine, target])
        except formats.FormatError:
            continue  # groups of tokens that a page of this size does not have
        expected, fill = table.raw[0].copy(), 0
        for _ in range(4):
            position = int(rng.integers(min(fill + 3, dims[2])))
            x = tokens(int(rng.integers(1, dims[2] - position + 1)), dims[3], dims[1], fill)
            table.write([0], x, position)
            expected = spec.write(mine, expected, dims, x, position, fill)
            fill = max(fill, position + x.shape[2])
            np.testing.assert_array_equal(table.raw[0], expected, str(mine))
        np.testing.assert_array_equal(table.read(0), spec.decode(mine, expected, dims))
        table.convert(0, 1)
        converted = spec.convert(mine, target, expected, dims, fill)
        np.testing.assert_array_equal(table.raw[1], converted, f"{mine} to {target}")
        assert table.guards_intact()


@pytest.mark.parametrize("encoding", ENCODINGS, ids=lambda e: f"{e.storage.name}-{e.grouping.name}")
def test_every_encoding_keeps_its_bound_and_survives_its_message(encoding: Encoding) -> None:
    mine = PageFormat("MINE", encoding, encoding)
    message = schema.QuantizationProto.FromString(mine.to_proto().SerializeToString())
    assert PageFormat.from_proto(message) == mine
    if encoding.fit is Fit.SEARCH:
        return  # clips ranges on purpose
    x = tokens(128)
    page = spec.encode(mine, x, 128)
    dims = (2, 2, 128, 64)
    for half, y, values in zip(
        spec.unpack(mine, page, dims), spec.decode(mine, page, dims), x, strict=True
    ):
        error = y - values
        if encoding.rotated:
            error = spec.rotate(error)
        assert (np.abs(error) <= bounds(half) + 1e-5 * np.abs(values).max()).all()
