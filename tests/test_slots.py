"""Slots for small pieces: no two overlap, the lowest free one is given, all else goes on."""

import ctypes
import threading

import meter
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_inplace.numba_kernels import slots
from onnx_inplace.numba_kernels.slots import LARGEST, LINE, Words

pytestmark = pytest.mark.kernel

ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
DESCRIBE = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
ALLOCATOR, OTHER, KEPT, INFORMATION = 7, 1 << 40, 1 << 41, 11


class Rest:
    """The allocator of all else: notes what it is asked for."""

    def __init__(self):
        self.asked: list[tuple[str, int, int]] = []
        self.functions = (
            ALLOCATE(lambda allocator, size: self.note("give", allocator, size, OTHER)),
            FREE(lambda allocator, place: self.note("take back", allocator, place, None)),
            ALLOCATE(lambda allocator, size: self.note("keep", allocator, size, KEPT)),
        )

    def note(self, what, allocator, number, answer):
        self.asked.append((what, allocator, number))
        return answer


class Slots:
    """A pool, called as a library calls it."""

    def __init__(self):
        self.pool, self.rest = slots.Pool(), Rest()
        words = self.pool.words
        words[Words.REST], words[Words.INFORMATION] = ALLOCATOR, INFORMATION
        for word, function in zip(
            (Words.GIVE, Words.TAKE_BACK, Words.KEEP), self.rest.functions, strict=True
        ):
            words[word] = ctypes.cast(function, ctypes.c_void_p).value
        self._give = ALLOCATE(slots.give.ready().address)
        self._keep = ALLOCATE(slots.keep.ready().address)
        self._take_back = FREE(slots.take_back.ready().address)
        self._describe = DESCRIBE(slots.describe.ready().address)

    def give(self, size):
        return self._give(self.pool.at, size)

    def keep(self, size):
        return self._keep(self.pool.at, size)

    def take_back(self, place):
        self._take_back(self.pool.at, place)

    def describe(self):
        return self._describe(self.pool.at)

    def holds(self, place, size):
        begin = int(self.pool.words[Words.BEGIN])
        return begin <= place and place + size <= begin + int(self.pool.words[Words.BYTES])


def fill(place, size, byte):
    ctypes.memset(place, byte, size)


def filled(place, size, byte):
    return ctypes.string_at(place, size) == bytes([byte]) * size


wishes = st.lists(st.one_of(st.integers(1, LARGEST), st.integers(1, 300), st.none()), max_size=200)


@settings(deadline=None, max_examples=60)
@given(wishes=wishes, data=st.data())
def test_pieces_are_whole_and_apart(wishes, data):
    """A number asks for so many bytes; None gives one piece back. Bytes tell of any overlap."""
    pool, held = Slots(), []
    for number, size in enumerate(wishes):
        if size is not None:
            place = pool.give(size)
            if place != OTHER:
                assert pool.holds(place, size) and place % LINE == 0
                fill(place, size, number % 251)
                held.append((place, size, number % 251))
        elif held:
            piece = held.pop(data.draw(st.integers(0, len(held) - 1)))
            assert filled(*piece)
            pool.take_back(piece[0])
    assert all(filled(*piece) for piece in held)
    everything = pool.pool.free + len(held)
    for place, *_ in held:
        pool.take_back(place)
    assert pool.pool.free == everything == Slots().pool.free
    assert not any(what == "take back" for what, *_ in pool.rest.asked)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 192, 256, 257, 320, 2304, 12288, LARGEST])
def test_the_lowest_free_slot_is_given(size):
    pool = Slots()
    places = [pool.give(size) for _ in range(64)]
    assert places == sorted(places) and len(set(places)) == 64
    for k in (50, 3, 63, 0, 17):
        pool.take_back(places[k])
    assert [pool.give(size) for _ in range(5)] == [places[k] for k in (0, 3, 17, 50, 63)]


@pytest.mark.parametrize("size", [1, 200, 2304, LARGEST])
def test_a_slot_is_hardly_larger_than_what_was_asked_for(size):
    pool = Slots()
    stride = pool.give(size) - pool.give(size)
    lines = -(-size // LINE) * LINE
    assert lines <= abs(stride) <= 1.25 * lines


@pytest.mark.parametrize("size", [LARGEST + 1, 1 << 30, -1])
def test_a_large_piece_is_the_librarys(size):
    pool = Slots()
    assert pool.give(size) == OTHER
    pool.take_back(OTHER)
    assert pool.rest.asked == [("give", ALLOCATOR, size), ("take back", ALLOCATOR, OTHER)]


def test_without_a_free_slot_a_piece_is_the_librarys():
    pool = Slots()
    places = [pool.give(64) for _ in range(64)]
    assert OTHER not in places and pool.give(64) == OTHER
    pool.take_back(places[20])
    assert pool.give(64) == places[20]


def test_what_is_kept_takes_no_slot():
    pool = Slots()
    free = pool.pool.free
    assert pool.keep(64) == KEPT and pool.rest.asked == [("keep", ALLOCATOR, 64)]
    assert pool.pool.free == free


def test_the_library_hears_of_its_memory():
    assert Slots().describe() == INFORMATION


def test_threads_never_get_the_same_piece():
    pool, count, wrong = Slots(), 4, []
    free = pool.pool.free
    begin = threading.Barrier(count)

    def use(own):
        begin.wait()
        for _ in range(3000):
            held = [(pool.give(100), 100, own) for _ in range(10)]
            for piece in held:
                fill(*piece)
            wrong.extend(piece for piece in held if not filled(*piece))
            for place, *_ in held:
                pool.take_back(place)

    workers = [threading.Thread(target=use, args=(k,)) for k in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong and not pool.rest.asked and pool.pool.free == free


@pytest.mark.skipif(not meter.AVAILABLE, reason="needs Linux")
def test_memory_comes_with_the_first_write():
    """Addresses for all slots take 13 MiB."""
    Slots()
    meter.restart()
    before = meter.peak()
    pools = [Slots() for _ in range(8)]
    assert meter.peak() - before < 2 << 20
    assert all(pool.pool.words[Words.BYTES] > 12 << 20 for pool in pools)
