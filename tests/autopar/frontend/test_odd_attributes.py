"""Models that hold what is unusual but legal are traced, and compute what they compute eagerly."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.errors import ModelError, TraceError
from autopar.frontend.trace import trace
from benchmarks.by_hand import is_exact


class _Silent:
    """Answers nothing: whatever it is asked raises."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"{name} of what answers nothing")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __hash__(self) -> int:
        raise RuntimeError("hashed")

    def __repr__(self) -> str:
        raise RuntimeError("printed")

    def __bool__(self) -> bool:
        raise RuntimeError("asked")


class _Closed(tuple[Any, ...]):
    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        raise NotImplementedError

    def __hash__(self) -> int:
        raise NotImplementedError


class _ClosedList(list[Any]):
    __len__ = __iter__ = __getitem__ = _Closed.__len__  # type: ignore[assignment]


class _ClosedDict(dict[Any, Any]):
    __len__ = __iter__ = items = keys = values = _Closed.__len__  # type: ignore[assignment]


class _Color(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class _Config:
    use_cache: bool = True
    sizes: tuple[int, ...] = (1, 2)


class _Slotted:
    __slots__ = ("lock", "unset")

    def __init__(self) -> None:
        self.lock = threading.Lock()


_Pair = collections.namedtuple("_Pair", "a b")


def _cycle() -> list[Any]:
    found: list[Any] = [1]
    found.append({"again": found})
    return found


def _nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


ATTRIBUTES = {
    "answers nothing": lambda: [_Silent()],
    "closed tuple": lambda: (_Closed((1, 2)), [_Closed()]),
    "closed list": lambda: _ClosedList([1, torch.ones(2)]),
    "closed dict": lambda: _ClosedDict({"a": torch.ones(2)}),
    "lock": threading.RLock,
    "generator": lambda: (i for i in range(3)),
    "module of Python": lambda: {"np": np, "torch": torch},
    "lambda with a lock": lambda: functools.partial(lambda lock, x: x, threading.Lock()),
    "cycle": _cycle,
    "deep": lambda: _nested(3000),
    "arrays": lambda: [np.ones(3), np.float32(2), np.array([None, 1], dtype=object)],
    "enum": lambda: {_Color.RED: _Color.RED},
    "frozen config": _Config,
    "slots": _Slotted,
    "named tuple": lambda: _Pair(1, [2]),
    "sizes and dtypes": lambda: (torch.Size([1, 2]), torch.float32, torch.device("cpu"), torch.strided),
    "generator of torch": lambda: torch.Generator().manual_seed(1),
    "script function": lambda: torch.jit.script(_doubled),
    "weak": lambda: weakref.ref(_Color),
    "nan": lambda: [float("nan"), {1, 2}, collections.deque([1])],
    "with a graph": lambda: torch.ones(3, requires_grad=True) * 2,
}


def _doubled(x: Tensor) -> Tensor:
    return x * 2


class _Layer(nn.Module):
    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.held = held
        self.register_module("nothing", None)
        self.register_parameter("no_weight", None)
        self.register_buffer("no_buffer", None)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(x))


class _Net(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers._modules.values():
            x = layer(x) if layer is not None else x
        return x.square().mean()


BATCH = {"x": torch.randn(4, 6)}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_traced_with_what_a_module_holds(kind: str) -> None:
    model = _Net(nn.ModuleList(_Layer(ATTRIBUTES[kind]()) for _ in range(3)))
    held = [layer.held for layer in model.layers]
    assert is_exact(model, BATCH)
    assert all(layer.held is own for layer, own in zip(model.layers, held, strict=True))


class _OddList(nn.ModuleList):
    """Takes a number, and neither counts nor slices what it has."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for index in range(count):
            self.add_module(str(index), _Layer() if index % 2 else None)

    def __len__(self) -> int:
        raise TypeError

    def __getitem__(self, index: Any) -> Any:
        raise TypeError


class _Overrides(_Layer):
    """Answers for itself where torch's modules have methods that all tools call."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return list(super().named_modules(*args, **kwargs))

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    @property
    def config(self) -> Any:
        raise RuntimeError

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_odd"):
            raise KeyError(name)
        return super().__getattr__(name)


def _shared() -> nn.Module:
    layer = _Layer()
    return nn.ModuleDict({"a": layer, "b": layer, "c": _Layer()})


def _parent() -> nn.Module:
    layers = nn.ModuleList(_Layer() for _ in range(3))
    for layer in layers:
        layer.held = [layers]
    return layers


def _old_weight_norm() -> nn.Module:
    layers = nn.ModuleList(_Layer() for _ in range(3))
    for layer in layers:
        torch.nn.utils.weight_norm(layer.fc)
    return layers


LISTS = {
    "None in a list": lambda: nn.ModuleList([None, _Layer(), None, _Layer(), _Layer()]),
    "a dict without one": lambda: _without(nn.ModuleDict({"a": _Layer(), "b": _Layer()}), "a"),
    "a list of its own class": lambda: _OddList(6),
    "overridden methods": lambda: nn.ModuleList(_Overrides() for _ in range(3)),
    "shared": _shared,
    "a parent": _parent,
    "weight norm": _old_weight_norm,
}


def _without(layers: nn.ModuleDict, name: str) -> nn.ModuleDict:
    layers._modules[name] = None
    return layers


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_traced_with_odd_lists_of_modules(kind: str) -> None:
    assert is_exact(_Net(LISTS[kind]()), BATCH)


def test_modules_may_be_as_deep_as_a_forward_can_call() -> None:
    layer: nn.Module = _Layer()
    for _ in range(250):
        layer = nn.Sequential(layer)
    assert trace(_Net(nn.ModuleList([layer])), BATCH).body


def test_parameters_that_the_model_hides_are_refused_by_name() -> None:
    model = _Net(nn.ModuleList(_Layer() for _ in range(2)))
    model.named_parameters = lambda *args, **kwargs: iter(())  # type: ignore[method-assign, assignment, misc]
    with pytest.raises(ModelError, match=r"layers.0.fc.weight"):
        trace(model, BATCH)
    for layer in model.layers:
        layer.requires_grad_(False)
    with pytest.raises(TraceError, match="nothing to train"):
        trace(model, BATCH)
