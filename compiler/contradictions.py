"""Facts of a file that cannot all be true, whatever the model means.

Works on the protobuf message alone and knows no rule of any operator. Ports and names are two
descriptions of one relation: where both stand they must lead to one root. Whether the relation is
true is decided in ``comparison``.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import onnx

from onnx_inplace.compiler import facts, integrity, schema
from onnx_inplace.compiler.errors import Finding


def contradictions(model: Any) -> list[Finding]:
    """The first of these groups that has any: a later one makes no sense while an earlier is there.

    What a fact names is not there or cannot be (E118, E119, E124, E125, E128, E129, E130); a call
    says other than its function (E127); ports and names lead to different roots (E101).
    """
    check = _Contradictions(model)
    check.graph(model.graph, None, "")
    for function in model.functions:
        check.function(function)
    return check.impossible or check.calls or check.roots


class _Scope:
    """Names of a graph or function; names of outer scopes are seen from inside."""

    def __init__(self, outer: _Scope | None, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        self.outer = outer
        self.known = set(inputs)
        self.parameters = set(inputs) if outer is None else set()  # inputs of a body are aliases
        self.results = set(outputs) - self.known  # an input may be returned as it is
        self.by_port: dict[str, str] = {}
        self.by_name: dict[str, str] = {}

    def home(self, name: str) -> _Scope | None:
        """The scope that defines ``name``."""
        scope: _Scope | None = self
        while scope is not None and name not in scope.known:
            scope = scope.outer
        return scope

    def root(self, name: str) -> str | None:
        """The parameter that facts lead to; None: they end elsewhere, so some were lost."""
        home = self.home(name)
        while home is not None:  # cycles were refused before
            following = home.by_port.get(name) or home.by_name.get(name)
            if following is None:
                return name if name in home.parameters else None
            name, home = following, home.home(following)
        return None


class _Contradictions:
    """Walks a model once.

    Attributes:
        impossible, calls, roots: findings, in groups.
    """

    def __init__(self, model: Any) -> None:
        self.impossible: list[Finding] = []
        self.calls: list[Finding] = []
        self.roots: list[Finding] = []
        self._functions = {(f.domain, f.name, f.overload): f for f in model.functions}
        self._mutable: set[str] = set()  # parameters of the graph or function that is walked

    def graph(self, graph: Any, outer: _Scope | None, name: str) -> None:
        scope = _Scope(outer, [v.name for v in graph.input], [v.name for v in graph.output])
        scope.known.update(tensor.name for tensor in graph.initializer)
        if outer is None:
            self._mutable = {v.name for v in graph.input if v.access == schema.READ_WRITE}
        results = {(v.name, v.access, v.alias_of): v for v in graph.output}  # may stand there twice
        self._block(graph.node, [*graph.input, *results.values(), *graph.value_info], scope, name)

    def function(self, function: Any) -> None:
        scope, name = _Scope(None, function.input, function.output), facts.function_scope(function)
        self._mutable = {v.name for v in function.value_info if v.access == schema.READ_WRITE}
        inputs, outputs = list(function.input), list(function.output)
        if self._ports(function, inputs, outputs, f"function {name}", None):
            for alias in function.output_alias:
                result, parameter = outputs[alias.output_index], inputs[alias.input_index]
                if result != parameter:
                    scope.by_port[result] = parameter
        self._block(function.node, function.value_info, scope, name)

    def _block(self, nodes: Iterable[Any], infos: Iterable[Any], scope: _Scope, name: str) -> None:
        nodes, infos = list(nodes), [v for v in infos if v.access or v.alias_of]
        for node in nodes:
            scope.known.update(filter(None, node.output))
        self._twice(infos, name)
        for info in infos:
            self._name(info, scope, name)
        self._cycles(scope, name)
        for node in nodes:
            label = facts.label(node.output)
            what = f"`{label}`{_inside(name)}"
            if self._ports(node, list(node.input), list(node.output), what, node):
                for alias in node.output_alias:
                    output = node.output[alias.output_index]
                    declared = scope.by_port.get(output)
                    scope.by_port[output] = node.input[alias.input_index]
                    if declared is not None:
                        self._compare(scope, output, declared, node.input[alias.input_index], node)
                self._call(node, what)
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    self.graph(attribute.g, scope, facts.body_scope(name, label, attribute.name))
        for node in () if self.impossible else nodes:
            for output in node.output:
                port, named = scope.by_port.get(output), scope.by_name.get(output)
                if port is not None and named is not None:
                    self._compare(scope, output, port, named, node)

    # -- one fact

    def _twice(self, infos: Iterable[Any], scope: str) -> None:
        """E125."""
        count = collections.Counter(info.name for info in infos)
        for name in (name for name, times in count.items() if times > 1):
            self._find("E125", f"`{name}`{_inside(scope)} is described {count[name]} times.")

    def _name(self, info: Any, scope: _Scope, name: str) -> None:
        """Keep an ``alias_of``, or say why it cannot be."""
        what, target = f"`{info.name}`{_inside(name)}", info.alias_of
        home = scope.home(target) if target else None
        if scope.home(info.name) is None:
            self._find("E124", f"a fact stands at {what}, which no node makes.")
        elif not target:
            return
        elif info.name in scope.parameters:
            message = f"parameter {what} has alias_of `{target}`: it is a root itself."
            self._find("E118", message)
        elif home is None:
            self._find("E124", f"{what} has alias_of `{target}`, which does not exist there.")
        elif target in home.results and target != info.name:
            self._find("E119", f"{what} has alias_of `{target}`, an output of its block.")
        else:
            scope.by_name[info.name] = target

    def _cycles(self, scope: _Scope, name: str) -> None:
        """E130."""
        for start in list(scope.by_name):
            seen, current = {start}, scope.by_name[start]
            while current in scope.by_name and current in scope.known:
                if current in seen:
                    if current == start:
                        way = f"alias_of of `{start}`{_inside(name)} leads back to itself"
                        self._find("E130", f"{way}, through `{scope.by_name[start]}`.")
                    break
                seen.add(current)
                current = scope.by_name[current]

    def _ports(
        self, message: Any, inputs: Sequence[str], outputs: Sequence[str], what: str, node: Any
    ) -> bool:
        """Whether all ports exist, and no output is two inputs. Two outputs may be one input."""
        count = len(self.impossible)
        for alias in message.output_alias:
            if alias.kind != schema.MUST_ALIAS:
                text = f"{what} has an output_alias of kind UNDEFINED: MUST_ALIAS is meant."
                self._find("E129", text, node)
            for index, values, side in (
                (alias.output_index, outputs, "output"),
                (alias.input_index, inputs, "input"),
            ):
                if not 0 <= index < len(values) or not values[index]:
                    text = f"{what} has an output_alias of {side} {index}; it has {len(values)}."
                    self._find("E128", text, node)
        times = collections.Counter(alias.output_index for alias in message.output_alias)
        for output in (output for output, count in times.items() if count > 1):
            text = f"{what} has {times[output]} times an output_alias of output {output}."
            self._find("E125", text, node)
        return len(self.impossible) == count

    # -- two facts

    def _call(self, node: Any, what: str) -> None:
        """E127: what a call says of an output that its function speaks of, is what that says."""
        function = self._functions.get((node.domain, node.op_type, node.overload))
        if function is None:
            return
        promised = {a.output_index: a.input_index for a in function.output_alias}
        for alias in node.output_alias:
            output, stated = alias.output_index, alias.input_index
            meant = promised.get(output, stated)
            if meant != stated:
                message = (
                    f"{what} says that output {output} is input {stated}; the function "
                    f"{facts.function_scope(function)}, that it is input {meant}."
                )
                self.calls.append(Finding("E127", message, integrity.source(node)))

    def _compare(self, scope: _Scope, value: str, port: str, named: str, node: Any) -> None:
        """E101. Of what is no mutable parameter other rules speak."""
        if self.impossible:
            return
        by_port, by_name = scope.root(port), scope.root(named)
        if by_port != by_name and {by_port, by_name} <= self._mutable:
            message = f"`{value}` is `{by_port}` by its port, and `{by_name}` by its name."
            self.roots.append(Finding("E101", message, integrity.source(node)))

    def _find(self, code: str, message: str, node: Any = None) -> None:
        place = None if node is None else integrity.source(node)
        self.impossible.append(Finding(code, message, place))


# -- places


def misplaced(model: Any) -> list[Finding]:
    """Declarations where none may stand (E106), and aliases of what is no mutable parameter (E117).

    A result names a parameter, not what lies between (E119).
    """
    return [*_access(model), *_aliases(model)]


def _access(model: Any) -> Iterable[Finding]:
    weights = {tensor.name for tensor in model.graph.initializer}
    mutable = {v.name for v in model.graph.input if v.access == schema.READ_WRITE}
    for name in sorted(mutable & weights):
        what = f"graph input `{name}` is READ_WRITE and has an initializer"
        yield Finding("E106", f"{what}: nobody lends its storage.")
    parameters = {facts.function_scope(f): set(f.input) for f in model.functions}
    for place, fact in facts.stored(model).items():
        if not isinstance(fact, facts.ValueFact) or fact.access != schema.READ_WRITE:
            continue
        allowed = place.where is facts.Where.INPUT and not place.scope
        if place.where is facts.Where.VALUE:
            allowed = place.name in parameters.get(place.scope, ())
        if not allowed:
            message = f"{place} is READ_WRITE, and no parameter of a graph or function."
            yield Finding("E106", message)


def _aliases(model: Any) -> Iterable[Finding]:
    access = {"": {v.name: v.access for v in model.graph.input}}
    for function in model.functions:
        infos = {v.name: v.access for v in function.value_info}
        scope = facts.function_scope(function)
        access[scope] = {name: infos.get(name, schema.READ_ONLY) for name in function.input}
    for place, fact in facts.stored(model).items():
        if not isinstance(fact, facts.ValueFact) or not fact.alias_of:
            continue
        if place.scope not in access:  # a body: it names parameters of the block around
            access[place.scope] = access[max((s for s in access if place.inside(s)), key=len)]
        found = access[place.scope].get(fact.alias_of)
        if found == schema.READ_ONLY:
            yield Finding("E117", f"{place} has alias_of `{fact.alias_of}`, a READ_ONLY parameter.")
        elif found is None and place.where is facts.Where.OUTPUT and not place.scope:
            yield Finding("E119", f"{place} has alias_of `{fact.alias_of}`, no graph input.")


def _inside(scope: str) -> str:
    return f" in {scope.strip('/')}" if scope else ""
