"""Numbers that set layers apart between steps, and code that a script replaces."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import ModelError
from autopar.frontend.state.reads import Reads, noting_reads
from tests.turns import by_turns


def activation(x: Tensor) -> Tensor:
    return F.gelu(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(8, 16), nn.Linear(16, 8), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(activation(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 8)
        self.weight, self.rates = 0.5, (0.2, 0.1)

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        out = self.head(self.hidden(x))
        return self.weight * F.smooth_l1_loss(out, z) + self.rates[0] * out.abs().mean() + self.rates[1]


def batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{name: torch.randn(8, 8, generator=generator) for name in "xz"} for _ in range(count)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


Change = Callable[[Any, int], None]


def scales_layers(model: Any, step: int) -> None:
    for number, block in enumerate(model.blocks):
        block.scale = 1.0 - 0.1 * step * number


def scales_the_last(model: Any, step: int) -> None:
    model.blocks[-1].scale = (1.0, 0.7, 1.0, 0.0)[step]


def reaches_one(model: Any, step: int) -> None:
    model.weight = (0.5, 1.0, 0.25, 2.0)[step]


def sets_a_tuple(model: Any, step: int) -> None:
    model.rates = (0.2 + step, 0.1 * step)


def sets_a_number_of_numpy(model: Any, step: int) -> None:
    model.weight = np.float32(0.5 + step)


FOLLOWED = (scales_layers, scales_the_last, reaches_one, sets_a_tuple, sets_a_number_of_numpy)
PLANS: tuple[dict[str, Any], ...] = (
    {"dp": 2},
    {"pp": 2, "micro_batches": 2, "recompute": "full"},
    {"pp": 2, "micro_batches": 2},
    {"dp": 2, "zero": 3},
)


def eager(change: Change, data: list[dict[str, Tensor]]) -> list[float]:
    model, losses = Net(), []
    optimizer = sgd(model.parameters())
    for number, batch in enumerate(data):
        change(model, number)
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(step: Any, model: nn.Module, change: Change, data: list[dict[str, Tensor]]) -> list[float]:
    losses = []
    for number, batch in enumerate(data):
        change(model, number)
        losses.append(float(step(step.local_batch(batch))))
    return losses


def all_at_once(model: Any, step: int) -> None:
    for change in FOLLOWED:
        change(model, step)


def test_numbers_that_set_layers_apart_are_followed() -> None:
    data, model = batches(4), Net()
    step = autopar.compile(model, "1 cpu", example_inputs=data[0], optimizer=sgd).build(first_step_check=False)
    assert train(step, model, all_at_once, data) == pytest.approx(eager(all_at_once, data), rel=1e-5)


def test_a_function_of_the_script_is_noted() -> None:
    reads, batch = Reads(), batches(1)[0]
    with noting_reads(reads):
        Net()(**batch)
    assert "activation" in {name for _, name in reads.variables}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("change", FOLLOWED)
def test_a_plan_is_refitted_to_them(change: Change) -> None:
    model = Net()
    wanted: Any = {"example_inputs": batches(1)[0], "optimizer": sgd, "constraints": {"dp": 2}}
    compiled = autopar.compile(model, "2 cpu", **wanted)
    change(model, 1)
    again = compiled.remake(compiled)  # type: ignore[misc]
    stored = {name: p for scope in again.plan.scopes.values() for name, p in scope.parameters.items()}
    assert all(str(p.placements) == str(stored["head.weight"].placements) for p in stored.values())


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("change", "plan"), by_turns(FOLLOWED, PLANS, 2))
def test_they_are_followed_under_plans(change: Change, plan: dict[str, Any]) -> None:
    data, model = batches(4), Net()
    compiled = autopar.compile(model, "2 cpu", example_inputs=data[0], optimizer=sgd, constraints=plan)
    by_rank = compiled.launch(train, model, change, data)
    assert by_rank[0] == pytest.approx(eager(change, data), rel=1e-5)


def without_blocks(self: Any, x: Tensor) -> Tensor:
    return x


def replaces_forward(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.blocks[1].forward = MethodType(without_blocks, model.blocks[1])


def replaces_a_method(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Net, "hidden", without_blocks)


def replaces_forward_of_a_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Block, "forward", without_blocks)


REPLACED = {
    "forward of blocks.1": replaces_forward,
    "hidden of the class Net": replaces_a_method,
    "forward of the class Block": replaces_forward_of_a_class,
}


def test_replaced_code_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    data = batches(4)
    for replace in REPLACED.values():
        runs = []
        for kind in ("eager", "program"):
            model = Net()
            optimizer, step = sgd(model.parameters()), None
            if kind == "program":
                step = autopar.compile(model, "1 cpu", example_inputs=data[0], optimizer=sgd).build()
            with monkeypatch.context() as patch:
                losses = []
                for number, batch in enumerate(data):
                    if number == 2:
                        replace(model, patch)
                    if step is not None:
                        losses.append(float(step(step.local_batch(batch))))
                        continue
                    optimizer.zero_grad()
                    loss = model(**batch)
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
            runs.append(losses)
        assert runs[1] == pytest.approx(runs[0], rel=1e-5)


class Parts(Net):
    """Layers, a second head and an average, which flags leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.has_second, self.left_out, self.averages = nn.Linear(8, 8), True, -1, False
        self.register_buffer("mean", torch.zeros(8))

    def hidden(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x if number == self.left_out else block(x)
        if self.averages:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        loss = super().forward(x, z)
        return loss + F.l1_loss(self.second(self.hidden(x)), z) if self.has_second else loss


def leaves_parts_out(model: Any, step: int) -> None:
    model.has_second, model.left_out = step != 1, (-1, 1, 2, -1)[step]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def eager_parts(data: list[dict[str, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = Parts(), []
    optimizer = adamw(model.parameters())
    for number, batch in enumerate(data):
        leaves_parts_out(model, number)
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def train_parts(step: Any, model: nn.Module, data: list[dict[str, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    return train(step, model, leaves_parts_out, data), step.full_state_dict()


def assert_equal_parts(outcome: tuple[list[float], dict[str, Tensor]], data: list[dict[str, Tensor]]) -> None:
    losses, state = eager_parts(data)
    assert outcome[0] == pytest.approx(losses, rel=1e-5)
    for name, value in state.items():
        torch.testing.assert_close(outcome[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_parts_that_a_flag_leaves_out_are_not_updated() -> None:
    data, model = batches(4), Parts()
    compiled = autopar.compile(model, "1 cpu", example_inputs=data[0], optimizer=adamw)
    step = compiled.build(first_step_check=False)
    assert_equal_parts(train_parts(step, model, data), data)
    model.averages = True
    with pytest.raises(ModelError, match="forward now updates buffers that it did not update before: mean"):
        step(step.local_batch(data[0]))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("plan", [{"dp": 2, "zero": 3}, {"tp": 2}, {"dp": 2, "recompute": "full"}], ids=str)
def test_parts_are_left_out_under_plans(plan: dict[str, Any]) -> None:
    data, model = batches(4), Parts()
    compiled = autopar.compile(model, "2 cpu", example_inputs=data[0], optimizer=adamw, constraints=plan)
    assert_equal_parts(compiled.launch(train_parts, model, data)[0], data)
