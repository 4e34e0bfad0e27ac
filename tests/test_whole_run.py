"""A run that is a layer and looks like the one before is one call, and does what it did without."""

import contextlib
from collections.abc import Iterator
from typing import Any

import driven
import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_inplace import PagedCache, Session, errors, formats
from onnx_inplace.compiler.contract import Access
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, Paged, kv, model, op
from onnx_inplace.numba_kernels import intake, objects, whole_run
from onnx_inplace.numba_kernels.append_attend import DONE, REFUSED
from onnx_inplace.numba_kernels.memory import FIELD, address
from onnx_inplace.numba_kernels.whole_run import Claim, Words
from onnx_inplace.runner import whole_run as whole
from onnx_inplace.runner.page import Use
from onnx_inplace.runner.profile import profile

HEADS, KV_HEADS, SIZE, CAPACITY, PAGE, PAGES = 4, 2, 32, 64, 16, 4
DIMS = 2, KV_HEADS, PAGE, SIZE
NAMES = "FLOAT32", "INT8"
Cache = FLOAT[1, KV_HEADS, CAPACITY, SIZE]
Page = FLOAT[2, KV_HEADS, PAGE, SIZE]
Pages = Paged[(Page, *[formats.BUILTIN[name] for name in NAMES])]


@model
def dense(
    keys: Mutable[Cache],
    values: Mutable[Cache],
    query: FLOAT[1, HEADS, "n", SIZE],
    key: FLOAT[1, KV_HEADS, "n", SIZE],
    value: FLOAT[1, KV_HEADS, "n", SIZE],
    position: INT64[()],
    length: INT64[1],
) -> tuple[Alias["keys"], FLOAT[1, HEADS, "n", SIZE], Alias["values"]]:
    new_keys = kv.CacheUpdate(keys, key, position)
    new_values = kv.CacheUpdate(values, value, position)
    attended = op.Attention(query, new_keys, new_values, nonpad_kv_seqlen=length, is_causal=1)
    return new_keys, attended, new_values


@model
def paged(
    cache: Mutable[Pages],
    table: INT64["blocks"],
    query: FLOAT[1, HEADS, "n", SIZE],
    values: FLOAT[2, KV_HEADS, "n", SIZE],
    position: INT64[()],
    length: INT64[()],
) -> tuple[FLOAT[1, HEADS, "n", SIZE], Alias["cache"]]:
    updated = kv.PagedCacheUpdate(cache, table, values, position, quantized_type="INT8")
    return kv.PagedAttention(query, updated, table, length, is_causal=1), updated


SESSIONS = {"dense": Session(dense, fuse="off"), "paged": Session(paged, fuse="off")}


def storage_of(kind: str) -> dict[str, Any]:
    """Storage with numbers in all places but, of pages, the last one, which is not there yet."""
    rng = np.random.default_rng(0)
    if kind == "dense":
        shape = 1, KV_HEADS, CAPACITY, SIZE
        return {name: rng.standard_normal(shape, np.float32) for name in ("keys", "values")}
    cache = PagedCache(DIMS, np.float32, [formats.BUILTIN[name] for name in NAMES])
    for page in cache.allocate_pages(PAGES - 1, "FLOAT32"):
        cache.write(page, rng.standard_normal(DIMS, np.float32), 0)
    return {"cache": cache}


def feeds_of(kind: str, at: int) -> dict[str, Any]:
    rng = np.random.default_rng(at)
    feeds: dict[str, Any] = {
        "query": rng.standard_normal((1, HEADS, 1, SIZE), np.float32),
        "position": np.array(at),
    }
    if kind == "dense":
        new = {n: rng.standard_normal((1, KV_HEADS, 1, SIZE), np.float32) for n in ("key", "value")}
        return feeds | new | {"length": np.array([at + 1])}
    values = rng.standard_normal((2, KV_HEADS, 1, SIZE), np.float32)
    return feeds | {"table": np.arange(PAGES), "values": values, "length": np.array(at + 1)}


def state_of(storage: dict[str, Any]) -> list[object]:
    return [x.snapshot() if isinstance(x, PagedCache) else x.tobytes() for x in storage.values()]


class Both:
    """Two bindings of one session: runs of one may be whole, those of the other never are."""

    def __init__(self, kind: str) -> None:
        self.kind, session = kind, SESSIONS[kind]
        self.storage = [storage_of(kind) for _ in range(2)]
        self.bindings = [session.bind(**storage) for storage in self.storage]

    def run(self, feeds: dict[str, Any]) -> list[Any]:
        """What both give: outputs as bytes, or an error; and what they count."""
        found = []
        for binding, storage in zip(self.bindings, self.storage, strict=True):
            off = binding is not self.bindings[0]
            with pytest.MonkeyPatch.context() as patch:
                if off:
                    patch.setattr(whole, "find", lambda *_: None)
                try:
                    outputs = binding.run(**feeds)
                except errors.InplaceError as error:
                    found.append((type(error), str(error), binding.generation))
                    continue
            names = [n for n, x in outputs.items() if not any(x is y for y in storage.values())]
            found.append((outputs[names[0]].tobytes(), binding.generation))
        return found

    def agree(self, feeds: dict[str, Any]) -> Any:
        one, other = self.run(feeds)
        assert one == other
        assert state_of(self.storage[0]) == state_of(self.storage[1])
        return one

    def close(self) -> None:
        for binding in self.bindings:
            binding.close()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the compiled call of whole runs said, each time."""
    found: list[int] = []
    monkeypatch.setattr(whole_run, "run", driven.recording(whole_run.run, found))
    return found


@pytest.fixture(params=["dense", "paged"])
def both(request) -> Iterator[Both]:
    pair = Both(request.param)
    with contextlib.closing(pair):
        yield pair


# -- what it does


def test_tokens_are_the_same_as_one_by_one(both, answers) -> None:
    """Also where a page has to be made, which the steps do, and pages behind it."""
    for at in range(2 * PAGE, CAPACITY):
        both.agree(feeds_of(both.kind, at))
    assert answers.count(REFUSED) <= 1 and answers.count(DONE) >= CAPACITY - 2 * PAGE - 4


def test_outputs_are_new_and_aliases_are_the_storage(both, answers) -> None:
    binding, storage = both.bindings[0], both.storage[0]
    runs = [binding.run(**feeds_of(both.kind, at)) for at in range(20, 30)]
    kept = [[x.copy() if isinstance(x, np.ndarray) else x for x in run] for run in runs]
    for at in range(30, 34):
        binding.run(**feeds_of(both.kind, at))
    assert answers.count(DONE) > 10
    for run, before in zip(runs, kept, strict=True):
        for (name, x), old in zip(run.items(), before, strict=True):
            root = {"new_keys": "keys", "new_values": "values", "updated": "cache"}.get(name)
            if root is None:
                np.testing.assert_array_equal(x, old)
            else:
                assert x is storage[root]


def test_inputs_may_be_written_again_behind_a_run(both, answers) -> None:
    """Nothing of a run refers to them: neither its outputs nor later runs."""
    binding = both.bindings[0]
    feeds = feeds_of(both.kind, 20)
    for at in range(20, 26):
        for name, array in feeds_of(both.kind, at).items():
            feeds[name][...] = array
        mine = binding.run(**feeds)
        others = both.bindings[1].run(**feeds_of(both.kind, at))
        for x, y in zip(mine, others, strict=True):
            if isinstance(x, np.ndarray):
                np.testing.assert_array_equal(x, y)
    assert DONE in answers


def test_prompts_between_tokens(both, answers) -> None:
    """Other shapes have calls of their own."""
    for at in (20, 21, 22, 23, 24):
        both.agree(feeds_of(both.kind, at))
    feeds = feeds_of(both.kind, 25)
    for name in feeds.keys() & {"query", "key", "value", "values"}:
        feeds[name] = np.concatenate([feeds[name]] * 3, axis=2)
    feeds["length"] = feeds["length"] + 2
    for _ in range(4):
        both.agree(feeds)
    for at in range(28, 33):
        both.agree(feeds_of(both.kind, at))
    assert answers.count(DONE) > 5


# -- what it leaves to others


NUMBERS = st.integers(-3, CAPACITY + 3) | st.sampled_from([-(2**63), 2**63 - 1])


def changed(draw: st.DataObject, kind: str, feeds: dict[str, Any], lent: np.ndarray) -> dict:
    """Inputs of which one is another: number, type, shape, order, memory; or missing, or more."""
    name = draw.draw(st.sampled_from([*feeds]))
    array = feeds[name]
    if array.dtype == np.int64 and draw.draw(st.booleans()):
        numbers = [draw.draw(NUMBERS) for _ in range(array.size)]
        return feeds | {name: np.array(numbers, np.int64).reshape(array.shape)}
    change = draw.draw(st.integers(0, 7))
    if change == 0:
        return {other: value for other, value in feeds.items() if other != name}
    if change == 1:
        return feeds | {"another": array}
    others = {
        2: lambda: array.astype(np.int32 if array.dtype == np.int64 else np.float16),
        3: lambda: array[None],
        4: lambda: array.tolist(),
        5: lambda: np.stack([array, array], -1)[..., 0],
        6: lambda: array.reshape(-1)[:0],
        7: lambda: (
            lent.reshape(-1)[: array.size].view(array.dtype)[: array.size].reshape(array.shape)
            if array.dtype == lent.dtype
            else array.copy()
        ),
    }
    return feeds | {name: others[change]()}


PAIRS: dict[str, Both] = {}


@pytest.mark.parametrize("kind", ["dense", "paged"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_change_of_the_inputs_does_the_same(kind, data) -> None:
    pair = PAIRS.setdefault(kind, Both(kind))
    right = feeds_of(kind, 20)
    for _ in range(4):
        pair.agree(right)
    storage = next(iter(pair.storage[0].values()))
    lent = storage if isinstance(storage, np.ndarray) else storage.page(0).decode()
    pair.agree(changed(data, kind, right, lent))
    pair.agree(right)


def test_other_names_in_another_order(both, answers) -> None:
    for at in range(20, 26):
        feeds = feeds_of(both.kind, at)
        both.agree(dict(reversed(feeds.items())))
    assert answers[-1] == DONE


def test_plain_numbers_are_tried_once(both, answers) -> None:
    """Runs behind one that brought no arrays are not likely to; arrays are taken again later."""
    for at in range(20, 30):
        both.agree(feeds_of(both.kind, at) | {"position": at})
    assert answers == [REFUSED]
    for at in range(30, 34):
        both.agree(feeds_of(both.kind, at))
    assert answers == [REFUSED, *[DONE] * 3]


def test_bytes_of_a_page_that_somebody_sees_are_lent(answers) -> None:
    pair = Both("paged")
    with contextlib.closing(pair):
        for at in range(20, 26):
            pair.agree(feeds_of("paged", at))
        count, cache = len(answers), pair.storage[0]["cache"]
        query = cache.page(0).raw.view(np.float32)[: HEADS * SIZE].reshape(1, HEADS, 1, SIZE)
        with pytest.raises(errors.SharedStorage):
            pair.bindings[0].run(**feeds_of("paged", 26) | {"query": query})
        assert answers[count:] == [REFUSED]


def test_shared_pages_and_converted_ones(answers) -> None:
    pair = Both("paged")
    with contextlib.closing(pair):
        for at in range(20, 26):
            pair.agree(feeds_of("paged", at))
        for storage in pair.storage:
            storage["cache"].share(1)
        assert pair.agree(feeds_of("paged", 26))[0] is errors.PageError
        for storage in pair.storage:
            storage["cache"].release(1)
            storage["cache"].convert(0, "INT8")
        for at in range(26, 30):
            pair.agree(feeds_of("paged", at))
        assert answers[-1] == DONE


def test_who_looks_at_steps_sees_them(both, answers) -> None:
    binding = both.bindings[0]
    for at in range(20, 26):
        binding.run(**feeds_of(both.kind, at))
    count = len(answers)
    binding.observe(lambda step, action: action)
    for at in range(26, 30):
        binding.run(**feeds_of(both.kind, at))
    assert len(answers) == count > 0


def test_a_profile_names_the_steps(both) -> None:
    found = profile(SESSIONS[both.kind], storage_of(both.kind), feeds_of(both.kind, 20), runs=3)
    assert "Attention" in str(found)


def test_a_closed_binding_is_refused(both) -> None:
    binding = both.bindings[0]
    for at in range(20, 26):
        binding.run(**feeds_of(both.kind, at))
    binding.close()
    with pytest.raises(errors.BindingError, match="closed"):
        binding.run(**feeds_of(both.kind, 26))


def test_an_interrupt_behind_the_writes(both, monkeypatch) -> None:
    """What was written is told; later runs are refused until somebody says that it is well."""
    real, stop = whole_run.run.ready(), False

    class Interrupted:
        def ready(self) -> Any:
            def call(*arguments: int) -> int:
                answer: int = real(*arguments)
                if stop:
                    raise KeyboardInterrupt
                return answer

            return call

    monkeypatch.setattr(whole_run, "run", Interrupted())
    binding = both.bindings[0]
    for at in range(20, 26):
        binding.run(**feeds_of(both.kind, at))
    stop = True
    with pytest.raises(KeyboardInterrupt):
        binding.run(**feeds_of(both.kind, 26))
    stop = False
    with pytest.raises(errors.DirtyState) as dirty:
        binding.run(**feeds_of(both.kind, 27))
    roots = {"dense": ["keys", "values"], "paged": ["cache"]}[both.kind]
    assert [written.root for written in dirty.value.written] == roots
    if both.kind == "dense":
        assert {(w.position, w.length) for w in dirty.value.written} == {(26, 1)}
    assert binding.generation == 7
    binding.reset()
    binding.run(**feeds_of(both.kind, 27))
    assert binding.generation == 8


def test_an_interrupt_of_a_run_with_plain_numbers(monkeypatch) -> None:
    """They are no arrays, so that the run is left to others: the interrupt comes all the same."""
    session, storage = SESSIONS["dense"], storage_of("dense")

    class Interrupted:
        def ready(self) -> Any:
            def call(*arguments: int) -> int:
                raise KeyboardInterrupt

            return call

    with session.bind(**storage) as binding:
        monkeypatch.setattr(whole_run, "run", Interrupted())
        for at in range(20, 22):
            binding.run(**feeds_of("dense", at))
        with pytest.raises(KeyboardInterrupt):
            binding.run(**feeds_of("dense", 23) | {"position": 23})
        with pytest.raises(errors.DirtyState):
            binding.run(**feeds_of("dense", 23))


# -- who has the pages


def test_nobody_changes_a_cache_that_a_compiled_run_has() -> None:
    cache = storage_of("paged")["cache"]
    claim = cache.claim("mine")
    claim[Claim.RUN] = 1
    with pytest.raises(errors.BindingInUse, match="`mine` runs on it"):
        cache.convert(0, "INT8")
    for access in Access.READ_ONLY, Access.READ_WRITE:
        with pytest.raises(errors.BindingInUse, match="`mine` runs on it"):
            cache.begin(Use("other"), access)
    assert claim.tolist() == [0, 0, 1]
    claim[Claim.RUN] = 0
    cache.convert(0, "INT8")
    assert not claim.any()


def test_owner_and_runs_say_that_they_use_a_cache() -> None:
    cache = storage_of("paged")["cache"]
    claim = cache.claim("mine")
    use, reader = Use("one"), Use("two")
    cache.begin(use, Access.READ_ONLY)
    cache.begin(reader, Access.READ_ONLY)
    assert claim.tolist() == [0, 2, 0]
    cache.end(use)
    del reader  # as an interrupt leaves it
    cache.begin(use := Use("three"), Access.READ_WRITE)
    assert claim.tolist() == [0, 1, 0]
    cache.end(use)
    with PagedCache.still("counted", [cache]), cache._runs.none("counted again"):
        assert claim.tolist() == [2, 0, 0]
    assert not claim.any()


@numba.cfunc("int64(int64,int64,int64,int64)")
def _claimed(slots, table, space, team):
    """The claim that ``table`` is the address of, as one number."""
    found = numba.carray(intake.int64_at(table), (3,))
    return 1 + found[0] + 10 * found[1] + 100 * found[2]


@pytest.mark.parametrize("used", [None, *Claim][:-1], ids=str)
def test_pages_are_claimed_for_the_call_alone(used) -> None:
    claim, words, places = np.zeros(Claim.END, np.int64), np.zeros(Words.END, np.int64), np.zeros(1)
    slots, output, lent = np.full(2, -7), np.zeros(1), intake.lent([], [], [])
    words[Words.SLOTS], words[Words.OUTPUT], words[Words.KIND] = address(slots), 1, objects.ARRAY
    words[Words.PLACES], words[Words.CALL] = address(places), _claimed.address
    words[Words.TABLE] = words[Words.CLAIM] = address(claim)
    if used is not None:
        claim[used] = 1
    before, given = claim.copy(), ()
    arguments = id(given) + objects.ITEMS, id(output), id(lent) + FIELD, address(words), 0, 0
    answer = whole_run.run.ready()(*arguments)
    assert answer == (101 if used is None else REFUSED)
    assert (claim == before).all()
    assert slots[1] == id(output) and slots[0] == -7
