"""What has to be known about a Llama decoder before its weights are read."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of a decoder, without units unless they are given."""

    layers: int
    width: int  # of the residual stream
    heads: int
    kv_heads: int  # each is shared by heads / kv_heads query heads
    head_size: int
    hidden: int  # of the feed-forward
    vocabulary: int
    context: int  # [tokens] positions that the model was trained for
    norm_epsilon: float
    rope_base: float


SMOLLM2_135M = Config(
    layers=30,
    width=576,
    heads=9,
    kv_heads=3,
    head_size=64,
    hidden=1536,
    vocabulary=49152,
    context=8192,
    norm_epsilon=1e-5,
    rope_base=100_000.0,
)
