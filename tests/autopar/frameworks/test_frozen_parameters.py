"""Optimizers of all parameters, some of which are frozen: a program trains them as torch does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from autopar.frameworks.accelerate import parallelize
from autopar.frameworks.building import SameOptimizer

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(self.embed(x))), y)


def biases(net: nn.Module) -> list[nn.Parameter]:
    return [value for name, value in net.named_parameters() if name.endswith("bias")]


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another, with which it shares groups and state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


FROZEN: dict[str, Callable[[Net], list[nn.Parameter]]] = {
    "the first layer": lambda net: list(net.embed.parameters()),
    "the trunk": lambda net: [*net.embed.parameters(), *net.body.parameters()],
    "all biases": biases,
    "the last layer": lambda net: list(net.head.parameters()),
}
OPTIMIZERS: dict[str, Make] = {
    "one group": lambda net: torch.optim.AdamW(net.parameters(), lr=0.1),
    "a group each": lambda net: torch.optim.SGD(
        [{"params": list(child.parameters())} for child in net.children()], 0.1
    ),
    "named": lambda net: torch.optim.AdamW(net.named_parameters(), lr=0.1),
    "wrapped": lambda net: Wrapper(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)),
}


def batches() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return [{"x": torch.randint(10, (4,)), "y": torch.randint(10, (4,))} for _ in range(3)]


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_copied_optimizer_leaves_frozen_parameters_out(frozen: str, name: str) -> None:
    net = Net()
    for parameter in FROZEN[frozen](net):
        parameter.requires_grad_(False)
    original = OPTIMIZERS[name](net)
    stand_ins = [(name, nn.Parameter(p.detach().clone())) for name, p in net.named_parameters() if p.requires_grad]
    copied = SameOptimizer(original, net)(stand_ins)
    parameters = [parameter for group in copied.param_groups for parameter in group["params"]]
    assert {id(p) for p in parameters} == {id(p) for _, p in stand_ins} and len(parameters) == len(stand_ins)
    assert len(copied.param_groups) == len(original.param_groups)  # schedules count them
    names = [name for group in copied.param_groups for name in group.get("param_names", ())]
    assert names in ([], [name for name, _ in stand_ins])
    assert sum(len(group["params"]) for group in original.param_groups) == len(list(net.parameters()))  # untouched


@pytest.mark.parametrize(("frozen", "name"), [("the trunk", "named"), ("all biases", "wrapped")])
def test_a_loop_with_frozen_parameters_trains_as_torch_does(frozen: str, name: str) -> None:
    net = Net()
    for parameter in FROZEN[frozen](net):
        parameter.requires_grad_(False)
    reference, expected = copy.deepcopy(net), []
    optimizer = OPTIMIZERS[name](reference)
    for batch in batches():
        optimizer.zero_grad()
        loss = reference(**batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    accelerator: Any = parallelize(Accelerator(cpu=True), "1 cpu")
    load: Any = torch.utils.data.DataLoader
    loader = load(batches(), batch_size=None)
    model, stepper, loader = accelerator.prepare(net, OPTIMIZERS[name](net), loader)
    losses = []
    for batch in loader:
        loss = model(**batch)
        accelerator.backward(loss)
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
    trained = accelerator.unwrap_model(model).state_dict()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(trained[name], value)
