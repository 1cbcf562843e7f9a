"""Gradients that forward takes itself are traced, and losses and gradients equal those of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad

import autopar
from autopar.errors import TraceError
from autopar.frontend.trace import trace
from benchmarks.by_hand import compiled_for, is_exact, sgd

DRAWN = torch.Generator().manual_seed(0)
BATCH = {"x": torch.randn(8, 6, generator=DRAWN)}


class Deep(nn.Module):
    """Norms, softmax and more that backward keeps something of."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.BatchNorm1d(8), nn.RMSNorm(8)])

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = x + torch.tanh(norm(x)) * x.softmax(1)
        return F.log_softmax(x, 1) + F.logsigmoid(x)


class Net(nn.Module):
    """Two layers, and a loss that differentiates them."""

    def __init__(self, loss: Callable[[Any, Tensor], Tensor], between: Callable[[], nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), between(), nn.Linear(8, 8), between(), nn.Linear(8, 1))
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self, x)


def penalty(m: Any, x: Tensor) -> Tensor:
    """R1: the gradient by the input, of the sum over the batch."""
    x = x.requires_grad_()
    score = m.body(x)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return F.softplus(-score).mean() + slope.square().sum(1).mean()


def interpolated(m: Any, x: Tensor) -> Tensor:
    """WGAN-GP: given gradients of outputs, at points of forward's own."""
    y = (0.3 * x + 0.7 * x.flip(0)).detach().requires_grad_(True)
    score = m.body(y)
    slope = grad(score, y, grad_outputs=torch.ones_like(score), create_graph=True, retain_graph=True)[0]
    return (slope.norm(2, dim=1) - 1).square().mean() + m.body(x).mean()


def physics(m: Any, x: Tensor) -> Tensor:
    """A second derivative by one coordinate."""
    t = x[:, :1].clone().requires_grad_(True)
    u = m.body(torch.cat([t, x[:, 1:]], 1))
    (first,) = grad(u.sum(), t, create_graph=True)
    (second,) = grad(first.sum(), t, create_graph=True)
    return (second + u * first).square().mean()


def adapted(m: Any, x: Tensor) -> Tensor:
    """A step of MAML: gradients by parameters."""
    weights = dict(m.body.named_parameters())
    inner = torch.func.functional_call(m.body, weights, (x[:4],)).square().mean()
    slopes = grad(inner, list(weights.values()), create_graph=True)
    moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
    return torch.func.functional_call(m.body, moved, (x[4:],)).square().mean()


def first_order(m: Any, x: Tensor) -> Tensor:
    """Without create_graph the gradient is a constant."""
    h = x * 1.0
    h.requires_grad_(True)
    score = m.body(h)
    (slope,) = torch.autograd.grad(score.sum(), h, retain_graph=True)
    return (score.squeeze(1) * slope.sum(1)).mean()


def force(m: Any, x: Tensor) -> Tensor:
    energy, pull = torch.func.vjp(m.body, x)
    return energy.mean() + pull(torch.ones_like(energy))[0].square().mean()


def per_sample(m: Any, x: Tensor) -> Tensor:
    weights = {name: p * 1.0 for name, p in m.body.named_parameters()}

    def loss(weights: Any, row: Tensor) -> Tensor:
        return torch.func.functional_call(m.body, weights, (row,)).square().sum()

    slopes = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    return sum(slope.square().mean() for slope in slopes.values())


def pushed(m: Any, x: Tensor) -> Tensor:
    u, rate = torch.func.jvp(m.body, (x,), (torch.ones_like(x),))
    return (u + rate).square().mean()


def curvature(m: Any, x: Tensor) -> Tensor:
    return torch.vmap(torch.func.hessian(lambda row: m.body(row).sum()))(x).square().mean()


def divergence(m: Any, x: Tensor) -> Tensor:
    jacobian = torch.vmap(torch.func.jacrev(lambda row: m.body[:3](row)[:6]))(x)
    return torch.diagonal(jacobian, dim1=1, dim2=2).sum(1).square().mean()


LOSSES = [penalty, interpolated, physics, adapted, first_order, force, per_sample, pushed, curvature, divergence]
QUICK = [penalty, physics, adapted, per_sample, pushed]


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    "loss", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in LOSSES]
)
def test_equal_to_one_process(loss: Callable[[Any, Tensor], Tensor]) -> None:
    assert is_exact(Net(loss), {"x": BATCH["x"].clone()})


@pytest.mark.slow
@pytest.mark.parametrize("between", [nn.SiLU, nn.GELU, nn.Sigmoid, nn.Softplus, nn.ELU, lambda: nn.LayerNorm(8), Deep])
def test_equal_with_other_layers_in_between(between: Callable[[], nn.Module]) -> None:
    assert is_exact(Net(penalty, between), {"x": BATCH["x"].clone()})


@pytest.mark.slow
def test_a_convolutional_critic_that_writes_in_place() -> None:
    critic = Net(penalty)
    critic.body = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.Flatten(),
        nn.Linear(16, 1),
    )
    assert is_exact(critic, {"x": torch.randn(4, 2, 7, 7, generator=DRAWN)})


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("loss", [penalty, physics, adapted, pushed])
def test_equal_on_two_processes(loss: Callable[[Any, Tensor], Tensor]) -> None:
    batch = {"x": BATCH["x"].clone()}
    report = autopar.verify(Net(loss), "1x2 cpu", example_inputs=batch, steps=2, constraints={"dp": 2}, optimizer=sgd)
    assert report.ok(1e-5)


def test_calls_are_cut_along_the_batch() -> None:
    compiled = compiled_for(Net(penalty), {"x": BATCH["x"].clone()}, cluster="1x2 cpu", constraints={"dp": 2})
    assert "nothing is sharded" not in str(compiled.report())


def dropped(m: Any, x: Tensor) -> Tensor:
    return penalty(m, F.dropout(x, 0.0)) + grad(F.dropout(m.body(x), 0.5).sum(), x, create_graph=True)[0].mean()


def unused(m: Any, x: Tensor) -> Tensor:
    found = grad(m.body(x).sum(), (x, m.body[0].weight, m.spare), create_graph=True, allow_unused=True)
    return found[0].mean()


def written(m: Any, x: Tensor) -> Tensor:
    h = m.body[0](x)
    view = h[:, :2]
    view.mul_(2)
    return grad(m.body[1:](h).sum(), x, create_graph=True)[0].mean()


@pytest.mark.parametrize(("loss", "why"), [(dropped, "dropout"), (unused, "returns None"), (written, "writes to")])
def test_refused_with_the_line(loss: Callable[[Any, Tensor], Tensor], why: str) -> None:
    model = Net(loss)
    model.spare = nn.Parameter(torch.ones(3))
    with pytest.raises(TraceError, match=rf"cannot be traced(.|\n)*{why}(.|\n)*test_inner_gradients.py:\d+: "):
        trace(model, {"x": BATCH["x"].clone().requires_grad_(True)})


def _cubed(y: Tensor, x: Tensor) -> Tensor:
    return grad(y.pow(3).sum(), x, create_graph=True)[0].square().mean()


def ones_less(m: Any, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    return _cubed(torch.ones_like(m.body(x)).sub_(m.body(x)), x)


def filled_less(m: Any, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    return _cubed(torch.empty(8, 1).fill_(2.0).sub_(m.body(x)).mul_(3.0), x)


def twice(m: Any, x: Tensor) -> Tensor:
    """Gradients of SiLU's gradients, in which C++ computes `1 - sigmoid` in place."""
    x = x.requires_grad_()
    (slope,) = grad(m.body(x).sum(), x, create_graph=True)
    return grad(slope.pow(2).sum(), x, create_graph=True)[0].square().mean()


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("loss", [ones_less, filled_less, twice])
def test_what_was_written_in_place_before_is_made_again(loss: Callable[[Any, Tensor], Tensor]) -> None:
    assert is_exact(Net(loss, nn.SiLU if loss is twice else nn.Tanh), BATCH)
