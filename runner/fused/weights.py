"""Weights of fused steps, as kernels take them: made once for a session, kept beside the model.

The copies of all products are one piece of memory. Where the model has a path they are a file
beside it, ``M.onnx.fused``, which the next session of any process maps; it is made again when it is
missing, damaged, or of other weights. ``ONNX_INPLACE_FUSED`` names a folder for such files, or is
``0``: then each session makes its own copies in memory, as it does of small models, of models
without a path, and in folders that cannot be written.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_inplace.compiler import matrices as compiled
from onnx_inplace.compiler.arena import ALIGNMENT
from onnx_inplace.compiler.fused import Fusion
from onnx_inplace.compiler.matrices import ProductWeights
from onnx_inplace.numba_kernels.fused import panels
from onnx_inplace.runner.actions import Array
from onnx_inplace.runner.fused import blob, matrices, sources
from onnx_inplace.runner.fused.blob import Blob
from onnx_inplace.runner.fused.buffers import aligned
from onnx_inplace.runner.fused.matrices import Packed, Unpacked

_VARIABLE = "ONNX_INPLACE_FUSED"
_WORTH_A_FILE = 1 << 20  # [bytes] of weights: fewer are repacked before anyone notices

Part = dict[str, Any]
"""Of one product, for a head of a file: its layout, and where data and bias begin; or why not."""


class Weights:
    """Weights of all fused steps of a session. Safe in several threads.

    Attributes:
        mapped: whether the copies are a file that other processes share.
        nbytes: of the copies.
    """

    def __init__(
        self, products: Sequence[ProductWeights], parts: Sequence[Part], data: Array, mapped: bool
    ):
        self.mapped, self.nbytes = mapped, data.size
        self._products = products  # so that no other tensor gets the identity of one of these
        self._found = {
            _key(product): _view(part, data) for product, part in zip(products, parts, strict=True)
        }
        self._lock = threading.Lock()
        self._plain: dict[int, tuple[ir.TensorProtocol, Array]] = {}

    def packed(self, product: ProductWeights) -> Packed:
        """The copies of a product's weights.

        Raises:
            ValueError: its matrices cannot be one.
        """
        found = self._found[_key(product)]
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def plain(self, tensor: ir.TensorProtocol) -> Array:
        """The tensor as the file has it, where possible without a copy."""
        with self._lock:
            found = self._plain.get(id(tensor))
            if found is None:  # the tensor is kept, so that no other gets its id
                found = self._plain[id(tensor)] = tensor, tensor.numpy()
            return found[1]


def load(fusion: Fusion, model: Path | None = None) -> Weights:
    """The weights of all fused steps: mapped, or made now, and kept for the next time.

    Args:
        fusion: of a plan.
        model: the file of the model; None: it has none.
    """
    products = tuple(compiled.distinct(fusion))
    size = sum(t.nbytes for p in products for t in p.every if t is not None)
    path = None if model is None or size < _WORTH_A_FILE else _place(model)
    if path is None:
        return Weights(products, *_make(products), mapped=False)
    given = sources.of(products)
    found = blob.read(path)
    key = None
    if found is not None:
        known = given.stamps and given.stamps == found.head.stamps
        proven = bool(known) and given.outline == found.head.outline
        key = found.head.key if proven else given.key()
        if key == found.head.key and _fit(found, products):
            if found.touched or (given.stamps and not proven):  # the next time will be quick
                again = _keep(path, key, given, found.head.parts, found.data)
                found = again if again is not None and _fit(again, products) else found
            return Weights(products, found.head.parts, found.data, mapped=True)
    parts, data = _make(products)
    found = _keep(path, key or given.key(), given, parts, data)
    if found is None or not _fit(found, products):
        return Weights(products, parts, data, mapped=False)
    return Weights(products, found.head.parts, found.data, mapped=True)


def _place(model: Path) -> Path | None:
    """Where the copies of a model are kept; None: nowhere."""
    folder = os.environ.get(_VARIABLE)
    if folder is None:
        return model.with_name(f"{model.name}.fused")
    if folder in ("", "0"):
        return None
    whose = blob.digest(os.fsencode(model.absolute()))[:12]
    return Path(folder) / f"{model.name}.{whose}.fused"


def _keep(
    path: Path, key: str, given: sources.Sources, parts: Sequence[Part], data: Array
) -> Blob | None:
    """Write a file and map it; None: there is no place for it, or another process wants it too."""
    try:
        blob.write(path, key, given.outline, given.stamps, parts, data)
    except OSError:
        return None
    found = blob.read(path)
    return found if found is not None and found.head.key == key else None


def _key(product: ProductWeights) -> tuple[str, tuple[int, ...]]:
    return product.form, tuple(map(id, product.every))


def _make(products: Sequence[ProductWeights]) -> tuple[list[Part], Array]:
    parts: list[Part] = []
    read: list[Unpacked | None] = []
    end = 0
    for product in products:
        try:
            found = matrices.read(product)
        except ValueError as error:
            parts.append({"refused": str(error)})
            read.append(None)
            continue
        begin, end = end, end + compiled.padded(found.layout.nbytes)
        bias = None
        if found.bias is not None:
            bias, end = end, end + compiled.padded(found.bias.nbytes)
        parts.append(
            {"layout": list(dataclasses.astuple(found.layout)), "data": begin, "bias": bias}
        )
        read.append(found)
    data = aligned(end)
    data[:] = 0
    for part, unpacked in zip(parts, read, strict=True):
        if unpacked is not None:
            packed = _view(part, data)
            assert not isinstance(packed, str)
            unpacked.write(packed.data)
            if packed.bias is not None:
                packed.bias[:] = unpacked.bias
    data.flags.writeable = False
    return parts, data


def _view(part: Part, data: Array) -> Packed | str:
    """The copies of one product, or why there are none."""
    if "refused" in part:
        return str(part["refused"])
    layout, begin, bias = panels.Layout(*part["layout"]), part["data"], part["bias"]
    size = 4 * panels.PANEL * layout.panels
    added = None if bias is None else data[bias : bias + size].view(np.float32)
    return Packed(layout, data[begin : begin + layout.nbytes], added)


def _fit(found: Blob, products: Sequence[ProductWeights]) -> bool:
    """Whether the parts of a file are those that products read: kernels check no bounds."""
    if len(found.head.parts) != len(products):
        return False
    pairs = zip(found.head.parts, products, strict=True)
    try:
        return all("refused" in p or _fits(p, product, found.data.size) for p, product in pairs)
    except (KeyError, TypeError):  # no such field, or of another type
        return False


def _fits(part: Part, product: ProductWeights, size: int) -> bool:
    layout, begin, bias = panels.Layout(*part["layout"]), part["data"], part["bias"]
    biased = any(b is not None for b in product.biases)
    numbers = [*part["layout"], begin, bias if biased else 0]
    if not all(isinstance(n, int) and n >= 0 for n in numbers) or (bias is not None) != biased:
        return False
    if not matrices.fits(layout, product) or begin % ALIGNMENT or (bias or 0) % ALIGNMENT:
        return False
    room = 4 * panels.PANEL * layout.panels
    return begin + layout.nbytes <= size and (bias is None or bias + room <= size)
