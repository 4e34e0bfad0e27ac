"""What a run is going to do to page tables, found out before it writes: lists and logs."""

import numpy as np
import onnxruntime

from onnx_inplace import formats
from onnx_inplace.compiler import load, page_log, positions, sizes
from onnx_inplace.compiler.page_checks import Mode, Operand
from onnx_inplace.dsl import FLOAT, FLOAT16, INT64, Alias, Mutable, Paged, kv, model, op, scan

Pages = Paged[FLOAT16[2, 2, 16, 32], formats.FLOAT16, formats.INT8]
Values = FLOAT16[2, 2, "n", 32]


def checks(program):
    return positions.build(load(program)).pages


def log_of(found, **inputs):
    """Entries (number, length, positions, ids) of the log of a run."""
    trace = found.trace
    session = onnxruntime.InferenceSession(trace.model, providers=["CPUExecutionProvider"])
    dims = {"n": 1, **{k: v for k, v in inputs.items() if isinstance(v, int) and len(k) == 1}}
    vectors = {name: np.asarray(sizes.numbers(v, dims), np.int64) for name, v in trace.sizes}
    feeds = {name: np.asarray(inputs[name]) for name in trace.inputs}
    for length in (4, 400):
        log = {trace.log: np.zeros(length, np.int64)}
        [noted] = session.run(None, {**feeds, **vectors, **log})
        assert noted.shape == (length,)
    used, entries = noted[0], noted[1:].tolist()
    found, k = [], 0
    while k < used:
        number, count, rows, blocks = entries[k : k + page_log.HEADER]
        k += page_log.HEADER
        where, k = entries[k : k + max(rows, 1)], k + max(rows, 1) * (rows > 0)
        ids, k = entries[k : k + rows * blocks], k + rows * blocks
        found.append((number, count, where if rows else [], ids))
    return found


def test_a_straight_program_is_a_list():
    @model
    def decode(
        cache: Mutable[Pages],
        table: INT64["blocks"],
        query: FLOAT[1, 4, "n", 32],
        values: Values,
        position: INT64[()],
    ) -> tuple[FLOAT[...], Alias["cache"]]:
        updated = kv.PagedCacheUpdate(cache, table, values, position, quantized_type="INT8")
        return kv.PagedAttention(query, updated, table, position + 1), updated

    found = checks(decode)
    assert found.trace is None
    write, read = found.accesses
    assert (write.mode, write.root, write.quantized_type, write.rank) == (
        Mode.WRITE,
        "cache",
        "INT8",
        1,
    )
    assert (write.ids, write.positions) == (Operand("table"), Operand("position"))
    assert (write.length, write.rows, write.blocks) == ("n", 1, "blocks")
    assert (read.mode, read.positions, read.length) == (Mode.READ, Operand("position", 1), "n")


def test_numbers_of_the_model_need_no_input():
    @model
    def write(cache: Mutable[Pages], values: Values) -> Alias["cache"]:
        cache = kv.PagedCacheUpdate(cache, 3, values, 5, quantized_type="INT8")
        return kv.PagedCacheConvert(cache, [3, 4], quantized_type="FLOAT16")

    update, convert = checks(write).accesses
    assert update.ids == Operand(None, 0, (3,)) and update.positions == Operand(None, 0, (5,))
    assert convert.ids == Operand(None, 0, (3, 4))
    assert (convert.mode, convert.quantized_type, convert.blocks) == (Mode.CONVERT, "FLOAT16", 2)


def test_a_batch_has_rows():
    @model
    def write(
        cache: Mutable[Pages],
        tables: INT64["batch", "blocks"],
        values: FLOAT16[2, "batch", 2, "n", 32],
        position: INT64["batch"],
    ) -> Alias["cache"]:
        return kv.PagedCacheUpdate(cache, tables, values, position, quantized_type="INT8")

    [found] = checks(write).accesses
    assert (found.rank, found.rows, found.blocks) == (2, "batch", "blocks")


def test_the_only_format_is_the_one_of_new_pages_and_of_several_none_is():
    @model
    def write(
        one: Mutable[Paged[FLOAT16[2, 2, 16, 32], formats.INT8]], two: Mutable[Pages], x: Values
    ) -> tuple[Alias["one"], Alias["two"]]:
        return kv.PagedCacheUpdate(one, 0, x, 0), kv.PagedCacheUpdate(two, 0, x, 0)

    assert [a.quantized_type for a in checks(write).accesses] == ["INT8", None]


def test_branches_and_loops_are_noted_in_order_of_execution():
    @model
    def write(
        cache: Mutable[Pages], other: Mutable[Pages], x: Values, page: INT64[()], t: INT64[()]
    ) -> tuple[Alias["cache"], Alias["other"]]:
        for k in range(t):
            cache = kv.PagedCacheUpdate(cache, page + k, x, k, quantized_type="INT8")
            if k > 0:
                other = kv.PagedCacheUpdate(other, page, x, 2 * k, quantized_type="INT8")
        other = kv.PagedCacheConvert(other, page, quantized_type="FLOAT16")
        return cache, other

    found = checks(write)
    assert [a.root for a in found.accesses] == ["cache", "other", "other"]
    assert log_of(found, page=7, t=3) == [
        (0, 1, [0], [7]),
        (0, 1, [1], [8]),
        (1, 1, [2], [7]),
        (0, 1, [2], [9]),
        (1, 1, [4], [7]),
        (2, 0, [0], [7]),
    ]
    assert log_of(found, page=7, t=0) == [(2, 0, [0], [7])]


def test_a_while_loop_and_a_scan_are_noted():
    @model
    def write(
        cache: Mutable[Pages], x: Values, tables: INT64["steps", 2], t: INT64[()]
    ) -> Alias["cache"]:
        for table in scan(tables):
            cache = kv.PagedCacheUpdate(cache, table, x, t, quantized_type="INT8")
        while t > 0:
            cache = kv.PagedCacheUpdate(cache, t, x, 0, quantized_type="INT8")
            t = t - 2
        return cache

    tables = np.array([[1, 2], [3, 4]])
    assert log_of(checks(write), tables=tables, t=3) == [
        (0, 1, [3], [1, 2]),
        (0, 1, [3], [3, 4]),
        (1, 1, [0], [3]),
        (1, 1, [0], [1]),
    ]


def test_rows_are_noted_with_one_position_for_all_or_one_each():
    @model
    def write(
        cache: Mutable[Pages],
        tables: INT64[2, "b"],
        x: FLOAT16[2, 2, 2, "n", 32],
        t: INT64[()],
        each: INT64[2],
    ) -> Alias["cache"]:
        cache = kv.PagedCacheUpdate(cache, tables, x, t * t, quantized_type="INT8")
        return kv.PagedCacheUpdate(cache, tables, x, each * 2, quantized_type="INT8")

    tables = np.arange(6).reshape(2, 3)
    assert log_of(checks(write), tables=tables, t=3, each=np.array([1, 4]), n=5, b=3) == [
        (0, 5, [9, 9], [0, 1, 2, 3, 4, 5]),
        (1, 5, [2, 8], [0, 1, 2, 3, 4, 5]),
    ]


def test_what_depends_on_this_run_is_late():
    @model
    def write(cache: Mutable[Pages], x: Values, page: INT64[()]) -> Alias["cache"]:
        cache = kv.PagedCacheUpdate(cache, page, x, 0, quantized_type="INT8")
        first = op.ReduceMax(kv.PageGather(cache, page), keepdims=0)
        cache = kv.PagedCacheUpdate(cache, op.Cast(first, to=INT64), x, 0, quantized_type="INT8")
        return cache

    found = checks(write)
    assert found.trace is None
    assert [a.late is None for a in found.accesses] == [True, True, False]
    assert "PageGather" in found.accesses[2].late


def test_a_branch_that_depends_on_this_run_is_noted_as_a_whole():
    @model
    def write(cache: Mutable[Pages], x: Values, page: INT64[()], t: INT64[()]) -> Alias["cache"]:
        for k in range(t):
            first = op.ReduceMax(kv.PageGather(cache, page + k), keepdims=0)
            if first > 0.0:
                cache = kv.PagedCacheUpdate(cache, page, x, 0, quantized_type="INT8")
        return cache

    assert log_of(checks(write), page=3, t=2) == [
        (0, 0, [0], [3]),
        (-2, 0, [], []),
        (0, 0, [0], [4]),
        (-2, 0, [], []),
    ]


def test_a_model_without_pages_has_none():
    @model
    def dense(cache: Mutable[FLOAT[2, 8, 4]], x: FLOAT[2, 1, 4], p: INT64[()]) -> Alias["cache"]:
        return kv.CacheUpdate(cache, x, p)

    assert checks(dense) is None
