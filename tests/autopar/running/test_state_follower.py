"""A loop changes the model between steps: the losses of one process, or a refusal before the step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import Trainer, TrainerConfig
from autopar.compile import Remake
from autopar.errors import ModelError
from autopar.launch import run_ranks
from codegen.runtime.captured import WARM_UPS, Captured
from codegen.runtime.reference import SameDropout
from tests.codegen.runtime.recorded_graph import RecordedGraph

SHARPNESS = 1.5
"""A variable of the script that forward reads."""


class Net(nn.Module):
    """A classifier with all that a script may change."""

    margin = 0.2

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.drop = nn.Linear(8, 16), nn.Linear(16, 4), nn.Dropout(0.2)
        self.temperature, self.mask, self.scales = 1.5, torch.ones(16), [0.5, {"last": 0.9}]
        self.register_buffer("weights", torch.ones(4))
        self.config = SimpleNamespace(use_relu=True, penalty=SimpleNamespace(rate=0.1))
        self.calls, self.kind, self.squash, self.shift = 0, "mean", torch.relu, None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.inner(x)) * self.mask * self.scales[1]["last"] * SHARPNESS
        if self.config.use_relu:
            hidden = self.squash(hidden)
        if self.shift is not None:
            hidden = hidden + self.shift
        scores = (self.outer(hidden) / self.temperature).softmax(-1) * self.weights
        penalty = hidden.square().sum() if self.kind == "sum" else hidden.square().mean()
        return scores - (1 - self.margin) * self.config.penalty.rate * penalty


class Weighted:
    """A loss with a weight, and one per class."""

    def __init__(self) -> None:
        self.weight, self.classes = 1.2, torch.ones(4)

    def __call__(self, scores: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(scores, target, weight=self.classes, label_smoothing=0.1) * self.weight


def batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(8, 8, generator=generator), "target": torch.randint(4, (8,), generator=generator)}
        for _ in range(count)
    ]


Change = Callable[[Net, Any, int], None]


def anneals(model: Net, loss: Any, step: int) -> None:
    model.temperature = 1.5 / (step + 1)


def drops_less(model: Net, loss: Any, step: int) -> None:
    model.drop.p = 0.3 - 0.1 * step if step < 3 else 0.0


def masks(model: Net, loss: Any, step: int) -> None:
    model.mask = (torch.arange(16) >= step).float()


def masks_in_place(model: Net, loss: Any, step: int) -> None:
    model.mask[step] = 0.5


def fills_buffer(model: Net, loss: Any, step: int) -> None:
    model.weights[step % 4] *= 1.7


def replaces_buffer(model: Net, loss: Any, step: int) -> None:
    model.weights = torch.full((4,), 1.0 + step)


def sets_nested(model: Net, loss: Any, step: int) -> None:
    model.config.penalty.rate, model.scales[1]["last"] = 0.1 * step, 0.9 - 0.1 * step


def sets_class(model: Net, loss: Any, step: int) -> None:
    Net.margin = 0.2 + 0.1 * step


def sets_global(model: Net, loss: Any, step: int) -> None:
    global SHARPNESS
    SHARPNESS = 1.5 + 0.2 * step


def weighs_loss(model: Net, loss: Any, step: int) -> None:
    loss.weight, loss.classes = 1.2 + step, torch.ones(4).index_fill(0, torch.tensor([step % 4]), 2.0)


def counts(model: Net, loss: Any, step: int) -> None:
    model.calls += 1


def sets_flag(model: Net, loss: Any, step: int) -> None:
    model.config.use_relu = step % 2 == 0


def sets_text(model: Net, loss: Any, step: int) -> None:
    model.kind = "mean" if step < 1 else "sum"


def sets_function(model: Net, loss: Any, step: int) -> None:
    model.squash = torch.relu if step < 2 else torch.tanh


def sets_shift(model: Net, loss: Any, step: int) -> None:
    model.shift = None if step < 1 else torch.full((16,), 0.1 * step)


def stops_drops(model: Net, loss: Any, step: int) -> None:
    model.drop.train(step < 1)


def freezes(model: Net, loss: Any, step: int) -> None:
    model.inner.requires_grad_(step not in (1, 2))
    model.outer.bias.requires_grad_(step != 0)


FOLLOWED = (anneals, drops_less, masks, masks_in_place, fills_buffer, replaces_buffer, sets_nested, sets_class)
FOLLOWED += (sets_global, weighs_loss, counts, sets_flag, sets_text, sets_function, sets_shift, stops_drops, freezes)


@pytest.fixture(autouse=True)
def as_before() -> Any:
    yield
    sets_global(None, None, 0)  # type: ignore[arg-type]
    sets_class(None, None, 0)  # type: ignore[arg-type]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2)


def eager(change: Change, data: list[dict[str, Tensor]]) -> list[float]:
    """The losses of one process."""
    model, loss, losses = Net(), Weighted(), []
    optimizer = sgd(model.parameters())
    for number, batch in enumerate(data):
        change(model, loss, number)
        optimizer.zero_grad()
        with SameDropout(0, number):
            value = loss(model(batch["x"]), batch["target"])
        value.backward()
        optimizer.step()
        losses.append(float(value))
    return losses


def program(change: Change, data: list[dict[str, Tensor]]) -> list[float]:
    """The losses of a program in a loop of its own."""
    model, loss, losses = Net(), Weighted(), []
    step = autopar.compile(model, "1 cpu", example_inputs=data[0], loss_fn=loss, optimizer=sgd).build()
    for number, batch in enumerate(data):
        change(model, loss, number)
        losses.append(float(step(step.local_batch(batch))))
    return losses


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("first", range(3))
def test_each_kind_of_change_is_followed(first: int) -> None:
    """Before each step another kind of change."""
    kinds = FOLLOWED[first::3]

    def change(model: Net, loss: Any, step: int) -> None:
        kinds[step](model, loss, step % 3 + 1)

    data = batches(len(kinds))
    right = eager(change, data)
    for value in (2, 0):  # another value before the program is made
        sets_global(None, None, value), sets_class(None, None, value)  # type: ignore[arg-type]
    assert program(change, data) == pytest.approx(right, rel=1e-5)


def test_a_schedule_needs_a_new_program_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is known which numbers of the program's text are the schedule's."""
    programs, original = [], Remake.__call__
    monkeypatch.setattr(Remake, "__call__", lambda self, program: programs.append(1) or original(self, program))
    data = batches(6)

    def change(model: Net, loss: Any, step: int) -> None:
        model.temperature, model.config.penalty.rate = 1.73 + 0.1 * step, 0.11 * (step + 1)

    assert program(change, data) == pytest.approx(eager(change, data), rel=1e-5)
    assert len(programs) == 2


REFUSED: dict[str, Callable[[Net], Any]] = {
    "the submodules": lambda model: setattr(model, "outer", nn.Linear(16, 4)),
    "mode of the model": lambda model: model.eval(),
    "no parameter is left": lambda model: model.requires_grad_(False),
    "the parameters of inner": lambda model: setattr(model.inner, "bias", nn.Parameter(torch.zeros(16))),
    "hooks": lambda model: model.inner.register_forward_hook(lambda module, args, output: output * 2),
}


def test_what_cannot_be_followed_is_refused_before_the_step_by_name() -> None:
    data = batches(1)[0]
    compiled = autopar.compile(Net(), "1 cpu", example_inputs=data, loss_fn=Weighted(), optimizer=sgd)
    for name, change in REFUSED.items():
        model: Any = compiled.model
        before = model.outer, model.inner.bias
        step = compiled.build(first_step_check=False)
        handle = change(model)
        with pytest.raises(ModelError, match="cannot follow a change of the model") as caught:
            step(step.local_batch(data))
        assert name in str(caught.value) and step.rng.step == 0
        model.outer, model.inner.bias = before
        model.train().requires_grad_(True)
        if name == "hooks":
            handle.remove()
        assert float(step(step.local_batch(data))) > 0  # as it was, it trains


def hooks_of_all_modules(model: Net) -> Any:
    return nn.modules.module.register_module_full_backward_hook(lambda module, grad_input, grad_output: None)


HOOKS: dict[str, Callable[[Net], Any]] = {
    "backward hooks of inner": lambda model: model.inner.register_full_backward_hook(lambda *args: None),
    "backward pre hooks of outer": lambda model: model.outer.register_full_backward_pre_hook(lambda *args: None),
    "hooks of inner.weight's gradient": lambda model: model.inner.weight.register_hook(lambda gradient: gradient * 2),
    "hooks of outer.bias's gradient": lambda model: model.outer.bias.register_post_accumulate_grad_hook(
        lambda parameter: None
    ),
    "global backward hooks of all modules": hooks_of_all_modules,
}


def test_hooks_that_are_added_between_steps_are_refused_until_they_are_removed() -> None:
    data = batches(1)[0]
    compiled = autopar.compile(Net(), "1 cpu", example_inputs=data, loss_fn=Weighted(), optimizer=sgd)
    step = compiled.build(first_step_check=False)
    model: Any = compiled.model
    for number, (name, add) in enumerate(HOOKS.items()):
        handle = add(model)
        with pytest.raises(ModelError, match="cannot follow a change of the model") as caught:
            step(step.local_batch(data))
        assert name in str(caught.value) and step.rng.step == number
        handle.remove()
        step(step.local_batch(data))


def test_a_buffer_of_another_dtype_is_refused() -> None:
    data = batches(1)[0]
    compiled = autopar.compile(Net(), "1 cpu", example_inputs=data, loss_fn=Weighted(), optimizer=sgd)
    step = compiled.build(first_step_check=False)
    model: Any = compiled.model
    model.weights = model.weights.double()
    with pytest.raises(ModelError, match="weights"):
        step(step.local_batch(data))


def test_buffers_that_the_program_changes_are_changed_where_they_are_up_to_date() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    data = {"input": batches(1)[0]["x"]}
    compiled = autopar.compile(model, "1 cpu", example_inputs=data, loss_fn=lambda y: y.square().mean(), optimizer=sgd)
    step = compiled.build()
    step(step.local_batch(data))
    compiled.update_model(step)
    mean = model[1].running_mean.clone()
    model[1].running_mean.add_(3.0)
    step.evaluate(step.local_batch(data))
    assert torch.allclose(step.full_state_dict()["1.running_mean"], mean + 3)
    step(step.local_batch(data))
    model[1].running_mean.mul_(0.5)  # an old value
    with pytest.raises(ModelError, match=r"1\.running_mean") as caught:
        step(step.local_batch(data))
    assert "update_model" in str(caught.value)


class Changes(autopar.Callback):
    def __init__(self, model: Net, loss: Any, change: Change) -> None:
        self.model, self.loss, self.change = model, loss, change

    def on_start(self, state: Any) -> None:
        self.change(self.model, self.loss, 0)

    def on_step(self, state: Any) -> None:
        self.change(self.model, self.loss, state.step)


def trainer(change: Change, model: Net, data: list[dict[str, Tensor]]) -> Trainer:
    loss = Weighted()
    settings: dict[str, Any] = {"learning_rate": 0.2, "weight_decay": 0.0, "optimizer": {"name": "sgd"}}
    config = TrainerConfig(cluster="2 cpu", steps=len(data), log_every=0, **settings)
    return Trainer(model, config, data, loss_fn=loss, callbacks=[Changes(model, loss, change)])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("change", [anneals, fills_buffer, weighs_loss, sets_flag, freezes])
def test_what_callbacks_change_on_rank_0_is_changed_on_all_ranks(change: Change) -> None:
    data, model = batches(4), Net()
    losses = trainer(change, model, data).fit().losses
    assert list(losses) == pytest.approx(eager(change, data), rel=1e-4)
    if change is anneals:
        assert model.temperature == 1.5 / 5  # as after a loop of one process


@pytest.mark.slow
@pytest.mark.distributed
def test_what_callbacks_change_is_refused_on_all_ranks() -> None:
    def swaps(model: Net, loss: Any, step: int) -> None:
        if step == 2:
            model.outer = nn.Linear(16, 4)

    with pytest.raises(ModelError, match="the submodules"):
        trainer(swaps, Net(), batches(4)).fit()


class Layered(nn.Module):
    """Equal blocks with numbers and buffers of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.temperature = nn.Linear(8, 16), nn.Linear(16, 4), 1.5
        self.blocks = nn.ModuleList(Gated() for _ in range(4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.outer(x) / self.temperature, target)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop, self.scale = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.1), 0.5
        self.register_buffer("gate", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(self.up(x).relu())) * self.scale * self.gate


def changes_layers(model: Layered, step: int) -> None:
    model.temperature = 1.5 + 0.1 * step
    for block in model.blocks:
        block.drop.p, block.scale = 0.1 + 0.05 * step, 0.5 + 0.07 * step
        block.gate.mul_(0.9)


def layered_losses(compiled: Any) -> list[float]:
    step, losses = compiled.build(), []
    for number, batch in enumerate(batches(5)):
        changes_layers(compiled.model, number)
        losses.append(float(step(step.local_batch(batch))))
    return losses


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("constraints", [{"pp": 2, "micro_batches": 2}, {"tp": 2}, {"dp": 2, "zero": 3}])
def test_changes_are_followed_under_every_kind_of_plan(constraints: dict[str, Any]) -> None:
    model, right = Layered(), []
    optimizer = sgd(model.parameters())
    for number, batch in enumerate(batches(5)):
        changes_layers(model, number)
        optimizer.zero_grad()
        with SameDropout(0, number):
            loss = model(**batch)
        loss.backward()
        optimizer.step()
        right.append(float(loss))
    options: dict[str, Any] = {"optimizer": sgd, "constraints": constraints}
    compiled = autopar.compile(Layered(), "2 cpu", example_inputs=batches(1)[0], **options)
    for losses in run_ranks(layered_losses, (compiled,), 2):
        assert losses == pytest.approx(right, rel=1e-4)


def test_replayed_steps_follow_a_changed_number() -> None:
    """A graph holds the numbers that it was captured with, so a change captures it anew."""
    model, loss_fn = Net(), Weighted()
    all_batches = batches(12)
    options = {"example_inputs": all_batches[0], "loss_fn": loss_fn, "kernels": "on"}
    program = autopar.compile(model, "1 cpu", **options)
    eager, replayed = (program.build(first_step_check=False) for _ in range(2))
    replayed._replay_with(captured=Captured(replayed.mesh, RecordedGraph))
    for number, batch in enumerate(all_batches):
        if number == WARM_UPS + 2:
            assert replayed._captured.num_graphs
            model.temperature = 2.5
        losses = [step(step.local_batch(batch)) for step in (eager, replayed)]
        assert torch.equal(*losses), number
    assert replayed._captured.is_on and replayed._captured.num_graphs
