"""The syntax tree of one function, from the whole file.

Dedenting the text of a function alone fails where a string of it reaches column 0.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import types
from typing import Any

from onnx_inplace.compiler.errors import ContractError, Finding, Location


def plain_function(f: Any) -> types.FunctionType:
    """``f``, if it can be recorded.

    Raises:
        ContractError: E100, it is a lambda, a generator, a coroutine, or no function.
    """
    if not isinstance(f, types.FunctionType):
        raise ContractError([Finding("E100", f"{f!r} is no function written with def.", None)])
    for test, what in (
        (f.__name__ == "<lambda>", "a lambda"),
        (inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f), "an async function"),
        (inspect.isgeneratorfunction(f), "a generator"),
    ):
        if test:
            message = f"{what} cannot be recorded: write a function with def and return."
            raise ContractError([Finding("E100", message, place(f))])
    return f


def place(f: types.FunctionType) -> Location:
    """Where the definition of ``f`` begins (its first decorator)."""
    return Location(f.__code__.co_filename, f.__code__.co_firstlineno)


def definition(f: types.FunctionType) -> ast.FunctionDef:
    """A fresh syntax tree of ``f``, with the line numbers of its file.

    Raises:
        ContractError: E100, there is no source.
    """
    lines = linecache.getlines(f.__code__.co_filename, f.__globals__)
    text = "".join(lines)
    first = f.__code__.co_firstlineno
    if text:
        try:
            tree = _parsed(text)
        except SyntaxError:
            tree = ast.Module([], [])
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == f.__name__:
                begin = node.decorator_list[0].lineno if node.decorator_list else node.lineno
                if begin == first:
                    copy: ast.FunctionDef = _copied(node)
                    return copy
    message = (
        f"The source of `{f.__name__}` is not found: functions from a prompt, from exec, or from "
        "a file that changed since it was imported cannot be recorded. Write it in a file."
    )
    raise ContractError([Finding("E100", message, place(f))])


@functools.lru_cache(maxsize=8)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def _copied(node: Any) -> Any:
    """A deep copy: the tree of the file is kept, and staging changes what it gets."""
    if isinstance(node, ast.AST):
        copy = type(node)(**{k: _copied(v) for k, v in ast.iter_fields(node)})
        return ast.copy_location(copy, node) if hasattr(node, "lineno") else copy
    if isinstance(node, list):
        return [_copied(e) for e in node]
    return node
