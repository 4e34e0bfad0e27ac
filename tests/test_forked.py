"""A forked process: threads of its parent are not in it, results are the same."""

import os
import pathlib
import subprocess
import sys
import warnings

import numpy as np
import pytest
from decoders import Shape, decoder

from onnx_inplace import Session

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
]


def tokens(session: Session) -> bytes:
    """Logits of four tokens; from the second one on kernels take several threads."""
    caches = {p.name: session.allocate(p.name, max_length=16) for p in session.mutable_inputs}
    with session.bind(**caches) as step:
        runs = [step.run(tokens=[[k]], position=k)["logits"] for k in range(4)]
    return np.concatenate(runs).tobytes()


def demand_that_children_decode() -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads, from 3.12 on
    program = decoder(Shape())
    session = Session(program, threads=2)
    expected = tokens(session)
    for inherited in (True, False):
        child = os.fork()
        if not child:
            status = 1
            try:
                mine = session if inherited else Session(program, threads=2)
                status = 0 if tokens(mine) == expected else 2
            finally:
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(ended) == 0, inherited
    assert tokens(session) == expected


def test_sessions_run_in_forked_processes() -> None:
    here = pathlib.Path(__file__)
    done = subprocess.run(
        [sys.executable, "-c", "import test_forked; test_forked.demand_that_children_decode()"],
        env=os.environ | {"PYTHONPATH": str(here.parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
