"""Small buffers whose values decide what forward does: the losses of one process while a script changes them, or a
refusal where forward writes to them itself."""

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
from autopar.errors import TraceError


class Codebook(nn.Module):
    """A flag that says that it is filled, and numbers that choose what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("is_filled", torch.tensor(True))
        self.register_buffer("kinds", torch.tensor([2, 1]))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        if self.is_filled:
            hidden = hidden * 1.5
        if self.kinds[0].item() == 2:
            hidden = hidden.tanh()
        return F.mse_loss(hidden * 2 if (self.kinds > 1).all() else hidden, x)


class Block(nn.Module):
    def __init__(self, is_bounded: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("is_bounded", torch.tensor(is_bounded))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.inner(x).tanh() if self.is_bounded else self.inner(x))


class Blocks(nn.Module):
    def __init__(self, *are_bounded: bool) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(8, 8), nn.ModuleList(map(Block, are_bounded))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Selected(nn.Module):
    """Columns that a mask of the model's selects, and how often a layer is applied."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("mask", torch.arange(8) % 3 != 0)
        self.register_buffer("depth", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(self.depth)):
            x = self.inner(x).tanh()
        return x[:, self.mask].square().mean()


def nothing(model: Any, step: int) -> None:
    pass


def other_kind(model: Any, step: int) -> None:
    model.kinds[0] = 2 if step < 2 else 5


def another_buffer(model: Any, step: int) -> None:
    if step == 2:
        model.kinds, model.is_filled = torch.tensor([7, 7]), torch.tensor(False)


def bounds(model: Any, step: int) -> None:
    for block in model.blocks:
        block.is_bounded.fill_(step < 2)


def bounds_the_last(model: Any, step: int) -> None:
    model.blocks[-1].is_bounded.fill_(step < 2)


def selects(model: Any, step: int) -> None:
    model.mask[0] = step > 1
    model.depth.fill_(2 + step // 2)


CASES: tuple[tuple[Callable[[], nn.Module], Callable[[Any, int], None]], ...] = (
    (Codebook, nothing),
    (Codebook, other_kind),
    (Codebook, another_buffer),
    (lambda: Blocks(True, True, True), bounds),
    (Selected, nothing),
    (Selected, selects),
)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batches(count: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, 8, generator=generator)} for _ in range(count)]


def eager(model: nn.Module, change: Callable[[Any, int], None], data: list[dict[str, Tensor]]) -> list[float]:
    optimizer, losses = sgd(model.parameters()), []
    for number, batch in enumerate(data):
        change(model, number)
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def by_program(step: Any, model: nn.Module, change: Any, data: list[dict[str, Tensor]]) -> list[float]:
    losses = []
    for number, batch in enumerate(data):
        change(model, number)
        losses.append(float(step(step.local_batch(batch)).detach()))
    return losses


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("make", "change"), CASES)
def test_values_of_buffers_may_decide(make: Callable[[], nn.Module], change: Callable[[Any, int], None]) -> None:
    torch.manual_seed(0)
    model, data = make(), batches()
    expected = eager(copy.deepcopy(model), change, data)
    compiled = autopar.compile(model, "1 cpu", example_inputs=data[0], optimizer=sgd)
    assert by_program(compiled.build(), model, change, data) == pytest.approx(expected, rel=1e-5)


def run(step: Any, compiled: Any, data: list[dict[str, Tensor]]) -> list[float]:
    return by_program(step, compiled.model, other_kind, data)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("pins", [{"dp": 2}, {"tp": 2}, {"dp": 2, "zero": 3}])
def test_under_plans(pins: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, data = Codebook(), batches()
    expected = eager(copy.deepcopy(model), other_kind, data)
    compiled = autopar.compile(model, "2 cpu", example_inputs=data[0], optimizer=sgd, constraints=pins)
    for losses in compiled.launch(run, compiled, data):
        assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("updates", [False, True])
def test_a_checkpoints_value_decides(updates: bool, tmp_path: Path) -> None:
    """As `load_state_dict` would have it, also where the step's values are then written to the model."""
    torch.manual_seed(0)
    model, data = Codebook(), batches(6)
    fresh = copy.deepcopy(model)
    expected = eager(copy.deepcopy(model), other_kind, data)
    compiled = autopar.compile(model, "1 cpu", example_inputs=data[0], optimizer=sgd)
    step = compiled.build()
    by_program(step, model, other_kind, data[:4])
    compiled.save_checkpoint(step, tmp_path / "checkpoint")
    again = autopar.compile(fresh, "1 cpu", example_inputs=data[0], optimizer=sgd)
    resumed = again.build()
    again.load_checkpoint(resumed, tmp_path / "checkpoint")
    if updates:
        again.update_model(resumed)
    assert by_program(resumed, fresh, nothing, data[4:]) == pytest.approx(expected[4:], rel=1e-5)


class Initialized(nn.Module):
    """Sets its mean by its first batch, as ActNorm does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("is_set", torch.tensor(False))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        if not self.is_set:
            with torch.no_grad():
                self.mean.copy_(hidden.mean(0))
                self.is_set.fill_(True)
        return F.mse_loss(hidden - self.mean, x)


class Counting(nn.Module):
    """A counter that forward brings forward, and asks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.inner(x)
        return F.mse_loss(hidden, x) if self.calls < 3 else F.l1_loss(hidden, x)


@pytest.mark.parametrize("make", [Initialized, Counting, lambda: Blocks(True, False, True)])
def test_what_one_program_cannot_have_is_refused(make: Callable[[], nn.Module]) -> None:
    """A value that forward changes, or that equal blocks have otherwise."""
    with pytest.raises(TraceError, match="decide"):
        autopar.compile(make(), "1 cpu", example_inputs=batches()[0], optimizer=sgd)


def test_a_block_that_becomes_unlike_the_others_is_refused() -> None:
    model, data = Blocks(True, True, True), batches()
    compiled = autopar.compile(model, "1 cpu", example_inputs=data[0], optimizer=sgd)
    with pytest.raises(autopar.errors.ModelError, match="is_bounded"):
        by_program(compiled.build(), model, bounds_the_last, data)
