"""An operator of ours that a library calls: what it enters first.

A value that passes from call to call, the token, is the address of words of the run: ``Run``. They
may name a compiled call for the operator, which serves while the library's tensors are where the
caller has arrays over them; a decoder's are, from token to token. Else the caller is called back.
"""

from __future__ import annotations

import enum

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from onnx_inplace.numba_kernels.append_attend import DONE
from onnx_inplace.numba_kernels.foreign import call_2, call_4, create, fetch
from onnx_inplace.numba_kernels.memory import kernel, load_int64, store_int64
from onnx_inplace.numba_kernels.sharing import Team

_INT = ir.IntType(64)


class Operator(enum.IntEnum):
    """Words of an operator, int64."""

    FUNCTIONS = 0
    """Address of the table of the library's functions."""
    BACK = 1
    """Address of a C function, int64(int64 context): ``SUCCEEDED``, or it has failed."""
    FAIL = 2
    """Address of a C function, int64(int64 code, int64 text): what tells the library so."""
    CODE = 3
    """What it takes."""
    TEXT = 4
    """What it takes: address."""
    NUMBER = 5
    """Which of the calls of a run it is."""
    END = 6


class Run(enum.IntEnum):
    """Words of a run, int64."""

    KEY = 0
    """What the caller calls it."""
    LOST = 1
    """1 when a function of the caller has neither succeeded nor said that it has failed."""
    SLOTS = 2
    """``id`` of the list that compiled calls take."""
    LAYERS = 3
    """Of each call, by its number: address of a ``Layer``, or 0."""


class Layer(enum.IntEnum):
    """Words of a compiled call, int64."""

    CALL = 0
    """Address of a C function of four int64: ``called`` of ``append_attend`` or of its like."""
    TABLE = 1
    """What it takes."""
    SPACE = 2
    """What it takes."""
    RESULT = 3
    """Where what it returns is written: address of an int64."""
    INPUTS = 4
    """Tensors that go in, the token among them."""
    OUTPUTS = 5
    """Tensors that come out, likewise."""
    SHAPES = 6
    """Address of their shapes, see ``foreign.provide``."""
    TEAM = 7
    """What it takes: address of a ``sharing.Team``."""
    PLACES = 8
    """Where the elements of tensors have to be, inputs before outputs, without the token."""


_STEPS = 3  # bits of the result of a compiled call; others say more, see ``append_attend.NEWS``
SUCCEEDED, FAILED = 0x0D0E0D0E0D0E, 0x0FA10FA10FA1
"""What a function of the caller returns; one that an interrupt has ended returns anything else."""


@intrinsic
def _slot(typing_context):
    """The address of eight bytes on the stack."""

    def generate(context, builder, signature, arguments):
        with builder.goto_entry_block():
            place = builder.alloca(_INT)
        return builder.ptrtoint(place, _INT)

    return types.int64(), generate


@intrinsic
def _call_1(typing_context, function, argument):
    """Call a C function of an integer."""

    def generate(context, builder, signature, values):
        pointer = ir.FunctionType(_INT, [_INT]).as_pointer()
        return builder.call(builder.inttoptr(values[0], pointer), [values[1]])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _take_gil(typing_context):
    """Wait for the GIL; what :func:`_leave_gil` wants."""

    def generate(context, builder, signature, arguments):
        function = ir.FunctionType(ir.IntType(32), [])
        ensure = cgutils.get_or_insert_function(builder.module, function, "PyGILState_Ensure")
        return builder.zext(builder.call(ensure, []), _INT)

    return types.int64(), generate


@intrinsic
def _leave_gil(typing_context, state):
    """Leave the GIL as it was."""

    def generate(context, builder, signature, arguments):
        function = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
        release = cgutils.get_or_insert_function(builder.module, function, "PyGILState_Release")
        builder.call(release, [builder.trunc(arguments[0], ir.IntType(32))])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@njit
def _are_there(functions, context, layer):
    """Whether tensors that go in are where arrays of a compiled call are."""
    place = _slot()
    for number in range(1, load_int64(layer + 8 * Layer.INPUTS)):
        if fetch(functions, context, number, place) != 0:
            return False
        if load_int64(place) != load_int64(layer + 8 * (Layer.PLACES + number - 1)):
            return False
    return True


@njit
def _come_there(functions, context, layer, run):
    """Whether tensors that come out are there, too. The first gets the token."""
    place, shapes = _slot(), load_int64(layer + 8 * Layer.SHAPES)
    wanted = layer + 8 * (Layer.PLACES + load_int64(layer + 8 * Layer.INPUTS) - 2)
    for number in range(load_int64(layer + 8 * Layer.OUTPUTS)):
        if create(functions, context, number, shapes, place) != 0:
            return False
        if number == 0:
            store_int64(load_int64(place), run)
        elif load_int64(place) != load_int64(wanted + 8 * number):
            return False
        shapes += 8 * (load_int64(shapes) + 1)
    return True


@njit
def _compiled(functions, context, layer, run):
    """Make the compiled call, if its arrays are over these tensors; whether all is done."""
    if not _are_there(functions, context, layer):
        return False
    if not _come_there(functions, context, layer, run):
        return False
    team = load_int64(layer + 8 * Layer.TEAM)
    store_int64(team + 8 * Team.CONTEXT, context)
    arguments = (
        load_int64(run + 8 * Run.SLOTS), load_int64(layer + 8 * Layer.TABLE),
        load_int64(layer + 8 * Layer.SPACE), team,
    )  # fmt: skip
    state = _take_gil()
    found = call_4(load_int64(layer + 8 * Layer.CALL), arguments)
    store_int64(load_int64(layer + 8 * Layer.RESULT), found)
    _leave_gil(state)
    return found & _STEPS == DONE


@kernel("int64(int64,int64)")
def compute(operator, context):
    """Do what an ``Operator`` is for, with what its context says.

    Returns:
        0, or what the library says of a failure.
    """
    functions, place = load_int64(operator + 8 * Operator.FUNCTIONS), _slot()
    status = fetch(functions, context, 0, place)
    if status != 0:
        return status
    run = load_int64(load_int64(place))
    number = load_int64(operator + 8 * Operator.NUMBER)
    layer = load_int64(run + 8 * (Run.LAYERS + number))
    if layer != 0 and _compiled(functions, context, layer, run):
        return 0
    found = _call_1(load_int64(operator + 8 * Operator.BACK), context)
    if found == SUCCEEDED:
        return 0
    if found != FAILED:
        store_int64(run + 8 * Run.LOST, 1)
    fail = load_int64(operator + 8 * Operator.FAIL)
    arguments = (
        load_int64(operator + 8 * Operator.CODE), load_int64(operator + 8 * Operator.TEXT),
    )  # fmt: skip
    return call_2(fail, arguments)
