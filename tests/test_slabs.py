"""Memory of caches of one size: side by side, zeroed, given back, seen by meters."""

import gc
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import slabs
from onnx_inplace.runner.slabs import LARGEST, Slabs

SIZE = 100_000


def test_arrays_of_one_size_lie_side_by_side() -> None:
    memory = Slabs()
    arrays = [memory.take(SIZE, zeroed=True) for _ in range(5)]
    places = [address(a) for a in arrays]
    assert set(np.diff(places)) == {-(-SIZE // 64) * 64}
    assert all(place % 64 == 0 for place in places)
    assert places[0] % (2 << 20) == 0, "the first one begins a huge frame"


@pytest.mark.parametrize("size", [1, 63, 64, 65, SIZE, LARGEST])
def test_arrays_share_nothing_and_have_their_size(size: int) -> None:
    memory = Slabs()
    arrays = [memory.take(size, zeroed=True) for _ in range(20)]
    for number, array in enumerate(arrays):
        array[:] = number
    assert all(a.nbytes == size and (a == n).all() for n, a in enumerate(arrays))


def test_memory_is_used_again_and_zeroed() -> None:
    memory = Slabs()
    first, second = memory.take(SIZE, zeroed=True), memory.take(SIZE, zeroed=True)
    place = address(first)
    first[:] = second[:] = 7
    del first
    again = memory.take(SIZE, zeroed=True)
    assert address(again) == place and not again.any() and (second == 7).all()


def test_a_view_holds_its_memory() -> None:
    memory = Slabs()
    array = memory.take(SIZE, zeroed=True)
    array[:] = 7
    view = array.view(np.int16)[10:20].reshape(2, 5)
    place = address(array)
    del array
    gc.collect()
    assert address(memory.take(SIZE, zeroed=True)) != place
    assert (view == 0x0707).all()
    del view
    assert address(memory.take(SIZE, zeroed=True)) == place


def test_a_full_slab_is_followed_by_another_one_and_has_room_again() -> None:
    memory = Slabs()
    arrays = [memory.take(LARGEST, zeroed=False) for _ in range(9)]
    assert len({address(a) for a in arrays}) == 9
    places = {address(a) for a in arrays[:3]}
    del arrays[:3]
    arrays += [memory.take(LARGEST, zeroed=False) for _ in range(10)]  # two slabs of eight
    held = {address(a) for a in arrays}
    assert len(held) == 16 and places < held


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is Linux's")
def test_what_nobody_holds_goes_back_to_the_system() -> None:
    memory = Slabs()
    arrays = [memory.take(1 << 20, zeroed=True) for _ in range(100)]
    for array in arrays:
        array[:] = 1
    before = resident()
    del array, arrays[::2]  # every other one: holes, not an end
    assert before - resident() > 40 << 20
    assert all((a == 1).all() for a in arrays)


def test_a_meter_of_memory_sees_it() -> None:
    memory = Slabs()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        array = memory.take(LARGEST, zeroed=True)
        assert tracemalloc.get_traced_memory()[0] - before >= LARGEST
        del array
        assert tracemalloc.get_traced_memory()[0] - before < SIZE
    finally:
        tracemalloc.stop()


def test_threads_take_and_give_back_at_once() -> None:
    memory = Slabs()
    faults: list[int] = []

    def use(mark: int) -> None:
        for _ in range(300):
            array = memory.take(SIZE, zeroed=True)
            if array.any():
                faults.append(mark)
            array[:] = mark
            if (array != mark).any():
                faults.append(mark)

    threads = [threading.Thread(target=use, args=(mark,)) for mark in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


@pytest.mark.parametrize("shape", [(), (3,), (3, 8192, 64), (64, 8192, 64)], ids=str)
def test_arrays_for_callers_are_zeroed_writable_and_whole(shape: tuple[int, ...]) -> None:
    array = slabs.zeros(shape, np.dtype(np.float16))
    assert array.shape == shape and array.dtype == np.float16
    assert array.flags.c_contiguous and array.flags.writeable and not array.any()
