"""Decoders over pages: fused steps give what ordinary steps give, in the same pages."""

import numpy as np
import pytest

from onnx_inplace import Session, compiler, errors, formats
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, Paged, kv, model, op, weight
from onnx_inplace.runner.pages import PagedCache

pytestmark = pytest.mark.kernel

HEADS, GROUP, SIZE, PAGE, LAYERS = 2, 2, 32, 32, 2
WIDTH = HEADS * GROUP * SIZE
KINDS = ["FLOAT16", "INT8", "INT4", "FP8_E4M3"]
RANDOM = np.random.default_rng(3)


def matrix(outputs: int) -> np.ndarray:
    return (RANDOM.standard_normal((WIDTH, outputs)) / np.sqrt(WIDTH)).astype(np.float32)


WEIGHTS = [matrix(WIDTH) for _ in range(2 * LAYERS)]
WEIGHTS_KV = [matrix(2 * HEADS * SIZE) for _ in range(LAYERS)]


def decoder(
    created: str | None = "FLOAT16", *, batch: int = 1, rows: bool = False, accuracy: int = 0
):
    """Rows of numbers -> rows of numbers, over LAYERS paged caches with one block table."""
    Caches = tuple[(Mutable[Paged[FLOAT[2, HEADS, PAGE, SIZE]]],) * LAYERS]
    Ids = INT64[batch, "blocks"] if rows else INT64["blocks"]
    Position = INT64[batch] if rows else INT64[()]

    @model
    def paged(
        x: FLOAT[batch, "n", WIDTH], caches: Caches, table: Ids, position: Position
    ) -> tuple[FLOAT[batch, "n", WIDTH], Alias["caches"]]:
        updated, length = [], position + op.Shape(x)[1]
        for k, cache in enumerate(caches):
            query = op.Reshape(op.MatMul(x, weight(WEIGHTS[k], f"q{k}")), [0, 0, -1, SIZE])
            both = op.MatMul(x, weight(WEIGHTS_KV[k], f"kv{k}"))
            both = op.Transpose(op.Reshape(both, [0, 0, 2, HEADS, SIZE]), perm=[2, 0, 3, 1, 4])
            values = both if rows else op.Squeeze(both, [1])
            new = kv.PagedCacheUpdate(cache, table, values, position, quantized_type=created)
            query = op.Transpose(query, perm=[0, 2, 1, 3])
            h = kv.PagedAttention(query, new, table, length, is_causal=1, accuracy_level=accuracy)
            h = op.Reshape(op.Transpose(h, perm=[0, 2, 1, 3]), [0, 0, WIDTH])
            x = x + op.MatMul(h, weight(WEIGHTS[LAYERS + k], f"o{k}"))
            updated.append(new)
        return x, updated

    return paged


def run(program, fuse, steps, *, threads=1, caches=None, **options):
    """Outputs of steps (x, table, position), and the caches."""
    session = Session(program, threads=threads, fuse=fuse)
    names = [port.name for port in session.mutable_inputs]
    caches = caches or {name: session.allocate(name, **options) for name in names}
    with session.bind(**caches) as step:
        found = [step.run(x=x, table=t, position=p)[0].copy() for x, t, p in steps]
        fused = [run.frame.fused for run in step._execution._frames.values()]
    return found, caches, fused


def steps(pieces, table, batch=1, start=0):
    random, position, found = np.random.default_rng(7), start, []
    for count in pieces:
        x = random.standard_normal((batch, count, WIDTH)).astype(np.float32)
        where = np.array(position) if table.ndim == 1 else np.full(batch, position)
        found.append((x, table, where))
        position += count
    return found


def same(one: PagedCache, other: PagedCache, tolerance: float) -> None:
    assert len(one) == len(other)
    for page in range(len(one)):
        a, b = one.page(page), other.page(page)
        assert a.quantized_type == b.quantized_type
        np.testing.assert_allclose(a.decode(), b.decode(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_decoder_over_pages_agrees_with_the_ordinary_one(kind):
    program, table = decoder(kind), np.array([0, 1, 2, 0])
    pieces = [30, 1, 1, 3, 1, 30, 1]  # pages are made in the middle of a piece, and by one token
    plain, old, none = run(program, "off", steps(pieces, table))
    found, new, fused = run(program, "auto", steps(pieces, table))
    assert not any(none) and sorted(fused) == [False, True, True], "30 tokens are not fused"
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a, b, atol=0.02 * np.abs(b).max(), rtol=0)
    for name, cache in old.items():
        assert len(cache) == 3
        same(cache, new[name], 0.05 if kind != "INT4" else 0.5)
        assert cache.clipped == new[name].clipped


def test_all_of_a_decoder_over_pages_is_one_step_behind_its_lengths():
    plan = compiler.plan(decoder())
    assert [type(step).__name__ for step in plan.fused.block.steps] == ["SubSession", "Fused"]
    assert not plan.fused.refusals


def with_pages(*kinds: str) -> dict[str, PagedCache]:
    """Caches with full pages of several formats; the last page is empty."""
    caches = {}
    for name in ("caches.0", "caches.1"):
        cache = PagedCache((2, HEADS, PAGE, SIZE), np.float32)
        for seed, kind in enumerate(kinds):
            page = cache.allocate_page(kind)
            if seed < len(kinds) - 1:
                tokens = np.random.default_rng(seed).standard_normal(cache.dims)
                cache.write(page, tokens.astype(np.float32), 0)
        caches[name] = cache
    return caches


def test_pages_of_several_formats_in_any_order():
    table, program = np.array([2, 0, 1, 3, 7]), decoder(None)
    kinds = ["INT4", "FLOAT16", "INT8", "FLOAT32"]
    work = steps([1, 1, 2], table, start=3 * PAGE)
    plain, old, _ = run(program, "off", work, caches=with_pages(*kinds))
    found, new, fused = run(program, "auto", work, caches=with_pages(*kinds))
    assert all(fused)
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3 * np.abs(b).max(), rtol=0)
    for name, cache in old.items():
        same(cache, new[name], 1e-4)


def test_two_sequences_with_pages_of_their_own():
    table = np.array([[0, 2], [1, 3]])
    program = decoder("FLOAT32", batch=2, rows=True)
    work = steps([1] * (PAGE + 2), table, batch=2)
    plain, old, _ = run(program, "off", work)
    found, new, fused = run(program, "auto", work)
    assert all(fused)
    np.testing.assert_allclose(found[-1], plain[-1], atol=1e-4 * np.abs(plain[-1]).max(), rtol=0)
    for name, cache in old.items():
        assert len(cache) == 4
        same(cache, new[name], 1e-4)


@pytest.mark.parametrize("kind", ["FLOAT16", "INT8"])
def test_threads_do_not_change_a_byte(kind):
    program, table = decoder(kind), np.arange(12)
    work = steps([1] * 200, table)
    one, first, _ = run(program, "auto", work)
    two, second, _ = run(program, "auto", work, threads=2)
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert {k: c.snapshot() for k, c in first.items()} == {
        k: c.snapshot() for k, c in second.items()
    }


@pytest.mark.parametrize("threads", [1, 2])
def test_accuracy_level_means_the_same_in_a_fused_step(threads):
    table, precise = np.arange(12), decoder("INT8")
    fast = decoder("INT8", accuracy=4)
    made = run(precise, "off", steps([300], table))[1]
    for cache in made.values():
        for page in range(8):
            cache.convert(page, "INT4")
    work = steps([1], table, start=300)
    by = {
        (program, fuse): run(program, fuse, work, threads=threads, caches=made)[0][0]
        for program in (precise, fast)
        for fuse in ("off", "auto")
    }
    largest = np.abs(by[precise, "off"]).max()
    away = {key: np.abs(out - by[precise, "off"]).max() / largest for key, out in by.items()}
    assert away[precise, "auto"] < 1e-5
    assert 1e-4 < away[fast, "off"] < 3e-2
    assert np.abs(by[fast, "auto"] - by[fast, "off"]).max() < 1e-5 * largest


def test_pages_may_move_and_change_their_format_between_runs():
    program, table = decoder("FLOAT32"), np.array([0, 1])
    results = []
    for fuse in ("off", "auto"):
        session = Session(program, fuse=fuse)
        caches = {p.name: session.allocate(p.name) for p in session.mutable_inputs}
        with session.bind(**caches) as step:
            for x, _, position in steps([1] * 34, table):
                if position == 20:
                    for cache in caches.values():
                        cache.convert(0, "INT8")
                        for _ in range(20):  # the table of pages grows
                            cache.allocate_page("INT8")
                    table[1] = 20
                results.append(step.run(x=x, table=table, position=position)[0].copy())
        table[1] = 1
    plain, found = results[:34], results[34:]
    for a, b in zip(found, plain, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3 * np.abs(b).max(), rtol=0)


@pytest.mark.parametrize(
    ("table", "position", "error"),
    [
        ([0, 5], 32, errors.PageError),
        ([0], 32, errors.CapacityError),
        ([0, 1], 40, errors.CapacityError),
    ],
)
def test_what_a_fused_run_refuses_has_changed_no_page(table, position, error):
    program, first = decoder(), np.array([0, 1])
    _, caches, _ = run(program, "auto", steps([1] * 3, first))
    before = {name: cache.snapshot() for name, cache in caches.items()}
    work = [(np.zeros((1, 1, WIDTH), np.float32), np.array(table), np.array(position))]
    with pytest.raises(error):
        run(program, "auto", work, caches=caches)
    assert {name: cache.snapshot() for name, cache in caches.items()} == before


@pytest.mark.parametrize("fuse", ["auto", "off"])
def test_a_page_without_room_is_refused_before_the_first_write(fuse):
    program, table = decoder(), np.array([0, 1])
    size = formats.FLOAT16.page_bytes((2, HEADS, PAGE, SIZE))
    session = Session(program, fuse=fuse)
    caches = {
        "caches.0": session.allocate("caches.0"),
        "caches.1": session.allocate("caches.1", budget=size),
    }
    with session.bind(**caches) as step:
        for x, ids, position in steps([1] * PAGE, table):
            step.run(x=x, table=ids, position=position)
        before = {name: cache.snapshot() for name, cache in caches.items()}
        with pytest.raises(errors.PageBudget):
            step.run(x=np.zeros((1, 1, WIDTH), np.float32), table=table, position=PAGE)
        assert {name: cache.snapshot() for name, cache in caches.items()} == before
