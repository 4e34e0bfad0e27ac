"""Every rule of the analysis is needed: without it the soundness property fails.

A mutation takes one rule away. Then a random program must be found that the mutated product accepts
and that goes wrong: another result, a cache that does not hold its last version, another array, a
shared result. Where the search begins is noted, so that it ends at once; a program that the whole
analysis judges rightly is part of every case.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import soundness
import strategies

from onnx_inplace.compiler.versions import Versions

SEARCH = 400  # programs, from the noted seed on

Mutation = Callable[[pytest.MonkeyPatch], None]


def without(code: str) -> Mutation:
    """No fault of this code is ever found; the walk goes on as if all were well."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        find = Versions.find

        def forgiving(self, finding, *taints):
            if finding.code != code:
                find(self, finding, *taints)

        patch.setattr(Versions, "find", forgiving)

    return apply


def without_versions_of(*op_types: str) -> Mutation:
    """Nodes of these kinds overwrite a root, but make no new version of it."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        advance = Versions.advance

        def standing(self, root, node, writer):
            if node.op_type in op_types:
                return self.live[root]
            return advance(self, root, node, writer)

        patch.setattr(Versions, "advance", standing)

    return apply


MUTATIONS: dict[str, tuple[Mutation, int]] = {
    "E104 a stale name is read": (without("E104"), 0),
    "E105 a stale name is written": (without("E105"), 0),
    "E106 what nobody lent is written": (without("E106"), 0),
    "E107 branches return different storage": (without("E107"), 0),
    "E108 a loop carries other storage": (without("E108"), 0),
    "E109 an update is lost": (without("E109"), 0),
    "E110 a declared alias is new storage": (without("E110"), 0),
    "E111 an alias is not declared": (without("E111"), 0),
    "E114 a name hides another": (without("E114"), 0),
    "E116 a write reads its own root": (without("E116"), 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_property_fails_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And holds again, on the same program, with the rule."""
    mutation, first = MUTATIONS[name]
    seed = counterexample(mutation, first)
    assert seed is not None, f"no program shows that this rule is needed: {name}"
    assert soundness.judge(strategies.seeded(seed)).verdict in soundness.Verdict


def counterexample(mutation: Mutation, first: int) -> int | None:
    """Seed of a program on which the mutated product goes wrong."""
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        for seed in range(first, first + SEARCH):
            try:
                soundness.judge(strategies.seeded(seed))
            except soundness.Unsound:
                return seed
    return None
