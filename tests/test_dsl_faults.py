# ruff: noqa: F841, B007, B023  (programs as authors write them, faulty ones among them)
"""Faults come at the author's line, all of a function at once, each once."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from recorded import reasons, refused

from onnx_inplace import errors
from onnx_inplace.dsl import BOOL, FLOAT, INT64, Alias, Mutable, function, kv, model, op

Cache, New = FLOAT["heads", "capacity", 4], FLOAT["heads", "n", 4]

# -- blocks that leave


def test_a_block_that_depends_on_a_tensor_cannot_return() -> None:
    def declare() -> None:
        @model
        def program(x: New, k: BOOL[()]) -> New:
            if k:
                y = x * 2.0
                return y
            return x

    assert refused(declare) == [("E100", 5)]


@pytest.mark.parametrize("statement", ["break", "continue"])
def test_a_loop_over_a_tensor_cannot_be_left(statement: str, tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent(f"""
        from onnx_inplace.dsl import *
        @model
        def program(x: FLOAT["n"], n: INT64[()]) -> FLOAT["n"]:
            for i in range(n):
                x = x + 1.0
                if i > 3:
                    {statement}
            return x
        """)
    )
    run = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert run.returncode and f"{path}:8: E100" in run.stderr


def test_a_while_over_a_tensor_has_no_else() -> None:
    def declare() -> None:
        @model
        def program(n: INT64[()]) -> INT64[()]:
            while n > 3:
                n = n - 1
            else:
                n = n + 1
            return n

    assert refused(declare) == [("E100", 6)]


def test_a_while_over_a_tensor_cannot_assign_in_its_test() -> None:
    def declare() -> None:
        @model
        def program(n: INT64[()]) -> INT64[()]:
            while (m := n - 1) > 3:
                n = m
            return n

    assert refused(declare) == [("E100", 3)]
    assert "`" not in reasons(declare) and ":=" in reasons(declare)


def test_python_values_may_return_break_and_continue() -> None:
    @model
    def program(x: New) -> New:
        for k in range(10):
            if k == 1:
                continue
            if k == 3:
                break
            x = x + float(k)
        else:
            return x * 0.0
        while True:
            if k == 3:
                return x

    assert program.name == "program"


# -- Python cannot decide


def clipped(x, k):
    if k:
        return x * 2.0
    return x


def test_a_helper_cannot_decide_on_a_tensor() -> None:
    def declare() -> None:
        @model
        def program(x: New, k: BOOL[()]) -> New:
            for _ in range(30):
                x = clipped(x, k)
            return x

    line = clipped.__code__.co_firstlineno - declare.__code__.co_firstlineno + 1
    assert refused(declare) == [("E100", line)]


def test_a_helper_decides_on_python_values() -> None:
    @model
    def program(x: New) -> New:
        return clipped(x, True)

    assert program.name == "program"


def test_what_python_asks_of_a_tensor_is_refused() -> None:
    for ask in (
        lambda x: len(x),
        lambda x: list(x),
        lambda x: int(x),
        lambda x: float(x),
        lambda x: range(3)[x],
        lambda x: 1.0 in x,
        lambda x: [1, 2][x],
    ):

        def declare() -> None:
            @model
            def program(x: FLOAT["n"]) -> FLOAT["n"]:
                return ask(x)

        with pytest.raises(errors.ContractError) as caught:
            declare()
        assert [f.code for f in caught.value.findings] == ["E100"]


def test_items_of_a_tensor_are_no_loop() -> None:
    def declare() -> None:
        @model
        def program(x: FLOAT["n"]) -> FLOAT["n"]:
            y = x
            for row in x:
                y = y + row
            return y

    assert refused(declare) == [("E100", 4)]


# -- values where they do not belong


def test_a_tensor_of_another_model_is_refused() -> None:
    kept = []

    @model
    def first(x: FLOAT["n"]) -> FLOAT["n"]:
        kept.append(x)
        return x + 1.0

    def declare() -> None:
        @model
        def program(x: FLOAT["n"]) -> FLOAT["n"]:
            return x + kept[0]

    assert refused(declare) == [("E100", 3)]


def test_a_value_cannot_leave_its_branch_through_a_list() -> None:
    def declare() -> None:
        @model
        def program(x: New, k: BOOL[()]) -> New:
            seen = []
            if k:
                doubled = x * 2.0
                seen.append(doubled)
            return seen[0] + x

    assert refused(declare) == [("E100", 7)]
    assert "`doubled`" in reasons(declare)


def test_a_value_cannot_leave_its_branch_through_a_nonlocal() -> None:
    kept = None

    def declare() -> None:
        @model
        def program(x: New, n: INT64[()]) -> New:
            nonlocal kept
            for i in range(n):
                kept = x * 2.0
            return x + kept

    assert refused(declare) == [("E100", 6)]
    assert "`kept`" in reasons(declare)


def test_a_variable_of_one_branch_has_no_value_afterwards() -> None:
    def declare() -> None:
        @model
        def program(x: New, k: BOOL[()], n: INT64[()]) -> tuple[New, New, INT64[()]]:
            if k:
                y = x * 2.0
            for i in range(n):
                z = x * 3.0
            a = x + y
            b = x + z
            c = i + 1
            return a, b, c

    assert refused(declare) == [("E100", 7), ("E100", 8), ("E100", 9)]
    assert "`y` has no value here" in reasons(declare)


def test_branches_that_leave_different_types_have_no_value() -> None:
    def declare() -> None:
        @model
        def program(x: FLOAT["n"], i: INT64["n"], k: BOOL[()]):
            if k:
                y = x
            else:
                y = i
            return y

    assert refused(declare) == [("E102", 7)]


def test_python_values_cannot_differ_by_a_tensor() -> None:
    def declare() -> None:
        @model
        def program(x: FLOAT["n"], k: BOOL[()], n: INT64[()]):
            if k:
                name = "a"
            else:
                name = "b"
            return {"a": x}[name]

    assert refused(declare) == [("E100", 7)]


def test_a_carried_value_keeps_its_type() -> None:
    def declare() -> None:
        @model
        def program(x: FLOAT["n"], n: INT64[()]):
            for i in range(n):
                x = op.Cast(x, to=INT64)
            return x

    assert refused(declare) == [("E102", 3)]


def test_a_carried_value_begins_as_a_tensor() -> None:
    def declare() -> None:
        @model
        def program(x: FLOAT["n"], n: INT64[()]):
            last = None
            for i in range(n):
                last = x
                x = x + 1.0
            return x

    assert refused(declare) == [("E100", 4)]


def test_one_bool_decides() -> None:
    def declare() -> None:
        @model
        def program(x: FLOAT["n"], b: BOOL["n"], n: FLOAT[()]):
            if x:
                x = x + 1.0
            if b:
                x = x + 1.0
            for i in range(n):
                x = x + 1.0
            return x

    assert refused(declare) == [("E102", 3), ("E102", 5), ("E102", 7)]


# -- all at once


def test_all_faults_of_a_function_come_at_once() -> None:
    def declare() -> None:
        @model
        def program(
            cache: Mutable[Cache], new: New, i: INT64[()], k: BOOL[()]
        ) -> tuple[Alias["cache"], FLOAT[()], New]:
            wrong = new + i
            updated = kv.CacheUpdate(cache, new, i)
            stale = op.ReduceSum(cache, keepdims=0)
            missing = op.Rolu(new) if k else new
            return updated, stale, wrong * 2.0

    found = refused(declare)
    assert ("E102", 5) in found and ("E100", 8) in found


def test_faults_of_recording_and_of_the_contract_come_together() -> None:
    def declare() -> None:
        @model
        def program(
            cache: Mutable[Cache], new: New, i: INT64[()]
        ) -> tuple[Alias["cache"], FLOAT[()], New]:
            wrong = new + i
            updated = kv.CacheUpdate(cache, new, i)
            stale = op.ReduceSum(cache, keepdims=0)
            return updated, stale, wrong * 2.0

    assert refused(declare) == [("E102", 5), ("E104", 7)]


def test_nothing_is_said_of_what_follows_from_a_fault() -> None:
    def declare() -> None:
        @model
        def program(cache: Mutable[Cache], new: New, i: INT64[()], k: BOOL[()]) -> Alias["cache"]:
            wrong = new + i
            again = wrong * 2.0 + wrong[0]
            if k:
                cache = kv.CacheUpdate(cache, again, i)
            for j in range(i):
                cache = kv.CacheUpdate(cache, again, j)
            return kv.CacheUpdate(cache, again, i)

    assert refused(declare) == [("E102", 3)]


def test_a_dropped_write_is_judged_by_the_contract() -> None:
    def fork() -> None:
        @model
        def program(cache: Mutable[Cache], new: New, i: INT64[()]) -> Alias["cache"]:
            kv.CacheUpdate(cache, new, i)
            return kv.CacheUpdate(cache, new, i + 1)

    def lost() -> None:
        @model
        def program(cache: Mutable[Cache], new: New, i: INT64[()], k: BOOL[()]) -> New:
            if k:
                kv.CacheUpdate(cache, new, i)
            return new * 2.0

    assert refused(fork) == [("E105", 4)]
    assert refused(lost) == [("E109", 4)]


def test_findings_name_variables() -> None:
    def declare() -> None:
        @model
        def program(
            cache: Mutable[Cache], new: New, i: INT64[()]
        ) -> tuple[Alias["cache"], FLOAT[()]]:
            updated = kv.CacheUpdate(cache, new, i)
            updated = kv.CacheUpdate(updated, new, i + 1)
            last = updated
            return last, op.ReduceSum(cache, keepdims=0)

    assert "`cache` was overwritten in place" in reasons(declare)
    assert "updated_1" not in reasons(declare)


# -- what cannot be recorded


def test_only_plain_functions_are_recorded() -> None:
    async def coroutine(x: FLOAT["n"]) -> FLOAT["n"]:
        return x

    def generator(x: FLOAT["n"]) -> FLOAT["n"]:
        yield x

    for f, what in ((lambda x: x, "lambda"), (coroutine, "async"), (generator, "generator")):
        with pytest.raises(errors.ContractError, match=what) as caught:
            model(f)
        [finding] = caught.value.findings
        assert finding.location.line == f.__code__.co_firstlineno
    with pytest.raises(errors.ContractError, match="no function"):
        model(print)


def test_functions_without_source_are_refused() -> None:
    variables: dict = {}
    exec('def f(x: FLOAT["n"]) -> FLOAT["n"]:\n    return x', {"FLOAT": FLOAT}, variables)
    with pytest.raises(errors.ContractError, match="source of"):
        model(variables["f"])


def test_annotations_are_checked() -> None:
    def declare() -> None:
        @model
        def program(x: FLOAT["n"], y, z: int, w: tuple[FLOAT["n"], ...]) -> FLOAT["n"]:
            return x

    assert refused(declare) == [("E100", 1)] * 3
    assert "`y` needs a tensor type" in reasons(declare)

    def strange() -> None:
        @model
        def program(x: "Missing") -> FLOAT["n"]:
            return x

    assert refused(strange) == [("E100", 1)]


def test_strings_see_locals_and_closures() -> None:
    Local = FLOAT["n", 3]

    def make(size: int):
        Sized = FLOAT["n", size]

        @model
        def program(x: "Sized", y: "Local") -> "Sized":
            assert Local is not None
            return x

        return program

    assert make(2).name == "program"


def test_something_is_returned() -> None:
    def declare() -> None:
        @model
        def program(x: FLOAT["n"]) -> FLOAT["n"]:
            x = x + 1.0

    assert refused(declare) == [("E100", 1)]


def test_errors_of_pythons_own_come_through() -> None:
    with pytest.raises(ZeroDivisionError):

        @model
        def program(x: FLOAT["n"]) -> FLOAT["n"]:
            return x * (1 / 0)


def test_a_function_reports_where_it_stands() -> None:
    def declare() -> None:
        @function
        def f(x: FLOAT["n"], i: INT64["n"]) -> FLOAT["n"]:
            return x + i

    assert refused(declare) == [("E102", 3)]


def test_faults_of_results_stand_at_the_return() -> None:
    def declare() -> None:
        @model
        def program(cache: Mutable[Cache], new: New) -> tuple[Cache, Alias["cache"]]:
            fresh = new * 2.0
            kept = fresh
            return cache, kept

    assert refused(declare) == [("E111", 5), ("E110", 5)]
    assert "`cache` is the storage of `cache`" in reasons(declare)


@pytest.mark.parametrize("right", ["3", "1.5", "None", "'text'", "[1]"])
@pytest.mark.parametrize("word", ["and", "or"])
def test_a_tensor_and_a_value_that_is_no_truth_is_refused(
    right: str, word: str, tmp_path: Path
) -> None:
    """Python would give one of the two; there is no ONNX operator for that."""
    source = f"""\
from onnx_inplace.dsl import *

@model
def program(n: INT64[()]) -> INT64[()]:
    return n {word} {right}
"""
    path = tmp_path / "program.py"
    path.write_text(source)
    with pytest.raises(errors.ContractError) as caught:
        exec(compile(source, str(path), "exec"), {"__name__": "program"})
    assert [(f.code, f.location.line) for f in caught.value.findings] == [("E100", 5)]
