"""`step.perturbed`: the two passes of sharpness-aware minimization, against the usual implementation of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

RHO = 0.2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.norm, self.head = (
            nn.ModuleList(nn.Linear(8, 8) for _ in range(2)),
            nn.BatchNorm1d(8),
            nn.Linear(8, 4),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return F.cross_entropy(self.head(self.norm(x)), y)


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(8, 8, generator=generator), "y": torch.randint(4, (8,), generator=generator)}
        for _ in range(3)
    ]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def eager() -> tuple[list[float], dict[str, Tensor]]:
    model, found = Net(), []
    optimizer = sgd(model.parameters())
    parameters = list(model.parameters())
    for batch in batches():
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        before = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for parameter in parameters:
                parameter += parameter.grad * (RHO / (norm + 1e-12))
        optimizer.zero_grad()
        model(**batch).backward()
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
        optimizer.step()
        found.append(loss.item())
    return found, model.state_dict()


def train(step: Any) -> tuple[list[float], dict[str, Tensor]]:
    found = []
    for batch in batches():
        local = step.local_batch(batch)
        found.append(float(step.forward_backward(local)))
        with step.perturbed(RHO):
            step.forward_backward(local)
        step.update()
    return found, step.full_state_dict()


def assert_equal(found: tuple[list[float], dict[str, Tensor]]) -> None:
    losses, state = eager()
    assert found[0] == pytest.approx(losses, rel=1e-5)
    for name, value in state.items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_two_passes_are_those_of_one_process() -> None:
    step = autopar.compile(Net(), "1 cpu", example_inputs=batches()[0], optimizer=sgd).build(first_step_check=False)
    with pytest.raises(RuntimeError, match="call forward_backward"), step.perturbed(RHO):
        pass
    assert_equal(train(step))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("plan", [{"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2, "micro_batches": 1}], ids=str)
def test_two_passes_under_plans(plan: dict[str, Any]) -> None:
    compiled = autopar.compile(Net(), "2 cpu", example_inputs=batches()[0], optimizer=sgd, constraints=plan)
    assert_equal(compiled.launch(train)[0])
