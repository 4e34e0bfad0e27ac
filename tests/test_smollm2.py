"""The tutorial's decoder against float32 numpy, on the real weights."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import chat
import generate
import gguf
import numpy as np
import onnxruntime
import paged
import paged_decoder
import pytest
import smollm2_reference
import tokenizer
import weights
from config import SMOLLM2_135M
from decoder import Precision
from tokenizers import Tokenizer

from onnx_inplace import Session
from onnx_inplace.runner.policy import ByAge, Tier

pytestmark = pytest.mark.model

CAPITAL = "What is the capital of France?"
SEA = "Tell me about the sea in one sentence."
LONG = """Say in one sentence what this is about.
The sea is a large body of salt water that covers most of the earth. Ships have crossed it for
thousands of years, and people who live beside it catch fish, gather salt and trade with those on
other shores. Storms come from it, and rain, because the sun lifts water from it into the air, and
winds carry it over the land. Twice a day the moon draws it up the beach and lets it fall again.
Deep down it is dark and cold, and most of what lives there has never been seen by anybody."""


@pytest.fixture(scope="module")
def reference() -> smollm2_reference.Decoder:
    return smollm2_reference.Decoder()


@pytest.fixture(scope="module")
def text() -> Tokenizer:
    return tokenizer.read(weights.gguf_path())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled decoders of this module's tests."""
    return tmp_path_factory.mktemp("smollm2")


@pytest.fixture(scope="module")
def load(folder: Path) -> Callable[..., Session]:
    """Sessions, each compiled and loaded once."""
    sessions: dict[tuple[Precision, str, str], Session] = {}

    def session(precision: Precision, element: str, fuse: str = "auto") -> Session:
        key = precision, element, fuse
        if key not in sessions:
            path = generate.compiled(precision, element, folder)
            sessions[key] = Session(path, fuse=fuse)
        return sessions[key]

    return session


def expected_logits(
    reference: smollm2_reference.Decoder, prompt: list[int], count: int
) -> tuple[list[int], np.ndarray]:
    """The ``count`` most likely tokens after a prompt, and the logits of each."""
    reference.length = 0
    tokens, logits = [], [reference.feed(prompt)]
    for _ in range(count):
        tokens.append(int(logits[-1].argmax()))
        logits.append(reference.feed([tokens[-1]]))
    return tokens, np.stack(logits)


def teacher_forced(
    conversation: generate.Conversation | paged.PagedConversation,
    prompt: list[int],
    tokens: list[int],
) -> np.ndarray:
    """Logits after the prompt and after each of the given tokens."""
    steps = [prompt, *([token] for token in tokens)]
    return np.stack([conversation.run(step)["logits"][0].copy() for step in steps])


def divergence(exact: np.ndarray, approximate: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence of the next token's distributions, in nats."""
    exact, approximate = (
        x
        - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - x.max(-1, keepdims=True)
        for x in (exact.astype(np.float64), approximate.astype(np.float64))
    )
    return float((np.exp(exact) * (exact - approximate)).sum(-1).mean())


@pytest.mark.parametrize("fuse", ["auto", "off"])
@pytest.mark.parametrize("question", [CAPITAL, SEA])
def test_exact_mode_says_what_numpy_says(question, fuse, reference, text, load) -> None:
    """To the token, and each logit as nearly as float32 has it."""
    prompt = text.encode(tokenizer.first_turn(question)).ids
    expected, logits = expected_logits(reference, prompt, 31)
    session = load(Precision.EXACT, "float32", fuse)

    assert list(generate.Conversation(session, 128).generate(prompt, 31)) == expected
    conversation = generate.Conversation(session, 128)
    forced = teacher_forced(conversation, prompt, expected)
    np.testing.assert_allclose(forced, logits, atol=2e-4)
    assert conversation.binding._frame.frame.fused == (fuse == "auto")
    assert not session.refusals


@pytest.mark.parametrize("element", ["float32", "float16"])
def test_fast_mode_stays_close(element, reference, text, load) -> None:
    prompt = text.encode(tokenizer.first_turn(SEA)).ids
    expected, logits = expected_logits(reference, prompt, 40)
    conversation = generate.Conversation(load(Precision.FAST, element), 128)
    assert divergence(logits, teacher_forced(conversation, prompt, expected)) < 0.02


def test_pages_say_what_numpy_says(reference, text, load) -> None:
    """In 32 bits, to the token; old pages in fewer bits stay close, and are far smaller."""
    prompt = text.encode(tokenizer.first_turn(LONG)).ids
    expected, logits = expected_logits(reference, prompt, 110)
    session = load(Precision.EXACT, generate.PAGED)

    plain = paged.PagedConversation(session, 300, tiers=None, first_format="FLOAT32")
    assert list(plain.generate(prompt, 31)) == expected[:31]
    plain.sequence.truncate(0)
    forced = teacher_forced(plain, prompt, expected[:31])
    np.testing.assert_allclose(forced, logits[:32], atol=2e-4)

    short = [Tier("FLOAT16", tokens=64), Tier("INT8", tokens=64), Tier("INT4")]
    tiers = paged.PagedConversation(session, 300, tiers=ByAge(short, first=1))
    assert divergence(logits, teacher_forced(tiers, prompt, expected)) < 0.02
    assert set(tiers.formats()) == {"FLOAT16", "INT8", "INT4"}
    assert sum(cache.nbytes for cache in tiers.caches) < 0.8 * tiers.pool.pages.used * (
        tiers.pool.pages.new_bytes()
    )


def test_pages_are_allocated_when_they_fill(text, load) -> None:
    conversation = paged.PagedConversation(load(Precision.EXACT, generate.PAGED), 300, tiers=None)
    assert sum(cache.nbytes for cache in conversation.caches) == 0
    conversation.run(text.encode("The sea is a large body of water").ids)
    used = -(-conversation.length // paged_decoder.PAGE_SIZE)
    assert [len(cache) for cache in conversation.caches] == [used] * SMOLLM2_135M.layers


def test_a_prompt_may_come_in_pieces(text, load) -> None:
    prompt = text.encode(tokenizer.first_turn(SEA)).ids
    session = load(Precision.EXACT, "float32")
    whole, pieces = (generate.Conversation(session, 64) for _ in range(2))
    logits = whole.run(prompt)["logits"]
    for piece in (prompt[:1], prompt[1:20], prompt[20:]):
        last = pieces.run(piece)["logits"]
    np.testing.assert_allclose(last, logits, atol=2e-4)  # the first piece is a fused run
    for one, other in zip(pieces.caches, whole.caches, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_caches_are_the_callers(text, load) -> None:
    conversation = generate.Conversation(load(Precision.EXACT, "float32"), 64)
    addresses = [cache.ctypes.data for cache in conversation.caches]
    for tokens in (text.encode("The sea").ids, [28], [253]):
        outputs = list(conversation.run(tokens))[1:]
        assert all(o is c for o, c in zip(outputs, conversation.caches, strict=True))
    assert [cache.ctypes.data for cache in conversation.caches] == addresses
    assert all(cache[:, :, : conversation.length].any() for cache in conversation.caches)
    assert not any(cache[:, :, conversation.length :].any() for cache in conversation.caches)


def test_stock_onnxruntime_computes_the_same(text, load, folder) -> None:
    prompt = text.encode("The sea is").ids
    conversation = generate.Conversation(load(Precision.EXACT, "float32"), 16)
    path = generate.compiled(Precision.EXACT, "float32", folder)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    stock = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feeds = {"tokens": np.array([prompt]), "position": np.array(0)}
    names = [value.name for value in stock.get_inputs() if value.name not in feeds]
    feeds |= {name: cache.copy() for name, cache in zip(names, conversation.caches, strict=True)}

    logits, *caches = stock.run(None, feeds)
    outputs = conversation.run(prompt)
    np.testing.assert_allclose(outputs["logits"], logits, atol=2e-4)
    for ours, theirs in zip(conversation.caches, caches, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_benchmark_runs(tmp_path) -> None:
    program = Path(__file__).parents[1] / "benchmarks" / "decode.py"
    few = ["--positions", "64", "--rounds", "1", "--tokens", "2", "--fuse", "auto", "--peers"]
    done = subprocess.run(
        [sys.executable, program, *few, "--json", "result.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode in (0, 1), done.stderr  # 1: a promise fails, as on a busy machine
    result = json.loads((tmp_path / "result.json").read_text())
    token = {row["variant"]: row["ms"] for row in result["rows"] if "ms" in row}
    assert token.keys() == {"in place, float16, fuse=auto", "in place, INT8, fuse=auto"}
    assert all(ms > 0 for ms in token.values())


def test_weights_are_those_of_the_file() -> None:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(weights.gguf_path()).tensors}
    read = weights.read(SMOLLM2_135M, weights.gguf_path())

    def decoded(name: str) -> np.ndarray:
        tensor = tensors[f"{name}.weight"]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)

    np.testing.assert_array_equal(read.embedding, decoded("token_embd"))
    head = (read.head_quants.astype(np.float32) - 128) * read.head_scales[..., np.newaxis]
    np.testing.assert_array_equal(head.reshape(read.embedding.shape), read.embedding)
    for layer in (0, 29):
        matrix = read.layers[layer].query_key_value
        quants = np.stack([matrix.quants & 15, matrix.quants >> 4], -1).astype(np.float32)
        zeros = np.stack([matrix.zeros & 15, matrix.zeros >> 4], -1).astype(np.float32)
        shape = (matrix.outputs, -1, weights.BLOCK)
        blocks = (quants.reshape(shape) - zeros.reshape(matrix.outputs, -1, 1)) * matrix.scales[
            ..., None
        ]
        blocks += matrix.remainder.T[..., np.newaxis]
        rows = np.concatenate([decoded(f"blk.{layer}.attn_{name}") for name in "qkv"])
        np.testing.assert_allclose(blocks.reshape(rows.shape), rows, atol=1e-6)


def test_characters_of_several_tokens_arrive_whole(text) -> None:
    written = "Zoë: 世界 🌊!"
    pieces = list(tokenizer.stream(text, text.encode(written).ids))
    assert "".join(pieces) == written
    assert len(pieces) < len(text.encode(written).ids), "no character of several tokens was tried"


def test_chat_answers_with_paris_and_reports(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", Path(chat.__file__), "--once", CAPITAL],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout
    assert "bytes allocated for caches during decoding: 0" in done.stdout
    assert re.search(r"\d+ tokens, \d+\.\d tokens/s", done.stdout)


def test_a_chat_goes_on_in_the_same_caches(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, Path(chat.__file__), "--max-length", "96", "--limit", "200"],
        input=f"{CAPITAL}\n{SEA}\n",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout and "sea" in done.stdout.lower()
    assert "The caches are full: 96 tokens" in done.stdout or done.stdout.endswith("> \n")


def test_a_kept_decoder_is_made_again_when_what_makes_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Program:
        def save(self, path: Path) -> None:
            made.append(path.write_text("model"))

    made: list[int] = []
    source = tmp_path / "compiler" / "emitter.py"
    source.parent.mkdir()
    source.touch()
    assert {"compiler", "dsl", "smollm2"} <= {maker.name for maker in generate.MAKERS}
    monkeypatch.setattr(generate, "MAKERS", [source.parent])
    monkeypatch.setattr(generate.weights, "read", lambda *arguments: None)
    monkeypatch.setattr(generate, "decoder", lambda *arguments: Program())
    for _ in range(2):
        path = generate.compiled(Precision.FAST, "float32", tmp_path)
    assert len(made) == 1
    os.utime(source, (path.stat().st_mtime + 1, path.stat().st_mtime + 1))
    generate.compiled(Precision.FAST, "float32", tmp_path)
    assert len(made) == 2
