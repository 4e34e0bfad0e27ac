"""Paged caches in the language and in files: types, what is refused, what a file says."""

import os
import re
import subprocess
import sys

import google.protobuf.text_format
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from google.protobuf.message import Message
from typer.testing import CliRunner

from onnx_inplace import Session, errors, formats
from onnx_inplace.cli.commands import app
from onnx_inplace.compiler import (
    ShapesContext,
    load,
    page_declarations,
    plan,
    restore,
    schema,
    sizes,
    steps,
)
from onnx_inplace.dsl import (
    FLOAT,
    FLOAT16,
    INT64,
    Alias,
    Mutable,
    Paged,
    SparsePaged,
    function,
    kv,
    model,
    op,
    scan,
)

H, PAGE, D = 2, 32, 64
Page = FLOAT16[2, H, PAGE, D]
Pages = Paged[Page, formats.FLOAT16, formats.INT8, formats.INT4]
Values = FLOAT16[2, H, "n", D]


@model
def decode(
    cache: Mutable[Pages],
    block_table: INT64["blocks"],
    query: FLOAT[1, 4, "n", D],
    values: Values,
    position: INT64[()],
) -> tuple[FLOAT[1, 4, "n", D], Alias["cache"]]:
    updated = kv.PagedCacheUpdate(cache, block_table, values, position, quantized_type="FLOAT16")
    output = kv.PagedAttention(query, updated, block_table, position + 1, is_causal=1)
    return output, updated


def values_of(proto):
    """Every ValueInfoProto of a model, by name."""

    def walk(graph):
        yield from (*graph.input, *graph.output, *graph.value_info)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    yield from walk(attribute.g)

    return {v.name: v for v in walk(proto.graph)}


# -- what a file says


def test_a_paged_cache_is_carried_by_a_sequence_of_uint8_vectors():
    for name in ("cache", "updated"):
        element = values_of(decode.proto)[name].type.sequence_type.elem_type
        assert element.tensor_type.elem_type == onnx.TensorProto.UINT8
        assert len(element.tensor_type.shape.dim) == 1
        pages = element.quantized_tensor
        assert list(pages.allowed_quantized_type) == ["FLOAT16", "INT8", "INT4"]
        assert pages.elem_type == onnx.TensorProto.FLOAT16 and not pages.sparse_ids
        assert [d.dim_value for d in pages.shape.dim] == [2, H, PAGE, D]


def test_a_file_declares_the_formats_that_it_uses_in_canonical_order():
    @model
    def read(
        a: Paged[Page, formats.INT2, formats.INT8], b: Paged[Page, formats.FLOAT16], ids: INT64["k"]
    ) -> tuple[FLOAT16[...], FLOAT16[...]]:
        return kv.PageGather(a, ids), kv.PageGather(b, ids)

    assert [q.name for q in read.proto.quantizations] == ["FLOAT16", "INT8", "INT2"]


def test_no_formats_mean_any():
    @model
    def read(cache: Paged[Page], page: INT64[()]) -> FLOAT16[2, H, PAGE, D]:
        return kv.PageGather(cache, page)

    assert [q.name for q in read.proto.quantizations] == list(formats.BUILTIN)
    load(read)


def test_the_checker_accepts_the_file_and_stock_onnxruntime_has_no_such_operator():
    plain = decode.proto.SerializeToString()
    onnx.checker.check_model(onnx.ModelProto.FromString(plain), full_check=True)
    with pytest.raises(Exception, match="PagedCacheUpdate"):
        onnxruntime.InferenceSession(plain, providers=["CPUExecutionProvider"])


def test_the_file_says_that_other_runtimes_cannot_run_it():
    [said] = [p.value for p in decode.proto.metadata_props if p.key == "onnx_inplace.requires"]
    assert "PagedAttention, PagedCacheUpdate" in said


@pytest.mark.parametrize("suffix", [".onnx", ".textproto", ".json"])
def test_a_saved_file_loads_again(tmp_path, suffix):
    decode.save(tmp_path / f"m{suffix}")
    again = load(tmp_path / f"m{suffix}")
    assert again.program.proto == decode.proto


# -- the language


def test_structures_of_caches_functions_and_control_flow_keep_the_type():
    @function
    def layer(
        cache: Mutable[Pages], ids: INT64["b"], values: Values, p: INT64[()]
    ) -> Alias["cache"]:
        return kv.PagedCacheUpdate(cache, ids, values, p, quantized_type="INT8")

    @model
    def steps(
        caches: Mutable[tuple[Pages, Pages]],
        ids: INT64["b"],
        values: Values,
        p: INT64[()],
        all_values: FLOAT16["k", 2, H, 1, D],
    ) -> Alias["caches"]:
        first, second = caches
        first = layer(first, ids, values, p)
        if p > 3:
            second = layer(second, ids, values, p)
        for _ in range(p):
            second = layer(second, ids, values, p)
        for v in scan(all_values):
            second = layer(second, ids, v, p)
        return first, second

    loaded = load(steps)
    roots = {loaded.aliases.root[v].name for v in loaded.model.graph.outputs}
    assert roots == {"caches.0", "caches.1"}
    plain = onnx.ModelProto.FromString(steps.proto.SerializeToString())
    onnx.checker.check_model(plain, full_check=False)


def test_ids_may_be_sparse():
    @model
    def write(
        cache: Mutable[SparsePaged[Page, formats.INT8]], id: INT64[()], x: Values
    ) -> Alias["cache"]:
        return kv.PagedCacheUpdate(cache, id, x, 0)

    element = values_of(write.proto)["cache"].type.sequence_type.elem_type
    assert element.quantized_tensor.sparse_ids
    load(write)


def test_a_format_may_stand_for_its_name():
    @model
    def convert(cache: Mutable[Pages], page: INT64[()]) -> Alias["cache"]:
        return kv.PagedCacheConvert(cache, page, quantized_type=formats.INT4)

    [node] = convert.proto.graph.node
    assert node.attribute[0].s == b"INT4"


def test_what_is_decoded_is_a_tensor_that_is_computed_with():
    @model
    def read(cache: Pages, ids: INT64[4]) -> FLOAT16[2, H, 4 * PAGE, D]:
        return kv.PageGather(cache, ids) * 2.0

    load(read)


# -- what is refused

HEADER = """
from onnx_inplace import formats
from onnx_inplace.dsl import *
Page = FLOAT16[2, 2, 32, 64]
Pages = Paged[Page, formats.FLOAT16, formats.INT8]
N = FLOAT16[2, 2, "n", 64]
P = INT64[()]
"""
"""Lines that break a rule end with its code."""

REFUSED = {
    "an ordinary operator reads pages": """
@model
def program(c: Mutable[Pages], x: FLOAT[...]) -> tuple[FLOAT[...], Alias["c"]]:
    return op.Add(x, c), c  # E102
""",
    "arithmetic on pages": """
@model
def program(c: Mutable[Pages]) -> FLOAT16[...]:
    return c + 1.0  # E102
""",
    "an operator of another library reads pages": """
@model
def program(c: Pages) -> FLOAT16[...]:
    return op.SequenceAt(c, 0)  # E102
""",
    "a copy of pages": """
@model
def program(c: Pages) -> Pages:
    return kv.Copy(c)  # E102
""",
    "a tensor is updated as pages": """
@model
def program(c: Mutable[Page], x: N, p: P) -> Alias["c"]:
    return kv.PagedCacheUpdate(c, p, x, p)  # E102
""",
    "an unknown format": """
@model
def program(c: Mutable[Pages], x: N, p: P) -> Alias["c"]:
    return kv.PagedCacheUpdate(c, p, x, p, quantized_type="INT9")  # E115
""",
    "a format that the cache does not allow": """
@model
def program(c: Mutable[Pages], p: P) -> Alias["c"]:
    return kv.PagedCacheConvert(c, p, quantized_type="INT4")  # E115
""",
    "a format of another spelling": """
@model
def program(c: Mutable[Pages], p: P) -> Alias["c"]:
    return kv.PagedCacheConvert(c, p, quantized_type="int8")  # E115
""",
    "pages that a format cannot group": """
Wide = Paged[FLOAT16[2, 2, 96, 64], formats.INT4]  # E115
""",
    "pages that are no floats": """
Wide = Paged[INT64[2, 2, 32, 64]]  # E115
""",
    "pages of three dimensions": """
Wide = Paged[FLOAT16[2, 32, 64]]  # E115
""",
    "pages without keys": """
Wide = Paged[FLOAT16[1, 2, 32, 64]]  # E115
""",
    "pages of a size that nobody knows": """
Wide = Paged[FLOAT16[2, 2, "page", 64]]  # E115
""",
    "branches give pages of two types": """
@model
def program(
    c: Mutable[Pages], d: Mutable[Paged[Page, formats.INT8]], p: P
) -> tuple[Alias["c"], Alias["d"]]:
    if p > 0:  # E107
        e = c
    else:
        e = d
    return e, d
""",
    "a function takes pages of another type": """
@function
def write(c: Mutable[Paged[Page, formats.INT8]], x: N, p: P) -> Alias["c"]:
    return kv.PagedCacheUpdate(c, p, x, p)
@model
def program(c: Mutable[Pages], x: N, p: P) -> Alias["c"]:
    return write(c, x, p)  # E115
""",
    "a function takes pages of another size": """
Large = Paged[FLOAT16[2, 4, 32, 64], formats.FLOAT16, formats.INT8]
@function
def write(c: Mutable[Large], p: P) -> Alias["c"]:
    return kv.PagedCacheConvert(c, p, quantized_type="INT8")
@model
def program(c: Mutable[Pages], x: N, p: P) -> Alias["c"]:
    return write(c, p)  # E102
""",
    "a function takes a tensor, and gets pages": """
@function
def total(c: Page) -> FLOAT16[...]:
    return op.ReduceSum(c)
@model
def program(c: Pages) -> FLOAT16[...]:
    return total(c)  # E115
""",
    "values of other heads": """
@model
def program(c: Mutable[Pages], x: FLOAT16[2, 4, "n", 64], p: P) -> Alias["c"]:
    return kv.PagedCacheUpdate(c, p, x, p, quantized_type="INT8")  # E102
""",
    "values of another head size": """
@model
def program(c: Mutable[Pages], x: FLOAT16[2, 2, "n", 32], p: P) -> Alias["c"]:
    return kv.PagedCacheUpdate(c, p, x, p, quantized_type="INT8")  # E102
""",
    "values of a batch into one page": """
@model
def program(c: Mutable[Pages], x: FLOAT16[2, 3, 2, "n", 64], p: P) -> Alias["c"]:
    return kv.PagedCacheUpdate(c, p, x, p, quantized_type="INT8")  # E102
""",
    "values that are no floats": """
@model
def program(c: Mutable[Pages], x: INT64[2, 2, "n", 64], p: P) -> Alias["c"]:
    return kv.PagedCacheUpdate(c, p, x, p, quantized_type="INT8")  # E102
""",
    "a block table of three dimensions": """
@model
def program(c: Pages, t: INT64[1, 2, 3], q: FLOAT[1, 2, "n", 64], l: P) -> FLOAT[...]:
    return kv.PagedAttention(q, c, t, l)  # E102
""",
    "heads that do not divide": """
@model
def program(c: Pages, t: INT64["b"], q: FLOAT[1, 3, "n", 64], l: P) -> FLOAT[...]:
    return kv.PagedAttention(q, c, t, l)  # E102
""",
    "a batch of queries and one block table": """
@model
def program(c: Pages, t: INT64["b"], q: FLOAT[2, 2, "n", 64], l: P) -> FLOAT[...]:
    return kv.PagedAttention(q, c, t, l)  # E102
""",
    "an accuracy that nobody computes with": """
@model
def program(c: Pages, t: INT64["b"], q: FLOAT[1, 2, "n", 64], l: P) -> FLOAT[...]:
    return kv.PagedAttention(q, c, t, l, accuracy_level=1)  # E102
""",
    "more tokens than a page has": """
@model
def program(c: Mutable[Pages], x: FLOAT16[2, 2, 33, 64], p: P) -> Alias["c"]:
    return kv.PagedCacheUpdate(c, p, x, 0, quantized_type="INT8")  # E112
""",
    "a position behind all pages of a block table": """
@model
def program(c: Mutable[Pages], t: INT64[2], x: FLOAT16[2, 2, 1, 64]) -> Alias["c"]:
    return kv.PagedCacheUpdate(c, t, x, 64, quantized_type="INT8")  # E112
""",
    "a stale read of pages": """
@model
def program(c: Mutable[Pages], x: N, p: P) -> tuple[FLOAT16[...], Alias["c"]]:
    updated = kv.PagedCacheUpdate(c, p, x, p, quantized_type="INT8")
    return kv.PageGather(c, p), updated  # E104
""",
    "pages that are lent to nobody": """
@model
def program(c: Pages, x: N, p: P) -> Pages:
    return kv.PagedCacheUpdate(c, p, x, p, quantized_type="INT8")  # E106
""",
    "pages that nobody may write are returned": """
@model
def program(c: Pages) -> Pages:
    return c  # E111
""",
    "pages are returned, and not said to be the parameter's": """
@model
def program(c: Mutable[Pages]) -> Pages:
    return c  # E111
""",
    "a scan over pages": """
@model
def program(c: Pages) -> FLOAT16[...]:
    total = op.Constant(value_float=0.0)
    for half in scan(c):  # E102
        total = total + op.ReduceSum(op.Cast(half, to=FLOAT), keepdims=0)
    return total
""",
    "a loop over pages": """
@model
def program(c: Pages) -> FLOAT16[...]:
    for half in c:  # E100
        pass
""",
    "an item of pages": """
@model
def program(c: Pages) -> FLOAT16[...]:
    return c[0]  # E102
""",
    "a head size that no instruction loads": """
Wide = Paged[FLOAT16[2, 2, 32, 15], formats.INT4]  # E115
""",
    "one of two caches that nobody may write": """
@model
def program(c: Pages, d: Pages, p: P) -> FLOAT16[...]:
    if p > 0:  # E107
        e = c
    else:
        e = d
    return kv.PageGather(e, p)
""",
    "caches that change places in a loop": """
@model
def program(c: Pages, d: Pages, p: P) -> FLOAT16[...]:
    for _ in range(p):  # E108
        c, d = d, c
    return kv.PageGather(c, p)
""",
    "a lost update of pages": """
@model
def program(c: Mutable[Pages], x: N, p: P) -> P:
    kv.PagedCacheUpdate(c, p, x, p, quantized_type="INT8")  # E109
    return p
""",
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_program_is_refused_at_its_line(what, tmp_path):
    source = HEADER + REFUSED[what]
    path = tmp_path / "program.py"
    path.write_text(source)
    with pytest.raises(errors.ContractError) as caught:
        exec(compile(source, str(path), "exec"), {"__name__": "program"})
    lines = source.splitlines()
    expected = [(k, line[-4:]) for k, line in enumerate(lines, 1) if "  # E" in line]
    found = [(f.location.line, f.code) for f in caught.value.findings]
    assert list(dict.fromkeys(found)) == expected, str(caught.value)


def test_nobody_is_told_to_copy_pages(tmp_path):
    for what in ("branches give pages of two types", "caches that change places in a loop"):
        with pytest.raises(errors.ContractError) as caught:
            path = tmp_path / "again.py"
            path.write_text(HEADER + REFUSED[what])
            exec(compile(path.read_text(), str(path), "exec"), {"__name__": "again"})
        for finding in caught.value.findings:
            assert not {"Copy", "Assign"} & set(re.findall(r"\w+", str(finding)))


def test_what_is_no_format_is_refused_as_python_does():
    with pytest.raises(TypeError, match=r"formats\.INT8"):
        Paged[Page, "INT8"]
    with pytest.raises(TypeError, match="FLOAT16"):
        Paged[np.float16, formats.INT8]


# -- files that say something else


def changed(change):
    proto = schema.ModelProto.FromString(decode.proto.SerializeToString())
    change(proto, {v.name: v.type.sequence_type.elem_type for v in values_of(proto).values()})
    return proto.SerializeToString()


CHANGES = {
    "a lost type of an input": lambda p, e: e["cache"].ClearField("quantized_tensor"),
    "an intermediate type": lambda p, e: e["updated"].quantized_tensor.ClearField("shape"),
    "a lost type of a result": lambda p, e: e["updated"].ClearField("quantized_tensor"),
    "another carrier": lambda p, e: setattr(e["cache"].tensor_type, "elem_type", 1),
    "another rank of the carrier": lambda p, e: e["cache"].tensor_type.shape.dim.add(),
    "another element type": lambda p, e: setattr(e["cache"].quantized_tensor, "elem_type", 1),
    "another page": lambda p, e: setattr(e["cache"].quantized_tensor.shape.dim[2], "dim_value", 64),
    "a page of halves": lambda p, e: setattr(
        e["cache"].quantized_tensor.shape.dim[0], "dim_value", 1
    ),
    "a format more": lambda p, e: e["cache"].quantized_tensor.allowed_quantized_type.append("INT2"),
    "a format less": lambda p, e: e["cache"].quantized_tensor.allowed_quantized_type.pop(),
    "no format": lambda p, e: e["cache"].quantized_tensor.ClearField("allowed_quantized_type"),
    "sparse ids": lambda p, e: setattr(e["cache"].quantized_tensor, "sparse_ids", True),
    "a lost declaration of a format": lambda p, e: p.quantizations.pop(),
    "a format that is declared twice": lambda p, e: p.quantizations.append(p.quantizations[0]),
    "a format of another version": lambda p, e: setattr(p.quantizations[0], "version", 7),
    "a format of another name": lambda p, e: setattr(p.quantizations[0], "name", "INT9"),
}


CODES = {
    "a lost type of an input": "E113",
    "a lost type of a result": "E113",
    "a lost declaration of a format": "E115",
    "a format that is declared twice": "E125",
    "a format of another version": "E115",
    "a format of another name": "E115",
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_file_is_refused(what):
    with pytest.raises(errors.ContractError) as caught:
        load(changed(CHANGES[what]))
    assert {f.code for f in caught.value.findings} == {CODES.get(what, "E122")}, str(caught.value)


def test_the_unchanged_file_is_not():
    load(changed(lambda p, e: None))


def test_a_changed_declaration_is_named():
    with pytest.raises(errors.ContractError) as caught:
        load(changed(CHANGES["a lost type of an input"]))
    assert "FLOAT16[2, 2, 32, 64], FLOAT16, INT8, INT4" in str(caught.value)


INT4C = formats.PageFormat(
    "INT4C",
    formats.Encoding(ir.DataType.UINT4, formats.Grouping.TOKEN, 32, formats.Offset.MIDPOINT),
    formats.Encoding(ir.DataType.UINT4, formats.Grouping.TOKEN, 32, formats.Offset.MIDPOINT),
)


def test_a_format_of_an_author_is_declared_whole():
    @model
    def write(cache: Mutable[Paged[Page, INT4C]], x: Values) -> Alias["cache"]:
        return kv.PagedCacheUpdate(cache, 0, x, 0)

    [declared] = write.proto.quantizations
    assert declared == INT4C.to_proto()
    assert plan(write).inputs[0].pages.formats == (INT4C,)


@pytest.mark.parametrize("allowed", [(), (formats.INT8, INT4C)])
def test_what_a_stock_tool_drops_is_restored(allowed):
    Some = Paged[(Page, *allowed)]

    @function
    def layer(cache: Mutable[Some], x: Values, p: INT64[()]) -> Alias["cache"]:
        return kv.PagedCacheUpdate(cache, 0, x, p, quantized_type="INT8")

    @model
    def write(cache: Mutable[Some], x: Values, p: INT64[()]) -> Alias["cache"]:
        if p > 0:
            cache = layer(cache, x, p)
        return cache

    stock = onnx.ModelProto.FromString(write.proto.SerializeToString())
    text = onnx.printer.to_text  # what stock classes print has none of our fields
    bare = onnx.ModelProto()
    google.protobuf.text_format.Parse(google.protobuf.text_format.MessageToString(stock), bare)
    assert (
        text(bare) == text(stock)
        and not schema.ModelProto.FromString(bare.SerializeToString()).quantizations
    )
    with pytest.raises(errors.ContractError) as caught:
        load(bare.SerializeToString())
    assert {f.code for f in caught.value.findings} == {"E113"}
    assert restore(bare.SerializeToString()).proto == write.proto


# -- the plan


def test_a_plan_knows_the_pages_of_an_input():
    found = plan(decode)
    cache = found.inputs[0]
    assert cache.mutable and cache.pages == found.values[cache.slot].pages
    assert cache.pages.elem_type == ir.DataType.FLOAT16 and not cache.pages.sparse
    assert cache.pages.shape == (2, H, PAGE, D) == found.values[cache.slot].shape
    assert cache.pages.formats == (formats.FLOAT16, formats.INT8, formats.INT4)
    assert all(i.pages is None for i in found.inputs[1:])


def test_updates_and_attention_are_kernels_on_the_root():
    found = plan(decode)
    update, attention = [s for s in found.block.steps if isinstance(s, steps.Kernel)]
    assert (update.op_type, update.roots) == ("PagedCacheUpdate", {0: "cache"})
    assert update.attributes == {"quantized_type": "FLOAT16"}
    assert attention.op_type == "PagedAttention" and not attention.aliases
    read = found.values[attention.inputs[1]]
    assert (read.root, read.version, read.pages) == ("cache", 1, found.inputs[0].pages)


def test_what_a_run_checks_of_pages_is_listed():
    assert [str(c) for c in plan(decode).conditions] == [
        "0 <= position and position + n <= 32*blocks (`cache`)",
        "0 <= position + 1 and position + 1 <= 32*blocks (`cache`)",
        "pages `block_table` of `cache` exist or are the next ones, made as FLOAT16, "
        "and have one owner",
        "pages `block_table` of `cache` exist",
    ]


def test_shapes_of_results_follow_from_block_tables():
    @model
    def read(
        cache: Pages, table: INT64["batch", "blocks"], page: INT64[()]
    ) -> tuple[FLOAT16[...], FLOAT16[...]]:
        return kv.PageGather(cache, table), kv.PageGather(cache, page)

    shapes = ShapesContext()
    shapes.compute(read)
    found = [str(shapes.get(v.name).shape) for v in read.proto.graph.output]
    assert found == ["[2, batch, 2, (32 * blocks), 64]", "[2, 2, 32, 64]"]
    page = shapes.get("cache").element
    assert (page.dtype, str(page.shape)) == (ir.DataType.FLOAT16, "[2, 2, 32, 64]")


def test_pages_that_nobody_may_write_are_views_and_kernels_too():
    @model
    def read(cache: Pages, page: INT64[()]) -> FLOAT16[2, H, PAGE, D]:
        again = op.Identity(cache)
        if page > 3:
            found = kv.PageGather(again, page)
        else:
            found = kv.PageGather(again, 0)
        return found

    kinds = [type(s).__name__ for s in plan(read).block.steps]
    assert kinds == ["SubSession", "View", "Branch"]


def test_the_commands_take_such_files(tmp_path):
    decode.save(tmp_path / "decode.onnx")

    def run(*arguments):
        return CliRunner().invoke(app, [*arguments])

    shown = run("show", str(tmp_path / "decode.onnx"))
    assert "Paged[FLOAT16[2, 2, 32, 64], FLOAT16, INT8, INT4]" in shown.output
    for command in ("check", "annotate", "plan", "doctor"):
        result = run(command, str(tmp_path / "decode.onnx"))
        assert result.exit_code == 0, result.output


def leaves(message, path=()):
    """Paths of all scalars of a message that say something; repeated ones by index."""
    for field, value in message.ListFields():
        is_single = isinstance(value, bool | int | float | str | bytes | Message)
        for k, item in enumerate([value] if is_single else value):
            where = (*path, (field.name, None if is_single else k))
            if isinstance(item, Message):
                yield from leaves(item, where)
            else:
                yield where, item


def changed_at(proto, path, other):
    """A copy of a model in which one scalar says something else, or (None) nothing."""
    again = schema.ModelProto.FromString(proto.SerializeToString())
    owner = again
    for name, k in path[:-1]:
        owner = getattr(owner, name) if k is None else getattr(owner, name)[k]
    name, k = path[-1]
    if other is None:
        owner.ClearField(name)
    elif k is None:
        setattr(owner, name, other)
    else:
        getattr(owner, name)[k] = other
    return again


def others(value):
    """Other values of a scalar, and none."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int):
        return [value + 1, 0, -1, 1 << 30, None]
    if isinstance(value, float):
        return [value + 1, None]
    return [f"{value}2", "", None]


def about_pages(proto):
    """What a file says about pages, as it is understood."""
    declared = [formats.PageFormat.from_proto(q) for q in proto.quantizations]
    values = (*proto.graph.input, *proto.graph.output, *proto.graph.value_info)
    return declared, {v.name: page_declarations.read(v.type) for v in values}


def test_nothing_that_a_file_says_about_pages_is_believed():
    refused, meant = 0, about_pages(decode.proto)
    for path, value in leaves(decode.proto):
        names = [name for name, _ in path]
        if "quantizations" not in names and "sequence_type" not in names:
            continue
        for other in others(value):
            try:
                proto = changed_at(decode.proto, path, other)
            except ValueError:  # no value of this enum
                continue
            try:
                load(proto.SerializeToString())
            except errors.ContractError as error:
                codes = {f.code for f in error.findings}
                assert codes <= {"E113", "E115", "E118", "E122"}, f"{path}: {error}"
                assert len(codes) == 1, f"{path}: {error}"
                refused += 1
            except errors.ModelFileError:  # the carrier has no type of ONNX
                assert "tensor_type" in names
            else:
                assert about_pages(proto) == meant, f"{path} = {other!r} is believed"
    assert refused > 150


def test_an_enum_value_that_nobody_knows_is_refused():
    field = decode.proto.quantizations[1].DESCRIPTOR.fields_by_name["kind"].number
    raw = decode.proto.quantizations[1].SerializeToString() + bytes([field << 3, 99])
    proto = schema.ModelProto.FromString(decode.proto.SerializeToString())
    proto.quantizations[1].ParseFromString(raw)
    with pytest.raises(errors.ContractError) as caught:
        load(proto.SerializeToString())
    assert {f.code for f in caught.value.findings} == {"E126"}


def test_a_plan_says_how_many_pages_a_run_may_make():
    @model
    def write(
        one: Mutable[Pages],
        many: Mutable[Paged[FLOAT16[2, "heads", PAGE, D], formats.INT8]],
        x: FLOAT16[2, H, 1, D],
        y: FLOAT16[2, "heads", "n", D],
        table: INT64["blocks"],
        t: INT64[()],
    ) -> tuple[Alias["one"], Alias["many"]]:
        one = kv.PagedCacheUpdate(one, t, x, 0, quantized_type="INT8")
        one = kv.PagedCacheUpdate(one, table, x, t, quantized_type="FLOAT16")
        many = kv.PagedCacheUpdate(many, table, y, t)
        for _ in range(t):
            one = kv.PagedCacheConvert(one, [0, 1], quantized_type="INT4")
        return one, many

    found = plan(write).new_pages
    dims = (2, H, PAGE, D)
    assert [(p.root, p.format, str(p.count), p.repeated) for p in found] == [
        ("one", "INT8", "1", False),
        ("one", "FLOAT16", "1", False),
        ("many", "INT8", "(((n + 30) // 32) + 1)", False),
        ("one", "INT4", "2", True),
    ]
    assert found[0].bytes == formats.INT8.page_bytes(dims)
    assert found[1].bytes == formats.FLOAT16.page_bytes(dims)
    for n, pages in ((1, 1), (2, 2), (32, 2), (33, 2), (34, 3)):
        size = sizes.evaluate(found[2].bytes, {"n": n, "heads": 3})
        assert size == pages * formats.INT8.page_bytes((2, 3, PAGE, D))
    assert found[3].bytes is None


def test_new_pages_are_shown_as_formulas():
    [made] = plan(decode).new_pages
    size = formats.FLOAT16.page_bytes((2, H, PAGE, D))
    assert str(made) == f"`cache`: at most ((n + 30) // 32) + 1 pages FLOAT16 of {size} bytes"


# -- a run


def test_pages_that_nobody_may_write_are_read_by_a_run():
    @model
    def write(cache: Mutable[Pages], x: Values, ids: INT64["b"], p: INT64[()]) -> Alias["cache"]:
        return kv.PagedCacheUpdate(cache, ids, x, p, quantized_type="FLOAT16")

    @model
    def read(cache: Pages, ids: INT64["b"], t: INT64[()]) -> FLOAT16[...]:
        again = op.Identity(cache)
        if t > 0:
            chosen = again
        else:
            chosen = cache
        total = kv.PageGather(chosen, ids) * 0.0
        for _ in range(t):
            total = total + kv.PageGather(chosen, ids)
        return total

    session = Session(write)
    cache = session.allocate("cache")
    x = np.random.default_rng(0).standard_normal((2, H, 40, D)).astype(np.float16)
    with session.bind(cache=cache) as step:
        step.run(x=x, ids=[0, 1], p=3)
    before = cache.snapshot()
    with Session(read).bind() as step:
        [found] = step.run(cache=cache, ids=[0, 1], t=1)
        with pytest.raises(errors.PageError):
            step.run(cache=cache, ids=[0, 2], t=1)
    np.testing.assert_array_equal(found[:, :, 3:43], x)
    assert not found[:, :, :3].any() and not found[:, :, 43:].any()
    assert cache.snapshot() == before


def test_memory_counts_new_pages_and_names_those_that_are_there():
    size = formats.FLOAT16.page_bytes((2, H, PAGE, D))
    memory = plan(decode).memory(blocks=4, n=40)
    assert (memory.caches, memory.pages) == (0, 3 * size)
    assert "pages of cache that are there" in memory.unknown
    formula = plan(decode).memory().pages
    [n] = formula.free_symbols
    assert formula.subs(n, 40) == 3 * size and formula.subs(n, 1) == size


SOURCE = """
import hashlib
from onnx_inplace import formats
from onnx_inplace.dsl import FLOAT16, INT64, Alias, Mutable, Paged, SparsePaged, kv, model

Page = FLOAT16[2, "heads", 32, 64]
One, Any = Paged[Page, formats.INT2, formats.INT8, formats.FLOAT16], SparsePaged[Page]


@model
def write(
    caches: Mutable[tuple[One, Any]], x: FLOAT16[2, "heads", "n", 64], t: INT64[()]
) -> Alias["caches"]:
    one, other = caches
    for k in range(t):
        if k > 1:
            one = kv.PagedCacheUpdate(one, k, x, t, quantized_type="INT8")
        other = kv.PagedCacheConvert(other, k, quantized_type="INT4")
    return one, other


print(hashlib.sha256(write.serialized).hexdigest())
"""


def test_the_same_source_gives_the_same_bytes(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(SOURCE)
    digests = {
        subprocess.run(
            [sys.executable, str(path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "31")
    }
    assert len(digests) == 1 and len(digests.pop()) == 65
