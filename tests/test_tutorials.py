"""Tutorials and the example of the README, run as a reader runs them, each in its own folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from onnx_inplace import errors

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "tutorials").glob("[0-9]*.py"))


def run(program: Path, folder: Path) -> str:
    """What a program prints; a warning is an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        cwd=folder,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs(tutorial: Path, tmp_path: Path) -> None:
    printed = run(tutorial, tmp_path)
    assert "refused:" in printed, "a tutorial shows what is refused, too"


def test_there_are_tutorials() -> None:
    assert len(TUTORIALS) >= 2


def test_example_of_the_readme_runs(tmp_path: Path) -> None:
    examples = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert examples
    for number, example in enumerate(examples):
        program = tmp_path / f"example_{number}.py"
        program.write_text(example)
        run(program, tmp_path)


def test_page_of_errors_has_every_error() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    classes = [name for name, x in vars(errors).items() if isinstance(x, type)]
    raised = [n for n in classes if issubclass(getattr(errors, n), errors.InplaceError)]
    assert {n for n in raised if f"| `{n}` |" not in page} == {"InplaceError"}


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
