"""HTML and SVG as a tree: what is text stays text, whatever a model calls its values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias
from xml.etree.ElementTree import Element, tostring

Child: TypeAlias = "Element | str | Iterable[Child] | None"


def e(tag: str, *children: Child, **attributes: str | float | bool | None) -> Element:
    """An element.

    ``class_`` is ``class``, ``data_root`` is ``data-root``. Attributes that are None or False are
    left out, True has no value. Children that are None are left out.
    """
    element = Element(tag)
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        key = name.rstrip("_").replace("_", "-")
        element.set(key, "" if value is True else _text(value))
    _append(element, children)
    return element


def _text(value: str | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _append(element: Element, children: Iterable[Child]) -> None:
    for child in children:
        if child is None:
            continue
        if isinstance(child, Element):
            element.append(child)
        elif isinstance(child, str):
            _write(element, child)
        else:
            _append(element, child)


def _write(element: Element, text: str) -> None:
    """Text behind what the element has already."""
    if len(element):
        last = element[-1]
        last.tail = (last.tail or "") + text
    else:
        element.text = (element.text or "") + text


def hidden(text: str) -> Element:
    """Text for those who hear the page."""
    return e("span", text, class_="heard")


def code(text: str, *more: Child, **attributes: str | None) -> Element:
    """A name or an expression of the model."""
    return e("code", text, *more, **attributes)


def document(root: Element) -> str:
    """The whole page."""
    return "<!DOCTYPE html>\n" + tostring(root, encoding="unicode", method="html") + "\n"
