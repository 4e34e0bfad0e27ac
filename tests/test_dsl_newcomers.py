"""What people write first, and what they are told."""

import traceback

import numpy as np
import pytest

from onnx_inplace import errors
from onnx_inplace.dsl import BOOL, FLOAT, INT4, INT64, Alias, Mutable, domain, kv, model

Cache = FLOAT["s", 4]


def misspelled():
    @model
    def program(c: Mutable[Cache], v: Cache) -> Alias["c"]:
        return kv.CacheUpdat(c, v, 0)


def numpys():
    @model
    def program(c: Mutable[Cache], v: Cache) -> Alias["c"]:
        return kv.Assign(c, np.tanh(v))


def default():
    @model
    def program(c: Mutable[Cache], v: Cache, p: INT64[()] = 0) -> Alias["c"]:
        return kv.CacheUpdate(c, v, p)


def unpacked():
    @model
    def program(c: Mutable[Cache], v: Cache) -> Alias["c"]:
        _, c = domain("com.example").Append(c, v)
        return c


def undeclared():
    @model
    def program(c: Mutable[Cache], v: Cache):
        return kv.CacheUpdate(c, v, 0)


def packed():
    @model
    def program(c: Mutable[INT4["s", 4]], v: INT4["s", 4]) -> Alias["c"]:
        return kv.CacheUpdate(c, v, 0)


def many():
    @model
    def program(c: Mutable[Cache], v: Cache, t: BOOL["s"]) -> Alias["c"]:
        if t:
            c = kv.CacheUpdate(c, v, 0)
        return c


def number():
    @model
    def program(c: Mutable[Cache], v: Cache, t: INT64[()]) -> Alias["c"]:
        if t:
            c = kv.CacheUpdate(c, v, 0)
        return c


SAID = [
    (misspelled, "E100", 3, "Did you mean CacheUpdate?"),
    (numpys, "E100", 3, "`op.Tanh(x)` for `np.tanh(x)`"),
    (default, "E100", 1, "cannot have a default"),
    (unpacked, "E100", 3, "`_outputs=3` says how many"),
    (undeclared, "E111", 3, 'Declare this result as `Alias["c"]` behind the `->`'),
    (packed, "E102", 3, "declare another element type"),
    (many, "E102", 3, "`op.ReduceMax(x, keepdims=0)`"),
    (number, "E102", 3, "Compare it with something."),
]


@pytest.mark.parametrize(
    "declare, code, line, words", SAID, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_fault_says_what_to_do(declare, code: str, line: int, words: str) -> None:
    with pytest.raises(errors.ContractError) as caught:
        declare()
    (finding,) = caught.value.findings
    assert finding.code == code and words in f"{finding.message} {finding.repair}"
    assert finding.location is not None
    assert finding.location.line == declare.__code__.co_firstlineno + line


def test_no_frames_of_the_compiler_stand_before_a_fault() -> None:
    with pytest.raises(errors.ContractError) as caught:
        undeclared()
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert frames[1].name == "undeclared" and len(frames) <= 4
