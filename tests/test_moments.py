"""What a run holds at each step, against the peak that the plan states."""

import file_programs
import pytest

from onnx_inplace import compiler, errors

SIZES = {"heads": 2, "capacity": 64, "n": 3, "batch": 2, "t": 5, "m": 16}


@pytest.mark.parametrize("name", file_programs.ALL)
def test_the_peak_is_that_of_the_moment_that_needs_most(name: str) -> None:
    plan = compiler.plan(file_programs.ALL[name])
    dims = {name: SIZES[name] for name in plan.footprint.dims}
    moments, memory = plan.moments(**dims), plan.memory(**dims)
    held = max(m.passing for m in moments)
    assert max(m.passing + m.workspace for m in moments) == held + memory.workspace
    buffers = max(m.buffers for m in moments)
    assert memory.values >= held + buffers
    arenas = memory.values - held  # aligned, and as large as the layout needs
    ends = [end for layout in plan.layout(**dims) for _, end in layout.values()]
    assert buffers <= arenas and max(ends, default=0) <= arenas


def test_steps_of_a_body_stand_behind_the_step_that_runs_it() -> None:
    plan = compiler.plan(file_programs.loop)
    moments = plan.moments(heads=2, capacity=8, n=1)
    places = [(m.block, m.step) for m in moments]
    # the Loop; in its body: less, If with two branches of two steps, CacheUpdate; what is returned
    body = [(1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2), (1, 2), (1, 3)]
    assert places == [(0, 0), *body, (0, 1)]
    around = moments[0].values
    assert all(m.values >= around for m in moments[1:-1])


def test_sizes_must_all_be_there() -> None:
    with pytest.raises(errors.BindingError):
        compiler.plan(file_programs.loop).moments(heads=2)
