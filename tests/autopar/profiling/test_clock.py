"""The clock that leaves other programs out, against what they are known to have taken.

benchmarks/measuring.py holds it against programs that really run.
"""

from __future__ import annotations

import pytest

from autopar.profiling.clock import Usage, quiet_seconds


@pytest.mark.parametrize(
    ("usages", "cores", "expected"),
    [
        # One process on two cores, alone; with one other program that takes the other core all the time, which costs
        # nothing; with others that take as much as two cores give.
        ([(2.0, 2.0, 2.0)], 2.0, 2.0),
        ([(2.0, 2.0, 4.0)], 2.0, 2.0),
        ([(4.0, 2.0, 8.0)], 2.0, 2.0),
        # Two that wait for one another half of the time, alone.
        ([(2.0, 1.0, 2.0), (2.0, 1.0, 2.0)], 2.0, 2.0),
        # Two that compute, and others who take two thirds of both cores.
        ([(3.0, 1.0, 6.0), (3.0, 1.0, 6.0)], 2.0, 1.0),
        # Four on two cores, nobody else; then others with a third.
        ([(2.0, 1.0, 4.0)] * 4, 2.0, 2.0),
        ([(3.0, 1.0, 6.0)] * 4, 2.0, 2.0),
        # A system that does not tell how busy it is.
        ([(3.0, 1.0, 0.0)] * 2, 2.0, 3.0),
    ],
)
def test_quiet_seconds_leave_out_what_others_took(
    usages: list[tuple[float, float, float]], cores: float, expected: float
) -> None:
    found = quiet_seconds([("host", Usage(*usage)) for usage in usages], cores)
    assert found == pytest.approx(expected)


def test_the_slowest_host_counts() -> None:
    slow, fast = ("a", Usage(2.0, 2.0, 2.0)), ("b", Usage(2.0, 1.0, 5.0))
    assert quiet_seconds([slow, fast], 2.0) == pytest.approx(2.0)
    assert quiet_seconds([fast], 2.0) == pytest.approx(1.0)
