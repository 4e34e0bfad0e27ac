"""The command line, as a shell and as a program sees it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import decoders
import file_programs
import ml_dtypes
import numpy as np
import onnx_ir
import pytest
from typer.testing import CliRunner

from onnx_inplace import compiler
from onnx_inplace.cli.commands import app
from onnx_inplace.compiler import declarations, errors, schema
from onnx_inplace.dsl import BFLOAT16, INT64, Alias, Mutable, kv, model

GOOD = """
import helper_of_mine
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, kv, model

@model
def append(
    cache: Mutable[FLOAT[2, "m", 4]], new: FLOAT[2, "n", 4], position: INT64[()]
) -> Alias["cache"]:
    return kv.CacheUpdate(cache, new * helper_of_mine.SCALE, position)

class Models:
    inner = append

number = 5
print("said by the program")
"""

STALE = """
from onnx_inplace.dsl import FLOAT, INT64, Alias, Mutable, kv, model, op

@model
def stale(
    cache: Mutable[FLOAT[2, "m", 4]], new: FLOAT[2, "n", 4], position: INT64[()]
) -> tuple[Alias["cache"], FLOAT[()]]:
    updated = kv.CacheUpdate(cache, new, position)
    return updated, op.ReduceSum(cache, keepdims=0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with programs and a compiled model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "helper_of_mine.py").write_text("SCALE = 2.0\n")
    (tmp_path / "stale.py").write_text(STALE)
    (tmp_path / "broken.py").write_text("x = (\n")
    (tmp_path / "raising.py").write_text("x = 1\ny = x / 0\n")
    file_programs.loop.save("loop.onnx")
    return tmp_path


def invoke(*arguments: Any) -> Any:
    """Run in this process; a traceback is a fault."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def ok(*arguments: Any) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(code: int, *arguments: Any) -> str:
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.stderr
    assert result.stderr and not result.stdout
    return result.stderr


# -- as a shell sees it


def shell(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onnx_inplace", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_session_in_a_shell(folder: Path) -> None:
    done = shell("compile", "good.py:append", "-o", "append.onnx")
    assert (done.returncode, done.stderr) == (0, "said by the program\n"), done.stderr
    done = shell("check", "append.onnx")
    assert done.returncode == 0 and done.stdout == "append.onnx: ok: updated_cache is cache\n"
    done = shell("compile", "stale.py:stale")
    assert done.returncode == 1 and done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0] == "stale.py:9: E104 stale read"
    assert "Traceback" not in done.stderr
    assert shell("check").returncode == 2
    script = Path(sys.executable).with_name("onnx-inplace")
    if script.exists():
        done = subprocess.run([script, "check", "append.onnx"], check=False, capture_output=True)
        assert done.returncode == 0


def test_a_reader_that_goes_away(folder: Path) -> None:
    command = [sys.executable, "-m", "onnx_inplace", "schema"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert "Traceback" not in done.stderr


def test_checking_needs_neither_numba_nor_onnxruntime(folder: Path) -> None:
    script = """
import sys
from onnx_inplace import compiler, errors
import onnx_inplace.dsl
from typer.testing import CliRunner
from onnx_inplace.cli.commands import app
for arguments in (["check", "loop.onnx"], ["show", "loop.onnx"], ["plan", "loop.onnx"], ["schema"]):
    assert CliRunner().invoke(app, arguments).exit_code == 0
print(sorted({"numba", "onnxruntime"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


# -- compile


def test_compile(folder: Path) -> None:
    assert ok("compile", "good.py:append") == "append.onnx: ok: updated_cache is cache\n"
    assert [v.name for v in compiler.load("append.onnx").mutable] == ["cache"]
    ok("compile", folder / "good.py:Models.inner", "--output", "inner.textproto")
    assert (
        compiler.load("inner.textproto").program.proto == compiler.load("append.onnx").program.proto
    )
    content = json.loads(ok("compile", "good.py:append", "--json"))
    assert content["ok"] and content["outputs"] == {"updated_cache": "cache"}


def test_compile_reports_findings(folder: Path) -> None:
    text = fails(1, "compile", "stale.py:stale")
    assert "stale.py:9: E104" in text and "op.ReduceSum(cache" in text and "1 problem." in text
    assert not Path("stale.onnx").exists()
    result = invoke("compile", "stale.py:stale", "--json")
    assert result.exit_code == 1
    (problem,) = json.loads(result.stdout)["problems"]
    assert (problem["code"], problem["line"]) == ("E104", 9)
    assert problem["file"] == "stale.py" and problem["repair"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("good.py", "FILE.py:NAME"),
        ("good.py:", "FILE.py:NAME"),
        ("absent.py:x", "no such file"),
        ("good.py:absent", "models in it: append"),
        ("good.py:number", "a int"),
        ("helper_of_mine.py:SCALE", "no @model"),
    ],
)
def test_compile_of_something_else(source: str, words: str, folder: Path) -> None:
    assert words in fails(2, "compile", source)


def test_compile_of_a_broken_file(folder: Path) -> None:
    assert "broken.py:1: error: SyntaxError" in fails(1, "compile", "broken.py:x")
    assert "raising.py:2: error: ZeroDivisionError" in fails(1, "compile", "raising.py:x")


# -- check and restore


def test_check_and_restore(folder: Path) -> None:
    assert "updated_cache is cache, updated_other is other" in ok("check", "loop.onnx")
    onnx_ir.save(onnx_ir.load("loop.onnx"), "dropped.onnx")
    text = fails(1, "check", "dropped.onnx")
    assert "dropped.onnx: E113" in text and "`other`" in text
    result = invoke("check", "dropped.onnx", "--json")
    problems = json.loads(result.stdout)["problems"]
    assert {p["code"] for p in problems} == {"E113"} and problems[0]["file"] == "dropped.onnx"
    ok("restore", "dropped.onnx", "-o", "restored.onnx")
    ok("check", "restored.onnx")
    assert "updated_cache" in ok("restore", "loop.onnx", "-o", "again.onnx", "--json")


def test_no_model(folder: Path) -> None:
    assert "absent.onnx: error: No such file" in fails(1, "check", "absent.onnx")
    assert "good.py: error: this is no ONNX model" in fails(1, "check", "good.py")
    assert invoke("check", "good.py", "--json").exit_code == 1


# -- show


def test_show(folder: Path) -> None:
    lines = ok("show", "loop.onnx").splitlines()
    assert lines[0].startswith("loop.onnx: IR ") and "onnx_inplace 1" in lines[0]
    text = "\n".join(lines)
    for part in (
        "cache@0  READ_WRITE",
        "steps    READ_ONLY",
        "then_branch(",
        "function local::append",
    ):
        assert part in text
    writes = [line for line in lines if "writes other" in line]
    assert len(writes) == 1 and "other_1[other@" in writes[0].replace("other[", "other_1[")
    assert "\x1b" not in text  # no colours where nobody sees them


def test_show_as_json(folder: Path) -> None:
    listing = json.loads(ok("show", "loop.onnx", "--json"))
    graph = listing["graph"]
    assert graph["access"] == ["READ_WRITE", "READ_WRITE", "READ_ONLY", "READ_ONLY"]
    assert [v["root"] for v in graph["outputs"]] == ["cache", "other", None]
    (loop,) = (n for n in graph["nodes"] if n["op"] == "Loop")
    assert loop["effects"] == ["is cache", "is other"]
    (body,) = loop["blocks"]
    roots = [v["root"] for v in body["inputs"]]
    assert sorted(r for r in roots if r) == ["cache", "other"]
    assert all(n["source"].startswith("file_programs.py:") for n in body["nodes"])


def test_show_refuses_what_is_not_proven(folder: Path) -> None:
    onnx_ir.save(onnx_ir.load("loop.onnx"), "dropped.onnx")
    assert "E113" in fails(1, "show", "dropped.onnx")


@pytest.mark.parametrize("name", file_programs.ALL)
def test_every_program_can_be_shown(name: str, folder: Path) -> None:
    file_programs.ALL[name].save("m.onnx")
    assert f"graph {file_programs.ALL[name].name}" in ok("show", "m.onnx")
    assert json.loads(ok("show", "m.onnx", "--json"))["ok"]


def test_plan(folder: Path) -> None:
    text = ok("plan", "loop.onnx")
    assert "onnx_inplace::CacheUpdate" in text and "writes other" in text
    assert "copies: none" in text and "checked in a run:" in text
    content = json.loads(ok("plan", "loop.onnx", "--json"))
    assert content["copies"] == [] and len(content["checked in a run"]) == 2
    loops = [line for line in content["steps"] if "Loop(" in line]
    assert len(loops) == 1 and "is cache, other" in loops[0]


def test_plan_says_what_a_run_needs(folder: Path) -> None:
    text = ok("plan", "loop.onnx")
    assert "32*capacity*heads" in text  # two caches of [heads, capacity, 4] floats
    assert "memory [bytes]:" in text and "peak" in text
    dims = "heads:2,capacity:8,n:1"
    content = json.loads(ok("plan", "loop.onnx", "--dims", dims, "--json"))["memory"]
    assert content["caches"] == 2 * 2 * 8 * 4 * 4 and content["extra_cache_bytes"] == 0
    parts = (content[part] for part in ("caches", "values", "workspace", "pages"))
    assert content["peak"] == sum(parts)
    assert f"{content['peak']:,}" in ok("plan", "loop.onnx", "--dims", dims)
    half = json.loads(ok("plan", "loop.onnx", "--dims", "heads:2", "--json"))["memory"]
    assert half["caches"] == "64*capacity"


def test_plan_refuses_dimensions_that_are_none(folder: Path) -> None:
    assert "rows" in fails(1, "plan", "loop.onnx", "--dims", "rows:2")
    file_programs.plain.save("plain.onnx")
    assert "E112" in fails(1, "plan", "plain.onnx", "--dims", "heads:1,capacity:4,n:5")
    assert "DIMENSION:SIZE" in fails(2, "plan", "loop.onnx", "--dims", "heads")


def test_plan_says_whether_it_fits_before_anything_is_allocated(folder: Path) -> None:
    """In a kibibyte less than it needs it does not; a terabyte of caches is refused, not made."""
    dims = "heads:2,capacity:1024,n:1"
    total = json.loads(ok("plan", "loop.onnx", "--dims", dims, "--json"))["memory"]["total"]
    assert "total" in ok("plan", "loop.onnx", "--dims", dims, "--budget", str(total))
    text = fails(1, "plan", "loop.onnx", "--dims", dims, "--budget", str(total - 1))
    assert "MemoryBudget" in text and f"{total:,}" in text and f"{total - 1:,}" in text
    huge = "heads:1024,capacity:1073741824,n:1"
    assert "caches" in fails(1, "plan", "loop.onnx", "--dims", huge, "--budget", "4GiB")
    assert ok("plan", "loop.onnx", "--dims", dims, "--budget", "0.5 GB")


def test_plan_needs_sizes_and_a_size_to_say_whether_it_fits(folder: Path) -> None:
    text = fails(1, "plan", "loop.onnx", "--dims", "heads:2", "--budget", "4GiB")
    assert "capacity" in text and "n" in text
    assert "GiB" in fails(2, "plan", "loop.onnx", "--budget", "4 gigs")
    assert "threads" in fails(2, "plan", "loop.onnx", "--threads", "0")


def test_plan_writes_a_page(folder: Path) -> None:
    dims = "heads:2,capacity:8,n:1"
    assert ok("plan", "loop.onnx", "--html", "loop.html", "--dims", dims) == "loop.html: ok\n"
    text = Path("loop.html").read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>") and "loop.onnx" in text and "chosen" not in text
    content = json.loads(ok("plan", "loop.onnx", "--html", "other.html", "--json"))
    assert content["ok"] and "chosen" in Path("other.html").read_text(encoding="utf-8")
    fails(1, "plan", "loop.onnx", "--html", "none.html", "--dims", "rows:1")
    assert not Path("none.html").exists()
    assert "nowhere" in fails(2, "plan", "loop.onnx", "--html", "nowhere/loop.html")


def test_plan_shows_what_is_proved(folder: Path) -> None:
    @model
    def fits(
        cache: Mutable[BFLOAT16[2, 8, 4]], new: BFLOAT16[2, 1, 4], position: INT64[()]
    ) -> Alias["cache"]:
        return kv.CacheUpdate(kv.CacheUpdate(cache, new, 7), new, position)

    fits.save("fits.onnx")
    content = json.loads(ok("plan", "fits.onnx", "--json"))
    assert content["proved"] == ["0 <= 7 and 7 + 1 <= 8 (`cache`)"]
    assert content["checked in a run"] == ["0 <= position and position + 1 <= 8 (`cache`)"]


@pytest.mark.parametrize("name", file_programs.ALL)
def test_every_program_can_be_planned(name: str, folder: Path) -> None:
    file_programs.ALL[name].save("m.onnx")
    assert json.loads(ok("plan", "m.onnx", "--json"))["ok"]
    assert "m.onnx" in ok("plan", "m.onnx")


# -- explain and schema


def test_explain() -> None:
    assert ok("explain", "E104") == ok("explain", "e104")
    assert ok("explain", "E104") == errors.explain("E104").text
    listed = ok("explain")
    assert all(code in listed for code in errors.RULES)
    assert set(json.loads(ok("explain", "--json"))) == set(errors.RULES)
    assert "E104" in fails(2, "explain", "E999")


def test_schema() -> None:
    assert ok("schema") == schema.proto_fragment()


# -- run


def run(*arguments: str) -> str:
    return ok("run", "loop.onnx", "--input", "new=new.npy", "--input", "steps=3", *arguments)


@pytest.fixture
def arrays(folder: Path) -> Path:
    np.save("new.npy", np.ones((2, 1, 4), np.float32))
    np.save("cache.npy", np.zeros((2, 8, 4), np.float32))
    return folder


def test_run_updates_a_file_in_place(arrays: Path) -> None:
    before = Path("cache.npy").stat()
    run("--cache", "cache=cache.npy", "--cache", "other=heads:2,capacity:8")
    cache = np.load("cache.npy")
    assert cache[:, :2].all() and not cache[:, 2:].any()
    assert Path("cache.npy").stat().st_ino == before.st_ino


def test_run_saves_results(arrays: Path) -> None:
    sizes = ("--cache", "cache=heads:2,capacity:8", "--cache", "other=heads:2,capacity:8")
    text = run(*sizes, "--save", "other=other.npy", "--save", "count=count.npy")
    assert "updated_other  (is other)  float32[2, 8, 4]" in text and "count  int64[]  2" in text
    assert np.load("other.npy")[:, :3].all() and np.load("count.npy") == 2
    results = json.loads(run(*sizes, "--json"))["results"]
    assert results["count"] == {"dtype": "int64", "shape": [], "alias_of": None, "values": 2}
    assert results["updated_cache"]["alias_of"] == "cache"


def test_run_on_types_that_numpy_has_no_name_for(folder: Path) -> None:
    @model
    def halves(cache: Mutable[BFLOAT16[2, 4]], x: BFLOAT16[2, 4]) -> Alias["cache"]:
        return kv.Assign(cache, x)

    halves.save("halves.onnx")
    ones = np.ones((2, 4), ml_dtypes.bfloat16)
    np.save("x.npy", ones)
    np.save("cache.npy", np.zeros_like(ones))
    assert np.load("x.npy").dtype.kind == "V"
    ok("run", "halves.onnx", "--input", "x=x.npy", "--cache", "cache=cache.npy")
    np.testing.assert_array_equal(np.load("cache.npy").view(ml_dtypes.bfloat16), ones)


def test_run_that_does_not_fit(arrays: Path) -> None:
    before = Path("cache.npy").read_bytes()
    text = fails(
        1, "run", "loop.onnx", "--input", "new=new.npy", "--input", "steps=30",
        "--cache", "cache=cache.npy", "--cache", "other=heads:2,capacity:8",
    )  # fmt: skip
    assert text.startswith("file_programs.py:") and ": CapacityError: `other`" in text
    assert "capacity 8" in text
    assert Path("cache.npy").read_bytes() == before


@pytest.mark.parametrize("target", ["absent=x.npy", "other=absent/x.npy", "other=x.txt"])
def test_a_result_that_cannot_be_saved_is_said_before_the_run(target: str, arrays: Path) -> None:
    before = Path("cache.npy").read_bytes()
    sizes = ("--cache", "cache=cache.npy", "--cache", "other=heads:2,capacity:8")
    inputs = ("--input", "new=new.npy", "--input", "steps=3")
    fails(2, "run", "loop.onnx", *inputs, *sizes, "--save", target)
    assert Path("cache.npy").read_bytes() == before


def test_a_folder_that_is_not_there(folder: Path) -> None:
    text = fails(1, "compile", "good.py:append", "-o", "absent/m.onnx")
    assert "absent: error: no such folder" in text.splitlines()


@pytest.mark.parametrize(
    ("code", "arguments", "words"),
    [
        (2, ["--input", "new"], "NAME=FILE.npy"),
        (2, ["--input", "new=absent.npy"], "No such file"),
        (2, ["--input", "new=abc"], "no .npy file"),
        (2, ["--input", "new=1", "--input", "new=2"], "twice"),
        (2, ["--cache", "cache=heads"], "DIMENSION:SIZE"),
        (2, ["--cache", "cache=heads:-2"], "DIMENSION:SIZE"),
        (2, ["--cache", "absent=heads:2"], "missing"),
        (2, ["--threads", "0"], "threads"),
        (1, ["--cache", "cache=heads:2"], "capacity"),
        (1, ["--cache", "cache=heads:2,capacity:8,more:1"], "more"),
    ],
)
def test_run_with_wrong_arguments(
    code: int, arguments: list[str], words: str, arrays: Path
) -> None:
    if "absent=heads:2" in arguments:
        code, words = 1, "missing"  # sizes of the caches that do exist come first
    assert words in fails(code, "run", "loop.onnx", *arguments)


def test_run_with_a_cache_too_many(arrays: Path) -> None:
    sizes = [f"--cache={name}=heads:2,capacity:8" for name in ("cache", "other", "third")]
    text = fails(2, "run", "loop.onnx", "--input", "new=new.npy", "--input", "steps=1", *sizes)
    assert "third" in text


def test_version() -> None:
    assert ok("--version").startswith("onnx-inplace ")


def test_facts_have_one_form() -> None:
    """What ``check --json`` prints is what stands in the file."""
    declared = declarations.of_model(file_programs.loop.proto, ())
    assert declared.outputs == {"updated_cache": "cache", "updated_other": "other"}


def test_plan_says_what_is_fused_and_why_not(folder: Path) -> None:
    decoders.decoder(decoders.Shape(layers=1)).save("decoder.onnx")
    assert "nodes in one call each, while 1, new_length are at most 4" in ok("plan", "decoder.onnx")
    content = json.loads(ok("plan", "decoder.onnx", "--json"))["fused"]
    assert content["nodes"][0] > 30 and content["rows"] == ["1", "new_length"]
    assert content["refusals"] == []
    assert json.loads(ok("plan", "loop.onnx", "--json"))["fused"]["nodes"] == []


def test_plan_shows_what_a_session_is_loaded_with(folder: Path) -> None:
    """``--fuse``: other steps, and weights in other forms."""
    decoders.decoder(decoders.Shape(layers=1)).save("decoder.onnx")

    def planned(fuse: str) -> dict:
        return json.loads(ok("plan", "decoder.onnx", "--json", "--fuse", fuse))

    auto, off, only = (planned(fuse) for fuse in ("auto", "off", "decode-only"))
    assert auto["steps"] == off["steps"] and any("Attention" in line for line in off["steps"])
    assert ["nodes in one call" in line for line in only["steps"]] == [False, True]
    repacked = "repacked for fused steps"
    assert [repacked in p["memory"]["weights_in"] for p in (auto, off, only)] == [True, False, True]
    assert auto["memory"]["weights"] > only["memory"]["weights"]
    assert 'fused, with fuse="decode-only"' in ok("plan", "decoder.onnx", "--fuse", "decode-only")
    assert "fused" not in ok("plan", "decoder.onnx", "--fuse", "off")
    assert "nothing of this model" in fails(1, "plan", "loop.onnx", "--fuse", "decode-only")
    assert "decode-only" in fails(2, "plan", "loop.onnx", "--fuse", "always")
