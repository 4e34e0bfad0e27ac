"""The shape of the code: who may import whom, where imports stand, how long a file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "onnx_inplace"
MAY_IMPORT = {
    "compiler": set(),
    "numba_kernels": set(),
    "dsl": {"compiler"},
    "runner": {"compiler", "numba_kernels"},
    "api": {"compiler", "numba_kernels", "dsl", "runner"},
}
FILES = [path for folder in MAY_IMPORT for path in sorted((ROOT / folder).rglob("*.py"))]
NAMES = [str(path.relative_to(ROOT)) for path in FILES]
LINES = 400


def imports(tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    """Every import statement and the modules that it names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield node, module
            yield from ((node, f"{module}.{alias.name}") for alias in node.names)


def parts(module: str) -> set[str]:
    """The folder of ours that a module name speaks of, if any."""
    words = module.split(".")
    if words[0] in MAY_IMPORT:
        return {words[0]}  # the bare name would load a second copy
    if words[0] != PACKAGE:
        return set()
    if len(words) == 1:
        return set()
    return {words[1] if words[1] in MAY_IMPORT else "api"}


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_follow_the_arrows(path: Path) -> None:
    """A folder imports itself and what it may."""
    folder = path.relative_to(ROOT).parts[0]
    tree = ast.parse(path.read_text())
    for node, module in imports(tree):
        assert parts(module) <= MAY_IMPORT[folder] | {folder}, f"line {node.lineno}: {module}"
        relative = isinstance(node, ast.ImportFrom) and node.level
        assert not relative, f"line {node.lineno}: a relative import"
        assert module.split(".")[0] not in MAY_IMPORT, f"line {node.lineno}: bare {module}"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_imports_stand_at_the_top(path: Path) -> None:
    """Not inside of functions; the front door may load the runner when it is asked for."""
    if path.relative_to(ROOT).parts[0] == "api":
        pytest.skip("the front door loads lazily")
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in ast.walk(function):
                assert not isinstance(node, ast.Import | ast.ImportFrom), f"line {node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_files_have_one_subject(path: Path) -> None:
    """Short enough to be read at once, and each says what it is about."""
    text = path.read_text()
    assert text.count("\n") <= LINES
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "a module without a docstring"


def loaded_by(statement: str) -> set[str]:
    """Modules that a fresh interpreter has after a statement."""
    code = f"{statement}; import sys; print(*sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "tests"
    )
    return set(output.stdout.split())


def test_writing_a_model_needs_no_runner() -> None:
    """``import onnx_inplace.dsl`` loads neither numba nor onnxruntime."""
    modules = loaded_by(f"import {PACKAGE}.dsl")
    assert f"{PACKAGE}.compiler" in modules
    assert not {"numba", "llvmlite", "onnxruntime", f"{PACKAGE}.runner"} & modules


def test_no_folder_is_loaded_under_its_bare_name() -> None:
    """`dsl` beside `onnx_inplace.dsl` would be a second copy with other classes."""
    modules = loaded_by(f"import {PACKAGE}.dsl, {PACKAGE}.compiler, {PACKAGE}; {PACKAGE}.Session")
    assert f"{PACKAGE}.runner" in modules
    assert not set(MAY_IMPORT) & modules
    assert not {"planner", "alias", "session"} & modules
