"""Programs as users write them: each runs as it stands, in a folder of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = sorted((Path(__file__).parent / "accept").glob("*.py"))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_program_runs_as_it_stands(program: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("ok")


@pytest.mark.parametrize("way", ["off", "fused"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_program_runs_without_fused_steps_and_with_all_that_can_be(
    program: Path, way: str, tmp_path: Path
) -> None:
    """No program has a product, beside which alone a session fuses: ``all_fused`` does more."""
    done = subprocess.run(
        [sys.executable, str(program.parents[1] / "all_fused.py"), way, str(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    *_, last, frames = done.stdout.splitlines()
    assert last.startswith("ok")
    runs = program.stem != "contract"  # which only loads
    assert (frames != "fused frames: 0") == (runs and way == "fused"), frames


def test_programs_are_there() -> None:
    assert len(PROGRAMS) >= 6
