"""What the author of a model declared: access of parameters, roots of results, types of pages.

All else in the contract follows from it. It is read off the typed fields, and stands in the
model's metadata once more, as JSON, which more tools keep.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from onnx_inplace.compiler import facts, formats, page_declarations, schema
from onnx_inplace.compiler.contract import Access
from onnx_inplace.compiler.page_declarations import PageDeclaration

CONTRACT = "onnx_inplace.contract"  # metadata key
VERSION = 1


class UnknownVersion(ValueError):
    """A JSON contract that another version of this product wrote."""


@dataclasses.dataclass(frozen=True, slots=True)
class FunctionDeclaration:
    """What the author of a function declared.

    Attributes:
        access: of each parameter.
        alias: {result: parameter}, by port.
        pages: of parameters that are paged caches, by port.
    """

    access: tuple[str, ...]
    alias: Mapping[int, int]
    pages: Mapping[int, PageDeclaration] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Declarations:
    """What the author of a model declared. Everything else in the contract follows from it.

    Attributes:
        inputs: access of every graph input.
        outputs: root of every graph output that has one.
        functions: by scope. Functional bodies of cache operators declare nothing and are left out.
        pages: of graph inputs that are paged caches.
        formats: page formats that are none of this version's: the QuantizationProto, in base64.
    """

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    functions: Mapping[str, FunctionDeclaration]
    pages: Mapping[str, PageDeclaration] = dataclasses.field(default_factory=dict)
    formats: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """The canonical form: keys sorted, no spaces."""
        functions: dict[str, dict[str, Any]] = {
            scope: {"access": list(f.access), "alias": {str(o): i for o, i in f.alias.items()}}
            for scope, f in self.functions.items()
        }
        for scope, f in self.functions.items():
            if f.pages:
                functions[scope]["pages"] = {str(k): p.to_json() for k, p in f.pages.items()}
        content: dict[str, Any] = {
            "version": VERSION,
            "inputs": dict(self.inputs),
            "outputs": dict(self.outputs),
            "functions": functions,
        }
        if self.pages:
            content["pages"] = {name: p.to_json() for name, p in self.pages.items()}
        if self.formats:
            content["formats"] = dict(self.formats)
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Declarations:
        """Read what ``to_json`` wrote.

        Raises:
            UnknownVersion: another version wrote it.
            ValueError: the text is something else.
        """
        content = json.loads(text)
        if not isinstance(content, dict) or "version" not in content:
            raise ValueError("it is no object that has a version")
        if content["version"] != VERSION:
            found = content["version"]
            raise UnknownVersion(f"version {found} of the JSON contract; {VERSION} is read here")
        keys = {"version", "inputs", "outputs", "functions"}
        if not keys <= set(content) <= keys | {"pages", "formats"}:
            raise ValueError(f"keys {sorted(content)}")
        try:
            functions = {
                scope: FunctionDeclaration(
                    tuple(f["access"]),
                    {int(o): int(i) for o, i in f["alias"].items()},
                    {int(k): PageDeclaration.from_json(p) for k, p in f.get("pages", {}).items()},
                )
                for scope, f in content["functions"].items()
            }
            pages = content.get("pages", {})
            found = cls(
                dict(content["inputs"]),
                dict(content["outputs"]),
                functions,
                {name: PageDeclaration.from_json(p) for name, p in pages.items()},
                dict(content.get("formats", {})),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
        names = {access.name for access in Access}
        for access in (*found.inputs.values(), *(a for f in functions.values() for a in f.access)):
            if access not in names:
                raise ValueError(f"access {access!r}")
        return found


def of_model(model: Any, has_contract: Iterable[str]) -> Declarations:
    """What the typed fields of a ``schema.ModelProto`` declare.

    ``has_contract`` holds the scopes of its own functions: functional bodies declare nothing.
    """
    names = {schema.READ_ONLY: Access.READ_ONLY.name, schema.READ_WRITE: Access.READ_WRITE.name}
    inputs = {v.name: names[v.access] for v in model.graph.input}
    outputs = {v.name: v.alias_of for v in model.graph.output if v.alias_of}
    for value in model.graph.output:  # an input that is returned as it is
        if inputs.get(value.name) == Access.READ_WRITE.name:
            outputs[value.name] = value.name
    scopes = set(has_contract)
    functions = {}
    for function in model.functions:
        scope = facts.function_scope(function)
        if scope in scopes:
            access = {v.name: names[v.access] for v in function.value_info}
            infos = {v.name: v for v in function.value_info}
            functions[scope] = FunctionDeclaration(
                tuple(access.get(name, Access.READ_ONLY.name) for name in function.input),
                {a.output_index: a.input_index for a in function.output_alias},
                _pages((k, infos.get(name)) for k, name in enumerate(function.input)),
            )
    pages = _pages((v.name, v) for v in model.graph.input)
    own = {
        q.name: base64.b64encode(q.SerializeToString(deterministic=True)).decode()
        for q in model.quantizations
        if q.name not in formats.BUILTIN
    }
    return Declarations(inputs, outputs, functions, pages, own)


K = TypeVar("K", int, str)


def _pages(infos: Iterable[tuple[K, Any]]) -> dict[K, PageDeclaration]:
    """Declarations of the paged caches among some values."""
    found = {}
    for key, info in infos:
        declared = None if info is None else page_declarations.read(info.type)
        if declared is not None:
            found[key] = declared
    return found
