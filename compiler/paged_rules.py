"""Operators on paged caches: what they take, what they give, and when a model misuses them.

Decides E102 and E115 at one node as far as the types in the graph tell, and refuses every other
operator that is given a paged cache: pages have no elements until something decodes them. What
depends on sizes of a run is required in ``conditions``, what depends on the page table is left to
``page_checks``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnx_inplace.compiler import merging, paged_types
from onnx_inplace.compiler.classes import Link, Summary
from onnx_inplace.compiler.contract import DOMAIN
from onnx_inplace.compiler.diagnosis import called
from onnx_inplace.compiler.merging import Equality, Verdict
from onnx_inplace.compiler.paged_types import HALVES, HEAD_SIZE, HEADS, PAGE_SIZE, PagedType

CACHE_PORT = {
    (DOMAIN, "PagedCacheUpdate"): 0,
    (DOMAIN, "PagedCacheConvert"): 0,
    (DOMAIN, "PagedAttention"): 1,
    (DOMAIN, "PageGather"): 0,
}
"""The input of each operator on pages that is the paged cache."""

ACCURACY_LEVELS = (0, 4)
"""Of PagedAttention: as good as float32; weights of tokens may have 8 bits."""

SEE = "Read pages with `kv.PagedAttention` or `kv.PageGather`, write with `kv.PagedCacheUpdate`."
_LIBRARY = ("", "ai.onnx", "com.microsoft", DOMAIN)

Typed = tuple[ir.TypeProtocol | None, ir.Shape | None]


def is_paged_operator(node: ir.Node) -> bool:
    """Whether a node is an operator on pages."""
    return (node.domain, node.op_type) in CACHE_PORT


def created_format(node: ir.Node, type_: PagedType) -> str | None:
    """The format of pages that an update creates; None: it creates none, they must exist."""
    attribute = node.attributes.get("quantized_type")
    if attribute is not None:
        return attribute.as_string() if not attribute.is_ref() else None
    return type_.formats[0].name if len(type_.formats) == 1 and not type_.any_format else None


def result(node: ir.Node) -> Typed:
    """Type and shape of the result of an operator on pages, as far as its inputs tell."""
    cache = node.inputs[CACHE_PORT[node.domain, node.op_type]]
    first = node.inputs[0]
    if node.op_type != "PageGather":  # like the cache, or like the query
        if first is None:
            return None, None
        return first.type, None if first.shape is None else first.shape.copy()
    page, ids = None if cache is None else cache.shape, node.inputs[1]
    if cache is None or not isinstance(cache.type, PagedType) or page is None:
        return None, None
    type_ = ir.TensorType(cache.type.dtype)
    if ids is None or ids.shape is None:
        return type_, None
    dims = list(page)
    if ids.shape.rank():
        count, size = ids.shape[-1], page[PAGE_SIZE]
        whole = isinstance(count, int) and isinstance(size, int)
        dims[PAGE_SIZE] = count * size if whole else ir.SymbolicDim(None)
    return type_, ir.Shape([*dims[:HEADS], *list(ids.shape)[:-1], *dims[HEADS:]])


def check(node: ir.Node, links: Sequence[Link], summary: Summary | None) -> Verdict:
    """``merging.check``, and what it does not know of: pages."""
    if is_paged_operator(node):
        verdict = _operator(node)
    else:
        fault = None if summary is not None else misuse(node.domain, node.op_type, node.inputs)
        verdict = Verdict([] if fault is None else [fault], repair=SEE)
    if verdict.faults:
        return verdict
    merged = merging.check(node, links, summary)
    merged.equalities.extend(verdict.equalities)
    return merged


def misuse(domain: str, op_type: str, inputs: Iterable[ir.Value | None]) -> str | None:
    """What is wrong with a paged cache as an argument of an operator that knows no pages."""
    key = (domain, op_type)
    if key == ("", "Identity") or key in CACHE_PORT or domain not in _LIBRARY:
        return None
    for value in inputs:
        if value is not None and paged_types.is_paged(value):
            return f"`{op_type}` takes tensors, and {called(value)} is a paged cache"
    return None


def _operator(node: ir.Node) -> Verdict:
    port = CACHE_PORT[node.domain, node.op_type]
    cache = node.inputs[port] if port < len(node.inputs) else None
    if cache is None:
        return Verdict([f"`{node.op_type}` is given no paged cache"], repair=SEE)
    if not isinstance(cache.type, PagedType):
        return Verdict(
            [f"`{node.op_type}` takes a paged cache, and {called(cache)} is none"],
            repair=f"Declare {called(cache)} as `Paged[...]`.",
        )
    others = [v for k, v in enumerate(node.inputs) if k != port]
    for value in others:
        if value is not None and paged_types.is_paged(value):
            fault = f"`{node.op_type}` takes one paged cache, and {called(value)} is another"
            return Verdict([fault], repair=SEE)
    if any(attribute.is_ref() for attribute in node.attributes.values()):
        return Verdict()  # a function of another author: judged where it is inlined
    verdict = _format(node, cache)
    if verdict.faults:
        return verdict
    return _CHECKS[node.op_type](node, cache)


def _format(node: ir.Node, cache: ir.Value) -> Verdict:
    """E115: the format that is asked for must be one of the cache's."""
    attribute, type_ = node.attributes.get("quantized_type"), cache.type
    assert isinstance(type_, PagedType)
    if attribute is None:
        return Verdict()
    name = attribute.as_string()
    found = type_.format(name)
    if found is not None:
        return Verdict()
    allowed = ", ".join(f.name for f in type_.formats)
    close = next((f.name for f in type_.formats if f.name.lower() == name.lower()), None)
    if close is not None:
        repair = f"It is called {close}."
    else:
        repair = f"Declare it for {called(cache)}, or ask for one of {allowed}."
    verb = "declares" if type_.any_format else "allows"
    return Verdict([f"{called(cache)} {verb} no page format {name}"], repair=repair, code="E115")


def _update(node: ir.Node, cache: ir.Value) -> Verdict:
    """Values [2, (batch), heads, n, head_size] into one page, or along block tables."""
    ids, values, position = (_input(node, k) for k in (1, 2, 3))
    verdict = Verdict()
    if values.dtype is not None and values.dtype not in paged_types.DECODED:
        verdict.faults.append(f"{called(values)} is {values.dtype.name}, pages hold floats")
        verdict.repair = f"Cast {called(values)} to FLOAT or FLOAT16."
    batched = _integers(verdict, ids, "one page id, a block table, or [batch, blocks]", 2)
    _integers(verdict, position, "one position, or one for each sequence", 1)
    if verdict.faults or values.shape is None or batched is None:
        return verdict
    wanted = 5 if batched == 2 else 4
    if values.shape.rank() != wanted:
        dims = "[2, batch, heads, n, head_size]" if wanted == 5 else "[2, heads, n, head_size]"
        verdict.faults.append(
            f"{called(values)} has {values.shape.rank()} dimensions, and {dims} is written"
        )
        verdict.repair = f"Reshape {called(values)}."
        return verdict
    for axis, of_page in ((0, HALVES), (wanted - 3, HEADS), (wanted - 1, HEAD_SIZE)):
        merging.compare(verdict, Equality(node, values, axis, cache, of_page))
    _rows(verdict, node, position, ids, batched)
    if batched == 2:
        merging.compare(verdict, Equality(node, values, 1, ids, 0))
    return verdict


def _attention(node: ir.Node, cache: ir.Value) -> Verdict:
    """Query [batch, q_heads, n, head_size]; block_table [blocks] for one sequence."""
    query, table, lengths = (_input(node, k) for k in (0, 2, 3))
    verdict = Verdict()
    if query.dtype is not None and query.dtype not in paged_types.DECODED:
        verdict.faults.append(f"{called(query)} is {query.dtype.name}, a float is wanted")
        verdict.repair = f"Cast {called(query)} to FLOAT or FLOAT16."
    rank = _integers(verdict, table, "a block table, or [batch, blocks]", 2, at_least=1)
    _integers(verdict, lengths, "one length, or one for each sequence", 1)
    level = node.attributes.get("accuracy_level")
    if level is not None and level.as_int() not in ACCURACY_LEVELS:
        verdict.faults.append(f"accuracy_level={level.as_int()} is none of {ACCURACY_LEVELS}")
        verdict.repair = "Leave it out, or say 4 to allow weights of 8 bits."
    if verdict.faults or query.shape is None:
        return verdict
    if query.shape.rank() != 4:
        verdict.faults.append(
            f"{called(query)} has {query.shape.rank()} dimensions, it is "
            "[batch, heads, n, head_size]"
        )
        verdict.repair = f"Reshape {called(query)}."
        return verdict
    merging.compare(verdict, Equality(node, query, 3, cache, HEAD_SIZE))
    heads, own = query.shape[1], None if cache.shape is None else cache.shape[HEADS]
    if isinstance(heads, int) and isinstance(own, int) and (heads % own or not heads):
        verdict.faults.append(
            f"{called(query)} has {heads} heads, no multiple of the {own} of {called(cache)}"
        )
    batch = query.shape[0]
    if rank == 1 and isinstance(batch, int) and batch != 1:
        verdict.faults.append(f"{called(query)} has a batch of {batch}, and one block table")
        verdict.repair = "Pass a block table of [batch, blocks]."
    elif rank == 2:
        merging.compare(verdict, Equality(node, query, 0, table, 0))
    if rank is not None and not verdict.faults:
        _rows(verdict, node, lengths, table, rank)
    return verdict


def _convert(node: ir.Node, cache: ir.Value) -> Verdict:
    verdict = Verdict()
    _integers(verdict, _input(node, 1), "one page id, or several", 1)
    if "quantized_type" not in node.attributes:
        verdict.faults.append("`quantized_type` of `PagedCacheConvert` is missing")
        verdict.repair = "Say which page format the page gets."
    return verdict


def _gather(node: ir.Node, cache: ir.Value) -> Verdict:
    verdict = Verdict()
    _integers(verdict, _input(node, 1), "one page id, a block table, or [batch, blocks]", 2)
    return verdict


_CHECKS = {
    "PagedCacheUpdate": _update,
    "PagedCacheConvert": _convert,
    "PagedAttention": _attention,
    "PageGather": _gather,
}


def _input(node: ir.Node, k: int) -> ir.Value:
    value = node.inputs[k] if k < len(node.inputs) else None
    if value is None:
        raise ValueError(f"{node.op_type} has no input {k}")
    return value


def _integers(
    verdict: Verdict, value: ir.Value, what: str, most: int, at_least: int = 0
) -> int | None:
    """INT64 of a rank between two; returns the rank, if it is known."""
    if value.dtype not in (None, ir.DataType.INT64):
        verdict.faults.append(f"{called(value)} is {value.dtype}, not INT64")
        verdict.repair = f"Cast {called(value)} to INT64."
    rank = None if value.shape is None else value.shape.rank()
    if rank is not None and not at_least <= rank <= most:
        verdict.faults.append(f"{called(value)} has {rank} dimensions, it is {what}")
        verdict.repair = f"Reshape {called(value)}."
    return rank


def _rows(verdict: Verdict, node: ir.Node, numbers: ir.Value, ids: ir.Value, rank: int) -> None:
    """One number for all sequences, or one for each row of block tables."""
    if numbers.shape is None or numbers.shape.rank() == 0:
        return
    if rank == 2:
        merging.compare(verdict, Equality(node, numbers, 0, ids, 0))
        return
    if numbers.shape[0] != 1:
        verdict.faults.append(
            f"{called(numbers)} has {numbers.shape[0]} numbers, and {called(ids)} is of one "
            "sequence"
        )
        verdict.repair = f"Pass one number, or a block table for each row of {called(numbers)}."
