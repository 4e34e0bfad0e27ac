"""Every rule: its page, a failing program with the line it fails at, the same repaired; and a
table of programs that break rules in other ways, or keep them where one might think they do not."""

import pickle
import re

import pytest

from onnx_inplace import errors
from onnx_inplace.compiler.errors import Finding, Location


def run(source, path):
    """Run a program from a file, as an author would."""
    path.write_text(source)
    exec(compile(source, str(path), "exec"), {"__name__": path.stem})


def marked(source):
    """{(line, code)} of the comments ``# E104``."""
    lines = enumerate(source.splitlines(), 1)
    return [(k, code) for k, text in lines for code in re.findall(r"# (E\d{3})", text)]


def findings_of(source, path):
    with pytest.raises(errors.ContractError) as caught:
        run(source, path)
    return caught.value


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


OF_FILES = {"E113", "E114", *(f"E{n}" for n in range(118, 133))}  # not of an author's line


def test_the_rules_are_those_of_the_design_and_of_files():
    assert set(errors.RULES) == ({f"E{n}" for n in range(100, 118)} - {"E103"}) | OF_FILES


@pytest.mark.parametrize("code", errors.RULES)
def test_a_page_is_complete(code):
    page = errors.explain(code)
    assert page.code == code and page.text.startswith(f"# {code}: {page.title}")
    assert page.title[0].islower() and page.repair.endswith(".") and page.rule.endswith((".", ".)"))
    for program in (page.failing, page.repaired):
        compile(program, code, "exec")
    assert [c for _, c in marked(page.failing)] == [code] and "# E" not in page.repaired


@pytest.mark.parametrize("code", errors.RULES)
def test_the_failing_program_of_a_page_fails_there(code, tmp_path):
    page = errors.explain(code)
    error = findings_of(page.failing, path := tmp_path / "program.py")
    assert {f.code for f in error.findings} == {code}, str(error)
    if code in OF_FILES:
        return
    [finding], [(line, _)] = error.findings, marked(page.failing)
    assert (finding.location.file, finding.location.line) == (str(path), line), str(error)
    assert page.failing.splitlines()[line - 1].strip() in str(error)


@pytest.mark.parametrize("code", errors.RULES)
def test_the_repaired_program_of_a_page_compiles(code, tmp_path):
    run(errors.explain(code).repaired, tmp_path / "program.py")


def test_an_unknown_code_has_no_page():
    with pytest.raises(KeyError):
        errors.explain("E999")


# Each program follows the header; a line that breaks a rule ends with its code. All findings of a
# program are these lines. A program without marks is legal.

HEADER = """\
from onnx_inplace.dsl import *
C, N, P, I, B, S = FLOAT["h", "m", 4], FLOAT["h", "n", 4], INT64[()], INT64[()], BOOL[()], FLOAT[()]
@function
def write(c: Mutable[C], n: N, p: P) -> Alias["c"]:
    return kv.CacheUpdate(c, n, p)
@function
def same(x: C) -> C:
    return op.Identity(x)
@function
def total(x: C) -> S:
    return op.ReduceSum(x, keepdims=0)
"""

PROGRAMS = {
    "a read before the write": """
@model
def program(c: Mutable[C], n: N, p: P) -> tuple[Alias["c"], S]:
    s = op.ReduceSum(c, keepdims=0)
    return kv.CacheUpdate(c, n, p), s
""",
    "a mutable parameter that is only read": """
@model
def program(c: Mutable[C]) -> S:
    return op.ReduceSum(c, keepdims=0)
""",
    "one version returned twice": """
@model
def program(c: Mutable[C], n: N, p: P) -> tuple[Alias["c"], Alias["c"]]:
    u = kv.CacheUpdate(c, n, p)
    return u, u
""",
    "a parameter that is read only comes back as a copy": """
@model
def program(x: C) -> tuple[C, C]:
    return x, op.Identity(x)
""",
    "a view of the live version is written through": """
@model
def program(c: Mutable[FLOAT[2, 8, 4]], n: FLOAT[2, 1, 4], p: P) -> Alias["c"]:
    wide = op.Unsqueeze(c, [0])
    wide = kv.CacheUpdate(wide, op.Unsqueeze(n, [0]), p)
    return op.Squeeze(wide, [0])
""",
    "a view of a view is stale": """
@model
def program(c: Mutable[C], n: N, p: P) -> tuple[Alias["c"], S]:
    flat = op.Reshape(op.Identity(c), [-1])
    u = kv.CacheUpdate(c, n, p)
    return u, op.ReduceSum(flat, keepdims=0)  # E104
""",
    "every fault of a program is reported, each once": """
@model
def program(c: Mutable[C], d: Mutable[C], x: C, n: N, p: P) -> tuple[Alias["c"], S, S]:
    u = kv.CacheUpdate(c, n, p)
    s = op.ReduceSum(c, keepdims=0)  # E104
    t = op.ReduceSum(c * 2.0, keepdims=0) + s  # E104
    v = kv.CacheUpdate(d, n, p)  # E109
    w = kv.CacheUpdate(x, n, p)  # E106
    y = kv.CacheUpdate(w, n, p)
    return u, s + t, op.ReduceSum(y, keepdims=0)
""",
    "what depends on a fault is not judged": """
@model
def program(c: Mutable[C], n: N, p: P) -> tuple[Alias["c"], S]:
    u = kv.CacheUpdate(c, n, p)
    f = kv.CacheUpdate(c, n, p + 1)  # E105
    g = kv.CacheUpdate(f, n, p + 2)
    return g, op.ReduceSum(f, keepdims=0)
""",
    "the old name cannot be returned": """
@model
def program(c: Mutable[C], n: N, p: P) -> Alias["c"]:
    u = kv.CacheUpdate(c, n, p)
    return c  # E104
""",
    "only one branch writes": """
@model
def program(c: Mutable[C], n: N, p: P, b: B) -> Alias["c"]:
    if b:
        c = kv.CacheUpdate(c, n, p)
    return c
""",
    "branches write different roots": """
@model
def program(c: Mutable[C], d: Mutable[C], n: N, p: P, b: B) -> tuple[Alias["c"], Alias["d"]]:
    if b:
        c = kv.CacheUpdate(c, n, p)
    else:
        d = kv.CacheUpdate(d, n, p)
    return c, d
""",
    "a name from before the branch is stale after it": """
@model
def program(c: Mutable[C], n: N, p: P, b: B) -> tuple[Alias["c"], S]:
    old = op.Identity(c)
    if b:
        c = kv.CacheUpdate(c, n, p)
    return c, op.ReduceSum(old, keepdims=0)  # E104
""",
    "a branch replaces the root by new storage": """
@model
def program(c: Mutable[C], b: B) -> Alias["c"]:
    if b:  # E107
        c = c * 2.0
    return c
""",
    "branches over parameters that are read only choose freely": """
@model
def program(x: C, y: C, b: B) -> C:
    if b:
        z = x
    else:
        z = y
    return z
""",
    "a view leaves a branch as the root it is": """
@model
def program(c: Mutable[C], n: N, p: P, b: B) -> Alias["c"]:
    if b:
        v = op.Identity(c)
    else:
        v = c
    return kv.CacheUpdate(v, n, p)
""",
    "a loop carries the cache": """
@model
def program(c: Mutable[C], n: N, k: I) -> Alias["c"]:
    for i in range(k):
        c = write(c, n, i)
    return c
""",
    "a body reads what it overwrites by a name from outside": """
@model
def program(c: Mutable[C], n: N, k: I) -> tuple[Alias["c"], S]:
    old = op.Identity(c)
    s = op.ReduceSum(c * 0.0, keepdims=0)
    for i in range(k):
        s = s + op.ReduceSum(old, keepdims=0)  # E104
        c = kv.CacheUpdate(c, n, i)
    return c, s
""",
    "a body reads a name from outside that it does not overwrite": """
@model
def program(c: Mutable[C], d: Mutable[C], n: N, k: I) -> tuple[Alias["c"], S]:
    s = op.ReduceSum(d * 0.0, keepdims=0)
    for i in range(k):
        s = s + op.ReduceSum(d, keepdims=0)
        c = kv.CacheUpdate(c, n, i)
    return c, s
""",
    "a body reads what it carries, before and after it writes": """
@model
def program(c: Mutable[C], n: N, k: I) -> tuple[Alias["c"], S]:
    s = op.ReduceSum(c * 0.0, keepdims=0)
    for i in range(k):
        s = s + op.ReduceSum(c, keepdims=0)
        u = kv.CacheUpdate(c, n, i)
        s = s + op.ReduceSum(u, keepdims=0)
        s = s + op.ReduceSum(c, keepdims=0)  # E104
        c = u
    return c, s
""",
    "a body writes what the loop does not carry": """
@model
def program(c: Mutable[C], n: N, k: I) -> Alias["c"]:
    s = k
    for i in range(k):
        u = kv.CacheUpdate(c, n, i)  # E105
        s = s + 1
    return c
""",
    "a loop exchanges its states": """
@model
def program(c: Mutable[C], d: Mutable[C], k: I) -> tuple[Alias["c"], Alias["d"]]:
    for i in range(k):  # E108 # E108
        c, d = d, c
    return c, d
""",
    "a loop replaces a parameter that is read only": """
@model
def program(x: C, k: I) -> C:
    for i in range(k):
        x = x * 2.0
    return x
""",
    "an inner loop writes what the outer one carries": """
@model
def program(c: Mutable[C], n: N, k: I) -> Alias["c"]:
    for i in range(k):
        for j in range(k):
            if j < i:
                c = write(c, n, j)
    return c
""",
    "a loop after which an old name is read": """
@model
def program(c: Mutable[C], n: N, k: I) -> tuple[Alias["c"], S]:
    old = op.Identity(c)
    for i in range(k):
        c = write(c, n, i)
    return c, op.ReduceSum(old, keepdims=0)  # E104
""",
    "a call that writes makes the old name stale": """
@model
def program(c: Mutable[C], n: N, p: P) -> tuple[Alias["c"], S]:
    u = write(c, n, p)
    return u, total(c)  # E104
""",
    "a call writes to an old version": """
@model
def program(c: Mutable[C], n: N, p: P) -> Alias["c"]:
    u = kv.CacheUpdate(c, n, p)
    return write(c, n, p)  # E105
""",
    "a call of what only reads": """
@model
def program(c: Mutable[C], n: N, p: P) -> tuple[Alias["c"], S]:
    s = total(same(c))
    return write(same(c), n, p), s
""",
    "what a function gives back as it is, is the root": """
@model
def program(c: Mutable[C], n: N, p: P) -> tuple[Alias["c"], S]:
    alias = same(c)
    u = write(c, n, p)
    return u, total(alias)  # E104
""",
    "what a function gives back as it is, is not declared": """
@model
def program(c: Mutable[C]) -> C:
    return same(c)  # E111
""",
    "a function is lent what nobody lent": """
@model
def program(x: C, n: N, p: P) -> C:
    return write(x, n, p)  # E106
""",
    "a function is lent an intermediate value": """
@model
def program(x: C, n: N, p: P) -> C:
    y = x * 2.0
    return write(y, n, p)  # E106
""",
    "a call takes the storage that it writes twice": """
@function
def both(c: Mutable[C], d: C, p: P) -> Alias["c"]:
    return kv.CacheUpdate(c, d, p)
@model
def program(c: Mutable[C], p: P) -> Alias["c"]:
    return both(c, op.Identity(c), p)  # E116
""",
    "a function that may give its parameter back": """
@function
def maybe(x: C, b: B) -> C:
    if b:
        x = x * 2.0
    return x
@model
def program(c: Mutable[C], b: B) -> S:
    return op.ReduceSum(maybe(c, b), keepdims=0)  # E107
""",
    "a function whose loop replaces its parameter": """
@function
def power(x: C, k: I) -> S:
    for i in range(k):
        x = x * x
    return op.ReduceSum(x, keepdims=0)
@function
def outer(x: C, k: I) -> S:
    return power(op.Identity(x), k)
@model
def program(c: Mutable[C], x: C, k: I) -> S:
    return outer(x, k) + outer(kv.Copy(c), k) + outer(c, k)  # E108
""",
    "a function scatters into its parameter": """
@function
def scattered(x: C, n: N, p: INT64["h"]) -> C:
    return op.TensorScatter(x, n, p)
@model
def program(c: Mutable[C], x: C, n: N, p: INT64["h"]) -> tuple[S, S]:
    return total(scattered(x, n, p)), total(scattered(c, n, p))  # E106
""",
    "a function loses what it writes": """
@function
def lose(c: Mutable[C], n: N, p: P) -> S:
    u = kv.CacheUpdate(c, n, p)  # E109
    return op.ReduceSum(u, keepdims=0)
""",
    "a function gives mutable storage back without a word": """
@function
def back(c: Mutable[C]) -> C:
    return op.Identity(c)  # E111
""",
    "standard operators write where they stand": """
@model
def program(c: Mutable[C], n: N, p: INT64["h"]) -> S:
    u = op.TensorScatter(c, n, p)  # E109
    return op.ReduceSum(u, keepdims=0)
""",
    "standard operators are functional elsewhere": """
@model
def program(c: Mutable[C], x: C, n: N, p: INT64["h"]) -> tuple[Alias["c"], C, C]:
    a = op.TensorScatter(x, n, p)
    b = op.TensorScatter(kv.Copy(c), n, p)
    return op.TensorScatter(c, n, p), a, b
""",
    "a scatter that adds makes a new value": """
@model
def program(c: Mutable[C], i: INT64["k", 1], n: FLOAT["k", "m", 4]) -> tuple[C, Alias["c"]]:
    added = op.ScatterND(c, i, n, reduction="add")
    return added, op.ScatterND(c, i, n)
""",
    "other heads than the cache has": """
@model
def program(c: Mutable[FLOAT[2, 8, 4]], n: FLOAT[4, 1, 4], p: P) -> Alias["c"]:
    return kv.CacheUpdate(c, n, p)  # E102
""",
    "a state of another shape": """
@model
def program(s: Mutable[FLOAT[2, 3]], x: FLOAT[3, 2]) -> Alias["s"]:
    return kv.Assign(s, x)  # E102
""",
    "positions of rows that no axis counts": """
@model
def program(c: Mutable[C], n: N, p: INT64["h"]) -> Alias["c"]:
    return kv.CacheUpdate(c, n, p)  # E102
""",
    "an axis that is none": """
@model
def program(c: Mutable[C], n: N, p: P) -> Alias["c"]:
    return kv.CacheUpdate(c, n, p, axis=3)  # E102
""",
    "a view under another shape is not the root": """
@model
def program(c: Mutable[FLOAT[2, 6]], n: FLOAT[2, 1], p: P) -> Alias["c"]:
    u = kv.CacheUpdate(c, n, p, axis=1)
    return op.Reshape(u, [3, 4])  # E102
""",
    "a read only parameter is declared as an alias": """
@model
def program(c: Mutable[C], x: C) -> Alias["c"]:
    return x  # E110
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_table(name, tmp_path):
    source = HEADER + PROGRAMS[name]
    path, expected = tmp_path / "program.py", marked(source)
    if not expected:
        run(source, path)
        return
    error = findings_of(source, path)
    assert all(f.location.file == str(path) for f in error.findings)
    assert sorted((f.location.line, f.code) for f in error.findings) == expected, str(error)


def test_a_finding_reads_as_a_compilers(tmp_path):
    program = """
@model
def program(cache: Mutable[C], n: N, p: P) -> tuple[Alias["cache"], S]:
    updated = kv.CacheUpdate(cache, n, p)
    return updated, op.ReduceSum(cache, keepdims=0)
"""
    error = findings_of(HEADER + program, path := tmp_path / "decode.py")
    assert str(error).splitlines() == [
        f"{path}:16: E104 stale read",
        "    return updated, op.ReduceSum(cache, keepdims=0)",
        "  `cache` was overwritten in place at line 15 and is now called `updated`.",
        "  Read `updated`, or read `cache` before line 15.",
    ]


ERRORS = [
    errors.ContractError([Finding("E104", "no", Location("a.py", 3), "do"), Finding("E113", "x")]),
    errors.UnsupportedOperator("", "Relu", "no kernel"),
    errors.ModelFileError("m.onnx", "not a model"),
    errors.BindingError("no", "x"),
    errors.ImmutableStorage("read-only", "cache"),
    errors.SharedStorage("overlap", "x", "cache"),
    errors.BindingInUse("lent", "cache", "other"),
    errors.StorageMismatch("shape", "cache", (2, 3), (3, 2)),
    errors.CapacityError("cache", 6, 3, 8, 1, Location("a.py", 3)),
    errors.CapacityError("cache", -1, 3, 8),
    errors.UnwrittenTokens("cache", 0, 12, 8, 1, "a.py:3"),
    errors.PageError("pages", 3, "missing"),
    errors.PageBudget("pages", 4096, 8192, 10000),
    errors.FormatError("INT4", "it cannot group such a page"),
    errors.PoolExhausted("pool", 3, 2),
    errors.PoolTooSmall("pool", 9, 8),
    errors.SavedStateError("cache.pages", "it is truncated"),
    errors.MemoryBudget("too much", 4096, 1024),
    errors.PlanError(["a slot is filled twice", "another"]),
    errors.AliasViolation("moved", "updated", 16, 32),
    errors.OperatorError("modulo by zero"),
    errors.OperatorError("Gather: `tokens` is [9]").at("a.py:3"),
    errors.WeightsError("`a.onnx.data` has changed"),
    errors.DirtyState("failed", (("cache", 3, 2),)),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_errors_carry_their_values_across_processes(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) != ""
    assert vars(copy) == vars(error) != {}
    assert isinstance(copy, errors.InplaceError)


def test_every_kind_of_error_is_in_the_table():
    def kinds(cls):
        return {cls, *(k for c in cls.__subclasses__() for k in kinds(c))}

    ours = {k for k in kinds(errors.InplaceError) if k.__module__ == errors.__name__}
    assert ours - {errors.InplaceError, errors.PlacedError} == {type(error) for error in ERRORS}
