"""A run of one layer, from the caller's arguments to its output, in one call."""

from __future__ import annotations

import enum

from onnx_inplace.numba_kernels.append_attend import REFUSED
from onnx_inplace.numba_kernels.foreign import call_4
from onnx_inplace.numba_kernels.intake import taken
from onnx_inplace.numba_kernels.memory import load_int64, on_demand, store_int64
from onnx_inplace.numba_kernels.objects import LIST


class Words(enum.IntEnum):
    """What a run has to know, in int64."""

    COUNT = 0
    """Inputs."""
    EXPECTED = 1
    """What they have to be: address of ``intake.table``."""
    KIND = 2
    """``objects.ARRAY``."""
    PLACES = 3
    """Slots of the inputs: address of (count) int64. -1: the slot has its copy already."""
    SLOTS = 4
    """Address of the slots: (slots) int64, addresses of objects."""
    OUTPUT = 5
    """The slot of the output."""
    CALL = 6
    """Address of the layer's call: ``called`` of ``append_attend`` or of its like."""
    TABLE = 7
    """What it takes."""
    CLAIM = 8
    """Address of the ``Claim`` of a paged cache; 0: there is none."""
    END = 9


class Claim(enum.IntEnum):
    """Who uses a paged cache, in int64."""

    OWNER = 0
    """More than 0 while its owner changes it, or is about to."""
    RUNS = 1
    """More than 0 while runs use it that Python makes, or is about to."""
    RUN = 2
    """1 while a run uses it that was made here."""
    END = 3


# With the GIL, but for what the layer does without it: nobody changes an array that is judged, or
# claims pages between the look and the claim.
@on_demand("int64(" + ",".join(["int64"] * 6) + ")", nogil=False)
def run(objects, output, lent, words, space, team):
    """Take inputs as ``intake.take`` does, claim pages, and make the call of a layer.

    Args:
        objects: address of the addresses of the inputs.
        output: ``id`` of the array that gets the output.
        lent: as of ``intake.take``.
        words: address of ``Words``.
        space: as of ``append_attend.append_and_attend``.
        team: likewise.

    Returns:
        What the layer's call says; ``REFUSED``, too, if it was not made.
    """
    count = load_int64(words + 8 * Words.COUNT)
    expected, kind = load_int64(words + 8 * Words.EXPECTED), load_int64(words + 8 * Words.KIND)
    if not taken(objects, expected, count, kind, lent):
        return REFUSED
    slots, places = load_int64(words + 8 * Words.SLOTS), load_int64(words + 8 * Words.PLACES)
    for k in range(count):
        place = load_int64(places + 8 * k)
        if place >= 0:
            store_int64(slots + 8 * place, load_int64(objects + 8 * k))
    store_int64(slots + 8 * load_int64(words + 8 * Words.OUTPUT), output)
    claim = load_int64(words + 8 * Words.CLAIM)
    if claim != 0:
        for word in range(Claim.END):
            if load_int64(claim + 8 * word) != 0:
                return REFUSED
        store_int64(claim + 8 * Claim.RUN, 1)
    as_list = words + 8 * Words.SLOTS - LIST  # where a list has the address of its items
    arguments = as_list, load_int64(words + 8 * Words.TABLE), space, team
    done = call_4(load_int64(words + 8 * Words.CALL), arguments)
    if claim != 0:
        store_int64(claim + 8 * Claim.RUN, 0)
    return done
