"""What a file says about pages: types of paged caches, and the page formats that it declares.

Decides what stands in the typed fields (``write``), reads the declarations back (``Declared``),
and compares every type that a file gives a paged cache with the one that follows from graph inputs,
parameters and operators. What pages a type allows is decided in ``paged_types``.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import onnx
import onnx_ir as ir

from onnx_inplace.compiler import (
    declarations,
    errors,
    facts,
    formats,
    page_declarations,
    paged_operators,
    paged_types,
    schema,
)
from onnx_inplace.compiler.contract import DOMAIN
from onnx_inplace.compiler.errors import Finding
from onnx_inplace.compiler.facts import Place, Where
from onnx_inplace.compiler.formats import PageFormat
from onnx_inplace.compiler.page_declarations import PageDeclaration
from onnx_inplace.compiler.paged_types import PagedType, PageTypeError

REQUIRES = "onnx_inplace.requires"  # metadata key: operators that only our runner has

Described = tuple[Place, Any, "ir.Value | None"]


# -- writing


def write(proto: Any, model: ir.Model) -> None:
    """Write types of paged caches, the page formats in use, and who can run the file."""
    in_use: list[PageFormat] = []
    for _, info, value in _infos(proto, model):
        if value is not None and isinstance(value.type, PagedType):
            paged_types.declaration(value.type, value.shape).write(info.type)
            in_use += value.type.formats
    declare_formats(proto, in_use)
    operators = sorted({n.op_type for n in _nodes(model) if _is_ours(n)})
    kept = [(p.key, p.value) for p in proto.metadata_props if p.key != REQUIRES]
    proto.ClearField("metadata_props")
    for key, value in kept:
        proto.metadata_props.add(key=key, value=value)
    if operators:
        proto.metadata_props.add(key=REQUIRES, value=requirement(operators))


def declare_formats(proto: Any, in_use: Iterable[PageFormat]) -> None:
    """Replace the page formats that a model declares."""
    proto.ClearField("quantizations")
    for found in paged_types.canonical(in_use):
        proto.quantizations.append(found.to_proto())


def requirement(operators: Iterable[str]) -> str:
    """What a file with such operators says to its reader."""
    return (
        f"onnx-inplace: {', '.join(operators)} have no meaning in standard operators; other "
        "runtimes cannot run this file"
    )


def _is_ours(node: ir.Node) -> bool:
    return node.domain == DOMAIN and node.op_type in paged_operators.SCHEMAS


def _nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from ir.traversal.RecursiveGraphIterator(model.graph)
    for function in model.functions.values():
        yield from ir.traversal.RecursiveGraphIterator(function)


# -- reading


def restore(proto: Any, promised: declarations.Declarations) -> list[Finding]:
    """Write types of parameters and page formats again, as the JSON contract has them."""
    named = [*_promised(proto, promised)]
    pages = [page for _, page, _ in named]
    if not pages:
        return []
    own = [PageFormat.from_proto(_decoded(text)) for text in promised.formats.values()]
    known = {**formats.BUILTIN, **{f.name: f for f in own}}
    names = [name for page in pages for name in page.formats or known]
    declare_formats(proto, (known[name] for name in names if name in known))
    findings = []
    for where, page, info in named:
        if info is None:
            findings.append(Finding("E124", f"{where}, a paged cache, is gone."))
        elif not page_declarations.is_carrier(info.type):
            findings.append(Finding("E122", f"{where} is no sequence of uint8 tensors any more."))
        else:
            page.write(info.type)
    return findings


def _promised(
    proto: Any, promised: declarations.Declarations
) -> Iterator[tuple[str, PageDeclaration, Any]]:
    inputs = {v.name: v for v in proto.graph.input}
    for name, page in promised.pages.items():
        yield f"`{name}`", page, inputs.get(name)
    for function in proto.functions:
        scope = facts.function_scope(function)
        declared = promised.functions.get(scope)
        infos = {v.name: v for v in function.value_info}
        for k, page in () if declared is None else declared.pages.items():
            if k < len(function.input):
                name = function.input[k]
                yield f"`{name}` of {scope}", page, infos.get(name)


def _decoded(text: str) -> Any:
    return schema.QuantizationProto.FromString(base64.b64decode(text))


class Declared:
    """The page formats that a file declares, and the types of its parameters.

    Attributes:
        findings: declarations that cannot be (E115), or stand there twice (E125).
    """

    def __init__(self, proto: Any) -> None:
        self.findings: list[Finding] = []
        self._formats: dict[str, PageFormat] = {}
        for stored in proto.quantizations:
            try:
                found = PageFormat.from_proto(stored)
            except errors.FormatError as error:
                self.findings.append(Finding("E115", f"{error}."))
                continue
            if found.name in self._formats:
                message = f"the page format {found.name} is declared twice."
                self.findings.append(Finding("E125", message))
            self._formats[found.name] = found

    def forget(self, proto: Any, model: ir.Model) -> None:
        """Drop what the file says of intermediate paged caches: it is derived again."""
        for _, info, value in _infos(proto, model):
            if value is not None and page_declarations.read(info.type) is not None:
                value.type = value.shape = None

    def inputs(self, infos: Iterable[Any], values: Iterable[ir.Value], where: str) -> None:
        """Give parameters the types that the file declares."""
        known = {v.name: v for v in values}
        for info in infos:
            declared = page_declarations.read(info.type)
            if info.name in known and declared is not None:
                try:
                    type_, shape = paged_types.read(declared, self._formats)
                except PageTypeError as error:
                    message = f"`{info.name}`{where}: {error}."
                    self.findings.append(Finding("E115", message))
                else:
                    known[info.name].type, known[info.name].shape = type_, shape


def differences(proto: Any, model: ir.Model) -> list[Finding]:
    """Types of paged caches that were lost (E113), are none (E118), or are others (E122)."""
    findings = []
    for place, info, value in _infos(proto, model):
        stands = _stored(info.type)
        follows = None
        if value is not None and isinstance(value.type, PagedType):
            expected = type(info.type)()
            paged_types.declaration(value.type, value.shape).write(expected)
            follows = _stored(expected)
        if stands != follows:
            texts = ["no pages" if x is None else x for x in (stands, follows)]
            message = f"{place}: the file says {texts[0]}; {texts[1]} follows from the model."
            code = "E113" if stands is None else "E118" if follows is None else "E122"
            findings.append(Finding(code, message))
    return findings + _unused(proto, model)


def _stored(type_: Any) -> str | None:
    """What a type says about pages. Sizes of the carrier's vectors say nothing."""
    declared = page_declarations.read(type_)
    if declared is None:
        return None
    carrier = type_.sequence_type.elem_type.tensor_type
    rank = len(carrier.shape.dim)
    return f"{declared}, carried by tensors of type {carrier.elem_type} and rank {rank}"


def _unused(proto: Any, model: ir.Model) -> list[Finding]:
    """Page formats that are declared are those in use (E113, E118), in their order (E122)."""
    copy = type(proto)()
    declare_formats(copy, (f for allowed in _paged(model) for f in allowed))
    stands, follows = ([q.name for q in p.quantizations] for p in (proto, copy))
    if stands != follows:
        message = f"the file declares the page formats {stands}; {follows} are in use."
        lost, extra = {*follows} - {*stands}, {*stands} - {*follows}
        return [Finding("E113" if lost else "E118" if extra else "E122", message)]
    return []


def _paged(model: ir.Model) -> Iterator[tuple[PageFormat, ...]]:
    blocks: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for block in blocks:
        for value in block.inputs:
            if isinstance(value.type, PagedType):
                yield value.type.formats


# -- places


def _infos(proto: Any, model: ir.Model) -> Iterator[Described]:
    """Every ValueInfoProto with the value that it describes."""
    yield from _graph(proto.graph, model.graph, "")
    for stored in proto.functions:
        function = model.functions.get((stored.domain, stored.name, stored.overload))
        if function is None or stored.domain == DOMAIN:
            continue
        scope = facts.function_scope(stored)
        values = _values(function)
        for info in stored.value_info:
            yield Place(scope, Where.VALUE, info.name), info, values.get(info.name)
        yield from _bodies(stored.node, function, scope)


def _graph(proto: Any, graph: ir.Graph, scope: str) -> Iterator[Described]:
    values = _values(graph)
    for where, infos in (
        (Where.INPUT, proto.input),
        (Where.OUTPUT, proto.output),
        (Where.VALUE, proto.value_info),
    ):
        for info in infos:
            yield Place(scope, where, info.name), info, values.get(info.name)
    yield from _bodies(proto.node, graph, scope)


def _bodies(protos: Any, nodes: Iterable[ir.Node], scope: str) -> Iterator[Described]:
    for stored, node in zip(protos, nodes, strict=True):
        name = facts.label(stored.output)
        for attribute in stored.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                inner = node.attributes[attribute.name].as_graph()
                yield from _graph(attribute.g, inner, facts.body_scope(scope, name, attribute.name))


def _values(block: ir.Graph | ir.Function) -> Mapping[str | None, ir.Value]:
    """Values of a block by name; a result may be one of a block around it."""
    found = {v.name: v for v in (*block.outputs, *block.inputs)}
    found.update({v.name: v for node in block for v in node.outputs if v.name})
    return found
