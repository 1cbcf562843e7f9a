"""Linear layers beside the sum of their input's gradient: the numbers of torch's own, and really beside."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from codegen.runtime import overlapped
from codegen.runtime.mesh import Axis, Mesh
from codegen.runtime.recompute import _policy, create_selective_checkpoint_contexts
from tests.codegen.runtime.ranks import run_ranks

ROWS, WIDTH = (2, 4), 8
SIZES = (6, 3, 5)


def parameters(rank: int = 0, frozen: tuple[int, ...] = ()) -> tuple[list[nn.Parameter], list[nn.Parameter | None]]:
    """Weights [out, in], the second without a bias."""
    generator = torch.Generator().manual_seed(7 + rank)
    weights = [nn.Parameter(torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)) for size in SIZES]
    biases = [nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64)) for size in SIZES]
    for index in frozen:
        weights[index].requires_grad_(False)
    return weights, [biases[0], None, biases[2]]


def values(rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def reshards(axis: Axis) -> dict[str, tuple[object, tuple[int, ...]]]:
    """Name -> (the reshard, the shape of its argument on one rank)."""
    batch, length = ROWS
    return {
        "for_use": (axis.for_use, (batch, length, WIDTH)),
        "all_reduce": (partial(axis.all_reduce, grad="partial"), (batch, length, WIDTH)),
        "all_gather": (partial(axis.all_gather, dim=1), (batch, length // axis.size, WIDTH)),
    }


def plain(x: Tensor, weights: list, biases: list) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def plain_addmm(x: Tensor, weights: list, biases: list) -> tuple[Tensor, ...]:
    return (torch.addmm(biases[0], x.view(-1, WIDTH), weights[0].t()),)


def joined_addmm(x: Tensor, weights: list, biases: list) -> tuple[Tensor, ...]:
    return (overlapped.addmm(biases[0], x, weights[0].t()),)


def gradients(run, shape, rank, frozen=(), read=SIZES, with_x=True):
    """Results, then gradients of x, weights and biases (None where there is none)."""
    weights, biases = parameters(rank, frozen)
    x = values(rank, *shape).requires_grad_(with_x)
    results = run(x * 1.0, weights, biases)
    loss = sum((result * torch.arange(1.0, 1 + result.shape[-1])).sin().sum() for result in results[: len(read)])
    loss.backward()
    return [r.detach() for r in results], [None if t is None else t.grad for t in (x, *weights, *biases)]


def assert_same(found, wanted) -> None:
    for ours, theirs in zip(found[0], wanted[0], strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(found[1], wanted[1], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


def compare(rank: int, size: int) -> int:
    """Every reshard, layer by layer and joined; returns how many cases there were."""
    axis, count = Mesh.create(("tp",), (size,)).tp, 0
    cases = [(plain, overlapped.linears), (plain_addmm, joined_addmm)]
    for reshard, shape in reshards(axis).values():
        for theirs, ours in cases:
            for options in ({}, {"frozen": (0, 1)}, {"read": SIZES[:1]}, {"with_x": False}):
                calls = [lambda x, w, b, f=f, reshard=reshard: f(reshard(x), w, b) for f in (ours, theirs)]
                assert_same(*(gradients(call, shape, rank, **options) for call in calls))
                count += 1
        whole = [
            lambda x, w, b, f=f, reshard=reshard: checkpoint(lambda x: f(reshard(x), w, b), x, use_reentrant=False)
            for f in (overlapped.linears, plain)
        ]
        assert_same(*(gradients(call, shape, rank) for call in whole))
        selective = [
            lambda x, w, b, f=f, reshard=reshard: checkpoint(
                lambda x: f(reshard(x), w, b),
                x,
                use_reentrant=False,
                context_fn=partial(create_selective_checkpoint_contexts, _policy),
            )
            for f in (overlapped.linears, plain)
        ]
        assert_same(*(gradients(call, shape, rank) for call in selective))
        # One reader too many: the sum that was begun is not of the whole gradient, and must not be used.
        calls = []
        for f in (overlapped.linears, plain):

            def call(x: Tensor, w: list, b: list, f=f, reshard=reshard) -> tuple[Tensor, ...]:
                x = reshard(x)
                return f(x, w, b)[0] + x.sum(), *f(x, w, b)[1:]

            calls.append(call)
        assert_same(*(gradients(call, shape, rank) for call in calls))
    return count


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_same_as_one_layer_after_the_other(size: int) -> None:
    assert run_ranks(compare, size) == [24] * size


def test_on_one_rank_and_without_gradients() -> None:
    calls = [lambda x, w, b, f=f: f(Axis("tp").for_use(x), w, b) for f in (overlapped.linears, plain)]
    assert_same(*(gradients(call, (*ROWS, WIDTH), 0) for call in calls))
    weights, biases = parameters()
    x = values(0, *ROWS, WIDTH)
    with torch.no_grad():
        assert torch.equal(overlapped.linear(x, weights[0], biases[0]), F.linear(x, weights[0], biases[0]))
    assert not overlapped.linear(x, weights[0].detach()).requires_grad


@dataclass(frozen=True)
class RecordedAxis(Axis):
    """Two ranks of which the other one has the same; writes down when sums start and are waited for."""

    events: list[str] = field(default_factory=list)

    def sum_over(self, x: Tensor, wait: bool = True) -> Tensor:
        self.events.append("sum")
        return 2 * x.detach()

    def start_sum(self, x: Tensor) -> RecordedArrival:
        self.events.append("start")
        return RecordedArrival(2 * x.detach(), self.events)

    def start_scatter_sum(self, parts: Tensor) -> RecordedArrival:
        self.events.append("start")
        return RecordedArrival(2 * parts[self.rank].detach(), self.events)

    def gather_parts(self, part: Tensor) -> Tensor:
        return torch.stack([part.detach()] * 2)


@dataclass(frozen=True)
class RecordedArrival:
    result: Tensor
    events: list[str]

    def wait(self) -> Tensor:
        self.events.append("wait")
        return self.result


class Products(TorchDispatchMode):
    """Writes down matrix products, by the shapes of their results."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
            self.events.append("x" if result.shape == (ROWS[0] * ROWS[1], WIDTH) else "weight")
        return result


@pytest.mark.parametrize("reshard", ["for_use", "all_gather"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_sum_starts_before_the_weights_gradients(reshard: str, count: int) -> None:
    axis = RecordedAxis("tp", 2, 0)
    function, shape = reshards(axis)[reshard]
    weights, _ = parameters()
    x = values(0, *shape).requires_grad_()
    results = overlapped.linears(function(x), weights[:count])  # type: ignore[operator]
    with Products(axis.events):
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    assert axis.events == ["x"] * count + ["start"] + ["weight"] * count + ["wait"]


def test_without_it_nothing_runs_beside_the_sum() -> None:
    axis = RecordedAxis("tp", 2, 0)
    weights, _ = parameters()
    x = values(0, *ROWS, WIDTH).requires_grad_()
    result = F.linear(axis.for_use(x), weights[0])
    with Products(axis.events):
        result.sum().backward()
    assert sorted(axis.events[:2]) == ["weight", "x"] and axis.events[2:] == ["sum"]
