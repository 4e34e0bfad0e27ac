"""Names of values: one each in a whole graph, after the author's variables where there are some."""

from __future__ import annotations

import onnx_ir as ir

from onnx_inplace.compiler.diagnosis import VARIABLE


class Names:
    """The names that are taken, and by which value."""

    def __init__(self) -> None:
        self._holders: dict[str, ir.Value | None] = {}
        self._counts: dict[str, int] = {}

    def fresh(self, stem: str) -> str:
        """A name that no other value has: ``stem``, or ``stem_1`` and so on."""
        name, n = stem, self._counts.get(stem, 0)
        while name in self._holders:
            n += 1
            name = f"{stem}_{n}"
        self._counts[stem] = n
        self._holders[name] = None
        return name

    def value(
        self, stem: str, type_: ir.TypeProtocol | None = None, shape: ir.Shape | None = None
    ) -> ir.Value:
        """A new value with a name of its own."""
        name = self.fresh(stem)
        value = self._holders[name] = ir.Value(name=name, type=type_, shape=shape)
        return value

    def rename(self, value: ir.Value, variable: str) -> None:
        """The author assigned ``value`` to ``variable``."""
        self._holders.pop(str(value.name), None)
        value.name = self.fresh(variable)
        self._holders[value.name] = value
        value.meta[VARIABLE] = variable

    def take(self, value: ir.Value, name: str) -> None:
        """Give a result its name; who had it before gets another."""
        if value.name == name:
            return
        holder = self._holders.pop(name, None)
        if holder is not None:
            holder.name = self.fresh(f"{name}_1")
            self._holders[holder.name] = holder
        self._holders.pop(str(value.name), None)
        self._holders[name] = value
        value.name = name

    def holder(self, name: str) -> ir.Value | None:
        """The value that has ``name``."""
        return self._holders.get(name)

    def copy(self) -> Names:
        """The state of now, to come back to."""
        copy = Names()
        copy._holders, copy._counts = dict(self._holders), dict(self._counts)
        return copy

    def restore(self, before: Names) -> None:
        """Come back to a state; values that have got another name since lose it."""
        self._holders, self._counts = before._holders, before._counts
        for name, holder in self._holders.items():
            if holder is not None and holder.name != name:
                holder.name = name
