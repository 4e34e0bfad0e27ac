"""The table of leases, and which arrays can be lent."""

import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from onnx_inplace.compiler import errors
from onnx_inplace.runner import storage
from onnx_inplace.runner.storage import Interval, Leases, interval

FLOAT = np.dtype(np.float32)


def test_allocated_storage_is_aligned_and_zero(address) -> None:
    for dtype in (np.float32, np.int8, ml_dtypes.bfloat16):
        array = storage.zeros((3, 5, 7), np.dtype(dtype))
        assert array.shape == (3, 5, 7) and array.dtype == dtype and array.flags.c_contiguous
        assert address(array) % 64 == 0 and not array.view(np.uint8).any()


def test_an_interval_reaches_from_the_lowest_to_the_highest_byte(address) -> None:
    base = np.zeros((4, 6), np.int16)
    start = address(base)
    assert interval(base) == (start, start + 48)
    assert interval(base[1:3]) == (start + 12, start + 36)
    assert interval(base[:, 2]) == (start + 4, start + 4 + 3 * 12 + 2)
    assert interval(base[::-1]) == (start, start + 48)
    empty = interval(base[:, :0])
    assert empty.start == empty.stop


@pytest.mark.parametrize(
    "other, together",
    [((0, 10), False), ((10, 11), True), ((5, 11), True), ((19, 30), True), ((20, 30), False)],
)
def test_neighbours_do_not_overlap(other: tuple[int, int], together: bool) -> None:
    assert Interval(10, 20).overlaps(Interval(*other)) is together
    assert Interval(*other).overlaps(Interval(10, 20)) is together


def test_what_is_empty_overlaps_nothing() -> None:
    assert not Interval(15, 15).overlaps(Interval(10, 20))


def test_a_lease_covers_its_bytes_until_it_is_given_back() -> None:
    table, array = Leases(), np.zeros(100, np.uint8)
    start = interval(array).start
    key = table.take({"a": array[20:40], "b": array[60:80]})
    for where, holder in ((19, None), (20, "a"), (39, "a"), (40, None), (79, "b"), (80, None)):
        place = Interval(start + where, start + where + 1)
        assert table.holder(place) == holder
        assert table.lent(*place) is (holder is not None)
    table.give_back(key)
    table.give_back(key)
    assert table.holder(interval(array)) is None and not table.lent(*interval(array))


def test_all_arrays_are_leased_or_none() -> None:
    table, array = Leases(), np.zeros(100, np.uint8)
    table.take({"a": array[50:60]})
    with pytest.raises(errors.BindingInUse) as caught:
        table.take({"free": array[:10], "taken": array[55:57]})
    assert (caught.value.name, caught.value.holder) == ("taken", "a")
    table.take({"free": array[:10]})


def test_two_arrays_of_one_call_overlap() -> None:
    array = np.zeros(10)
    with pytest.raises(errors.SharedStorage) as caught:
        Leases().take({"a": array[:6], "b": array[5:]})
    assert {caught.value.name, caught.value.other} == {"a", "b"}
    Leases().take({"a": array[:5], "b": array[5:], "nothing": array[3:3]})


def test_memory_that_a_session_reads_is_never_leased_but_may_be_read_twice() -> None:
    table, weight = Leases(), np.zeros(10)
    first, second = table.lend({"w": weight}), table.lend({"v": weight[2:]})
    with pytest.raises(errors.SharedStorage) as caught:
        table.take({"cache": weight[:3]})
    assert (caught.value.name, caught.value.other) == ("cache", "w")
    table.give_back(first)
    table.take({"cache": weight[:2]})
    with pytest.raises(errors.BindingInUse):
        table.lend({"u": weight})
    table.give_back(second)
    table.take({"rest": weight[2:]})


def test_a_finalizer_in_the_middle_of_a_lease_neither_waits_nor_disturbs() -> None:
    """Collection can run at any allocation, in the thread that holds the table's lock."""
    table, array = Leases(), np.zeros(100, np.uint8)
    key = table.take({"old": array[:50]})
    with table._lock:  # as if `take` was interrupted here
        table.give_back(key)
    assert table.holder(interval(array[:50])) is None
    table.take({"new": array})


@pytest.mark.parametrize("threads", [4])
def test_of_many_threads_one_gets_the_storage(threads: int) -> None:
    table, array, barrier = Leases(), np.zeros(100, np.uint8), threading.Barrier(threads)

    def take(k: int) -> bool:
        barrier.wait(10)
        try:
            table.take({f"a{k}": array[k : 60 + k]})
        except errors.BindingInUse:
            return False
        return True

    with ThreadPoolExecutor(threads) as pool:
        assert sum(pool.map(take, range(threads))) == 1


def refuse(array: object) -> Exception:
    with pytest.raises(errors.BindingError) as caught:
        storage.check_layout("cache", storage.check("cache", array, FLOAT))
    assert caught.value.name == "cache"
    return caught.value


def frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def test_storage_is_an_array() -> None:
    for other in ([0.0], 1.0, None, memoryview(b"1234"), np.float32(1)):
        assert isinstance(refuse(other), errors.StorageMismatch)


def test_storage_that_cannot_be_written_is_refused_before_all_else(tmp_path) -> None:
    """Case 95. The order of checks is part of the contract."""
    path = tmp_path / "cache.bin"
    path.write_bytes(bytes(64))
    repeated = np.lib.stride_tricks.as_strided(np.zeros(3, np.float32), (4, 3), (0, 4))
    for array in (
        frozen(np.zeros(4, np.float32)),
        frozen(np.zeros(4, ">f8")),
        np.broadcast_to(np.zeros(3, np.float32), (4, 3)),
        repeated,
        np.memmap(path, np.float32, "r"),
        np.frombuffer(bytes(16), np.float32),
    ):
        assert isinstance(refuse(array), errors.ImmutableStorage)
    writable = np.memmap(path, np.float32, "r+")
    assert storage.check("cache", writable, FLOAT) is writable


def test_elements_are_of_the_declared_type_in_native_order() -> None:
    for array in (np.zeros(4), np.zeros(4, ">f4"), np.zeros(4, object), np.zeros(4, np.int32)):
        error = refuse(array)
        assert isinstance(error, errors.StorageMismatch)
        assert (error.expected, error.given) == (FLOAT, array.dtype)
    structured = np.zeros(4, [("x", np.float32)])
    assert isinstance(refuse(structured), errors.StorageMismatch)


def test_storage_is_one_block_in_c_order() -> None:
    square = np.zeros((4, 4), np.float32)
    odd = np.zeros(17, np.uint8)[1:].view(np.float32)
    for array in (
        square.T,
        square[:, 1:3],
        square[::2],
        square[::-1],
        np.asfortranarray(square + 1),
    ):
        assert isinstance(refuse(array), errors.StorageMismatch)
    if not odd.flags.aligned:
        assert isinstance(refuse(odd), errors.StorageMismatch)
    storage.check_layout("cache", square[1:3])
