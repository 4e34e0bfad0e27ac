"""Attention of one layer over pages that a policy keeps, in several ways; see ``teacher.Attend``.

kernels:        a model writes, ``PagedAttention`` attends, the owner of the cache converts pages as
                they age: what decoding does, but a page of tokens a step
tokens:         the same, one token a step; at any ``accuracy_level``
pages:          pages are stored likewise; attention is numpy's, in float32
specification:  pages are made by the numpy specification of the tests; attention is numpy's
"""

import functools

import numpy as np
import page_specification
from config import SMOLLM2_135M
from numpy.typing import NDArray
from policies import Policy
from teacher import Array, Attend, attend

from onnx_inplace import Session
from onnx_inplace.compiler.formats import PageFormat
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, Paged, kv, model

HEADS, KV_HEADS, SIZE = SMOLLM2_135M.heads, SMOLLM2_135M.kv_heads, SMOLLM2_135M.head_size


@functools.cache
def layer(allowed: frozenset[PageFormat], page_size: int, accuracy_level: int) -> Session:
    """Appends a layer's new K and V to its cache and attends over all of it."""
    Pages = Paged[(FLOAT[2, KV_HEADS, page_size, SIZE], *sorted(allowed, key=str))]

    @model
    def step(
        cache: Mutable[Pages],
        table: INT64["blocks"],
        position: INT64[()],
        length: INT64[()],
        query: FLOAT[1, HEADS, "n", SIZE],
        values: FLOAT[2, KV_HEADS, "n", SIZE],
    ) -> tuple[FLOAT[1, HEADS, "n", SIZE], Alias["cache"]]:
        updated = kv.PagedCacheUpdate(cache, table, values, position)
        output = kv.PagedAttention(
            query, updated, table, length, is_causal=1, accuracy_level=accuracy_level
        )
        return output, updated

    return Session(step)


def formats_of(policy: Policy) -> frozenset[PageFormat]:
    """All formats that its pages ever have."""
    return frozenset(policy.chain) | ({policy.first} if policy.first else set())


def by_kernels(policy: Policy) -> Attend:
    """Everything as in decoding, a page of tokens a step."""
    return _by_steps(policy, policy.page_size, accuracy_level=0)


def by_tokens(policy: Policy, accuracy_level: int) -> Attend:
    """Everything as in decoding; only steps of one token honour ``accuracy_level``."""
    return _by_steps(policy, 1, accuracy_level)


def _by_steps(policy: Policy, rows: int, accuracy_level: int) -> Attend:
    """Steps of so many tokens; they divide a page."""
    size = policy.page_size
    session = layer(formats_of(policy), size, accuracy_level)

    def attend_by_kernels(query: Array, keys: Array, values: Array) -> Array:
        cache, output = session.allocate("cache"), np.empty_like(query)
        with session.bind(cache=cache) as step:
            for newest in range(query.shape[1] // size):
                for page in range(newest):
                    cache.convert(page, policy.format(page, newest))
                cache.allocate_page(policy.format(newest, newest))
                table = np.arange(newest + 1)
                for start in range(newest * size, (newest + 1) * size, rows):
                    new = slice(start, start + rows)
                    output[:, new] = step.run(
                        table=table,
                        position=new.start,
                        length=new.stop,
                        query=query[None, :, new],
                        values=np.stack([keys[:, new], values[:, new]]),
                    )["output"][0]
        return output

    return attend_by_kernels


def by_numpy(policy: Policy, specification: bool) -> Attend:
    """Attention over what pages decode to."""
    size = policy.page_size
    decode = stored_by_specification if specification else stored_by_runner

    def attend_by_numpy(query: Array, keys: Array, values: Array) -> Array:
        x = np.stack([keys, values])
        stages = decode(x, policy.chain, size)
        first = None if policy.first is None else decode(x[:, :, :size], [policy.first], size)[0]

        def visible(newest: int) -> tuple[Array, Array]:
            seen = np.empty_like(x[:, :, : (newest + 1) * size])
            for page in range(newest + 1):
                rows = slice(page * size, (page + 1) * size)
                seen[:, :, rows] = stages[policy.stage(newest - page)][:, :, rows]
            if first is not None:
                seen[:, :, :size] = first
            return seen[0], seen[1]

        return attend(query, visible, size)

    return attend_by_numpy


def stored_by_runner(x: Array, chain: list[PageFormat], page_size: int) -> list[Array]:
    """What pages of the runner decode to in each format of a chain: [2, heads, tokens, head_size].

    The first format of a chain is appendable: a page that is written at once is what it would be
    token by token.
    """
    session = writer(tuple(chain), page_size)
    cache = session.allocate("cache")
    pages = x.shape[2] // page_size
    with session.bind(cache=cache) as step:
        step.run(table=np.arange(pages), values=x)
    stages = []
    for place, page_format in enumerate(chain):
        for page in range(pages if place else 0):
            cache.convert(page, page_format)
        stages.append(np.concatenate([cache.page(page).decode() for page in range(pages)], axis=2))
    return stages


@functools.cache
def writer(chain: tuple[PageFormat, ...], page_size: int) -> Session:
    """Writes a layer's K and V into pages of the first format, which may become the other ones."""
    Pages = Paged[(FLOAT[2, KV_HEADS, page_size, SIZE], *chain)]

    @model
    def write(
        cache: Mutable[Pages], table: INT64["blocks"], values: FLOAT[2, KV_HEADS, "tokens", SIZE]
    ) -> Alias["cache"]:
        updated = kv.PagedCacheUpdate(cache, table, values, 0, quantized_type=chain[0].name)
        return updated

    return Session(write)


def stored_by_specification(x: Array, chain: list[PageFormat], page_size: int) -> list[Array]:
    """The same by the numpy specification: all pages as the heads of one page."""
    _, heads, tokens, head_size = x.shape
    pages = tokens // page_size
    by_page = x.reshape(2, heads * pages, page_size, head_size)
    dims = by_page.shape
    page = in_sequence(chain[0], x, page_size) if chain[0].key.channel_offset else None
    if page is None:
        page = page_specification.encode(chain[0], by_page, page_size)
    stages = []
    for before, page_format in zip([chain[0], *chain], chain, strict=False):
        if page_format is not before:
            page = page_specification.convert(before, page_format, page, dims, page_size)
        stages.append(page_specification.decode(page_format, page, dims).reshape(x.shape))
    return stages


def in_sequence(page_format: PageFormat, x: Array, page_size: int) -> NDArray[np.uint8]:
    """Pages of a format whose offsets come from the page before, as the heads of one page."""
    _, heads, tokens, head_size = x.shape
    dims = 2, heads, page_size, head_size
    pages = [page_specification.start_page(page_format, dims)]
    for start in range(0, tokens, page_size):
        new = x[:, :, start : start + page_size]
        pages[-1] = page_specification.write(page_format, pages[-1], dims, new, 0, 0)
        following = page_specification.start_page(
            page_format, dims, page_format, pages[-1], page_size
        )
        pages.append(following)
    by_head = [page.reshape(heads, 1, -1) for page in pages[:-1]]
    return np.concatenate(by_head, axis=1).reshape(-1)
