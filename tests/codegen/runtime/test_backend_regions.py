"""Cutting a forward into regions: what becomes one, what stays, and that the numbers stay bit for bit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from codegen.runtime.idioms import rms_norm, swiglu
from codegen.runtime.regions import Cut, cut

WIDTH = 4


class Axis:
    """Stands in for an axis of the mesh; remembers what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        self.calls.append(f"all_gather {dim}")
        return torch.cat([x, -x], dim)

    def sum(self, x: Tensor) -> Tensor:
        """Called as a method that tensors have too."""
        self.calls.append("sum")
        return x * 3


class MeshLike:
    def __init__(self) -> None:
        self.tp = Axis()
        self.device = torch.device("cpu")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mesh = MeshLike()
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, WIDTH))
        self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.factor = 3

    def noise(self, x: Tensor) -> Tensor:
        return x + 0.25

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        tp = self.mesh.tp
        x = hidden * self.scale
        y, z = torch.relu(x).split(2, -1)
        x = torch.cat([z, y], -1)
        x = tp.all_gather(x, dim=0)
        one = F.linear(x, self.parts[0].weight, self.parts[0].bias)
        two = self.noise(one)
        there = torch.arange(WIDTH, device=self.mesh.device) > 0
        three = (two**2).masked_fill(there, -1.0) + hidden.mean()
        four = tp.sum(three)
        five = four * self.factor
        six = external(five)
        seven = -six.view(-1, WIDTH)
        return seven, x


def external(x: Tensor) -> Tensor:
    """Not torch's, so what it does is not looked into."""
    return x.sin()


STORED = ("scale", "parts.0.weight", "parts.0.bias", "parts.1.weight", "parts.1.bias")


def _cut() -> Cut:
    return cut(Layer.forward, STORED)


def _run(forward: Callable[..., Any]) -> tuple[Tensor, ...]:
    """Results, gradients, and the axis' calls as a number."""
    torch.manual_seed(3)
    layer = Layer()
    hidden = torch.randn(2, WIDTH, requires_grad=True)
    seven, x = forward(layer, hidden)
    ((seven**2).sum() + x.sum()).backward()
    gradients = (hidden.grad, *(p.grad for p in layer.parameters() if p.grad is not None))
    assert layer.mesh.tp.calls == ["all_gather 0", "sum"]
    return seven, x, *(g for g in gradients if g is not None)


def test_only_runs_of_torch_calls_that_compute_twice_are_regions() -> None:
    regions = _cut().regions
    assert list(regions) == ["forward_region_0", "forward_region_1"]
    first, second = (list(inspect.signature(each).parameters) for each in regions.values())
    assert first == ["hidden", "self_scale"]
    assert set(second) == {"two", "hidden", "self_mesh_device"}


def test_regions_compute_the_same_bits() -> None:
    before, after = _run(Layer.forward), _run(_cut().forward)
    assert len(before) == len(after) == 6
    for expected, found in zip(before, after, strict=True):
        assert torch.equal(expected, found)


def test_regions_are_what_runs() -> None:
    """Exchanging them changes the result, so the forward calls them and nothing else."""
    parts = _cut()
    seen: list[str] = []

    def watched(region: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            seen.append(region.__name__)
            return region(*args)

        return run

    _run(parts.compiled(watched))
    assert seen == list(parts.regions)


def test_tracebacks_show_the_lines_of_the_source() -> None:
    lines, first = inspect.getsourcelines(Layer.forward)
    (line,) = [first + i for i, text in enumerate(lines) if "masked_fill" in text]
    region = _cut().regions["forward_region_1"]
    assert region.__code__.co_filename == __file__
    with pytest.raises(RuntimeError) as failure:
        region(torch.zeros(2, 3), torch.zeros(2, 3), torch.device("cpu"))
    assert failure.traceback[-1].lineno + 1 == line


def test_closures_are_seen() -> None:
    factor = 5

    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * factor
        z = y + factor
        return z

    parts = cut(forward, ())
    assert len(parts.regions) == 1
    assert parts.forward(None, torch.ones(2)).tolist() == [10.0, 10.0]


def test_idioms_and_what_is_returned_are_inside() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = rms_norm(x, self.scale, eps=1e-6)
        return x + swiglu(y, x)

    parts = cut(forward, STORED)
    assert list(parts.regions) == ["forward_region_0"]
    layer, x = Layer(), torch.randn(3, WIDTH)
    assert torch.equal(parts.forward(layer, x), forward(layer, x))
    assert not {"rms_norm", "swiglu"} & set(parts.forward.__code__.co_names), "all of it is in the region"
