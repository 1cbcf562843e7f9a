"""Methods check the same arguments as options, in the same words; `verify` takes the inputs of training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.errors import ConstraintError


class Net(nn.Module):
    """A linear layer, and beside it what `kind` says."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line, self.kind = nn.Linear(6, 6), kind
        if kind == "rows":
            self.none = nn.Parameter(torch.empty(2, 0))
        if kind == "unused nan":
            self.none = nn.Parameter(torch.tensor([1.0, math.nan]))
        if kind == "frozen inf":
            self.none = nn.Parameter(torch.tensor([1.0, -math.inf]), requires_grad=False)
        if kind == "buffers":
            self.register_buffer("none", torch.empty(0, 3))
            self.register_buffer("mask", torch.tensor([0.0, -math.inf, math.nan]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.line(x), y)
        return loss + self.none.sum() if self.kind in ("rows", "buffers") else loss


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(8, 6, generator=generator) for name in "xy"}


def step_of(rate: float = 0.1) -> Any:
    program = autopar.compile(
        Net(), "1 cpu", example_inputs=batch(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate)
    )
    return program.build()


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("bound", [-1.0, 0.0, 0, math.nan, -math.inf, True, "1", None])
def test_bounds_that_no_option_takes_are_refused_by_clip(bound: Any) -> None:
    step = step_of()
    step.forward_backward(step.local_batch(batch()))
    before = step.gradients()
    with pytest.raises(ValueError, match=r"^max_norm is a number above 0"):
        step.clip(bound)
    assert all(torch.equal(value, before[name]) for name, value in step.gradients().items())


@pytest.mark.parametrize("bound", [0.01, np.float64(0.5), 3, math.inf])
def test_other_bounds_clip_as_torch_does(bound: float) -> None:
    step, net = step_of(), Net()
    step.forward_backward(step.local_batch(batch()))
    net(**batch()).backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), bound)
    assert float(step.clip(bound)) == pytest.approx(float(norm), rel=1e-6)
    step.update()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    for name, value in step.full_state_dict().items():
        torch.testing.assert_close(value, net.state_dict()[name])


@pytest.mark.parametrize("rate", [-0.1, math.nan, math.inf, True])
def test_rates_that_no_option_takes_are_refused_before_the_update(rate: float) -> None:
    step = step_of()
    before = step.full_state_dict()
    step.optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(ValueError, match="^the learning rate of an optimizer's group is a finite number of at least 0"):
        step(step.local_batch(batch()))
    assert all(torch.equal(value, before[name]) for name, value in step.full_state_dict().items())


def test_paths_and_ranks_are_checked(tmp_path: Path) -> None:
    program = autopar.compile(Net(), "1 cpu", example_inputs=batch())
    step = program.build()
    for path in (5, "", None, b"bytes", ["a"]):
        for method in (program.save_checkpoint, program.load_checkpoint, program.save_pretrained):
            with pytest.raises(ConstraintError, match="^directory must be a path"):
                method(step, path)
    for rank in (1, -1, True, "0"):
        with pytest.raises(ConstraintError, match="^rank (must be|is) "):
            program.local_batch(batch(), rank=rank)
    assert not list(tmp_path.iterdir())


def report(kind: str, inputs: dict[str, torch.Tensor], cluster: str = "1 cpu", **options: Any) -> Any:
    return autopar.verify(Net(kind), cluster, example_inputs=inputs, **options)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "kind",
    ["rows", "unused nan", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("frozen inf", "buffers"))],
)
def test_empty_tensors_and_numbers_that_nothing_uses_are_verified(kind: str) -> None:
    verified = report(kind, batch())
    assert verified.ok() and not verified.proves_nothing


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("which", ["leaf", "of another layer", "parameter"])
def test_inputs_that_require_gradients_are_verified(which: str) -> None:
    values = batch()
    if which == "leaf":
        values["x"].requires_grad_()
    if which == "of another layer":
        values["x"] = nn.Linear(6, 6)(values["x"])
    if which == "parameter":
        values = {name: nn.Parameter(value) for name, value in values.items()}
    assert report("", values, "2 cpu", constraints={"dp": 2}).ok()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_parameter_that_is_not_as_finite_as_the_models_is_still_found() -> None:
    from autopar.verify import _stored_error

    one = torch.tensor([1.0, math.nan, math.inf])
    assert _stored_error(one, one.clone()) == 0.0
    for wrong in ([1.0, 2.0, math.inf], [1.0, math.nan, -math.inf], [math.nan, math.nan, math.inf]):
        assert _stored_error(torch.tensor(wrong), one) == math.inf
