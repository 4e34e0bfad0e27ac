"""Rules at one node that has no body: operators and calls of functions.

In this order: names that are stale (E104, E105), storage that must not be written (E106), storage
that is passed twice (E116), types and shapes (E102). The first fault makes the results unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir

from onnx_inplace.compiler import paged_rules
from onnx_inplace.compiler.classes import Link, Parameter, Restriction, Summary
from onnx_inplace.compiler.contract import Access, Effect, OutputAlias
from onnx_inplace.compiler.versions import Place, Versions


class Operations(Versions):
    """Adds operators and calls.

    Attributes:
        outside: roots that an open loop writes but does not carry, with that loop.
    """

    outside: dict[ir.Value, ir.Node]

    def operator(self, node: ir.Node) -> None:
        """One node without a body of its own."""
        links, summary = self.classes.links(node), self.classes.summary(node)
        parameters = () if summary is None else summary.parameters
        writes = {link.input for link in links if link.effect is Effect.WRITE}
        pairs = zip(range(len(node.inputs)), parameters, strict=False)
        writes.update(k for k, parameter in pairs if parameter.written)
        if self._is_faulty(node, links, summary, writes):
            self.unknown.update(node.outputs)
            self.tainted.update(
                root for k in writes if (root := self.root_of(node.inputs[k])) is not None
            )
            return
        for value in self.classes.restricted(node):
            if (root := self.root_of(value)) is not None:
                reason = self.say.would_write(node, value)
                self.restrictions.setdefault(root, Restriction("E106", reason))
        self._apply(node, links)
        if any(value in self.unknown for value in node.inputs):
            aliased = {link.output for link in links}
            self.unknown.update(v for k, v in enumerate(node.outputs) if k not in aliased)

    def _is_faulty(
        self, node: ir.Node, links: Sequence[Link], summary: Summary | None, writes: set[int]
    ) -> bool:
        before = len(self.map.findings)
        parameters = () if summary is None else summary.parameters
        self._ports(node, summary)
        self.stale_inputs(node, writes)
        if len(self.map.findings) == before:
            self._access(node, links, parameters)
            self._lend(node, parameters)
        if len(self.map.findings) == before:
            self._overlap(node, writes)
        if len(self.map.findings) == before:
            self._merge(node, links, summary)
        return len(self.map.findings) > before

    def _ports(self, node: ir.Node, summary: Summary | None) -> None:
        """E101: the file of a node without a rule says what cannot be."""
        if summary is not None or self.classes.has_rule(node):
            return
        for a in self.declared(node):
            outputs, inputs = len(node.outputs), len(node.inputs)
            if not (0 <= a.output_index < outputs and 0 <= a.input_index < inputs):
                self.find(self.say.no_port(node, a))

    def stale_inputs(self, node: ir.Node, writes: set[int]) -> None:
        """E104, E105: one finding for each root that the node takes by an old name."""
        reported: set[ir.Value] = set()
        for k in sorted(range(len(node.inputs)), key=lambda k: k not in writes):
            value = node.inputs[k]
            if value is None or value in self.unknown or value not in self.place:
                continue
            root, version = self.place[value].root, self.place[value].version
            if root in reported or (k in writes and self.place[value].sliced):
                continue  # a slice is never written, stale or not
            if k in writes and root in self.mutable and root in self.outside:
                reported.add(root)
                self.find(self.say.not_carried(value, node, self.outside[root]), root)
            elif self.is_stale(value):
                reported.add(root)
                self.find(self.say.stale(value, root, version, self.live, node, k in writes))

    def _access(
        self, node: ir.Node, links: Sequence[Link], parameters: Sequence[Parameter]
    ) -> None:
        """E106: what is written, or lent to a callee, must have been lent by the caller."""
        ports = {link.input for link in links if link.required}
        ports.update(k for k, p in enumerate(parameters) if p.access is Access.READ_WRITE)
        for k in sorted(ports):
            value = node.inputs[k] if k < len(node.inputs) else None
            if value is None or value in self.unknown:
                continue
            place = self.place.get(value)
            if place is None or place.sliced or place.root not in self.mutable:
                root, sliced = self.root_of(value), place is not None and place.sliced
                self.find(self.say.immutable(node, value, root, sliced))

    def _lend(self, node: ir.Node, parameters: Sequence[Parameter]) -> None:
        """Mutable storage must not stand for every READ_ONLY parameter of a function."""
        for value, parameter in zip(node.inputs, parameters, strict=False):
            root, restriction = self.root_of(value), parameter.restriction
            if value is None or root is None or restriction is None or value in self.unknown:
                continue
            if root in self.mutable:
                self.find(self.say.restricted(node, value, parameter.value, restriction))
            else:
                self.restrictions.setdefault(root, restriction)

    def _overlap(self, node: ir.Node, writes: set[int]) -> None:
        """E116: what is written must not come in by another argument."""
        for k in sorted(writes):
            value = node.inputs[k]
            root = self.root_of(value)
            if value is None or root is None:
                continue
            for j, other in enumerate(node.inputs):
                if other is not None and j != k and self.root_of(other) is root:
                    self.find(self.say.overlap(node, value, other))
                    return

    def _merge(self, node: ir.Node, links: Sequence[Link], summary: Summary | None) -> None:
        """E102."""
        if any(value in self.unknown for value in node.inputs):
            return
        verdict = paged_rules.check(node, links, summary)
        if verdict.faults:
            self.find(
                self.say.unmergeable(
                    node, node.outputs[0], verdict.faults, verdict.repair, verdict.code
                )
            )
        self.map.equalities.extend(verdict.equalities)

    def _apply(self, node: ir.Node, links: Sequence[Link]) -> None:
        """Name the results that share storage; a write makes one version for all of them."""
        written: set[ir.Value] = set()
        for link in links:
            value = node.inputs[link.input]
            if value in self.unknown:
                self.unknown.update(() if link.output is None else [node.outputs[link.output]])
                continue
            if value is None or (place := self.place.get(value)) is None:
                continue
            if link.effect is Effect.WRITE and place.root not in written:
                written.add(place.root)
                self.advance(place.root, node, node)
            if link.output is None:
                continue
            version, reshaped = self.live[place.root], place.reshaped or link.reshaped
            place = dataclasses.replace(place, version=version, reshaped=reshaped)
            self.alias(node, link.output, link.input, place)

    def alias(self, node: ir.Node, output: int, port: int | None, place: Place) -> None:
        """Output ``output`` is the storage of input ``port``; None: of what a branch captured."""
        source = place.root if port is None else node.inputs[port]
        self.name(node.outputs[output], place, source)
        if port is not None and place.root in self.mutable and not place.sliced:
            self.map.node.setdefault(node, []).append(OutputAlias(output, port))
