"""Files that somebody has edited node by node: refused in our words, or run as they now mean."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import interpreter
import numpy as np
import onnx
import pytest
import strategies

from onnx_inplace import Session
from onnx_inplace.compiler import errors, loader, program, schema

SEEDS = [*range(60), 174, 178, 238]  # 21 and the last three once were tracebacks
EDITS = 3


def blocks(graph: Any) -> Iterator[Any]:
    """Lists of nodes, at any depth."""
    yield graph.node
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from blocks(attribute.g)


def edit(proto: Any, chance: random.Random) -> None:
    """One change that an editor, or a faulty pass, could make."""
    inside = [list_ for f in proto.functions if f.domain == "local" for list_ in [f.node]]
    nodes = chance.choice([b for b in (*blocks(proto.graph), *inside) if len(b)])
    node = chance.choice(list(nodes))
    match chance.randrange(5):
        case 0 if len(node.input) > 1:  # exchange two inputs
            i, j = chance.sample(range(len(node.input)), 2)
            node.input[i], node.input[j] = node.input[j], node.input[i]
        case 1:  # lose a node
            nodes.remove(node)
        case 2:  # say a node twice
            nodes.append(node)
        case 3 if node.input:  # take another value
            names = [name for other in nodes for name in other.output]
            names += [value.name for value in proto.graph.input]
            node.input[chance.randrange(len(node.input))] = chance.choice(names)
        case _:  # exchange two nodes
            i, j = chance.randrange(len(nodes)), chance.randrange(len(nodes))
            first, second = type(node).FromString(nodes[i].SerializeToString()), nodes[j]
            nodes[i].CopyFrom(type(node).FromString(second.SerializeToString()))
            nodes[j].CopyFrom(first)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_edited_file_is_refused_or_means_what_it_says(seed: int) -> None:
    example = strategies.seeded(seed)
    try:
        compiled = program.build(example.declaration)
    except errors.ContractError:
        return  # nothing to edit
    chance = random.Random(seed)
    for _ in range(EDITS):
        proto = schema.ModelProto.FromString(compiled.serialized)
        edit(proto, chance)
        edited = proto.SerializeToString()
        try:
            loaded = loader.load(edited)
        except errors.InplaceError as error:
            assert str(error)
            continue
        compare(example, edited, loaded)


def compare(example: strategies.Example, edited: bytes, loaded: loader.Loaded) -> None:
    """Run an edited file, where it still has a meaning."""
    model, feed = interpreter.Model.parse(edited), example.feeds[0]
    try:
        wanted = interpreter.functional(model, {**feed, **example.storage})
    except (interpreter.OutOfRange, ValueError, IndexError, TypeError, AssertionError):
        return  # shapes that do not fit: no meaning to compare with
    try:
        session = Session(loaded)
    except errors.InplaceError:
        return  # types that no operator takes
    storage = {i.name: example.storage[i.name].copy() for i in session.mutable_inputs}
    with session.bind(**storage) as step:
        try:
            results = step.run(**{i.name: feed[i.name] for i in session.inputs})
        except errors.OperatorError:
            return  # numpy forgives a division by zero, onnxruntime does not
    for got, expected in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(got, expected)
