"""The golden fixture itself: it must fail when it should."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

CONFTEST = Path(__file__).with_name("conftest.py")
TEST = 'def test_program(golden):\n    golden("nested/program.py", "a = 1\\nb = {value}\\n")\n'


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST.read_text())
    pytester.makepyfile(test_it=TEST.format(value=2))
    return pytester


def test_missing_golden_fails_and_says_how_to_make_it(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*no golden file *program.py: run pytest with --update-golden*"])


def test_update_writes_and_later_runs_compare(project: pytest.Pytester) -> None:
    project.runpytest_inprocess("--update-golden").assert_outcomes(passed=1)
    assert (project.path / "golden" / "nested" / "program.py").read_text() == "a = 1\nb = 2\n"
    project.runpytest_inprocess().assert_outcomes(passed=1)


def test_difference_fails_with_a_diff(project: pytest.Pytester) -> None:
    project.runpytest_inprocess("--update-golden").assert_outcomes(passed=1)
    (project.path / "golden" / "nested" / "program.py").write_text("a = 1\nb = 3\n")
    result = project.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*program.py differs*", "-b = 3", "+b = 2"])


def test_difference_in_the_last_newline_fails(project: pytest.Pytester) -> None:
    project.runpytest_inprocess("--update-golden").assert_outcomes(passed=1)
    (project.path / "golden" / "nested" / "program.py").write_text("a = 1\nb = 2")
    project.runpytest_inprocess().assert_outcomes(failed=1)
