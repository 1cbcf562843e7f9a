"""Models that checkpoint activations themselves, reentrant or not: traced through, and equal to torch after a step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import autopar
from autopar.errors import TraceError
from autopar.frontend.trace import trace

X = {"x": torch.randn(8, 6)}


class Net(nn.Module):
    """A model whose forward is a function of it and x."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.call = forward
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.other = nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=0.3)
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.call(self, x)).square() * torch.arange(6)).mean()


def _pair(net: Net, x: Tensor) -> Tensor:
    def both(x: Tensor, scale: float, others: list[Tensor]) -> tuple[Tensor, Tensor]:
        return torch.tanh(net.second(x)) * scale, others[0].sin()

    y = net.first(x)
    a, b = checkpoint(both, y, 2.0, [x], use_reentrant=True)
    return a * b


def _chain(net: Net, x: Tensor) -> Tensor:
    block = nn.Sequential(net.second, nn.GELU(), net.last, nn.ReLU(inplace=True))
    return checkpoint_sequential(block, 2, net.first(x), use_reentrant=True)


def _inner(net: Net, x: Tensor) -> Tensor:
    outer = lambda x: checkpoint(net.second, net.first(x), use_reentrant=True).relu()  # noqa: E731
    return checkpoint(outer, net.first(x), use_reentrant=True)


def _without_gradient(net: Net, x: Tensor) -> Tensor:
    return checkpoint(lambda x: torch.relu(net.first(x)), x, use_reentrant=True)


def _normed(net: Net, x: Tensor, *, reentrant: bool) -> Tensor:
    block = lambda x: net.other(net.norm(net.second(x)).relu())  # noqa: E731
    return checkpoint(block, net.first(x), use_reentrant=reentrant)


def _frozen_norm(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        return checkpoint(net.norm, x, use_reentrant=False)


EQUAL = {
    "pair": _pair,
    "sequential": _chain,
    "nested": _inner,
    "without_gradient": _without_gradient,
    "norm_reentrant": partial(_normed, reentrant=True),
    "norm": partial(_normed, reentrant=False),
    "norm_without_gradient": _frozen_norm,
}


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", EQUAL)
def test_a_step_is_that_of_one_process(name: str, alone: None) -> None:
    torch.manual_seed(0)
    model, optimizer = Net(EQUAL[name]), partial(torch.optim.SGD, lr=0.1)
    expected = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about inputs that require no gradient
        step = autopar.compile(model, "1 cpu", example_inputs=X, optimizer=optimizer).build(device="cpu")
        loss = expected(**X)
        loss.backward()
        optimizer(expected.parameters()).step()
    assert float(step(dict(X))) == pytest.approx(float(loss))
    state = step.full_state_dict()
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


def _averaged(net: Net, x: Tensor) -> Tensor:
    def block(x: Tensor) -> Tensor:
        net.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return net.second(x)

    return checkpoint(block, net.first(x), use_reentrant=False)


def _shared(net: Net, x: Tensor) -> Tensor:
    return checkpoint(net.norm, net.norm(net.first(x)), use_reentrant=False)


def _nested_norm(net: Net, x: Tensor) -> Tensor:
    outer = lambda x: checkpoint(net.norm, net.second(x), use_reentrant=True)  # noqa: E731
    return checkpoint(outer, net.first(x), use_reentrant=True)


def _counted(net: Net, x: Tensor) -> Tensor:
    def block(x: Tensor) -> Tensor:
        net.count += 1
        return net.second(x) / net.count

    return checkpoint(block, net.first(x), use_reentrant=True)


def _queued(net: Net, x: Tensor) -> Tensor:
    def block(x: Tensor) -> Tensor:
        net.average[2:4] = x[0, 2:4].detach()
        return net.second(x)

    return checkpoint(block, net.first(x), use_reentrant=True)


@pytest.mark.parametrize("forward", [_averaged, _shared, _nested_norm, _counted, _queued])
def test_other_writes_of_checkpointed_functions_are_refused(forward: Any) -> None:
    with pytest.raises(TraceError, match="under activation checkpointing writes to state"):
        trace(Net(forward), (X["x"],))
