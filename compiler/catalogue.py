"""One page for every rule: what it demands, a program that breaks it, and the same one repaired.

The pages are files (``rules/E104.md``). The line that breaks the rule ends with the code in a
comment; the tests run both programs. Whether an author's program keeps a rule, and what a finding
says about it, is decided elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from importlib import resources

_FOLDER = resources.files(__name__.rpartition(".")[0]) / "rules"
_PAGE = re.compile(
    r"# (?P<code>E\d{3}): (?P<title>[^\n]+)\n\n"
    r"(?P<rule>.+?)\n\n"
    r"Refused:\n\n```python\n(?P<failing>.+?)\n```\n\n"
    r"Repair: (?P<repair>.+?)\n\n"
    r"```python\n(?P<repaired>.+?)\n```\n",
    re.DOTALL,
)

CODES: tuple[str, ...] = tuple(
    sorted(file.name.removesuffix(".md") for file in _FOLDER.iterdir() if file.name.endswith(".md"))
)


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """A rule.

    Attributes:
        code: "E104".
        title: what is wrong, in a few words.
        rule: what is demanded, and why.
        failing: a program that breaks the rule.
        repair: what to do about it, in one sentence.
        repaired: the same program, right.
        text: the whole page, as Markdown.
    """

    code: str
    title: str
    rule: str
    failing: str
    repair: str
    repaired: str
    text: str


@functools.cache
def explain(code: str) -> Page:
    """The page of a rule.

    Raises:
        KeyError: there is no such rule.
    """
    if code not in CODES:
        raise KeyError(code)
    text = (_FOLDER / f"{code}.md").read_text(encoding="utf-8")
    match = _PAGE.fullmatch(text)
    if match is None:
        raise ValueError(f"rules/{code}.md is no page of a rule")
    return Page(**match.groupdict(), text=text)
