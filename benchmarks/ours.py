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
from problem import Array, Problem, error, reference

from onnx_inplace import Session, formats

PAGE = 128  # [tokens]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SIGNIFICANT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}


class Step(NamedTuple):
    """One prepared run.

    Attributes:
        run: a call that gives the output, (1, heads, new, head_size).
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


def dense(problems: Sequence[Problem], kind: str, threads: int, spare: int = 0) -> list[Step]:
    """Over two arrays of type ``kind``, with room for ``spare`` tokens beyond the valid ones.

    Returns:
        A step for each of the problems, which are of one shape, over caches of its own; all of one
        session.
    """
    asked = problems[0]
    model = step_models.dense(kind, asked.heads, asked.kv_heads, asked.size)
    session = Session(model, threads=threads)
    return [_over_arrays(session, problem, kind, spare) for problem in problems]


def _over_arrays(session: Session, problem: Problem, kind: str, spare: int) -> Step:
    """One step of ``dense``."""
    dtype, new = DTYPES[kind], problem.new
    caches = [
        np.ones((1, problem.kv_heads, problem.tokens + spare, problem.size), dtype) for _ in "kv"
    ]
    for cache, x in zip(caches, problem.kv, strict=True):
        cache[0, :, : problem.tokens] = x
    step = session.bind(key_cache=caches[0], value_cache=caches[1])
    query = problem.query[np.newaxis].astype(dtype)
    feeds = {
        "query": query,
        "key": problem.keys[np.newaxis, :, -new:].astype(dtype),
        "value": problem.values[np.newaxis, :, -new:].astype(dtype),
        "position": np.array([problem.tokens - new]),
        "length": np.array([problem.tokens]),
    }

    def run() -> Array:
        return step.run(**feeds)["output"]

    def against_float64() -> float:
        stored = [cache[0, :, : problem.tokens].astype(np.float32) for cache in caches]
        return error(run(), reference(problem.query, *stored), SIGNIFICANT_BITS[kind])

    nbytes = sum(cache[0, :, : problem.tokens].nbytes for cache in caches)
    return Step(run, nbytes, against_float64, step)


def paged(
    problems: Sequence[Problem], kinds: Sequence[str], threads: int, accuracy_level: int = 0
) -> list[Step]:
    """Over pages of these formats in turn; the first one has to take single tokens.

    Returns:
        A step for each of the problems, which are of one shape, over a cache of its own; all of one
        session.
    """
    asked = problems[0]
    model = step_models.paged(kinds, asked.heads, asked.kv_heads, PAGE, asked.size, accuracy_level)
    session = Session(model, threads=threads)
    return [_over_pages(session, problem, kinds) for problem in problems]


def _over_pages(session: Session, problem: Problem, kinds: Sequence[str]) -> Step:
    """One step of ``paged``."""
    new, pages = problem.new, -(-problem.tokens // PAGE)
    table = np.arange(pages)
    cache, writer = step_models.page_writer(problem.kv_heads, PAGE, problem.size, kinds)
    with writer.bind(cache=cache) as writing:
        writing.run(blocks=table, values=np.stack(problem.kv), position=np.array(0))
    for page in range(pages):
        cache.convert(page, kinds[page % len(kinds)])
    step = session.bind(cache=cache)
    feeds: dict[str, Any] = {
        "blocks": table,
        "query": problem.query[np.newaxis],
        "values": np.ascontiguousarray(np.stack(problem.kv)[:, :, -new:]),
        "position": np.array(problem.tokens - new),
        "length": np.array(problem.tokens),
    }

    def run() -> Array:
        return step.run(**feeds)["output"]

    def against_float64() -> float:
        output = run()
        stored = np.concatenate([cache.page(page).decode() for page in table], axis=2)
        keys, values = stored[:, :, : problem.tokens].astype(np.float32)
        return error(output, reference(problem.query, keys, values))

    dims = (2, problem.kv_heads, PAGE, problem.size)
    page_bytes = [formats.BUILTIN[kinds[k % len(kinds)]].page_bytes(dims) for k in range(pages)]
    return Step(run, sum(page_bytes), against_float64, step)
