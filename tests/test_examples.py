"""Random examples are the same in every run, whatever else is loaded or has failed before."""

import sys
import types
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

pytest_plugins = ["pytester"]


@pytest.fixture
def always(pytestconfig) -> None:
    if pytestconfig.getoption("--fuzz") is not None:
        pytest.skip("other examples are wanted")


def drawn() -> list[int]:
    found = []

    @hypothesis.settings(max_examples=400)
    @hypothesis.given(st.integers(0, 10**9))
    def look(number: int) -> None:
        found.append(number)

    look()
    return found


def test_examples_do_not_depend_on_the_modules_that_are_loaded(
    always, tmp_path, monkeypatch
) -> None:
    before = drawn()
    path = tmp_path / "constants.py"
    path.write_text(f"NUMBERS = {list(range(123_456_000, 123_456_400))}")
    module = types.ModuleType("constants")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "constants", module)
    assert drawn() == before
    assert len(set(before)) > 200


def test_a_failure_names_its_seed(pytester) -> None:
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile(
        """
        def test_at_ten(seeds):
            for seed in seeds(100):
                assert seed != 200_010

        def test_elsewhere():
            assert False
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*it fails at once with --fuzz=200010"])
