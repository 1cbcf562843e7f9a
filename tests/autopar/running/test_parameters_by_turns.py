"""A flag between steps that changes which parameters forward reads, or gives gradients: equal to one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.compile import Remake
from autopar.errors import ModelError
from tests.turns import by_turns


class Adversaries(nn.Module):
    """Two networks that are trained by turns. turn: whose it is; `weight` is of the critic's loss."""

    def __init__(self, turn: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))
        self.turn, self.weight = turn, 1.0

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        fake = self.maker(noise)
        if self.turn == "maker":
            return F.softplus(-self.critic(fake)).mean()
        loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()
        return self.weight * loss


class Helped(nn.Module):
    """A regression that a second head, with a frozen table and a gain of its own, helps in some steps."""

    def __init__(self, is_helped: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.helper = nn.Linear(8, 16), nn.Linear(16, 6), nn.Linear(16, 3)
        self.gain, self.table = nn.Parameter(torch.ones(16)), nn.Parameter(torch.randn(16), requires_grad=False)
        self.is_helped = is_helped

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(real))
        loss = F.mse_loss(self.head(hidden), noise)
        return loss + self.helper(hidden * self.gain + self.table).square().mean() if self.is_helped else loss


class Stages(nn.Module):
    """Layers that are added one after the other, and heads of which some are active (progressive growing)."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.heads, self.depth, self.active = nn.ModuleList(nn.Linear(8, 6) for _ in range(3)), depth, (0,)

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        for layer in self.layers[: self.depth]:
            real = torch.relu(layer(real))
        return F.mse_loss(torch.stack([self.heads[index](real) for index in self.active]).sum(0), noise)


def takes_turns(model: Any, step: int) -> None:
    model.turn = ("critic", "maker")[step % 2]


def takes_frozen_turns(model: Any, step: int) -> None:
    takes_turns(model, step)
    model.critic.requires_grad_(model.turn == "critic"), model.maker.requires_grad_(model.turn == "maker")


def helps(model: Any, step: int) -> None:
    model.is_helped = int(step in (1, 2, 4))


def grows(model: Any, step: int) -> None:
    model.depth, model.active = ((1, (0,)), (1, (1,)), (2, (1,)), (2, (1, 2)), (3, (2,)), (3, (2,)))[step]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    make = [(torch.randn(8, 8, generator=generator), torch.randn(8, 6, generator=generator)) for _ in range(count)]
    return [{"real": real, "noise": noise} for real, noise in make]


Change = Callable[[Any, int], None]
Found = tuple[list[float], dict[str, Tensor]]

CASES: dict[str, tuple[Callable[[], nn.Module], Change, Any]] = {
    "made for the critic": (lambda: Adversaries("critic"), takes_turns, sgd),
    "made for the maker": (lambda: Adversaries("maker"), takes_turns, adamw),
    "frozen by turns": (lambda: Adversaries("critic"), takes_frozen_turns, adamw),
    "a helper": (lambda: Helped(0), helps, adamw),
    "a helper at first": (lambda: Helped(1), helps, sgd),
    "layers": (lambda: Stages(1), grows, sgd),
}
QUICK = {"made for the critic", "a helper"}
MARKED = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]


def eager(model: nn.Module, change: Change, optimizer: Any, data: list[dict[str, Tensor]]) -> Found:
    updater, losses = optimizer(model.parameters()), []
    for number, batch in enumerate(data):
        change(model, number)
        updater.zero_grad()
        loss = model(**batch)
        loss.backward()
        updater.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def train(step: Any, model: nn.Module, change: Change, data: list[dict[str, Tensor]]) -> Found:
    losses = []
    for number, batch in enumerate(data):
        change(model, number)
        losses.append(float(step(step.local_batch(batch))))
    return losses, step.full_state_dict()


def assert_equal(outcome: Found, right: Found) -> None:
    assert outcome[0] == pytest.approx(right[0], rel=1e-5)
    for name, value in right[1].items():
        torch.testing.assert_close(outcome[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", MARKED)
def test_parameters_by_turns_are_those_of_one_process(name: str) -> None:
    make, change, optimizer = CASES[name]
    model, data = make(), batches(6)
    right = eager(copy.deepcopy(model), change, optimizer, data)
    compiled = autopar.compile(model, "1 cpu", example_inputs=data[0], optimizer=optimizer)
    assert_equal(train(compiled.build(first_step_check=False), model, change, data), right)


PLANS: list[dict[str, Any]] = [{"dp": 2}, {"tp": 2}, {"dp": 2, "zero": 3}]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "plan"), by_turns(["frozen by turns", "a helper", "layers"], PLANS, 2))
def test_parameters_by_turns_under_plans(name: str, plan: dict[str, Any]) -> None:
    make, change, optimizer = CASES[name]
    model, data = make(), batches(6)
    right = eager(copy.deepcopy(model), change, optimizer, data)
    compiled = autopar.compile(model, "2 cpu", example_inputs=data[0], optimizer=optimizer, constraints=plan)
    assert_equal(compiled.launch(train, model, change, data)[0], right)


def test_a_flag_that_alternates_needs_two_new_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for the other turn, and one for the first, of which it is known by then what else it reads."""
    programs, original = [], Remake.__call__
    monkeypatch.setattr(Remake, "__call__", lambda self, program: programs.append(1) or original(self, program))
    model, data = Adversaries("critic"), batches(8)
    right = eager(copy.deepcopy(model), takes_turns, sgd, data)
    step = autopar.compile(model, "1 cpu", example_inputs=data[0], optimizer=sgd).build(first_step_check=False)
    assert_equal(train(step, model, takes_turns, data), right)
    assert len(programs) == 2


@pytest.mark.slow
def test_a_kept_program_of_another_number_is_not_taken_for_this_one() -> None:
    def anneals(model: Any, step: int) -> None:
        takes_turns(model, step)
        model.weight = (1.5, 0.7, 1.5)[step // 2 % 3] + 0.01 * (step > 7)

    model, data = Adversaries("critic"), batches(12)
    right = eager(copy.deepcopy(model), anneals, sgd, data)
    step = autopar.compile(model, "1 cpu", example_inputs=data[0], optimizer=sgd).build(first_step_check=False)
    assert_equal(train(step, model, anneals, data), right)


def test_state_that_a_checkpoint_has_and_the_step_had_no_room_for_is_not_forgotten(tmp_path: Path) -> None:
    model, data = Helped(0), batches(4)
    compiled = autopar.compile(model, "1 cpu", example_inputs=data[0], optimizer=adamw)
    step = compiled.build(first_step_check=False)
    train(step, model, helps, data[:3])
    compiled.save_checkpoint(step, tmp_path / "saved")
    model.is_helped = 0
    other = autopar.compile(model, "1 cpu", example_inputs=data[0], optimizer=adamw)
    resumed = other.build(first_step_check=False)
    other.load_checkpoint(resumed, tmp_path / "saved")
    model.is_helped = 1
    with pytest.raises(ModelError, match="the loaded checkpoint has optimizer state of them"):
        resumed(resumed.local_batch(data[3]))
