"""Rows that a mask selects: a step is that of one process, whether some, none or all are selected."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError
from autopar.frontend.trace import trace
from tests.turns import by_turns

Forward = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """A linear layer, then a function of its result, a mask of rows and classes."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.call = forward
        self.linear, self.head, self.scale = nn.Linear(6, 6), nn.Linear(6, 5), nn.Parameter(torch.rand(6) - 0.2)

    def forward(self, x: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
        return self.call(self, self.linear(x), mask, classes)


def classified(net: Net, h: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(net.head(h[mask]), classes[mask]) + F.softmax(h[mask], -1)[:, 0].sum()


def reconstructed(net: Net, h: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    target = h.detach().masked_fill(~mask[..., None], torch.nan)
    return F.smooth_l1_loss(h[~target.isnan()], target[~target.isnan()] + 1.0) + (h[mask] ** 2).mean(-1).mean()


def spline(net: Net, h: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    """Where it is not selected, the square root and its gradient are nan."""
    out, inside = torch.zeros_like(h), mask[..., None] & (h > 0)
    out[~inside] = h[~inside]
    out[inside] = torch.sqrt(h[inside]) + torch.log(net.scale.expand_as(h)[inside].abs() + 0.1)
    return out.square().mean()


def roots(net: Net, h: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    """A trained operand, by which rows that are not selected have no gradient either."""
    out = h.new_zeros(h.shape[:-1])
    rows = torch.where(mask[..., None], h.abs() + 1.0, -h.abs() - 1.0)
    out[mask] = (rows[mask] + net.scale.abs()).sqrt().sum(-1)
    return out.mean()


def routed(net: Net, h: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    for expert in range(3):
        token = torch.where((classes == expert) & mask)
        out[token] += F.gelu(net.linear(h[token])) * (expert + 1)
    return out.square().mean()


def graph(net: Net, h: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    """Edges without self loops, of which every node then gets one; softmax over the edges of a node."""
    nodes, edges = h.flatten(0, 1)[:5], torch.stack([classes.flatten(), classes.flatten().roll(1)])
    edges = edges[:, (edges[0] != edges[1]) & mask.flatten()]
    loops = torch.arange(5)
    edges = torch.cat([edges, torch.stack([loops, loops])], 1)
    score = (nodes[edges[0]] * net.scale).sum(-1)
    least = score.new_zeros(5).scatter_reduce_(0, edges[1], score.detach(), "amax", include_self=False)
    weight = (score - least[edges[1]]).exp()
    total = weight.new_zeros(5).scatter_add_(0, edges[1], weight)
    return (
        torch.zeros(5, 6).index_add_(0, edges[1], nodes[edges[0]] * (weight / total[edges[1]])[:, None]).square().mean()
    )


def degrees(net: Net, h: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
    """Nodes of each degree by layers of their own, and rows that are put where an index says."""
    nodes, out = h.flatten(0, 1)[:16], torch.zeros(16, 6)
    degree = torch.zeros(16, dtype=torch.long).index_add_(0, torch.arange(16) // 2, mask.flatten()[:16].long())
    for each in range(3):
        chosen = (degree == each).nonzero().view(-1)
        out.index_copy_(0, chosen, net.linear(nodes[chosen]) * (each + 1))
    loops, last = torch.ones(5, 6), mask.flatten()[-5:]
    loops[torch.arange(-5, 0)[last]] = nodes[:5][last]
    return out.square().mean() + (loops * net.scale).mean()


FORWARDS: dict[str, Forward] = {
    each.__name__: each for each in (classified, reconstructed, spline, roots, routed, graph, degrees)
}
MASKS = {"some": torch.rand(8, 4) > 0.4, "none": torch.zeros(8, 4, dtype=torch.bool), "all": torch.ones(8, 4) > 0}
MEANS = ("classified", "reconstructed")


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _batch(mask: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"x": torch.randn(8, 4, 6), "mask": MASKS[mask], "classes": torch.randint(5, (8, 4))}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("spline", "graph") else pytest.mark.slow) for name in FORWARDS]
)
def test_a_step_is_that_of_one_process(name: str, alone: None) -> None:
    torch.manual_seed(0)
    model = Net(FORWARDS[name])
    compiled = autopar.compile(model, "1 cpu", example_inputs=_batch("some"), optimizer=_sgd)
    for mask in MASKS if name not in MEANS else ("some", "all"):  # a mean of nothing is nan
        expected = copy.deepcopy(model)
        loss = expected(**_batch(mask))
        loss.backward()
        _sgd(expected.parameters()).step()
        step = compiled.build(device="cpu")
        assert float(step(_batch(mask))) == pytest.approx(float(loss), rel=1e-5)
        state = step.full_state_dict()
        for key, value in expected.state_dict().items():
            assert torch.isfinite(value).all()
            torch.testing.assert_close(
                state[key], value, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key} {text}"
            )


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "pins"), by_turns(list(FORWARDS), [{"dp": 2}, {"tp": 2}, {"dp": 2, "micro_batches": 2}]), ids=str
)
def test_on_two_ranks(name: str, pins: dict[str, int]) -> None:
    torch.manual_seed(0)
    try:
        report = autopar.verify(Net(FORWARDS[name]), "2 cpu", example_inputs=_batch("some"), constraints=pins)
    except autopar.errors.ConstraintError:
        assert "micro_batches" in pins  # it looks across the rows of the batch
        return
    assert report.ok(1e-5), str(report)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


MIXED: dict[str, Forward] = {
    "running sum": lambda net, h, mask, classes: h[mask].cumsum(0).square().mean(),
    "first": lambda net, h, mask, classes: h[mask][0].square().mean(),
    "two masks": lambda net, h, mask, classes: (h[mask][:3] * h[~mask][:3]).mean(),
    "by number": lambda net, h, mask, classes: (h[mask] * torch.arange(len(h[mask]))[:, None]).mean(),
    "largest": lambda net, h, mask, classes: h[mask].amax(),
    "flat": lambda net, h, mask, classes: h[mask].view(-1).softmax(0).square().sum(),
    "dropout": lambda net, h, mask, classes: F.dropout(h[mask], 0.5).sum(),
    "one more": lambda net, h, mask, classes: F.pad(h[mask], (0, 0, 0, 1)).square().mean(),
}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_selected_rows_is_refused(name: str) -> None:
    with pytest.raises(TraceError, match="depends on values|values of tensors"):
        trace(Net(MIXED[name]), _batch("some"))


def test_selections_are_recorded_and_watched(alone: None) -> None:
    model = Net(lambda net, h, mask, classes: (h[mask] * net.factor).square().mean())
    model.factor = 2.0  # type: ignore[assignment]
    compiled = autopar.compile(model, "1 cpu", example_inputs=_batch("some"), optimizer=_sgd)
    assert "NO_EVALUATION" not in compiled.source
    step, expected = compiled.build(device="cpu"), copy.deepcopy(model)
    for factor in (2.0, 3.0):
        model.factor = expected.factor = factor  # type: ignore[assignment]
        optimizer = _sgd(expected.parameters())
        optimizer.zero_grad()
        loss = expected(**_batch("some"))
        loss.backward()
        optimizer.step()
        assert float(step(_batch("some"))) == pytest.approx(float(loss), rel=1e-5)
