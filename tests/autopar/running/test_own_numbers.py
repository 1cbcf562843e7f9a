"""Numbers of a model that its own forward changes: counters, annealed temperatures, what they decide. The losses, the
parameters and the numbers of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError


class Block(nn.Module):
    """A layer that counts its own calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(8, 16), nn.Linear(16, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(torch.tanh(self.up(x))) / (1.5 + 0.1 * self.calls)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Annealed(nn.Module):
    """A temperature that training alone lowers, down to a least."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.temperature = nn.Linear(8, 8), 1.7

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.temperature = max(self.temperature * 0.9, 1.3)
        return (self.inner(x) / self.temperature).softmax(-1).square().mean()


class Warmed(nn.Module):
    """A term that begins in the third call, with a weight of Python's that grows to 0.9."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.step, self.weight = nn.Linear(8, 8), 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        hidden = self.inner(x)
        loss = F.mse_loss(hidden, x)
        if self.step > 2:
            self.weight = min(0.9, 0.21 * self.step)
            loss = loss + self.weight * hidden.abs().mean()
        return loss


class Alternating(nn.Module):
    """A flag that each call turns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.is_even = nn.Linear(8, 8), False

    def forward(self, x: Tensor) -> Tensor:
        self.is_even = not self.is_even
        hidden = self.inner(x)
        return (hidden.abs() if self.is_even else hidden.square()).mean()


class Rows(nn.Module):
    """How many rows were seen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = nn.Linear(8, 8), 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.inner(x).square().mean() * (2.0 / (1.0 + self.seen))


class Count:
    def __init__(self) -> None:
        self.calls = 0


class Held(nn.Module):
    """Counts in an object and in a dictionary, of which one decides what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.count, self.table = nn.Linear(8, 8), Count(), {"weight": 0.9}

    def forward(self, x: Tensor) -> Tensor:
        self.count.calls += 1
        self.table["weight"] *= 0.93
        hidden = self.inner(x)
        loss = F.mse_loss(hidden, x) if self.count.calls < 3 else F.l1_loss(hidden, x)
        return loss * self.table["weight"]


class Late(nn.Module):
    """A text that one call changes for all later ones, long after the model was compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls, self.phase, self.weight = nn.Linear(8, 8), 0, "warm", 0.3

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.weight = self.calls + 1, self.weight * 0.97 + 0.01
        if self.calls == 4:
            self.phase = "full"
        hidden = self.inner(x)
        return self.weight * (F.mse_loss(hidden, x) if self.phase == "warm" else F.l1_loss(hidden, x))


class Loss(nn.Module):
    """A loss that counts, behind a model that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(out, target) * 0.9**self.calls


class LossObject:
    """A loss that is no module, and takes another form in its third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, out: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(out, target) if self.calls < 3 else F.l1_loss(out, target)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def batches(names: tuple[str, ...] = ("x",)) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{name: torch.randn(8, 8, generator=generator) for name in names} for _ in range(5)]


def trained(
    model: nn.Module, loss_fn: Any, data: list[dict[str, Tensor]], evaluates: bool = False
) -> tuple[list[float], Any]:
    """The losses of one process, with an evaluation in the middle."""
    optimizer, losses = sgd(model.parameters()), []
    for number, batch in enumerate(data):
        if evaluates and number == 2:
            model.eval()
            with torch.no_grad():
                model(batch["x"])
            model.train()
        optimizer.zero_grad()
        loss = model(batch["x"]) if loss_fn is None else loss_fn(model(batch["x"]), batch["target"])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, numbers(model)


def numbers(model: nn.Module) -> list[Any]:
    plain = (int, float, type(None))
    return [v for m in model.modules() for k, v in vars(m).items() if isinstance(v, plain) and not k.startswith("_")]


def by_program(step: Any, compiled: Any, data: list[dict[str, Tensor]], evaluates: bool) -> tuple[list[float], Any]:
    losses = []
    for number, batch in enumerate(data):
        if evaluates and number == 2:
            step.evaluate(step.local_batch(batch))
        losses.append(float(step(step.local_batch(batch)).detach()))
    return losses, numbers(compiled.model)


MODELS: tuple[Callable[[], nn.Module], ...] = (Layers, Annealed, Warmed, Alternating, Rows, Held, Late)
QUICK = (Annealed, Held)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("make", [*QUICK, *(pytest.param(m, marks=pytest.mark.slow) for m in MODELS if m not in QUICK)])
def test_numbers_that_forward_changes_are_followed(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, data = make(), batches()
    evaluates = make not in (Alternating, Annealed)  # in evaluation these two compute something else
    expected, left = trained(copy.deepcopy(model), None, data, evaluates)
    compiled = autopar.compile(model, "1 cpu", example_inputs=data[0], optimizer=sgd)
    losses, numbers = by_program(compiled.build(), compiled, data, evaluates)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert numbers == pytest.approx(left)


@pytest.mark.parametrize("kind", [Loss, LossObject])
def test_numbers_that_a_loss_changes_are_followed(kind: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model, loss_fn, data = nn.Linear(8, 8), kind(), batches(("x", "target"))
    expected, _ = trained(copy.deepcopy(model), copy.deepcopy(loss_fn), data)
    example = {"input": data[0]["x"], "target": data[0]["target"]}
    compiled = autopar.compile(model, "1 cpu", example_inputs=example, loss_fn=loss_fn, optimizer=sgd)
    named = [{"input": item["x"], "target": item["target"]} for item in data]
    losses, _ = by_program(compiled.build(), compiled, named, False)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert loss_fn.calls == len(data)


class ByEpoch(nn.Module):
    """A text that forward changes in one of the epochs that the script counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.epoch, self.phase = nn.Linear(8, 8), 0, "warm"

    def forward(self, x: Tensor) -> Tensor:
        if self.epoch == 2:
            self.phase = "full"
        hidden = self.inner(x)
        return F.mse_loss(hidden, x) if self.phase == "warm" else F.l1_loss(hidden, x)


def test_what_forward_does_once_by_a_number_of_the_script_stays() -> None:
    torch.manual_seed(0)
    model, data = ByEpoch(), batches()
    reference = copy.deepcopy(model)
    compiled = autopar.compile(model, "1 cpu", example_inputs=data[0], optimizer=sgd)
    step, optimizer = compiled.build(), sgd(reference.parameters())
    for epoch, batch in enumerate(data):
        model.epoch = reference.epoch = epoch
        optimizer.zero_grad()
        loss = reference(**batch)
        loss.backward()
        optimizer.step()
        assert float(step(step.local_batch(batch)).detach()) == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("pins", [{"dp": 2, "micro_batches": 2}, {"pp": 2, "micro_batches": 2}, {"tp": 2}])
def test_a_step_of_several_micro_batches_on_several_ranks_is_one_call(pins: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, data = Layers(), batches()
    expected, left = trained(copy.deepcopy(model), None, data, evaluates=True)
    compiled = autopar.compile(model, "2 cpu", example_inputs=data[0], optimizer=sgd, constraints=pins)
    for losses, numbers in compiled.launch(by_program, compiled, data, True):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert numbers == pytest.approx(left)


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS)
def test_verify_compares_models_that_count(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    report = autopar.verify(make(), "2 cpu", example_inputs=batches()[0], optimizer=sgd, constraints={"dp": 2})
    assert report.ok, str(report)


class Listed(nn.Module):
    """A list is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = nn.Linear(8, 8), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.seen[-1] + 1)
        return self.inner(x).square().mean() * (1.0 + 0.1 * len(self.seen))


class Global(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        Global.calls += 1
        return self.inner(x).square().mean() * (1.0 + 0.1 * Global.calls)


@pytest.mark.parametrize("make", [Listed, Global])
def test_other_state_of_python_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(TraceError, match="forward (changes Python state|computes something else)"):
        autopar.compile(make(), "1 cpu", example_inputs=batches()[0], optimizer=sgd)
