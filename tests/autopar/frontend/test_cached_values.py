"""Values that a forward keeps of its first call: fine where later calls compute the same, else refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autopar.errors import TraceError
from autopar.frontend.trace import trace
from benchmarks.by_hand import is_exact

X = torch.linspace(-1, 1, 96).cos().reshape(4, 3, 8)


class Net(nn.Module):
    """A layer whose result is multiplied by what `table` returns, and places for it to keep that."""

    def __init__(self, table: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(8, 8), table
        self.cached: Any = None
        self.by_length: dict[int, Any] = {}
        self.length = 0
        self.frequencies = nn.Parameter(torch.linspace(0.1, 1, 8), requires_grad=False)
        self.register_buffer("rows", torch.zeros(16, 8), persistent=False)
        self.register_buffer("grown", torch.ones(0, 8), persistent=False)
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).tanh() * self.table(self, x)).square().mean()


def _angles(model: Any, length: int) -> Tensor:
    return torch.outer(torch.arange(length) + 1.0, model.frequencies)


def _by_length(model: Any, x: Tensor) -> Tensor:
    if x.shape[1] not in model.by_length:
        angles = _angles(model, x.shape[1])
        model.by_length[x.shape[1]] = {"cos": angles.cos(), "sin": (angles.sin(),)}
    found = model.by_length[x.shape[1]]
    return found["cos"] + found["sin"][0]


def _part_of_a_buffer(model: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    if model.length < length:
        with torch.no_grad():
            model.rows[:length] = _angles(model, length).sin()
        model.length = length
    return model.rows[:length]


def _longer_buffer(model: Any, x: Tensor) -> Tensor:
    if len(model.grown) < x.shape[1]:
        model.grown = _angles(model, 2 * x.shape[1]).cos()
    return model.grown[: x.shape[1]]


def _late_buffer(model: Any, x: Tensor) -> Tensor:
    if model.late is None:
        model.register_buffer("late", _angles(model, x.shape[1]), persistent=False)
    return model.late


@functools.lru_cache(maxsize=4)
def _ramp(length: int, width: int) -> Tensor:
    return torch.arange(length * width).reshape(length, width) / 7


_RAMPS: dict[Any, Tensor] = {}


def _in_a_global(model: Any, x: Tensor) -> Tensor:
    key = tuple(x.shape[1:])
    if key not in _RAMPS:
        _RAMPS[key] = torch.arange(24.0).reshape(key).cos()
    return _RAMPS[key]


class _Shared(Net):
    """Keeps its table for all instances."""

    tables: dict[str, Tensor] = {}  # noqa: RUF012


def _in_a_class(model: Any, x: Tensor) -> Tensor:
    if "sin" not in _Shared.tables:
        _Shared.tables["sin"] = torch.arange(8.0).sin()
    return _Shared.tables["sin"]


KEPT = {
    "dict of dicts": _by_length,
    "part of a buffer": _part_of_a_buffer,
    "buffer made longer": _longer_buffer,
    "buffer registered late": _late_buffer,
    "lru_cache": lambda model, x: _ramp(*x.shape[1:]),
    "global": _in_a_global,
    "class": _in_a_class,
}


QUICK = {"dict of dicts", "part of a buffer", "global"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in KEPT])
def test_tables_that_are_filled_in_the_first_call(name: str) -> None:
    torch.manual_seed(0)
    model = Net(KEPT[name])
    assert is_exact(model, {"x": X})
    assert model(X).isfinite()  # what the trace left nowhere


def test_no_fake_tensor_stays_in_a_cache() -> None:
    _RAMPS.clear()
    _ramp.cache_clear()
    trace(Net(KEPT["global"]), {"x": X})
    trace(Net(KEPT["lru_cache"]), {"x": X})
    assert not _RAMPS and not isinstance(_ramp(3, 8), FakeTensor)


def _of_the_batch(model: Any, x: Tensor) -> Tensor:
    if not model.by_length:
        model.by_length[0] = [x.detach().mean(0)]
    return model.by_length[0][0]


def _of_a_weight(model: Any, x: Tensor) -> Tensor:
    if model.length == 0:
        model.rows[:8] = model.layer.weight.detach()
        model.length = 1
    return model.rows[:3]


def _at_random(model: Any, x: Tensor) -> Tensor:
    if model.late is None:
        model.late = torch.rand(8)
    return model.late


def _otherwise_later(model: Any, x: Tensor) -> Tensor:
    if model.cached is None:
        model.cached = torch.arange(8.0)
        return x
    return model.cached


def _other_rows(model: Any, x: Tensor) -> Tensor:
    if model.length:
        return model.rows[1:4]
    model.rows[:3] = torch.arange(8.0)
    model.length = 1
    return model.rows[:3]


def _ever_longer(model: Any, x: Tensor) -> Tensor:
    model.grown = torch.cat([model.grown, x.detach().mean((0, 1))[None]])[-2:]
    return model.grown.sum(0)


@pytest.mark.parametrize(
    "table", [_of_the_batch, _of_a_weight, _at_random, _otherwise_later, _other_rows, _ever_longer]
)
def test_what_later_calls_compute_otherwise_is_refused(table: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(TraceError, match="called again|keeps a tensor|replaces a buffer"):
        trace(Net(table), {"x": X})
