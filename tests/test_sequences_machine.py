"""Sequences on shared pages against a model made of Python lists.

Tokens are small whole numbers, exact in every float format, so that contents are compared exactly
while pages are converted under way.
"""

from __future__ import annotations

import collections
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from onnx_inplace.compiler import errors
from onnx_inplace.runner.pages import PagedCache
from onnx_inplace.runner.sequence import Sequence
from onnx_inplace.runner.sequences import SequencePool

PAGE, HEADS, SIZE = 16, 1, 32
FORMATS = ["FLOAT16", "FLOAT32", "BFLOAT16", "FP8_E4M3"]
TOKEN = st.integers(0, 15)
TEXT = st.builds(  # hypothesis prefers short lists, and pages want long ones
    lambda first, count: [(first + 5 * k) % 16 for k in range(count)], TOKEN, st.integers(0, 40)
)
FIRST_FORMATS = {"first": "FLOAT16", "second": "FLOAT32"}
MAX_PAGES = 24


class Stop(Exception):
    """A run fails."""


class Sequences(RuleBasedStateMachine):
    """Every operation on a pool of two caches, mirrored on lists."""

    def __init__(self) -> None:
        super().__init__()
        dims = (2, HEADS, PAGE, SIZE)
        caches = [PagedCache(dims, np.float32, name=name) for name in ("first", "second")]
        self.pool = SequencePool(
            caches, {"first": "FLOAT16", "second": "FLOAT32"}, max_pages=MAX_PAGES
        )
        self.texts: dict[Sequence, list[int]] = {}
        self.known: list[list[int]] = []

    def _one(self, data: st.DataObject) -> Sequence:
        return data.draw(st.sampled_from(self.pool.sequences), label="sequence")

    # -- operations

    @rule()
    def new(self) -> None:
        self.texts[self.pool.new()] = []

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=TEXT, kept=st.integers(0, 40))
    def write(self, data: st.DataObject, tokens: list[int], kept: int) -> None:
        sequence = self._one(data)
        cost, before = sequence.cost.reserve(len(tokens)), self.pool.nbytes
        try:
            sequence.reserve(len(tokens))
        except (errors.PoolExhausted, errors.PoolTooSmall):
            return
        assert self.pool.nbytes == before + cost.allocated
        self._put(sequence, tokens)
        kept = min(kept, len(tokens))
        sequence.commit(kept)
        self.texts[sequence] += tokens[:kept]

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=TEXT)
    def fail_to_write(self, data: st.DataObject, tokens: list[int]) -> None:
        sequence = self._one(data)
        pages = sequence.pages
        try:
            with sequence.writing(len(tokens)):
                self._put(sequence, tokens)
                raise Stop
        except (Stop, errors.PoolExhausted, errors.PoolTooSmall):
            assert sequence.pages == pages

    @precondition(lambda self: 0 < len(self.texts) < 8)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence, before = self._one(data), self.pool.nbytes
        self.texts[sequence.fork()] = list(self.texts[sequence])
        assert self.pool.nbytes == before

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = self._one(data)
        length = data.draw(st.integers(0, sequence.length))
        cost, before = sequence.cost.truncate(length), self.pool.nbytes
        sequence.truncate(length)
        assert self.pool.nbytes == before - cost.freed
        del self.texts[sequence][length:]

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), whole=st.booleans())
    def drop(self, data: st.DataObject, whole: bool) -> None:
        sequence = self._one(data)
        start = data.draw(st.integers(0, sequence.length))
        stop = data.draw(st.integers(start, sequence.length))
        if whole:
            start, stop = start // PAGE * PAGE, stop // PAGE * PAGE
        cost, before = sequence.cost.drop(start, stop), self.pool.nbytes
        try:
            sequence.drop(start, stop)
        except errors.PoolExhausted:
            return
        assert self.pool.nbytes == before + cost.allocated - cost.freed
        if whole:
            assert cost.allocated == 0
        del self.texts[sequence][start:stop]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = self._one(data)
        cost, before = sequence.cost.free(), self.pool.nbytes
        sequence.free()
        assert self.pool.nbytes == before - cost.freed
        del self.texts[sequence]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        rows = data.draw(st.permutations(self.pool.sequences))
        chosen = [data.draw(st.integers(0, len(rows) - 1)) for _ in rows]
        texts = [list(self.texts[rows[i]]) for i in chosen]
        before = self.pool.nbytes
        self.pool.reorder(rows, chosen)
        assert self.pool.nbytes <= before
        self.texts.update(zip(rows, texts, strict=True))

    @precondition(lambda self: any(len(cache) for cache in self.pool.caches))
    @rule(data=st.data(), format=st.sampled_from(FORMATS))
    def convert(self, data: st.DataObject, format: str) -> None:
        cache = data.draw(st.sampled_from(self.pool.caches))
        cache.convert(data.draw(st.sampled_from(list(cache))), format)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        sequence = self._one(data)
        if not sequence.dropped:
            self.pool.publish(sequence, self.texts[sequence])
            self.known.append(list(self.texts[sequence]))

    @precondition(lambda self: self.known and len(self.texts) < 8)
    @rule(data=st.data(), more=st.lists(TOKEN, max_size=3))
    def begin_with_known(self, data: st.DataObject, more: list[int]) -> None:
        tokens = data.draw(st.sampled_from(self.known)) + more
        sequence = self.pool.new(tokens)
        assert sequence.length % PAGE == 0 and sequence.length <= max(len(tokens) - 1, 0)
        self.texts[sequence] = tokens[: sequence.length]

    @rule()
    def forget_known(self) -> None:
        self.pool.prefixes.clear()

    @rule()
    def save_and_load(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "pool.pages"
            self.pool.save(path)
            again = SequencePool.load(path)
        assert [c.snapshot() for c in again.caches] == [c.snapshot() for c in self.pool.caches]
        texts = {new: self.texts[self.pool.sequences[k]] for k, new in enumerate(again.sequences)}
        self.pool, self.texts = again, texts

    # -- what always holds

    @invariant()
    def contents_are_those_of_the_lists(self) -> None:
        assert set(self.texts) == set(self.pool.sequences)
        for sequence, tokens in self.texts.items():
            assert sequence.length == len(tokens)
            for cache in self.pool.caches:
                assert self._get(sequence, cache) == tokens

    @invariant()
    def owners_are_those_who_count(self) -> None:
        counts = collections.Counter(p for s in self.pool.sequences for p in s.pages)
        counts.update(self.pool.prefixes.pages)
        for cache in self.pool.caches:
            assert {page: cache.page(page).owners for page in cache} == counts
        assert self.pool.pages.used == len(counts) <= MAX_PAGES

    # -- what a run does

    def _put(self, sequence: Sequence, tokens: list[int]) -> None:
        for k, token in enumerate(tokens):
            page, place = divmod(sequence.length + k, PAGE)
            for cache in self.pool.caches:
                value = np.full((2, HEADS, 1, SIZE), token, np.float32)
                cache.write(sequence.pages[page], value, place)

    def _get(self, sequence: Sequence, cache: PagedCache) -> list[int]:
        found: list[int] = []
        for page in sequence.pages:
            values = cache.page(page).decode()
            assert (values == values[:1, :1, :, :1]).all()
            found += values[0, 0, :, 0].tolist()
        return found[: sequence.length]


TestSequences = Sequences.TestCase
TestSequences.settings = settings(  # more than 10,000 steps in all: some examples end early
    max_examples=125,
    stateful_step_count=100,
    suppress_health_check=list(HealthCheck),
)
