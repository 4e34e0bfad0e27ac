"""Kinds of changes of one annotation in a file, each made wherever there is such an annotation."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

from onnx_inplace.compiler import contract, declarations, schema

Changed = tuple[Any, str]  # a changed model, and a word that the error must say
Kind = Callable[[Any], Iterator[Changed]]


def copied(proto: Any) -> Any:
    again = type(proto)()
    again.CopyFrom(proto)
    return again


@dataclasses.dataclass(frozen=True)
class Site:
    """Where an annotation may stand.

    Attributes:
        message: ValueInfoProto, NodeProto or FunctionProto.
        block: the graph or function in which it stands.
        around: ``block`` and those around it, the graph of the model or a function last.
        seen: names of values that ``block`` sees.
        functions: names of functions.
    """

    message: Any
    block: Any
    around: tuple[Any, ...]
    seen: frozenset[str]
    functions: frozenset[str]

    @property
    def top(self) -> Any:
        return self.around[-1]

    @property
    def is_value(self) -> bool:
        return self.message.DESCRIPTOR.name == "ValueInfoProto"

    @property
    def is_node(self) -> bool:
        return self.message.DESCRIPTOR.name == "NodeProto"

    @property
    def is_call(self) -> bool:
        return self.is_node and self.message.op_type in self.functions

    @property
    def is_result(self) -> bool:
        """Whether it describes a result of the model or a function."""
        names = [getattr(v, "name", v) for v in self.top.output]
        return self.is_value and self.block is self.top and self.message.name in names

    @property
    def is_parameter(self) -> bool:
        return self.is_value and self.block is self.top and self.message.name in self.parameters

    @property
    def parameters(self) -> list[str]:
        return [getattr(v, "name", v) for v in self.top.input]

    @property
    def mutable(self) -> list[str]:
        """Parameters that are lent for writing."""
        described = self.top.input if self.top.DESCRIPTOR.name == "GraphProto" else ()
        infos = described or self.top.value_info
        return [v.name for v in infos if v.access == schema.READ_WRITE]

    @property
    def outputs(self) -> set[str]:
        """Results of the block and of those around it."""
        return {getattr(v, "name", v) for b in (self.block, self.top) for v in b.output}

    @property
    def label(self) -> str:
        return str(self.message.output[0] if self.is_node else self.message.name)

    def way(self, name: str) -> list[str]:
        """Names from ``name`` to a parameter, by the facts of a whole file."""
        links = {v.name: v.alias_of for b in self.around for v in infos(b) if v.alias_of}
        found = [name]
        while found[-1] in links:
            found.append(links[found[-1]])
        return found

    def root(self, name: str) -> str | None:
        """The mutable parameter whose storage a value is."""
        last = self.way(name)[-1]
        return last if last in self.mutable else None


def infos(block: Any) -> list[Any]:
    """Descriptions of values; of a function all stand in one list."""
    if block.DESCRIPTOR.name == "FunctionProto":
        return list(block.value_info)
    return [*block.input, *block.output, *block.value_info]


def sites(proto: Any) -> list[Site]:
    """All of them, in one order for all copies of a model."""
    own = [f for f in proto.functions if f.domain != contract.DOMAIN]
    names = frozenset(f.name for f in own)
    found: list[Site] = []

    def walk(block: Any, around: tuple[Any, ...], seen: frozenset[str]) -> None:
        around = (block, *around)
        seen |= {getattr(v, "name", v) for v in block.input}
        seen |= {name for node in block.node for name in node.output}
        found.extend(Site(m, block, around, seen, names) for m in (*infos(block), *block.node))
        for node in block.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    walk(attribute.g, around, seen)

    for top in (proto.graph, *own):
        if top is not proto.graph:
            found.append(Site(top, top, (top,), frozenset(), names))
        walk(top, (), frozenset())
    return found


def everywhere(change: Callable[[Site], str | None]) -> Kind:
    """The change at each site where it says a word; None: there is nothing to change."""

    def kind(original: Any) -> Iterator[Changed]:
        for k in range(len(sites(original))):
            proto = copied(original)
            word = change(sites(proto)[k])
            if word is not None:
                yield proto, word

    return kind


def ports(site: Site) -> bool:
    return not site.is_value and bool(site.message.output_alias)


def names(site: Site) -> bool:
    return site.is_value and bool(site.message.alias_of)


# -- facts of typed fields


def lost(site: Site) -> str | None:
    """Any fact is gone."""
    fields = ("access", "alias_of") if site.is_value else ("output_alias",)
    if not any(getattr(site.message, field) for field in fields):
        return None
    for field in fields:
        site.message.ClearField(field)
    return site.label


def another_root_by_name(site: Site) -> str | None:
    others = set(site.mutable) - {site.root(site.message.name)} if names(site) else ()
    for name in sorted(others):
        site.message.alias_of = name
        return name
    return None


def another_input(site: Site) -> str | None:
    """Of nodes that call no function: those are compared with it."""
    if not ports(site) or not site.is_node or site.is_call:
        return None
    alias, count = site.message.output_alias[0], len(site.message.input)
    alias.input_index = (alias.input_index + 1) % count
    return site.label if count > 1 else None


def another_output(site: Site) -> str | None:
    if not ports(site):
        return None
    used = {a.output_index for a in site.message.output_alias}
    for k in range(len(site.message.output)):
        if k not in used:
            site.message.output_alias[0].output_index = k
            return f"output {k}"
    return None


def another_contract_of_a_call(site: Site) -> str | None:
    """Or of the function that is called."""
    if not ports(site) or not (site.is_call or site.message.DESCRIPTOR.name == "FunctionProto"):
        return None
    alias = site.message.output_alias[0]
    alias.input_index = (alias.input_index + 1) % len(site.message.input)
    return f"input {alias.input_index}"


def extra_name(site: Site) -> str | None:
    """An ordinary value, no result, is said to be storage."""
    if not site.is_value or site.is_result or names(site) or not site.mutable:
        return None
    if site.is_parameter and site.message.access:
        return None
    site.message.alias_of = site.mutable[0]
    return site.message.name


def extra_ports(site: Site) -> str | None:
    """A node that aliases nothing says that it does."""
    if not site.is_node or site.message.output_alias or not site.message.input:
        return None
    if site.message.op_type == "If" or set(site.message.output) & site.outputs:
        return None
    site.message.output_alias.add(output_index=0, input_index=0, kind=schema.MUST_ALIAS)
    return site.label


def ordinary(site: Site) -> str | None:
    """The name of a parameter that is only read."""
    for name in site.parameters if names(site) else ():
        if name not in site.mutable:
            site.message.alias_of = name
            return name
    return None


def another_path(site: Site) -> str | None:
    """A value of the right root, but not the one that this was made from."""
    if not names(site):
        return None
    root = site.root(site.message.name)
    for name in sorted(site.seen - {site.message.alias_of, *site.mutable}):
        if site.message.name not in site.way(name) and site.root(name) == root:
            site.message.alias_of = name
            return name
    return None


def access_taken(site: Site) -> str | None:
    if not site.is_parameter or not site.message.access:
        return None
    site.message.access = schema.READ_ONLY
    return site.message.name


def access_given(site: Site) -> str | None:
    if not site.is_parameter or site.message.access:
        return None
    site.message.access = schema.READ_WRITE
    return site.message.name


def access_elsewhere(site: Site) -> str | None:
    if not site.is_value or site.is_parameter:
        return None
    site.message.access = schema.READ_WRITE
    return site.message.name


def unknown_target(site: Site) -> str | None:
    if not names(site):
        return None
    site.message.alias_of = "no_such_value"
    return "no_such_value"


def unknown_value(site: Site) -> str | None:
    if not names(site) or site.message not in site.block.value_info:
        return None
    site.message.name = "no_such_value"
    return "no_such_value"


def twice(site: Site) -> str | None:
    if ports(site):
        site.message.output_alias.add().CopyFrom(site.message.output_alias[0])
        return site.label
    if names(site):
        site.block.value_info.add().CopyFrom(site.message)
        return site.label
    return None


def itself(site: Site) -> str | None:
    if not names(site):
        return None
    site.message.alias_of = site.message.name
    return site.message.name


def no_port(site: Site, side: str, index: int) -> str | None:
    if not ports(site):
        return None
    setattr(site.message.output_alias[0], side, index)
    return f"{side.split('_')[0]} {index}"


def no_kind(site: Site) -> str | None:
    if not ports(site):
        return None
    site.message.output_alias[0].kind = schema.UNDEFINED
    return "UNDEFINED"


def unknown_kind(site: Site) -> str | None:
    if not ports(site):
        return None
    site.message.output_alias[0].ClearField("kind")
    site.message.output_alias[0].MergeFromString(b"\x18\x07")  # field 3, value 7
    return "number 3"


def unknown_field(site: Site) -> str | None:
    site.message.MergeFromString(b"\xe0\x41\x01")  # number 1052
    return "number 1052"


def another_size(site: Site) -> str | None:
    """Of what is storage by its operator: a number of its shape."""
    if not names(site):
        return None
    for dim in site.message.type.tensor_type.shape.dim:
        if dim.HasField("dim_value"):
            dim.dim_value += 3
            return site.label
    return None


def declared_result(site: Site) -> str | None:
    """An ordinary result of the model is declared as an alias."""
    if site.top.DESCRIPTOR.name != "GraphProto" or not site.is_result or names(site):
        return None
    if not site.mutable or site.message.name in site.parameters:
        return None
    site.message.alias_of = site.mutable[0]
    return site.message.name


# -- types of paged caches


def pages(site: Site) -> Any | None:
    """What a description says of pages, to be changed."""
    if not site.is_value or not site.message.type.HasField("sequence_type"):
        return None
    element = site.message.type.sequence_type.elem_type
    return element.quantized_tensor if element.HasField("quantized_tensor") else None


def lost_pages(site: Site) -> str | None:
    if pages(site) is None:
        return None
    site.message.type.sequence_type.elem_type.ClearField("quantized_tensor")
    return site.label


def other_pages(change: Callable[[Any], object]) -> Kind:
    def changed(site: Site) -> str | None:
        message = pages(site)
        if message is None:
            return None
        change(message)
        return site.label

    return everywhere(changed)


def other_carrier(site: Site) -> str | None:
    if pages(site) is None:
        return None
    site.message.type.sequence_type.elem_type.tensor_type.elem_type = 3
    return site.label


def format_twice(original: Any) -> Iterator[Changed]:
    for k, stored in enumerate(original.quantizations):
        proto = copied(original)
        proto.quantizations.add().CopyFrom(proto.quantizations[k])
        yield proto, stored.name


def format_lost(original: Any) -> Iterator[Changed]:
    for k, stored in enumerate(original.quantizations):
        proto = copied(original)
        del proto.quantizations[k]
        yield proto, stored.name


def formats_in_another_order(original: Any) -> Iterator[Changed]:
    if len(original.quantizations) > 1:
        proto = copied(original)
        del proto.quantizations[:]
        proto.quantizations.extend(reversed(original.quantizations))
        yield proto, proto.quantizations[0].name


# -- the JSON contract


def contract_text(proto: Any) -> str:
    [text] = [p.value for p in proto.metadata_props if p.key == declarations.CONTRACT]
    return text


def with_text(original: Any, text: str) -> Any:
    proto = copied(original)
    [stored] = [p for p in proto.metadata_props if p.key == declarations.CONTRACT]
    stored.value = text
    return proto


def in_json(change: Callable[[dict[str, Any]], Iterator[tuple[Any, str]]]) -> Kind:
    """``change`` gives new contents of the contract, which are then written as they should be."""

    def kind(original: Any) -> Iterator[Changed]:
        for content, word in change(json.loads(contract_text(original))):
            text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            yield with_text(original, text), word

    return kind


def less_access(content: Any) -> Iterator[tuple[Any, str]]:
    for name, access in content["inputs"].items():
        if access == "READ_WRITE":
            yield {**content, "inputs": {**content["inputs"], name: "READ_ONLY"}}, name


def more_access(content: Any) -> Iterator[tuple[Any, str]]:
    """As if the typed field had been lost."""
    for name, access in content["inputs"].items():
        if access == "READ_ONLY":
            yield {**content, "inputs": {**content["inputs"], name: "READ_WRITE"}}, name


def other_declarations(content: Any) -> Iterator[tuple[Any, str]]:
    """The typed fields are what the model does; the contract says something else, or too little."""
    outputs, inputs = content["outputs"], content["inputs"]
    for name, root in outputs.items():
        yield {**content, "outputs": {k: v for k, v in outputs.items() if k != name}}, name
        for other in inputs.keys() - {root}:
            yield {**content, "outputs": {**outputs, name: other}}, other
    for name in inputs:
        yield {**content, "inputs": {k: v for k, v in inputs.items() if k != name}}, name
    for scope, function in content["functions"].items():
        others = {k: v for k, v in content["functions"].items() if k != scope}
        yield {**content, "functions": others}, scope
        for port, parameter in function["alias"].items():
            for other in (*range(parameter), parameter + 1):
                changed = {**function, "alias": {**function["alias"], port: other}}
                yield {**content, "functions": {**others, scope: changed}}, scope


def unknown_names(content: Any) -> Iterator[tuple[Any, str]]:
    name = "no_such_value"
    for key, value in (("inputs", "READ_ONLY"), ("outputs", next(iter(content["inputs"])))):
        yield {**content, key: {**content[key], name: value}}, name
    for output in content["outputs"]:
        yield {**content, "outputs": {**content["outputs"], output: name}}, name
    nothing: dict[str, Any] = {"access": [], "alias": {}}
    yield {**content, "functions": {**content["functions"], "local:gone:": nothing}}, "local:gone:"


def more_pages(content: Any) -> Iterator[tuple[Any, str]]:
    """As if the typed type had been lost."""
    for page in content.get("pages", {}).values():
        for name in content["inputs"].keys() - content["pages"].keys():
            yield {**content, "pages": {**content["pages"], name: page}}, name


def other_version(content: Any) -> Iterator[tuple[Any, str]]:
    for version in (0, 2, "1.5"):
        yield {**content, "version": version}, f"version {version}"


def unreadable(original: Any) -> Iterator[Changed]:
    text = contract_text(original)
    for changed in (
        text.replace(",", ", ", 1),
        text.replace("READ_WRITE", "READ_MAYBE", 1),
        text.replace('"outputs":', '"results":'),
        text.replace('"alias":', '"aliases":') if '"alias":' in text else "{}",
        text[:-1],
        "[" * 5000,
        "[]",
        "",
    ):
        if changed != text:
            yield with_text(original, changed), "JSON contract"


def json_twice(original: Any) -> Iterator[Changed]:
    proto = copied(original)
    proto.metadata_props.add(key=declarations.CONTRACT, value=contract_text(original))
    yield proto, "twice"


# -- what the facts are about


def newer_domain(original: Any) -> Iterator[Changed]:
    proto = copied(original)
    for block in (proto, *proto.functions):
        for imported in block.opset_import:
            if imported.domain == contract.DOMAIN:
                imported.version = 2
    if proto != original:
        yield proto, f"{contract.DOMAIN} 2"


def other_attribute(site: Site) -> str | None:
    """The functional body that stands in the file is not what the node then means."""
    if not site.is_node or site.message.op_type != "CacheUpdate":
        return None
    kept = [a for a in site.message.attribute if a.name != "mode"]
    was = [a.s for a in site.message.attribute if a.name == "mode"]
    del site.message.attribute[:]
    site.message.attribute.extend(kept)
    other = b"linear" if was == [b"circular"] else b"circular"
    site.message.attribute.add(name="mode", s=other, type=3)
    return "CacheUpdate"
