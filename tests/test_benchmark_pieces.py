"""What stands around the benchmarks: the whole model's promises, bytes, pictures, the summary."""

from __future__ import annotations

import cProfile
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import cache_bytes
import decode
import ours
import overhead
import problem
import record
import run
from config import SMOLLM2_135M

HALF = "in place, float16, fuse=auto"


def claims_of(token: dict[tuple[str, int], float], **others: Any) -> dict[str, record.Claim]:
    """Claims by the end of their texts."""
    times = decode.Times(2, token, others.get("prompt", {}), others.get("bandwidth", {64: 30.0}))
    return {claim.text.split(": ")[-1]: claim for claim in decode.claims(times)}


def test_the_faster_way_of_a_peer_counts() -> None:
    token = {(HALF, 1024): 4.0, ("llama.cpp", 1024): 12.0, ("llama.cpp, flash attention", 1024): 8}
    (claim,) = claims_of(token).values()
    assert (claim.value, claim.limit) == (2.0, 2.5)
    assert not claim.holds


def test_what_is_not_measured_is_not_claimed() -> None:
    assert claims_of({("onnxruntime-genai", 64): 10.0, ("llama.cpp", 64): 10.0}) == {}


def test_bytes_of_a_token_are_weights_and_cache() -> None:
    found = claims_of({(HALF, 64): 5.0})
    (claim,) = found.values()
    config = SMOLLM2_135M
    body = config.width * (2 * config.width + 2 * 192 + 3 * config.hidden) * config.layers * 5 / 8
    head = config.width * config.vocabulary * 34 / 32
    cache = 2 * 2 * config.layers * 192 * 64
    assert claim.value == pytest.approx((body + head + cache) / 5e6 / 30, rel=0.01)


def test_pages_grow_and_arrays_do_not(tmp_path: Path) -> None:
    path = tmp_path / "bytes.json"
    assert cache_bytes.main(["--lengths", "64", "192", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    size = {(row["variant"], row["tokens"]): row["bytes"] for row in rows}
    token = 30 * 2 * 3 * 64  # elements of all layers
    assert [size["FLOAT16 pages", n] for n in (64, 192)] == [2 * token * n for n in (64, 192)]
    assert size["INT8 pages", 192] < 0.6 * size["FLOAT16 pages", 192]
    assert size["llama.cpp, float16", 64] == size["llama.cpp, float16", 192] == 2 * token * 192


def test_pictures_show_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import pictures

    rows: list[record.Row] = [
        {"variant": HALF, "threads": 2, "position": n, "ms": 4.0} for n in (64, 1024)
    ]
    record.Record("decode", {}, rows).conclude(tmp_path / "decode-2.json")
    assert pictures.main([str(tmp_path), str(tmp_path / "pictures")])
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["decoding_2.svg"]
    drawn = (tmp_path / "pictures" / "decoding_2.svg").read_text()
    assert "onnx-inplace, float16" in drawn and "llama.cpp" not in drawn


def test_the_summary_names_every_promise(tmp_path: Path, capsys: Any) -> None:
    good, bad = record.Claim("one", 2.0, 1.0), record.Claim("two", 0.5, 1.0)
    paths = [tmp_path / "a.json", tmp_path / "b.json", tmp_path / "never_run.json"]
    record.Record("a", {}, claims=[good], skipped=["ggml: not there"]).conclude(paths[0])
    assert run.summary(paths)
    record.Record("b", {}, claims=[good, bad]).conclude(paths[1])
    capsys.readouterr()
    assert not run.summary(paths)
    printed = capsys.readouterr().out
    assert "holds  one: 2 (at least 1)" in printed and "FAILS  two: 0.5 (at least 1)" in printed
    assert "skipped: ggml: not there" in printed


def test_an_unknown_piece_is_refused(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        run.main(["attention", "atention"])
    assert "no such piece: atention" in capsys.readouterr().err


@pytest.mark.kernel
def test_compiled_code_is_told_from_the_runner() -> None:
    (step,) = ours.dense([[problem.random_problem(2, 3, 64, 4096)]], "float32", 1)
    for _ in range(3):
        step.run()  # prepares its call
    profile = cProfile.Profile()
    profile.runcall(step.run)
    profile.create_stats()
    names = [(Path(file), name) for file, _, name in profile.stats]  # type: ignore[attr-defined]
    native = [name for file, name in names if overhead.is_native(file, name)]
    assert any("whole_run" in name for name in native), native
    assert not any(overhead.is_native(file, name) for file, name in names if "runner" in file.parts)
