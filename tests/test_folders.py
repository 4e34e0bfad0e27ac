"""Folders of compiled code: old ones go, those in use stay."""

import os
import subprocess
import sys
import threading

import pytest

from onnx_inplace.numba_kernels import folders

NOW = 1_000_000_000.0
DAY = folders.UNUSED


def folder(root, number, age, *, claimed=True):
    """A folder that was used ``age`` seconds ago, by a process that has ended."""
    path = root / f"{number:016x}"
    path.mkdir()
    (path / "code").write_text("x")
    if claimed:
        (path / "claimed").touch()
        os.utime(path / "claimed", (NOW - age, NOW - age))
    os.utime(path, (NOW - age, NOW - age))
    return path


def names(root):
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("claimed", [True, False])
def test_folders_that_were_not_used_for_a_day_go(tmp_path, claimed):
    made = [folder(tmp_path, k, (k + 2) * DAY, claimed=claimed) for k in range(folders.KEPT + 3)]
    assert set(folders.sweep(tmp_path, NOW)) == set(made[folders.KEPT :])
    assert names(tmp_path) == [path.name for path in made[: folders.KEPT]]
    assert folders.sweep(tmp_path, NOW) == []


def test_folders_of_today_stay(tmp_path):
    for k in range(20):
        folder(tmp_path, k, 0.9 * DAY)
    assert folders.sweep(tmp_path, NOW) == [] and len(names(tmp_path)) == 20


def test_what_is_not_ours_stays(tmp_path):
    for k in range(folders.KEPT):
        folder(tmp_path, k, 0)
    other = tmp_path / "something"
    other.mkdir()
    os.utime(other, (0, 0))
    (tmp_path / "file").touch()
    assert folders.sweep(tmp_path, NOW) == [] and other.exists()


def test_a_claim_makes_a_folder_the_one_used_last(tmp_path):
    made = [folder(tmp_path, k, 2 * DAY) for k in range(folders.KEPT + 1)]
    folders.claim(made[0])
    gone = folders.sweep(tmp_path, NOW)
    assert len(gone) == 1 and made[0].exists()


CLAIMANT = """
import pathlib, sys
from onnx_inplace.numba_kernels import folders
folders.claim(pathlib.Path(sys.argv[1]))
print("claimed", flush=True)
sys.stdin.read()
"""


def test_what_a_living_process_has_claimed_stays(tmp_path):
    mine = tmp_path / f"{99:016x}"
    for k in range(folders.KEPT):
        folder(tmp_path, k, 0)
    with subprocess.Popen(
        [sys.executable, "-c", CLAIMANT, mine], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"claimed\n"
        os.utime(mine / "claimed", (NOW - 99 * DAY, NOW - 99 * DAY))
        assert folders.sweep(tmp_path, NOW) == [] and mine.exists()
        process.stdin.close()
        process.wait()
    assert folders.sweep(tmp_path, NOW) == [mine] and not mine.exists()


def test_what_a_stopped_sweep_left_goes(tmp_path):
    (tmp_path / "0123456789abcdef.7.deleted").mkdir()
    folders.sweep(tmp_path, NOW)
    assert names(tmp_path) == []


def test_who_claims_while_others_sweep_has_the_folder(tmp_path):
    path = tmp_path / f"{99:016x}"
    for k in range(folders.KEPT):
        folder(tmp_path, k, -99 * DAY)
    stop = threading.Event()

    def sweep():
        while not stop.is_set():
            folders.sweep(tmp_path, NOW + 9e9)  # everything is old

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for _ in range(200):
            folders.claim(path)
            (path / "code").write_text("x")
            assert (path / "code").exists()
            os.close(folders._held.pop())  # as if the process had ended
    finally:
        stop.set()
        sweeper.join()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        folders.claim(tmp_path / "file" / "folder")
