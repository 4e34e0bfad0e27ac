"""Schemas of the operators on paged caches.

They have no functional bodies: standard operators can hand bytes of pages round, in a sequence of
uint8 vectors, but not decode them. A stock runtime finds no such operator and refuses the file,
which says so in its metadata (``page_contract``). What they demand is decided in ``paged_rules``.
"""

from __future__ import annotations

import onnx
from onnx.defs import OpSchema

from onnx_inplace.compiler.contract import DOMAIN, VERSION

CARRIER = "seq(tensor(uint8))"
_FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]
_INT64 = "tensor(int64)"


def _schema(
    name: str,
    doc: str,
    inputs: dict[str, tuple[str, str]],
    output: tuple[str, str, str],
    attributes: list[OpSchema.Attribute],
) -> OpSchema:
    types = {type_ for type_, _ in inputs.values()} | {output[1]}
    schema = OpSchema(
        name,
        DOMAIN,
        VERSION,
        doc,
        inputs=[OpSchema.FormalParameter(n, t, description=d) for n, (t, d) in inputs.items()],
        outputs=[OpSchema.FormalParameter(output[0], output[1], description=output[2])],
        type_constraints=[("T", _FLOATS, "What pages decode to.")] if "T" in types else [],
        attributes=attributes,
    )
    if name != "PageGather":  # what its pages decode to, onnx does not see
        schema.set_type_and_shape_inference_function(_like_first_input)
    return schema


def _like_first_input(context: onnx.shape_inference.InferenceContext) -> None:
    """Updates give back the cache, attention is shaped like its query."""
    context.set_output_type(0, context.get_input_type(0))


def _attribute(name: str, default: int | float, doc: str) -> OpSchema.Attribute:
    return OpSchema.Attribute(name, onnx.helper.make_attribute(name, default), doc)


def _cache(what: str) -> tuple[str, str]:
    return CARRIER, f"The paged cache that is {what}."


SCHEMAS: dict[str, OpSchema] = {
    schema.name: schema
    for schema in (
        _schema(
            "PagedCacheUpdate",
            "Writes `values` into pages, in place. A page that is missing is created. With one "
            "page id, `position` is a place in that page; with a block table, in the sequence "
            "whose pages it lists, and one call may cover several pages. Pages that one call "
            "writes are distinct.",
            {
                "cache": _cache("written"),
                "page_id": (_INT64, "One page, a block table [blocks], or [batch, blocks]."),
                "values": (
                    "T",
                    "[2, heads, n, head_size], with [batch, blocks] "
                    "[2, batch, heads, n, head_size].",
                ),
                "position": (_INT64, "First token written: scalar, or [batch]."),
            },
            ("updated", CARRIER, "The storage of `cache`."),
            [
                OpSchema.Attribute(
                    "quantized_type",
                    OpSchema.AttrType.STRING,
                    "Format of pages that are created. Without it the only one that the cache "
                    "allows; if it allows several, all pages must exist.",
                    required=False,
                )
            ],
        ),
        _schema(
            "PagedCacheConvert",
            "Gives pages another format, in place where the bytes fit. Other pages keep address "
            "and bytes.",
            {
                "cache": _cache("written"),
                "page_id": (_INT64, "One page, or several: [n]. They exist."),
            },
            ("updated", CARRIER, "The storage of `cache`."),
            [
                OpSchema.Attribute(
                    "quantized_type", OpSchema.AttrType.STRING, "The new format.", required=True
                )
            ],
        ),
        _schema(
            "PagedAttention",
            "Attention of `query` over the first `lengths` tokens of each sequence. Its queries "
            "are the last tokens of the sequence. Pages may have any mixture of formats; the "
            "arithmetic is float32, or as good.",
            {
                "query": (
                    "T",
                    "[batch, query heads, n, head_size]; heads a multiple of the cache's.",
                ),
                "cache": _cache("read"),
                "block_table": (_INT64, "[batch, blocks], or [blocks] for a batch of 1."),
                "lengths": (_INT64, "Valid tokens, those of `query` included: scalar or [batch]."),
            },
            ("output", "T", "Shaped like `query`."),
            [
                _attribute("is_causal", 0, "1: a query sees no token that comes after it."),
                OpSchema.Attribute(
                    "scale",
                    OpSchema.AttrType.FLOAT,
                    "Of query times key; 1 / sqrt(head_size) without it.",
                    required=False,
                ),
                _attribute("softcap", 0.0, "Scores are softcap * tanh(scores / softcap); 0: off."),
                _attribute(
                    "left_window_size", -1, "Tokens before its own that a query sees; -1: all."
                ),
                _attribute(
                    "accuracy_level",
                    0,
                    "As MatMulNBits has it: 4 allows weights of 8 bits, for values of less than 8; "
                    "0: float32, or as good.",
                ),
            ],
        ),
        _schema(
            "PageGather",
            "Decodes pages into a tensor, one after the other.",
            {
                "cache": _cache("read"),
                "page_ids": (_INT64, "One page, a block table [n], or [batch, n]."),
            },
            (
                "output",
                "T",
                "[2, heads, tokens, head_size], with [batch, n] [2, batch, heads, tokens, "
                "head_size]; tokens = n * page_size.",
            ),
            [],
        ),
    )
}


def register_schemas() -> None:
    """Let ``onnx.defs`` know them."""
    for schema in SCHEMAS.values():
        if not onnx.defs.has(schema.name, DOMAIN):
            onnx.defs.register_schema(schema)
