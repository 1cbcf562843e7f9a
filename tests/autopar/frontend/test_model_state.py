"""What is held beside parameters is compared between steps without running the user's code."""

from __future__ import annotations

import collections
import enum
import pickle
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.frontend.state.model_state import ModelState


def _refuses(*given: Any, **named: Any) -> Any:
    raise RuntimeError("asked")


class _Silent:
    """Answers nothing: whatever it is asked raises."""

    __getattribute__ = __eq__ = __bool__ = __repr__ = __hash__ = _refuses

    def __init__(self, value: float = 0.0) -> None:
        object.__setattr__(self, "value", value)


class _Key:
    """Hashes by its value until it is told to refuse."""

    is_closed = False

    def __hash__(self) -> int:
        return _refuses() if self.is_closed else 1

    def __eq__(self, other: object) -> bool:
        return bool(_refuses())


class _Text(str):
    __eq__ = __bool__ = __repr__ = __len__ = _refuses
    __hash__ = str.__hash__


class _Pair(tuple[Any, ...]):
    __eq__ = __iter__ = __len__ = __getitem__ = __hash__ = _refuses


class _List(list[Any]):
    __eq__ = __iter__ = __len__ = __getitem__ = __repr__ = _refuses


class _Dict(dict[Any, Any]):
    __eq__ = __iter__ = __len__ = items = keys = values = __repr__ = _refuses


class _Settings(Mapping[str, float]):
    """A mapping that is no dict."""

    def __init__(self, **values: float) -> None:
        self._values = values

    __getitem__ = __iter__ = __len__ = items = _refuses


class _Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class _Kind(enum.Enum):
    ADD, SCALE = "add", "scale"


class _Number(enum.IntEnum):
    ONE, TWO = 1, 2


class _Net(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.held = held

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return _refuses()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return _refuses()

    def modules(self, *args: Any, **kwargs: Any) -> Any:
        return _refuses()


_DEEP: dict[str, Any] = {"a": {"b": [{"c": SimpleNamespace(d=[{"e": 1.0}])}]}}


def _swapped(value: Any) -> Callable[[_Net], None]:
    return lambda net: setattr(net, "held", value)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[_Net], None], str]] = {
    "silent": (lambda: [_Silent(1.0)], lambda net: object.__setattr__(net.held[0], "value", 2.0), "held[0].value of"),
    "silent for a number": (lambda: 1.0, lambda net: vars(net).update(held=_Silent()), "1.0 then, a _Silent now"),
    "text": (lambda: _Text("a"), _swapped(_Text("b")), "'a' then, 'b' now"),
    "pair": (lambda: _Pair((1, 2)), _swapped(_Pair((1, 3))), "a _Pair then"),
    "list": (lambda: _List([1, 2]), lambda net: list.append(net.held, 3), "a _List of 2 then, a _List of 3 now"),
    "dict": (lambda: _Dict(a=1), lambda net: dict.__setitem__(net.held, "a", 2), "held['a'] of"),
    "set": (lambda: {1, 2}, lambda net: net.held.add(3), "held[3] of"),
    "deque": (lambda: collections.deque([1.0]), lambda net: net.held.append(2.0), "held[1] of"),
    "no dict": (lambda: _Settings(a=1.0), lambda net: net.held._values.update(a=2.0), "held._values['a'] of"),
    "a view": (lambda: MappingProxyType(_DEEP), lambda net: _DEEP.update(z=1), "held['z'] of"),
    "slots": (lambda: _Slotted(1.0), lambda net: setattr(net.held, "scale", 2.0), "held.scale of"),
    "enum": (lambda: _Kind.ADD, _swapped(_Kind.SCALE), "_Kind.ADD then, _Kind.SCALE now"),
    "enum in a list": (lambda: [_Kind.ADD], lambda net: net.held.__setitem__(0, _Kind.SCALE), "_Kind.SCALE now"),
    "numbers of another type": (lambda: [1], lambda net: net.held.__setitem__(0, True), "1 then, True now"),
    "deep": (
        lambda: {"a": {"b": [{"c": SimpleNamespace(d=[{"e": 1.0}])}]}},
        lambda net: net.held["a"]["b"][0]["c"].d[0].update(e=2.0),
        "held['a']['b'][0]['c'].d[0]['e'] of",
    ),
    "an enum for a key": (lambda: {_Kind.ADD: 1}, lambda net: net.held.update({_Kind.ADD: 2}), "held[_Kind.ADD] of"),
    "a tensor": (lambda: _List([torch.ones(2)]), lambda net: list.__getitem__(net.held, 0).zero_(), "held[0] of"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_changes_are_seen_and_told(kind: str) -> None:
    make, change, told = CHANGES[kind]
    net = _Net(make())
    state = ModelState(net)
    assert state.is_same() and state.twin().is_same() and not state.changes()
    change(net)
    assert not state.is_same() and any(told in str(each) for each in state.changes())
    state.note()
    assert state.is_same()


def test_equal_values_are_no_change() -> None:
    for make in (lambda: _Text("a"), lambda: _Pair((1, "b")), lambda: [_Text("a"), float("nan")], lambda: _Number.ONE):
        net = _Net(make())
        state = ModelState(net)
        net.held = make()
        assert not any("_Text" in str(each) or "_Pair" in str(each) for each in state.changes())


def test_keys_that_answer_nothing() -> None:
    key = _Key()
    net = _Net({key: 1.0})
    _Key.is_closed = True
    try:
        state = ModelState(net)
        assert state.is_same()
    finally:
        _Key.is_closed = False


def test_what_lies_too_deep_is_no_number() -> None:
    """Such as an identity that another process would be given in the place of an object."""
    held: Any = [1.0]
    for _ in range(20):
        held = [held]
    net = _Net(held)
    state = ModelState(net)
    inner = held
    for _ in range(9):
        inner = inner[0]
    inner[0] = [2.0]
    (change,) = state.changes()
    assert not change.is_of_values and not change.is_movable


def test_where_changes_cannot_be_moved_to() -> None:
    net = _Net({"pair": (1.0, [2.0]), "names": {"a"}, _Kind.ADD: 1.0})
    state = ModelState(net)
    net.held.update({"pair": (3.0, net.held["pair"][1]), _Kind.ADD: 2.0})
    net.held["names"].add("b")
    found = {str(each).partition(" ")[0]: each for each in state.changes()}
    assert not found["held['pair'][0]"].is_movable and not found["held['names']['b']"].is_movable
    moved = found["held[_Kind.ADD]"]
    assert moved.is_movable
    other = _Net({_Kind.ADD: 1.0})
    ModelState(other).apply(pickle.loads(pickle.dumps([(moved.key, moved.new)])))
    assert other.held == {_Kind.ADD: 2.0}


def test_parts_are_told_whatever_the_model_says_of_them() -> None:
    net = _Net(1.0)
    state = ModelState(net, loss_fn=_Net(2.0))
    net.fc.weight.requires_grad_(False)
    assert [each.name for each in state.changes()] == ["requires_grad of fc.weight"]
    net.fc.weight.requires_grad_(True)
    state.apply([(("attribute", "loss_fn", ("held",)), 3.0), (("attribute", "", ("held",)), 4.0)])
    assert (state.loss_fn.held, net.held) == (3.0, 4.0)


def test_a_module_around_another_has_no_mode_of_its_own() -> None:
    """As what torch.compile gives of a module, whose `training` is the other's."""
    net = _Net(1.0)
    around = nn.Sequential(torch.compile(net, backend="eager"))
    state = ModelState(around)
    assert state.is_same() and state.twin().is_same()
    net.held = 2.0
    assert not state.is_same() and any("held" in str(each) for each in state.changes())
