"""Buffers that forward updates from values, on several ranks: equal to one process, in the state too."""

from __future__ import annotations

from typing import Any

import pytest

import autopar
from autopar.errors import ConstraintError
from tests.autopar.frontend.updated_models import MODELS, made
from tests.turns import by_turns

PINS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "zero": {"dp": 2, "zero": 3, "recompute": "full"},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "micro": {"dp": 2, "micro_batches": 2},
}
WHOLE = {"centers", "contrast", "observed", "cumulative"}
"""Models that look across the rows of the batch otherwise than by sums, which need it in one micro-batch."""
ONE_STAGE = {"teacher", "codebook"}
"""Models that read at the start what they update at the end."""
RUN = [
    (name, plan)
    for name, plan in [*((name, "dp") for name in MODELS), *by_turns(list(MODELS), [p for p in PINS if p != "dp"])]
    if name != "spectral"  # torch does not let parametrized modules be sent to processes
    and not (plan == "micro" and name in WHOLE)
    and not (plan == "pp" and name in ONE_STAGE)
]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "plan"), RUN)
def test_buffers_are_those_of_one_process(name: str, plan: str) -> None:
    model, batch = made(name)
    pins = {key: value for key, value in PINS[plan].items() if key != "recompute" or name == "blocks"}
    report = autopar.verify(model, "2 cpu", example_inputs=batch, constraints=pins)
    assert report.ok(1e-5), str(report)


@pytest.mark.parametrize(
    ("name", "pins"), [("centers", {"micro_batches": 2}), ("contrast", {"micro_batches": 2}), ("codebook", {"pp": 2})]
)
def test_what_a_plan_cannot_do_is_refused(name: str, pins: dict[str, int]) -> None:
    model, batch = made(name)
    with pytest.raises(ConstraintError, match="micro_batches=1|pp that divides"):
        autopar.compile(model, f"{pins.get('pp', 1)} cpu", example_inputs=batch, constraints=pins)
