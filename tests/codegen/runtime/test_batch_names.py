"""A batch under the names of the program's inputs, or as the only input of forward without its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar

BATCH = {"x": torch.linspace(-1, 1, 32).view(8, 4), "of": {"y": torch.ones(8, 4)}}


class Whole(nn.Module):
    """Its forward takes all of a batch as one dict."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return nn.functional.mse_loss(self.line(batch["x"]), batch["of"]["y"])


def test_the_only_input_needs_no_name() -> None:
    model = Whole()
    losses = []
    for given in (BATCH, {"batch": BATCH}, {"batch_x": BATCH["x"], "batch_of_y": BATCH["of"]["y"]}):
        step = autopar.compile(model, "1 cpu", example_inputs={"batch": BATCH}).build(first_step_check=True)
        assert step.takes(given)
        losses.append(float(step(step.local_batch(given))))
    assert losses == [pytest.approx(float(model(BATCH)), rel=1e-6)] * 3


@pytest.mark.parametrize(
    "batch", [{"x": BATCH["x"]}, {**BATCH, "z": torch.ones(8)}, {"batch": {"x": BATCH["x"]}}, {"y": BATCH["x"]}]
)
def test_what_is_not_all_of_it_is_named(batch: dict[str, Any]) -> None:
    step = autopar.compile(Whole(), "1 cpu", example_inputs={"batch": BATCH}).build()
    assert not step.takes(batch)
    with pytest.raises(ValueError, match="the program takes batch_of_y, batch_x"):
        step.local_batch(batch)
