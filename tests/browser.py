"""A browser without a window, and what it made of a page."""

from __future__ import annotations

import html.parser
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import Element

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
VOID = {"br", "hr", "img", "input", "link", "meta", "source", "wbr"}


def find() -> str:
    """The path of a browser; skips the test where there is none."""
    paths = (shutil.which(name) for name in NAMES)
    found = next((path for path in paths if path is not None), None)
    if found is None:
        pytest.skip(f"no browser ({', '.join(NAMES)}): apt-get install chromium-headless-shell")
    return found


def opened(page: Path, fragment: str = "") -> tuple[Element, list[str]]:
    """The document after its script has run, and what was written to the console."""
    options = ["--headless", "--disable-gpu", "--virtual-time-budget=2000", "--dump-dom"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.append("--no-sandbox")  # which it refuses to root
    profile = page.parent / "profile"
    command = [find(), *options, "--enable-logging=stderr", f"--user-data-dir={profile}"]
    done = subprocess.run(
        [*command, page.as_uri() + fragment],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return parse(done.stdout), [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def parse(text: str) -> Element:
    """A page as a tree."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert len(reader.open) == 1, f"{reader.open[-1].tag} is not closed"
    return reader.open[0]


class _Reader(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("document")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        element = self.open[-1]
        if len(element):
            element[-1].tail = (element[-1].tail or "") + data
        else:
            element.text = (element.text or "") + data


def text(element: Element) -> str:
    """All text of an element, spaces folded."""
    return " ".join("".join(element.itertext()).split())


def of_class(element: Element, name: str) -> Iterator[Element]:
    """Elements inside that have a class, in order."""
    return (inner for inner in element.iter() if name in inner.get("class", "").split())


def by_id(element: Element, name: str) -> Element:
    """The element with an id."""
    (found,) = (inner for inner in element.iter() if inner.get("id") == name)
    return found
