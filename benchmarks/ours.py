"""This project's part in benchmarks of attention: models that write new tokens and attend.

Every call is ``step.run`` of a session, with all of its checks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import ml_dtypes
import numpy as np
import step_models
from problem import Array, Batch, error, reference

from onnx_inplace import Session, formats

PAGE = 128  # [tokens]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SIGNIFICANT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}


class Step(NamedTuple):
    """One prepared run.

    Attributes:
        run: a call that gives the output, (batch, heads, new, head_size).
        nbytes: of the cache that a run reads.
        error: of the output against float64 on what is stored; see ``problem.error``.
        keep: what has to stay alive.
    """

    run: Callable[[], Array]
    nbytes: int
    error: Callable[[], float]
    keep: object


@contextlib.contextmanager
def portable(wanted: bool) -> Iterator[None]:
    """Sessions that are made here take the kernels for every CPU."""
    with mock.patch.dict(os.environ, {"ONNX_INPLACE_KERNELS": "portable"} if wanted else {}):
        yield


def dense(batches: Sequence[Batch], kind: str, workers: int, spare: int = 0) -> list[Step]:
    """Over two arrays of type ``kind``, with room for ``spare`` tokens behind the longest sequence.

    Returns:
        A step for each of the batches, which are of one shape, over caches of its own; all of one
        session.
    """
    asked = batches[0][0]
    model = step_models.dense(kind, asked.heads, asked.kv_heads, asked.size)
    session = Session(model, threads=workers)
    return [_over_arrays(session, batch, kind, spare) for batch in batches]


def _over_arrays(session: Session, batch: Batch, kind: str, spare: int) -> Step:
    """One step of ``dense``."""
    dtype, new, asked = DTYPES[kind], batch[0].new, batch[0]
    capacity = max(problem.tokens for problem in batch) + spare
    shape = len(batch), asked.kv_heads, capacity, asked.size
    caches = [np.ones(shape, dtype) for _ in "kv"]
    for row, problem in enumerate(batch):
        for cache, x in zip(caches, problem.kv, strict=True):
            cache[row, :, : problem.tokens] = x
    step = session.bind(key_cache=caches[0], value_cache=caches[1])
    feeds = {
        "query": np.stack([problem.query for problem in batch]).astype(dtype),
        "key": np.stack([problem.keys[:, -new:] for problem in batch]).astype(dtype),
        "value": np.stack([problem.values[:, -new:] for problem in batch]).astype(dtype),
        "position": np.array([problem.tokens - new for problem in batch]),
        "length": np.array([problem.tokens for problem in batch]),
    }

    def run() -> Array:
        return step.run(**feeds)["output"]

    def stored(row: int) -> list[Array]:
        return [cache[row, :, : batch[row].tokens] for cache in caches]

    def against_float64() -> float:
        return _error(batch, run(), stored, SIGNIFICANT_BITS[kind])

    nbytes = sum(half.nbytes for row in range(len(batch)) for half in stored(row))
    return Step(run, nbytes, against_float64, step)


def paged(
    batches: Sequence[Batch], kinds: Sequence[str], workers: int, accuracy_level: int = 0
) -> list[Step]:
    """Over pages of these formats in turn; the first one has to take single tokens.

    Returns:
        A step for each of the batches, which are of one shape, over a cache of its own; all of one
        session.
    """
    asked = batches[0][0]
    model = step_models.paged(kinds, asked.heads, asked.kv_heads, PAGE, asked.size, accuracy_level)
    session = Session(model, threads=workers)
    return [_over_pages(session, batch, kinds) for batch in batches]


def _over_pages(session: Session, batch: Batch, kinds: Sequence[str]) -> Step:
    """One step of ``paged``; sequences have pages of their own, one behind the other."""
    new, asked = batch[0].new, batch[0]
    counts = [-(-problem.tokens // PAGE) for problem in batch]
    cache, writer = step_models.page_writer(asked.kv_heads, PAGE, asked.size, kinds)
    blocks = np.zeros((len(batch), max(counts)), np.int64)  # page 0 where nothing is read
    first = 0
    with writer.bind(cache=cache) as writing:
        for row, (problem, count) in enumerate(zip(batch, counts, strict=True)):
            table = np.arange(first, first + count)
            writing.run(blocks=table, values=np.stack(problem.kv), position=np.array(0))
            blocks[row, :count] = table
            first += count
    for page in range(first):
        cache.convert(page, kinds[page % len(kinds)])
    step = session.bind(cache=cache)
    values = [np.stack(problem.kv)[:, :, -new:] for problem in batch]
    feeds: dict[str, Any] = {
        "blocks": blocks,
        "query": np.stack([problem.query for problem in batch]),
        "values": np.stack(values, axis=1),
        "position": np.array([problem.tokens - new for problem in batch]),
        "length": np.array([problem.tokens for problem in batch]),
    }

    def run() -> Array:
        return step.run(**feeds)["output"]

    def stored(row: int) -> Array:
        pages = [cache.page(page).decode() for page in blocks[row, : counts[row]]]
        return np.concatenate(pages, axis=2)[:, :, : batch[row].tokens]

    def against_float64() -> float:
        return _error(batch, run(), stored)

    dims = (2, asked.kv_heads, PAGE, asked.size)
    page_bytes = [formats.BUILTIN[kinds[k % len(kinds)]].page_bytes(dims) for k in range(first)]
    return Step(run, sum(page_bytes), against_float64, step)


def _error(
    batch: Batch, outputs: Array, stored: Callable[[int], Sequence[Array]], bits: int = 24
) -> float:
    """The largest error of all sequences; ``stored`` gives keys and values of one of them."""
    errors = []
    for row, problem in enumerate(batch):
        keys, values = (np.asarray(half, np.float32) for half in stored(row))
        errors.append(error(outputs[row], reference(problem.query, keys, values), bits))
    return max(errors)
