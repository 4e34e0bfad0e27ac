"""How errors reach a terminal or a program that reads JSON. Exit codes as a compiler's.

0: fine. 1: findings, or a run that failed. 2: the command was not understood.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec

import typer
from rich.console import Console

from onnx_inplace.compiler import errors

P = ParamSpec("P")


def wide_console() -> Console:
    """Where tables have the width that they need: none of their words is broken or cut."""
    return Console(soft_wrap=True, highlight=False, markup=False, width=1000)


class UserCodeError(Exception):
    """A program of the user failed for a reason that is no finding."""

    def __init__(self, path: Path, error: BaseException):
        self.file, self.line = _place(path, error)
        super().__init__(f"{type(error).__name__}: {error}")


def _place(path: Path, error: BaseException) -> tuple[str, int]:
    """The innermost line of the user's file."""
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if Path(f.filename) == path.absolute() and f.lineno]
    return str(path), lines[-1] if lines else 1


@dataclasses.dataclass(frozen=True)
class Problem:
    """One line of a report.

    Attributes:
        file: of the author's program where it is known, else of the model.
        line: None where it is not known.
        code: of a rule, or the name of an error.
        title: of the rule.
        message: what is wrong.
        repair: what to do about it; None where that is not known.
        text: all of it, for a terminal.
    """

    file: str
    line: int | None
    code: str
    title: str
    message: str
    repair: str | None
    text: str

    def to_json(self) -> dict[str, object]:
        """Everything but the text for terminals."""
        content = dataclasses.asdict(self)
        del content["text"]
        return content


def problems(error: Exception, path: str) -> list[Problem]:
    """What an error says about the model or program at ``path``."""
    if isinstance(error, errors.ContractError):
        return [_finding(finding, path) for finding in error.findings]
    if isinstance(error, errors.ModelFileError):
        return [_problem(error.path, None, "error", "no model", error.reason)]
    if isinstance(error, errors.SavedStateError):
        return [_problem(error.path, None, "error", "no saved state", error.reason)]
    if isinstance(error, UserCodeError):
        return [_problem(_relative(error.file), error.line, "error", "failed", str(error))]
    if isinstance(error, OSError) and error.strerror:
        return [_problem(str(error.filename or path), None, "error", "failed", error.strerror)]
    name, message = type(error).__name__, str(error)
    place = str(getattr(error, "location", None) or "")
    file, _, line = place.rpartition(":")
    if line.isdecimal():
        message = message.removeprefix(f"{place}: ")
        return [_problem(_relative(file), int(line), name, name, message)]
    return [_problem(path, None, name, name, message)]


def _problem(file: str, line: int | None, code: str, title: str, message: str) -> Problem:
    place = file if line is None else f"{file}:{line}"
    return Problem(file, line, code, title, message, None, f"{place}: {code}: {message}")


def _finding(finding: errors.Finding, path: str) -> Problem:
    page, location = errors.explain(finding.code), finding.location
    file, line = (path, None) if location is None else (_relative(location.file), location.line)
    text = str(finding).removeprefix("model" if location is None else str(location))
    place = file if line is None else f"{file}:{line}"
    repair = finding.repair or page.repair
    return Problem(file, line, finding.code, page.title, finding.message, repair, f"{place}{text}")


def _relative(file: str) -> str:
    """A file as the author would call it from here."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def reported(command: Callable[P, None]) -> Callable[P, None]:
    """Report errors of the user instead of a traceback. Faults of ours keep theirs."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (errors.InplaceError, UserCodeError, OSError) as error:
            path = str(next(iter(kwargs.values()), "onnx-inplace"))
            found = problems(error, path)
            if kwargs.get("json_"):
                print_json({"ok": False, "problems": [p.to_json() for p in found]})
            else:
                for problem in found:
                    print(problem.text, file=sys.stderr)
                count = f"{len(found)} problem{'s' if len(found) > 1 else ''}"
                print(f"{count}.", file=sys.stderr)
            raise typer.Exit(1) from None

    return run


def print_json(content: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(content, indent=2, ensure_ascii=False))
