"""The peer of `decode.py`: onnxruntime-genai on the same weights, built from the tutorial's parts.

Its graph has com.microsoft.GroupQueryAttention, which turns queries and keys, writes the caches and
attends in one node; onnxruntime-genai binds the same buffers as past and present.
"""

import json
from pathlib import Path

import numpy as np
import onnxruntime_genai
import weights
from config import Config
from decoder import Precision, angles, feed_forward, head, linear, microsoft, norm
from weights import Weights

from onnx_inplace.compiler import Program
from onnx_inplace.dsl import FLOAT, INT32, INT64, Alias, Mutable, model, op, weight


def decoder(config: Config, content: Weights) -> Program:
    """The decoder with the inputs and outputs that onnxruntime-genai asks for."""
    Cache = Mutable[FLOAT["batch", config.kv_heads, "max_length", config.head_size]]

    @model
    def peer(
        tokens: INT64["batch", "new_length"],
        mask: INT64["batch", "total_length"],
        keys: tuple[(Cache,) * config.layers],
        values: tuple[(Cache,) * config.layers],
    ) -> tuple[FLOAT["batch", 1, config.vocabulary], Alias["keys"], Alias["values"]]:
        last = op.Cast(op.ReduceSum(mask, [1], keepdims=0) - 1, to=INT32.dtype)
        total = op.Cast(op.Shape(mask)[1], to=INT32.dtype)
        cos, sin = (weight(table, name) for name, table in angles(config).items())
        x = op.Gather(weight(content.embedding, "embedding"), tokens)
        present_keys, present_values = [], []
        for layer, past_keys, past_values in zip(content.layers, keys, values, strict=True):
            h = norm(x, layer.attention_norm, config)
            h, key, value = microsoft.GroupQueryAttention(
                linear(h, layer.query_key_value, Precision.FAST),
                None,
                None,
                past_keys,
                past_values,
                last,
                total,
                cos,
                sin,
                num_heads=config.heads,
                kv_num_heads=config.kv_heads,
                do_rotary=1,
                rotary_interleaved=1,
                _outputs=3,
            )
            present_keys.append(key)
            present_values.append(value)
            x = x + linear(h, layer.attention_output, Precision.FAST)
            x = x + feed_forward(norm(x, layer.feed_forward_norm, config), layer, Precision.FAST)
        logits = head(norm(x[:, -1:], content.norm, config), content, Precision.FAST)
        return logits, present_keys, present_values

    return peer


def describe(config: Config, threads: int, max_length: int) -> dict[str, object]:
    """The content of genai_config.json."""
    return {
        "model": {
            "type": "llama",
            "vocab_size": config.vocabulary,
            "context_length": max_length,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "decoder": {
                "filename": "model.onnx",
                "session_options": {"provider_options": [], "intra_op_num_threads": threads},
                "head_size": config.head_size,
                "hidden_size": config.width,
                "num_attention_heads": config.heads,
                "num_key_value_heads": config.kv_heads,
                "num_hidden_layers": config.layers,
                "inputs": {
                    "input_ids": "tokens",
                    "attention_mask": "mask",
                    "past_key_names": "keys.%d",
                    "past_value_names": "values.%d",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present_keys.%d",
                    "present_value_names": "present_values.%d",
                },
            },
        },
        "search": {
            "do_sample": False,
            "max_length": max_length,
            "past_present_share_buffer": True,
        },
    }


class GenAI:
    """A loaded peer with caches for ``max_length`` tokens."""

    name = "onnxruntime-genai"

    def __init__(self, folder: Path, max_length: int) -> None:
        """Load the model in ``folder``."""
        self.model = onnxruntime_genai.Model(str(folder))
        parameters = onnxruntime_genai.GeneratorParams(self.model)
        parameters.set_search_options(max_length=max_length, do_sample=False)
        self.generator = onnxruntime_genai.Generator(self.model, parameters)

    def read(self, tokens: list[int]) -> None:
        """Append a prompt."""
        self.generator.append_tokens(np.array(tokens, np.int32))

    def go_to(self, position: int) -> None:
        """Make ``position`` the place of the next token: back, or on through arbitrary tokens."""
        length = self.generator.token_count()
        if position < length:
            self.generator.rewind_to(position)
        while length < position:
            piece = min(512, position - length)
            self.read(list(range(1000, 1000 + piece)))
            length += piece

    def token(self) -> None:
        """Decode one token and choose the next."""
        self.generator.generate_next_token()


def write(folder: Path, config: Config, gguf: Path, threads: int, max_length: int) -> Path:
    """Put model and description into ``folder``; a model newer than this file stays. The model."""
    path = folder / "model.onnx"
    if not path.exists() or path.stat().st_mtime < Path(__file__).stat().st_mtime:
        folder.mkdir(parents=True, exist_ok=True)
        decoder(config, weights.read(config, gguf)).save(path)
    text = json.dumps(describe(config, threads, max_length), indent=2)
    (folder / "genai_config.json").write_text(text)
    return path
