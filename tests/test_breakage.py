"""Odd models, arrays and copies: refused in words, never half done."""

import copy
import pickle

import numpy as np
import onnx
import pytest

from onnx_inplace import Session, compiler, errors
from onnx_inplace.compiler import schema
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, kv, model, op
from onnx_inplace.runner import journal

ONE = np.ones((1, 4), np.float32)


@model
def modulo(
    cache: Mutable[FLOAT["s", 4]], values: FLOAT["n", 4], position: INT64[()], by: INT64[()]
) -> Alias["cache"]:
    return kv.CacheUpdate(cache, values, position % by)


@model
def gathered(
    cache: Mutable[FLOAT["s", 4]], values: FLOAT["n", 4], rows: INT64["k"]
) -> tuple[Alias["cache"], FLOAT["k", 4]]:
    cache = kv.CacheUpdate(cache, values, 0)
    return cache, op.Gather(cache, rows)


@model
def scattered(
    cache: Mutable[FLOAT["b", "s", 4]], values: FLOAT["b", "n", 4], start: INT64["b"]
) -> Alias["cache"]:
    return op.TensorScatter(cache, values, start, axis=1)


def test_a_position_that_cannot_be_computed_changes_nothing(capfd) -> None:
    session = Session(modulo)
    cache = session.allocate("cache", s=4)
    with session.bind(cache=cache) as step:
        with pytest.raises(errors.OperatorError, match=r"^positions cannot .* modulo by zero"):
            step.run(values=ONE, position=1, by=0)
        assert not cache.any()
        step.run(values=ONE, position=5, by=4)  # nothing was written: not dirty
        assert cache[1].all()
    assert "modulo" not in capfd.readouterr().err  # said once, by the error


def test_an_operator_that_fails_behind_a_write_leaves_a_dirty_binding() -> None:
    session = Session(gathered)
    cache = session.allocate("cache", s=4)
    with session.bind(cache=cache) as step:
        for _ in range(2):  # the first run of a shape, and a prepared one
            with pytest.raises(errors.OperatorError, match="out of data bounds"):
                step.run(values=ONE, rows=[9])
            with pytest.raises(errors.DirtyState, match="CacheUpdate of `cache`"):
                step.run(values=ONE, rows=[0])
            step.reset()
            assert step.run(values=ONE, rows=[0])[0] is cache


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_sessions_and_bindings_are_no_values(duplicate) -> None:
    session = Session(gathered)
    with pytest.raises(TypeError, match="a Session cannot be copied or pickled"):
        duplicate(session)
    binding = session.bind(cache=session.allocate("cache", s=4))
    with binding, pytest.raises(TypeError, match="a Binding cannot be copied or pickled"):
        duplicate(binding)


@pytest.mark.parametrize("subclass", [np.matrix, np.ma.MaskedArray, np.memmap, np.recarray])
def test_arrays_of_other_classes_are_the_callers_array(subclass) -> None:
    session = Session(gathered)
    cache = np.zeros((4, 4), np.float32).view(subclass)
    with session.bind(cache=cache) as step:
        outputs = step.run(values=ONE, rows=[0, 1])
    assert outputs[0] is cache
    assert np.asarray(cache).tolist() == [[1] * 4, [0] * 4, [0] * 4, [0] * 4]
    assert type(outputs[1]) is np.ndarray and not np.shares_memory(outputs[1], cache)


def test_a_reference_to_an_attribute_needs_a_function() -> None:
    proto = onnx.ModelProto.FromString(scattered.serialized)
    proto.graph.node[0].attribute.append(
        onnx.AttributeProto(name="mode", ref_attr_name="how", type=onnx.AttributeProto.STRING)
    )
    with pytest.raises(errors.ModelFileError, match="refers to an attribute `how`"):
        compiler.load(proto.SerializeToString())


def test_what_a_model_is_read_from() -> None:
    with pytest.raises(TypeError, match="the bytes of a file or a program, not ModelProto"):
        Session(onnx.ModelProto())  # type: ignore[arg-type]


@model
def updated(
    cache: Mutable[FLOAT["s", 4]], values: FLOAT["n", 4], at: INT64["n", 1]
) -> Alias["cache"]:
    return kv.CacheUpdate(cache, values, op.Reshape(at, []))


@model
def scattered_rows(
    cache: Mutable[FLOAT["s", 4]], values: FLOAT["n", 4], at: INT64["n", 1]
) -> Alias["cache"]:
    return op.ScatterND(cache, at, values)


@model
def scattered_elements(
    cache: Mutable[FLOAT["s", 4]], values: FLOAT["n", 1], at: INT64["n", 1]
) -> Alias["cache"]:
    return op.ScatterElements(cache, at, values, axis=0)


@pytest.mark.parametrize("program", [updated, scattered_rows, scattered_elements])
def test_a_position_that_changes_behind_the_checks_is_the_one_that_was_checked(
    program, guarded
) -> None:
    """Another thread may hold the array: it must not move a write out of the storage."""
    cache, at = guarded((4, 4)), np.array([[1]])
    values = ONE if program is not scattered_elements else ONE[:, :1]
    with Session(program).bind(cache=cache) as step:
        step.run(values=values, at=at)
        cache[:] = 0

        def meddle(slots: object) -> None:
            at[...] = 5

        step._checks = (*step._checks, meddle)  # what comes next in a run
        step.run(values=values, at=at)
    assert at.item() == 5 and cache[:, 0].tolist() == [0, 1, 0, 0]


class Interrupted(list):
    """Slots of a run, and a user who presses Ctrl+C when the first write is about to be noted."""

    pressed = False

    def __getitem__(self, slot):
        if slot == journal.JOURNAL and not self.pressed:
            self.pressed = True
            raise KeyboardInterrupt
        return super().__getitem__(slot)


def test_an_interrupt_between_a_write_and_its_note_leaves_a_dirty_binding() -> None:
    session = Session(scattered)
    cache = session.allocate("cache", b=1, s=4)
    with session.bind(cache=cache) as step:
        step.run(values=ONE[None], start=[0])
        made = step._frame.slots
        step._frame.slots = lambda: Interrupted(made())
        with pytest.raises(KeyboardInterrupt):
            step.run(values=ONE[None], start=[1])
        step._frame.slots = made
        assert cache[0, 1].all()
        with pytest.raises(errors.DirtyState, match="1 tokens at"):
            step.run(values=ONE[None], start=[2])


def test_a_plan_names_no_dimension_that_nobody_has_named() -> None:
    @model
    def one_row(cache: Mutable[FLOAT["s", 4]], rows: FLOAT["n", 4], i: INT64[()]) -> Alias["cache"]:
        x = rows[i : i + 1]
        return kv.CacheUpdate(cache, x, i)

    (condition,) = Session(one_row).plan.conditions
    assert str(condition).startswith("0 <= i and i + ") and "unk__" not in str(condition)


def test_a_position_of_a_wrong_type_in_a_file_is_an_error_of_ours() -> None:
    @model
    def rounds(
        cache: Mutable[FLOAT["s", 4]], values: FLOAT["n", 4], n: INT64[()]
    ) -> Alias["cache"]:
        for i in range(n):
            cache = kv.CacheUpdate(cache, values, i)
        return cache

    proto = schema.ModelProto.FromString(rounds.serialized)
    (loop,) = (node for node in proto.graph.node if node.op_type == "Loop")
    loop.input[1] = "n"  # the condition is no BOOL
    with pytest.raises(errors.ModelFileError, match="Loop"):
        Session(proto.SerializeToString())


def test_a_loop_without_an_end_is_refused_at_its_first_violation(guarded, untouched) -> None:
    @model
    def endless(
        cache: Mutable[FLOAT["s", 4]], values: FLOAT["n", 4], n: INT64[()]
    ) -> Alias["cache"]:
        i = 0
        while i < n:
            cache = kv.CacheUpdate(cache, values, i)
            i = i + 1
        return cache

    cache = guarded((4, 4))
    with Session(endless).bind(cache=cache) as step, untouched(cache):
        with pytest.raises(errors.CapacityError) as caught:
            step.run(values=ONE, n=2**62)
        assert caught.value.position == 4


def test_dimensions_with_an_empty_name_are_not_one_dimension() -> None:
    proto = schema.ModelProto.FromString(scattered.serialized)
    for value in (*proto.graph.input[:2], *proto.graph.output):
        for dim in value.type.tensor_type.shape.dim[:2]:
            dim.dim_param = ""
    session = Session(proto.SerializeToString())
    cache = np.zeros((2, 4, 4), np.float32)
    with session.bind(cache=cache) as step:
        assert step.run(values=np.ones((2, 1, 4), np.float32), start=[0, 3])[0] is cache
        with pytest.raises(errors.StorageMismatch):
            step.run(values=np.ones((1, 1, 4), np.float32), start=[0, 3])
    assert cache[:, :, 0].tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("read", [False, True], ids=["not read", "read"])
def test_a_scatter_into_what_nobody_lent_is_an_ordinary_operator(read, guarded, untouched) -> None:
    """It writes a value of its own: where nobody reads that, there is nothing to refuse."""

    @model
    def aside(
        cache: Mutable[FLOAT["s", 4]], values: FLOAT["s", 4], start: INT64[1]
    ) -> tuple[Alias["cache"], FLOAT["b", "s", 4]]:
        batch = op.Unsqueeze(values, [0])
        scattered = op.TensorScatter(batch, batch, start, axis=1)
        return kv.Assign(cache, values), scattered if read else batch

    cache, values = guarded((4, 4)), np.ones((4, 4), np.float32)
    with Session(aside).bind(cache=cache) as step:
        if read:
            with untouched(cache), pytest.raises(errors.OperatorError, match="TensorScatter"):
                step.run(values=values, start=[1])
        else:
            step.run(values=values, start=[1])
            assert (cache == 1).all()
