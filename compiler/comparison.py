"""What a file states against what follows: one code for each way in which the two can differ.

``declared`` compares the typed declarations with the JSON contract, ``derived`` the facts with
those that follow from operators and declarations. Every finding names both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from onnx_inplace.compiler import contract, declarations, derivation, facts, integrity, schema
from onnx_inplace.compiler.contract import Access
from onnx_inplace.compiler.declarations import Declarations, FunctionDeclaration
from onnx_inplace.compiler.errors import ContractError, Finding
from onnx_inplace.compiler.facts import Facts, Place, PortFact, ValueFact, Where

Ports = Mapping[int, int]  # output: input

# -- the JSON contract


def read_contract(proto: Any) -> Declarations | None:
    """The JSON contract; None where there is none.

    Raises:
        errors.ContractError: it stands there twice (E125), a newer version wrote it (E126), or it
            cannot be read (E131).
    """
    texts = [p.value for p in proto.metadata_props if p.key == declarations.CONTRACT]
    if not texts:
        return None
    if len(texts) > 1:
        message = f"the JSON contract stands {len(texts)} times in metadata_props."
        raise ContractError([Finding("E125", message)])
    try:
        found = Declarations.from_json(texts[0])
    except declarations.UnknownVersion as error:
        raise ContractError([Finding("E126", f"{error}.")]) from None
    except (ValueError, RecursionError) as error:
        message = f"the JSON contract in metadata_props cannot be read: {error}."
        raise ContractError([Finding("E131", message)]) from None
    if found.to_json() != texts[0]:
        message = "the JSON contract in metadata_props is not in canonical form."
        raise ContractError([Finding("E131", message)])
    return found


def declared(proto: Any, promised: Declarations) -> list[Finding]:
    """Typed declarations against the JSON contract."""
    return [*_Declared(proto, promised).findings()]


class _Declared:
    def __init__(self, proto: Any, promised: Declarations) -> None:
        self._proto, self._promised = proto, promised
        self._found = derivation.declared(proto)

    def findings(self) -> Iterator[Finding]:
        promised, found, graph = self._promised, self._found, self._proto.graph
        inputs = [v.name for v in graph.input]
        marked = {v.name for v in graph.input if v.HasField("access")}
        outputs = [v.name for v in graph.output]
        yield from _names("graph input", promised.inputs, inputs)
        yield from _names("graph output", promised.outputs, outputs)
        yield from _names("graph input", promised.outputs.values(), inputs)
        yield from _access("graph input", promised.inputs, found.inputs, marked)
        yield from _roots(promised.outputs, found.outputs, set(outputs), set(inputs))
        pages = {name: page for name, page in promised.pages.items() if name in inputs}
        yield from _pages("graph input", pages, found.pages)
        yield from _pages("page format", promised.formats, found.formats)
        functions = {facts.function_scope(f): f for f in derivation.own_functions(self._proto)}
        yield from _names("function", promised.functions, functions)
        for scope, function in functions.items():
            if scope in promised.functions:
                pair = promised.functions[scope], found.functions[scope]
                yield from _function(scope, function, *pair)
            else:
                yield _differs(f"function {scope}", "nothing", "that it is there")


def _names(what: str, named: Iterable[str], there: Iterable[str]) -> Iterator[Finding]:
    """E124."""
    for name in sorted({*named} - {*there}):
        message = f"the JSON contract speaks of {what} `{name}`, which does not exist."
        yield Finding("E124", message)


def _access(
    what: str, promised: Mapping[str, str], found: Mapping[str, str], marked: set[str]
) -> Iterator[Finding]:
    """E113, E120: parameters that tools made READ_ONLY or READ_WRITE. ``marked``: have a field."""
    for name, stands in found.items():
        said = promised.get(name)
        if said is None:
            yield _differs(f"{what} `{name}`", "nothing", stands)
        elif said != stands:
            lost = said == Access.READ_WRITE.name and name not in marked
            text = _sides(f"{what} `{name}`", said, "nothing" if lost else stands)
            yield Finding("E113" if lost else "E120", text)


def _roots(
    promised: Mapping[str, str], found: Mapping[str, str], outputs: set[str], inputs: set[str]
) -> Iterator[Finding]:
    for name in sorted(outputs):
        said, stands = promised.get(name), found.get(name)
        if said == stands or (said is not None and said not in inputs):
            continue
        texts = ["nothing" if x is None else f"alias of `{x}`" for x in (said, stands)]
        what = f"graph output `{name}`"
        if stands is None:
            yield Finding("E113", _sides(what, *texts))
        else:
            yield _differs(what, *texts)


def _pages(
    what: str, promised: Mapping[str, object], found: Mapping[str, object]
) -> Iterator[Finding]:
    for name in sorted({*promised, *found}):
        said, stands = promised.get(name), found.get(name)
        if said == stands:
            continue
        texts = ["nothing" if x is None else str(x) for x in (said, stands)]
        text = _sides(f"{what} `{name}`", *texts)
        code = "E123" if said is None else "E113" if stands is None else "E122"
        yield Finding(code, text)


def _function(
    scope: str, function: Any, promised: FunctionDeclaration, found: FunctionDeclaration
) -> Iterator[Finding]:
    what, names = f"function {scope}", list(function.input)
    if len(promised.access) != len(names):
        counts = [f"{n} parameters" for n in (len(promised.access), len(names))]
        yield _differs(what, *counts)
        return
    marked = {v.name for v in function.value_info if v.HasField("access")}
    said, stands = (dict(zip(names, d.access, strict=True)) for d in (promised, found))
    yield from _access(f"{what}, parameter", said, stands, marked)
    pages = ({names[k]: p for k, p in d.pages.items() if k < len(names)} for d in (promised, found))
    yield from _pages(f"{what}, parameter", *pages)
    code = _ports(promised.alias, found.alias, another="E123", extra="E123")
    if code is not None:
        texts = [_port_fact(d.alias) for d in (promised, found)]
        yield Finding(code, _sides(what, *texts))


def _port_fact(ports: Ports) -> str:
    triples = ((o, i, schema.MUST_ALIAS) for o, i in ports.items())
    return str(PortFact(tuple(sorted(triples)))) or "nothing"


def _differs(what: str, said: str, stands: str) -> Finding:
    return Finding("E123", _sides(what, said, stands))


def _sides(what: str, said: str, stands: str) -> str:
    return f"{what}: the JSON contract says {said}; the typed fields, {stands}."


# -- derived facts


def unmarked(proto: Any) -> list[Finding]:
    """E113: nodes that always write, without a fact."""
    findings = []
    for scope, node in derivation.all_nodes(proto):
        rule = contract.RULES.get((node.domain, node.op_type))
        if rule is not None and not rule.functional and not node.output_alias:
            name = Place(scope, Where.NODE, facts.label(node.output))
            message = f"{node.op_type}, {name}, has lost its output_alias."
            findings.append(Finding("E113", message, integrity.source(node)))
    return findings


def derived(proto: Any, follows: Facts) -> Iterator[Finding]:
    """Facts of a file against those that follow from its operators and declarations."""
    stored = facts.stored(proto)
    sources = {}
    for scope, node in derivation.all_nodes(proto):
        source = integrity.source(node)
        sources[Place(scope, Where.NODE, facts.label(node.output))] = source
        for name in node.output:
            sources[Place(scope, Where.OUTPUT, name)] = source
            sources[Place(scope, Where.VALUE, name)] = source
    roots = _Roots(follows)
    for place in sorted({*stored, *follows}, key=lambda p: (p.scope, p.where.value, p.name)):
        stands, meant = stored.get(place), follows.get(place)
        if stands != meant:
            texts = [str(fact) if fact is not None else "nothing" for fact in (stands, meant)]
            message = f"{place}: the file says {texts[0]}; {texts[1]} follows from the model."
            code = _difference(place, stands, meant, roots)
            yield Finding(code, message, sources.get(place))


def _difference(
    place: Place, stands: facts.Fact | None, meant: facts.Fact | None, roots: _Roots
) -> str:
    if stands is None:
        return "E113"
    if meant is None:
        return "E118"
    if isinstance(stands, ValueFact) and isinstance(meant, ValueFact):
        return _other_value(place, stands, meant, roots)
    assert isinstance(stands, PortFact) and isinstance(meant, PortFact)
    said, follows = ({o: i for o, i, _ in fact.ports} for fact in (stands, meant))
    code = _ports(follows, said, another="E101", extra="E118")
    assert code is not None
    return code


def _other_value(place: Place, stands: ValueFact, meant: ValueFact, roots: _Roots) -> str:
    if stands.access != meant.access:
        return "E120"
    if not stands.alias_of or not meant.alias_of:
        return "E118" if stands.alias_of else "E113"
    named = roots.of(place.scope, stands.alias_of)
    if named is None:
        return "E117"
    return "E119" if named == roots.of(place.scope, meant.alias_of) else "E101"


def _ports(follows: Ports, said: Ports, *, another: str, extra: str) -> str | None:
    """Code of the difference: an output is lost, is one too many, moved, or is another input."""
    if {*follows} - {*said}:
        return "E132" if {*said} - {*follows} else "E113"
    if {*said} - {*follows}:
        return extra
    return another if said != follows else None


class _Roots:
    """Which parameter a name belongs to, by the facts that follow."""

    def __init__(self, follows: Facts) -> None:
        self._links: dict[str, dict[str, ValueFact]] = {}
        for place, fact in follows.items():
            if isinstance(fact, ValueFact):
                self._links.setdefault(place.scope, {})[place.name] = fact

    def of(self, scope: str, name: str) -> str | None:
        """The mutable parameter; None: an ordinary value."""
        inner = Place(scope, Where.VALUE, name)
        scopes: Sequence[str] = sorted(filter(inner.inside, self._links), key=len)
        for around in reversed(scopes):
            fact = self._links[around].get(name)
            if fact is not None:
                return self.of(around, fact.alias_of) if fact.alias_of else name
        return None
