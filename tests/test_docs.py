"""Programs in the documentation run as they stand."""

import pathlib
import re
import subprocess
import sys

import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
BLOCKS = [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in [DOCS / name for name in ("formats.md", "kernels.md", "pages.md")]
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("code", BLOCKS)
def test_a_program_of_the_documentation_runs(code, tmp_path):
    (tmp_path / "program.py").write_text(code)  # models are read from their files
    command = [sys.executable, "-W", "error", "program.py"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300)
