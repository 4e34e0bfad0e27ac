"""A fused step beside other processes: a thread that comes late, again and again, is given up."""

import types

import numpy as np
import pytest
from decoders import Shape, decoder

from onnx_inplace import Session
from onnx_inplace.runner.fused import region as regions
from onnx_inplace.runner.fused.region import Region

pytestmark = pytest.mark.kernel

TOKENS = 40


def decode(program, threads):
    """Logits of ``TOKENS`` tokens, one a run."""
    session = Session(program, threads=threads, fuse="auto")
    ports = session.mutable_inputs
    caches = {port.name: session.allocate(port.name, max_length=64) for port in ports}
    with session.bind(**caches) as step:
        return np.stack(
            [step.run(tokens=[[7 * k % 50]], position=k)["logits"].copy() for k in range(TOKENS)]
        )


@pytest.fixture
def late(monkeypatch):
    """Every parallel call waits long for its last thread, by a clock of its own; their numbers."""
    calls, clock = [], [0.0]
    init = Region.__init__

    def perf_counter():
        clock[0] += 1
        return clock[0]

    def begin(region, *arguments):
        init(region, *arguments)
        parallel = region._parallel
        if parallel is None:
            return

        def slow(*arguments):
            calls.append(len(calls))
            clock[0] += 100
            return parallel(*arguments)

        region._parallel = slow

    monkeypatch.setattr(regions, "time", types.SimpleNamespace(perf_counter=perf_counter))
    monkeypatch.setattr(Region, "__init__", begin)
    return calls


def test_a_late_thread_is_given_up(late):
    decode(decoder(Shape()), threads=2)
    assert 1 <= len(late) <= 5 < TOKENS


def test_who_does_the_work_does_not_change_a_bit(late):
    """Several threads first, one afterwards: the bytes of one thread alone."""
    program = decoder(Shape(hidden=512))
    changing = decode(program, threads=2)
    assert 1 <= len(late) < TOKENS
    np.testing.assert_array_equal(changing, decode(program, threads=1))
