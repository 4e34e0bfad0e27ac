"""Memory that is filled while sessions are loaded comes into huge pages, unchanged."""

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from onnx_inplace.numba_kernels.memory import address
from onnx_inplace.runner import huge_pages

HUGE = 2 << 20

needed = pytest.mark.skipif(not huge_pages._possible(), reason="no huge pages on this system")


def filled(size: int) -> tuple[mmap.mmap, np.ndarray]:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, np.uint8)
    array[:] = np.arange(size, dtype=np.uint32).view(np.uint8)[:size]
    return memory, array


def in_huge_pages(array: np.ndarray) -> int:
    """Bytes of the mapping of an array that are in huge pages, as Linux counts them."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        places = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if places:
            low, high = (int(place, 16) for place in places.groups())
            inside = low < address(array) + array.size and address(array) < high
        elif inside and line.startswith("AnonHugePages:"):
            found += 1024 * int(line.split()[1])
    return found


@needed
def test_memory_that_is_filled_inside_comes_into_huge_pages_and_keeps_its_content() -> None:
    with huge_pages.of_what_is_loaded(8 * HUGE):
        _, array = filled(8 * HUGE)
    if not in_huge_pages(array):
        pytest.skip("this kernel does not collapse pages")
    assert in_huge_pages(array) >= 6 * HUGE
    expected = np.arange(array.size, dtype=np.uint32).view(np.uint8)[: array.size]
    np.testing.assert_array_equal(array, expected)


@needed
def test_memory_that_was_there_before_stays_as_it_is() -> None:
    _, array = filled(8 * HUGE)
    with huge_pages.of_what_is_loaded(8 * HUGE):
        array[:] = 1
    assert in_huge_pages(array) == 0


@needed
def test_memory_of_which_a_page_is_untouched_takes_no_more() -> None:
    with huge_pages.of_what_is_loaded(8 * HUGE):
        memory = mmap.mmap(-1, 8 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        array = np.frombuffer(memory, np.uint8)
        first = -address(array) % HUGE
        for start in range(first, array.size - HUGE + 1, HUGE):
            array[start + mmap.PAGESIZE : start + HUGE] = 1  # the first page is not touched
    assert in_huge_pages(array) == 0


@needed
def test_small_weights_are_no_reason_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> None:
        raise AssertionError("the mappings were read")

    monkeypatch.setattr(huge_pages, "_private", look)
    with huge_pages.of_what_is_loaded(HUGE - 1):
        pass
    with pytest.raises(AssertionError), huge_pages.of_what_is_loaded(HUGE):
        pass


def test_a_failure_inside_is_the_failure_that_is_seen() -> None:
    with pytest.raises(ZeroDivisionError), huge_pages.of_what_is_loaded(8 * HUGE):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ([], [(0, 2 * HUGE)], [0, HUGE]),
        ([], [(1, 2 * HUGE)], [HUGE]),
        ([(0, HUGE)], [(0, 3 * HUGE)], [HUGE, 2 * HUGE]),
        ([(HUGE, HUGE + 4096)], [(0, 3 * HUGE)], [0, 2 * HUGE]),
        ([(0, HUGE + 1), (3 * HUGE, 4 * HUGE)], [(0, 4 * HUGE)], [2 * HUGE]),
    ],
)
def test_blocks_meet_nothing_that_was_there(before, now, expected) -> None:
    assert list(huge_pages._blocks(before, now)) == expected


def test_blocks_in_a_row_are_one_call() -> None:
    found = list(huge_pages._runs([HUGE, 2 * HUGE, 5 * HUGE]))
    assert found == [(HUGE, 3 * HUGE), (5 * HUGE, 6 * HUGE)]
    assert list(huge_pages._runs([])) == []
