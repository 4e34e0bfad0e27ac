"""Questions about a piece of syntax: which variables it binds, and whether control leaves it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

_SCOPES = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes of this scope only; of an inner scope the node itself."""
    yield node
    if not isinstance(node, _SCOPES):
        for child in ast.iter_child_nodes(node):
            yield from walk(child)


def assigned(statements: Iterable[ast.AST]) -> list[str]:
    """Variables that the statements bind or delete, in order of appearance."""
    names: dict[str, None] = {}
    for statement in statements:
        for node in walk(statement):
            match node:
                case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                    names[name] = None
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    names[name] = None
                case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                    names.update((a.asname or a.name.partition(".")[0], None) for a in aliases)
                case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                    names[name] = None
                case ast.MatchMapping(rest=str(name)):
                    names[name] = None
                case ast.comprehension():
                    pass
        for node in ast.walk(statement):  # := in a comprehension binds outside of it
            if isinstance(node, ast.NamedExpr) and isinstance(node.target, ast.Name):
                names[node.target.id] = None
    return list(names)


def changed(statements: Iterable[ast.AST]) -> list[str]:
    """Variables whose members the statements assign: ``x[0] = ...``, ``x.k = ...``."""
    names: dict[str, None] = {}
    for statement in statements:
        for node in walk(statement):
            if isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(
                node.ctx, ast.Load
            ):
                base: ast.expr = node
                while isinstance(base, ast.Subscript | ast.Attribute):
                    base = base.value
                if isinstance(base, ast.Name):
                    names[base.id] = None
    return list(names)


def jump(statements: Iterable[ast.AST], in_loop: bool = False) -> ast.stmt | None:
    """The first statement that leaves the block; a break of a loop inside of it does not."""
    for node in statements:
        if isinstance(node, ast.Return) or (
            isinstance(node, ast.Break | ast.Continue) and not in_loop
        ):
            return node
        if isinstance(node, _SCOPES):
            continue
        if isinstance(node, ast.For | ast.While):
            found = jump(node.body, True) or jump(node.orelse, in_loop)
        else:
            found = jump(ast.iter_child_nodes(node), in_loop)
        if found is not None:
            return found
    return None


def can_be_thunk(node: ast.AST) -> bool:
    """A lambda would keep what := binds to itself."""
    return not any(
        isinstance(n, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) for n in ast.walk(node)
    )
