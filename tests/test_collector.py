"""The garbage collector rests while a model is loaded, and goes on behind it."""

import gc

import pytest
from file_programs import plain

from onnx_inplace import Session, compiler, errors
from onnx_inplace.compiler import collector


@pytest.fixture(params=[True, False])
def running(request):
    """Whether the caller lets the collector run."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_it_rests_within_a_block_and_is_then_what_it_was(running) -> None:
    with collector.paused():
        assert not gc.isenabled()
        with collector.paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled() == running


def test_loading_leaves_it_as_it_was(running) -> None:
    Session(plain)
    assert gc.isenabled() == running
    with pytest.raises(errors.ModelFileError):
        compiler.load(b"no model")
    assert gc.isenabled() == running
