"""Random stateful programs: what an author could have written, right or wrong.

A program is written at the level of the IR: several lent caches and a read-only one, functions that
call functions, If, Loop and Scan to some depth, views, every operator that writes, reads of every
kind, and values that are derived from reads. The writer keeps no versions. It remembers one
*current* name for each cache, as an author does, takes it nearly always, and a wrong name now and
then (``slips``). Whether the program is right is for others to say.

Everything is drawn through ``Choices``: a seed repeats a program, on every machine and with every
version of the libraries. Tensors are INT64, or integers as float32: every oracle then agrees to the
last bit.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
import scripting
from authoring.author import Author
from authoring.block import CACHE, CAPACITY, ROWS, TOKEN
from authoring.choices import Choices
from authoring.floats import FloatAuthor

from onnx_inplace.compiler import program
from onnx_inplace.compiler.contract import Access


@dataclasses.dataclass(frozen=True)
class Example:
    """A program and what to run it on, one run after the other on the same storage.

    Attributes:
        declaration: what an author recorded and declared.
        storage: content of the caches before the first run.
        feeds: ordinary inputs, one mapping for each run.
        stock: stock onnxruntime is asked as well, from the same bytes. It takes time.
    """

    declaration: program.Declaration
    storage: dict[str, np.ndarray]
    feeds: tuple[dict[str, np.ndarray], ...]
    stock: bool

    def plain(self) -> bytes:
        """The program as an ordinary model, made without the compiler."""
        graph = self.declaration.function.graph
        functions = [d.function for d in self.declaration.functions]
        for d in self.declaration.functions:
            pairs = zip(d.function.inputs, d.access, strict=True)
            lent = [v.name for v, access in pairs if access is Access.READ_WRITE]
            d.function.metadata_props["mutable"] = ",".join(lent)
        model = ir.Model(graph, ir_version=11, functions=functions)
        return ir.to_proto(model).SerializeToString()


def example(choices: Choices) -> Example:
    """A program with storage and inputs for three runs."""
    return _example(Author(choices), choices)


def _example(author: Author, choices: Choices) -> Example:
    declaration, dtype = author.program(), author.element.numpy()
    generator = np.random.default_rng(choices.below(1000))
    caches = {v.name: generator.integers(0, 9, CACHE).astype(dtype) for v in declaration.mutable}
    feeds = []
    for k in range(3):
        feeds.append(
            {
                "frozen": generator.integers(0, 9, CACHE).astype(dtype),
                "new": generator.integers(-9, 9, TOKEN).astype(dtype),
                "position": generator.integers(0, CAPACITY if k else 2, ()),
                "steps": generator.integers(0, 4, ()),
                "rows": generator.integers(0, 2, ROWS),
                "flag": np.asarray(bool((k + generator.integers(2)) % 2)),
            }
        )
    stock = choices.below(4) == 3
    inputs = tuple({k: np.asarray(v) for k, v in feed.items()} for feed in feeds)
    return Example(declaration, caches, inputs, stock)


def seeded(seed: int) -> Example:
    """The program of a seed."""
    return example(Choices(seed))


def seeded_floats(seed: int) -> Example:
    """The program on float32 of a seed."""
    choices = Choices(seed)
    return _example(FloatAuthor(choices), choices)


def seeded_script(seed: int) -> scripting.Script:
    """The text of a seed."""
    return scripting.script(Choices(seed))
