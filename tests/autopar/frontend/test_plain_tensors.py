"""Tensors that forward uses and no module has registered: buffers of the program."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.frontend.trace import trace
from autopar.ir.graph import LayerRun
from benchmarks.by_hand import is_exact

X = torch.linspace(-1, 1, 192).cos().reshape(4, 3, 16)
_TABLE = torch.linspace(-2, 2, 64).exp()


def _values(seed: int) -> Tensor:
    return torch.randn(3, 16, generator=torch.Generator().manual_seed(seed))


class _Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclasses.dataclass
class _Bands:
    low: Tensor
    gain: float = 1.5


class Holder(nn.Module):
    """A layer with tensors in all places that a class has."""

    of_class = _values(1)

    def __init__(self, use: Callable[[Any], Any], seed: int = 0) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(16, 16), use
        self.plain, self.nested = _values(seed), {"a": [_values(2), (_values(3),)]}
        self.pair, self.bands = _Pair(_values(4), _values(5)), _Bands(_values(6))
        self.space = types.SimpleNamespace(order=torch.randperm(16, generator=torch.Generator().manual_seed(7)))
        self.alive = torch.zeros(16)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).tanh() * self.use(self)).square().mean()


class _Block(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh() * self.plain


class Blocks(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(16, 16), nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _closure() -> Callable[[Any], Tensor]:
    held = _values(8)
    return lambda model: held


USES = {
    "attribute": lambda model: model.plain,
    "class": lambda model: model.of_class,
    "nested containers": lambda model: model.nested["a"][0] + model.nested["a"][1][0],
    "named tuple and dataclass": lambda model: model.pair.second + model.bands.low * model.bands.gain,
    "global": lambda model: _TABLE.reshape(4, 16)[:3],
    "closure": _closure(),
    "an index": lambda model: model.plain[:, model.space.order],
}


QUICK = {"nested containers", "named tuple and dataclass"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in USES])
def test_it_trains_as_in_one_process(name: str) -> None:
    torch.manual_seed(0)
    assert is_exact(Holder(USES[name]), {"x": X})


def test_it_is_a_buffer_that_no_state_dict_has() -> None:
    torch.manual_seed(0)
    graph = trace(Holder(USES["attribute"]), {"x": X})
    (table,) = (each for each in graph.parameters if each.is_buffer)
    assert (table.name, table.persistent, table.meta.requires_grad) == ("plain", False, False)
    assert table.value is not None and torch.equal(table.value, _values(0))


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [False, True])
def test_layers_with_tables_are_folded(is_shared: bool) -> None:
    torch.manual_seed(0)
    model = Blocks([_Block(USES["attribute"], 9 if is_shared else seed) for seed in range(4)])
    (run,) = (piece for piece in trace(model, {"x": X}).body if isinstance(piece, LayerRun))
    own = [each.name for each in run.layer.parameters if each.is_buffer]
    assert len(run.instances) == 4 and own == ([] if is_shared else ["plain"])
    assert is_exact(model, {"x": X})


def _count(model: Any) -> Tensor:
    model.alive += 1
    return model.alive


def _average(model: Any) -> Tensor:
    with torch.no_grad():
        model.nested["a"][0].mul_(0.5).add_(model.layer.weight[:3])
    return model.nested["a"][0]


def _rows(model: Any) -> Tensor:
    model.plain[0] = model.plain[1] + 1
    return model.plain


@pytest.mark.parametrize(
    "write", [_count, *(pytest.param(write, marks=pytest.mark.slow) for write in (_average, _rows))]
)
def test_what_forward_writes_to_it_is_kept(write: Callable[[Any], Tensor]) -> None:
    torch.manual_seed(0)
    model = Holder(write)
    before = [each.clone() for each in (model.alive, model.nested["a"][0], model.plain)]
    assert is_exact(model, {"x": X})
    now = (model.alive, model.nested["a"][0], model.plain)
    assert all(map(torch.equal, now, before))  # neither a trace nor a program writes to the user's


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("constraints", [{"tp": 2}, {"pp": 2}, {"dp": 2, "zero": 3}])
def test_every_plan_has_it(constraints: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Blocks([_Block(USES["attribute"], seed) for seed in range(4)])
    report = autopar.verify(model, "2 cpu", example_inputs={"x": X}, constraints=constraints, steps=2)
    assert report.ok(), str(report)
