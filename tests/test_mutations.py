"""Every rule of the analysis is needed: without it the soundness property fails.

A mutation takes one rule away. Then a random program must be found that the mutated product accepts
and that goes wrong: another result, a cache that does not hold its last version, another array, a
result that shares memory. The whole product judges the same program rightly. Where the search
begins is noted, so that it ends at once; when the author of random programs has changed, the search
goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import soundness
import strategies
from soundness import Unsound, Verdict

from onnx_inplace.compiler import program
from onnx_inplace.compiler.alias import _Walk
from onnx_inplace.compiler.operations import Operations
from onnx_inplace.compiler.versions import Versions

SEARCH = 3000  # programs, from the noted seed on

Mutation = Callable[[pytest.MonkeyPatch], None]


def without(code: str) -> Mutation:
    """No fault of this code is found; the walk goes on as if all were well."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        find = Versions.find

        def forgiving(self, finding, *taints):
            if finding.code != code:
                find(self, finding, *taints)

        patch.setattr(Versions, "find", forgiving)

    return apply


def without_versions(*op_types: str) -> Mutation:
    """Nodes of these kinds overwrite a root, but make no new version of it."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        advance = Versions.advance

        def standing(self, root, node, writer):
            if node.op_type in op_types:
                return self.live[root]
            return advance(self, root, node, writer)

        patch.setattr(Versions, "advance", standing)

    return apply


def without_fresh_entry(patch: pytest.MonkeyPatch) -> None:
    """A loop's body may read what it overwrites by the names of outside."""
    enter, advance = _Walk._enter, Versions.advance
    entering: list[bool] = []

    def enter_as_it_is(self, *arguments):
        entering.append(True)
        try:
            return enter(self, *arguments)
        finally:
            entering.pop()

    def standing(self, root, node, writer):
        return self.live[root] if entering else advance(self, root, node, writer)

    patch.setattr(_Walk, "_enter", enter_as_it_is)
    patch.setattr(Versions, "advance", standing)


def without_versions_of_views(patch: pytest.MonkeyPatch) -> None:
    """A view never grows old."""
    is_stale, views = Versions.is_stale, {"Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"}

    def timeless(self, value):
        made = value.producer()
        return is_stale(self, value) and (made is None or made.op_type not in views)

    patch.setattr(Versions, "is_stale", timeless)


def without_written_parameters(patch: pytest.MonkeyPatch) -> None:
    """A caller is not told what a function writes."""
    summarize = _Walk._summarize

    def silent(self):
        self.classes.written[self.graph] = {}
        summarize(self)

    patch.setattr(_Walk, "_summarize", silent)


def skipping(owner: type, method: str) -> Mutation:
    """A check that is never made."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(owner, method, lambda self, *arguments, **named: None)

    return apply


def without_agreement_of_branches(patch: pytest.MonkeyPatch) -> None:
    """What one branch returns is what the If returns."""
    join = _Walk._join

    def believing(self, node, k, a, b):
        place = self.place.get(a) or self.place.get(b)
        if place is not None:
            self.place[a] = self.place[b] = place
        join(self, node, k, a, b)

    patch.setattr(_Walk, "_join", believing)


def without_agreement_of_rounds(patch: pytest.MonkeyPatch) -> None:
    """What a body returns is what it was given."""
    carry = _Walk._carry

    def believing(self, node, k, port, formal, result):
        place = self.place.get(node.inputs[port])
        if place is not None:
            self.place[result] = place
        carry(self, node, k, port, formal, result)

    patch.setattr(_Walk, "_carry", believing)


MUTATIONS: dict[str, tuple[Mutation, int]] = {
    "E101 a result is another root than declared": (without("E101"), 618),
    "E104 a stale name is read": (without("E104"), 0),
    "E105 a stale name is written": (without("E105"), 153),
    "E106 what nobody lent is written": (without("E106"), 278),
    "E107 branches return different storage": (without_agreement_of_branches, 726),
    "E108 a loop carries other storage": (without_agreement_of_rounds, 256),
    "E109 an update is lost": (without("E109"), 29),
    "E110 a declared alias is new storage": (without("E110"), 398),
    "E111 an alias is not declared": (without("E111"), 68),
    "E114 a name hides another": (without("E114"), 2016),
    "E116 a write takes its root twice": (without("E116"), 831),
    "a block returns a stale name": (skipping(Versions, "leave"), 155),
    "a parameter that is only read is written": (skipping(Operations, "_lend"), 278),
    "fresh version at the entry of a loop": (without_fresh_entry, 5825),
    "new version after a loop": (without_versions("Loop", "Scan"), 562),
    "new version after a branch": (without_versions("If"), 1036),
    "new version by Assign": (without_versions("Assign"), 235),
    "new version by CacheUpdate": (without_versions("CacheUpdate"), 60),
    "new version by a call": (without_versions("f0", "f1", "f2"), 192),
    "versions of views": (without_versions_of_views, 235),
    "functions say what they write": (without_written_parameters, 192),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_property_fails_without(name: str) -> None:
    """It holds with the rule, on the same program."""
    mutation, first = MUTATIONS[name]
    seed = counterexample(mutation, first)
    assert seed is not None, f"no program shows that this is needed: {name}"
    whole = soundness.judge(strategies.seeded(seed))
    assert whole.verdict in (Verdict.HOLDS, Verdict.REFUSED, Verdict.NEEDLESS)


def counterexample(mutation: Mutation, first: int) -> int | None:
    """Seed of a program that only the mutated product accepts, and runs wrong."""
    for seed in range(first, first + SEARCH):
        if accepts(seed):
            continue  # a mutation only takes checks away
        with pytest.MonkeyPatch.context() as patch:
            mutation(patch)
            if accepts(seed) and goes_wrong(seed):
                return seed
    return None


def accepts(seed: int) -> bool:
    """Whether the analysis, as it is now, takes a program. A mutant that crashes does not."""
    try:
        program.build(strategies.seeded(seed).declaration)
    except Exception:  # a ContractError, or the mutant breaks down
        return False
    return True


def goes_wrong(seed: int) -> bool:
    """Whether the product, as it is now, runs a program otherwise than it means."""
    try:
        soundness.judge(strategies.seeded(seed), order=False)
    except Unsound:
        return True
    except Exception:
        return False
    return False
