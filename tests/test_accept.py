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


def test_programs_are_there() -> None:
    assert len(PROGRAMS) >= 6
