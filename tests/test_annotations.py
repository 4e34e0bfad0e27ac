"""One change of an annotation, one code: the diagnosis that a person needs, and no other."""

import itertools
from functools import partial

import annotations
import file_programs
import pytest
import strategies
from annotations import everywhere, in_json

from onnx_inplace import compiler, errors, formats
from onnx_inplace.compiler import program
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
)

Pages = Paged[FLOAT16[2, 2, 32, 64], formats.FLOAT16, formats.INT8, formats.INT4]


@function
def store(
    cache: Mutable[Pages], table: INT64["blocks"], values: FLOAT16[2, 2, "n", 64], t: INT64[()]
) -> Alias["cache"]:
    return kv.PagedCacheUpdate(cache, table, values, t, quantized_type="FLOAT16")


@model
def paged(
    cache: Mutable[Pages],
    table: INT64["blocks"],
    query: FLOAT[1, 4, "n", 64],
    values: FLOAT16[2, 2, "n", 64],
    t: INT64[()],
) -> tuple[FLOAT[1, 4, "n", 64], Alias["cache"]]:
    if t > 3:
        cache = store(cache, table, values, t)
    updated = store(cache, table, values, t)
    return kv.PagedAttention(query, updated, table, t + 1, is_causal=1), updated


@model
def sparse(
    cache: Mutable[SparsePaged[FLOAT16[2, 2, 32, 64], formats.FLOAT16, formats.INT8]],
    ids: INT64["count"],
    values: FLOAT16[2, 2, 1, 64],
    steps: INT64[()],
) -> tuple[Alias["cache"], INT64[()]]:
    written = steps * 0
    for k in range(steps):
        if ids[k] > 0:
            cache = kv.PagedCacheUpdate(cache, ids[k], values, k, quantized_type="INT8")
        else:
            cache = kv.PagedCacheConvert(cache, ids, quantized_type="FLOAT16")
        written = written + 1
    return cache, written


PROGRAMS = {**file_programs.ALL, "paged": paged, "sparse": sparse}

# Kinds of changes of typed fields and of the JSON contract that are one diagnosis have one code.
KINDS: dict[str, tuple[str, list[annotations.Kind]]] = {
    "names of another root": (
        "E101",
        [everywhere(annotations.another_root_by_name), everywhere(annotations.another_input)],
    ),
    "another size of the storage": ("E102", [everywhere(annotations.another_size)]),
    "access where none may stand": ("E106", [everywhere(annotations.access_elsewhere)]),
    "an ordinary result is declared": ("E110", [everywhere(annotations.declared_result)]),
    "lost": (
        "E113",
        [
            everywhere(annotations.lost),
            everywhere(annotations.lost_pages),
            in_json(annotations.more_access),
            in_json(annotations.more_pages),
        ],
    ),
    "a page format that is not declared": ("E115", [annotations.format_lost]),
    "the name of what is only read": ("E117", [everywhere(annotations.ordinary)]),
    "about an ordinary value": (
        "E118",
        [everywhere(annotations.extra_name), everywhere(annotations.extra_ports)],
    ),
    "another path to the root": ("E119", [everywhere(annotations.another_path)]),
    "another access": (
        "E120",
        [
            everywhere(annotations.access_taken),
            everywhere(annotations.access_given),
            in_json(annotations.less_access),
        ],
    ),
    "another attribute of the operator": ("E121", [everywhere(annotations.other_attribute)]),
    "another page type": (
        "E122",
        [
            annotations.other_pages(lambda p: setattr(p, "elem_type", 1)),
            annotations.other_pages(lambda p: setattr(p, "sparse_ids", not p.sparse_ids)),
            annotations.other_pages(lambda p: setattr(p.shape.dim[2], "dim_value", 64)),
            annotations.other_pages(lambda p: p.shape.dim.pop()),
            annotations.other_pages(lambda p: p.allowed_quantized_type.pop()),
            annotations.other_pages(lambda p: p.allowed_quantized_type.append("INT2")),
            annotations.other_pages(lambda p: p.ClearField("allowed_quantized_type")),
            everywhere(annotations.other_carrier),
            annotations.formats_in_another_order,
        ],
    ),
    "another JSON contract": ("E123", [in_json(annotations.other_declarations)]),
    "names of what does not exist": (
        "E124",
        [
            everywhere(annotations.unknown_target),
            everywhere(annotations.unknown_value),
            in_json(annotations.unknown_names),
        ],
    ),
    "stated twice": ("E125", [everywhere(annotations.twice), annotations.format_twice]),
    "of a newer version": (
        "E126",
        [
            everywhere(annotations.unknown_kind),
            everywhere(annotations.unknown_field),
            in_json(annotations.other_version),
            annotations.newer_domain,
        ],
    ),
    "a call against its function": ("E127", [everywhere(annotations.another_contract_of_a_call)]),
    "ports that do not exist": (
        "E128",
        [
            everywhere(partial(annotations.no_port, side=side, index=index))
            for side in ("input_index", "output_index")
            for index in (-1, 99)
        ],
    ),
    "an alias of no kind": ("E129", [everywhere(annotations.no_kind)]),
    "a name of itself": ("E130", [everywhere(annotations.itself)]),
    "a JSON contract that cannot be read": ("E131", [annotations.unreadable]),
    "another output": ("E132", [everywhere(annotations.another_output)]),
}


def test_every_kind_has_its_own_code() -> None:
    codes = [code for code, _ in KINDS.values()]
    assert len(set(codes)) == len(codes)
    assert set(codes) <= set(errors.RULES)


def findings(proto: object) -> tuple[errors.Finding, ...]:
    with pytest.raises(errors.ContractError) as caught:
        compiler.load(proto.SerializeToString())  # type: ignore[attr-defined]
    return caught.value.findings


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_has_its_code_wherever_it_is_made(kind: str) -> None:
    code, changes = KINDS[kind]
    for change in changes:
        count = 0
        for built in PROGRAMS.values():
            for proto, word in change(built.proto):
                check(proto, code, word)
                count += 1
        assert count, change


def check(proto: object, code: str, word: str) -> None:
    found = findings(proto)
    said = "\n".join(map(str, found))
    assert {f.code for f in found} == {code}, f"{word}: {said}"
    assert any(word in f.message for f in found), f"{word}: {said}"


@pytest.mark.parametrize("seed", range(12))
def test_changes_of_random_programs(seed: int) -> None:
    try:
        built = program.build(strategies.seeded(seed).declaration)
    except errors.ContractError:
        return  # refused by the rules: there is no file
    for code, changes in KINDS.values():
        for change in changes:
            for proto, word in itertools.islice(change(built.proto), seed % 3, 20, 5):
                check(proto, code, word)
