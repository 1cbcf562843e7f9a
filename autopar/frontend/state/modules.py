"""Plain attributes and hooks of modules: whether they changed since the model's program was made."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from autopar.frontend.admission import BACKWARD_HOOKS, GLOBAL_HOOKS, where
from autopar.frontend.attributes import dict_of
from autopar.frontend.state.values import MISSING, Change, is_equal


class ModuleAttributes:
    """A module's plain attributes."""

    def __init__(self, path: str, module: nn.Module, names: tuple[str, ...], inherited: tuple[str, ...]) -> None:
        attributes = dict_of(module)
        # A module around another (of torch.compile) has no mode of its own.
        first = "training" if "training" in attributes else "_modules"
        names = (first, *(name for name in names if name != "training"))
        self.path, self.module, self.names, self.inherited = path, module, names, inherited
        self.attributes, self.length = attributes, len(attributes)
        self.get: Callable[[Any], Any] = operator.itemgetter(*names, *((first,) if len(names) == 1 else ()))
        self.values: tuple[Any, ...] = self.get(attributes)

    def of(self, module: nn.Module) -> ModuleAttributes:
        """Return the same values, compared with another module in this one's place."""
        copy = object.__new__(ModuleAttributes)
        vars(copy).update(vars(self))
        copy.module, copy.attributes = module, dict_of(module)
        return copy

    def is_same(self, is_training: bool) -> bool:
        attributes = self.attributes
        if len(attributes) != self.length and any(name in attributes for name in self.inherited):
            return False
        try:
            if all(map(operator.is_, self.get(attributes), self.values)):
                return True
        except KeyError:
            return False
        return (is_equal(attributes[self.names[0]], self.values[0]) or not is_training) and not any(self.changed())

    def changed(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield (name, old, new) of changed attributes, except the mode."""
        for name, old in zip(self.names, self.values, strict=False):
            new = self.attributes.get(name, MISSING)
            if name != "training" and new is not old and not is_equal(old, new):
                yield name, old, new
        for name in self.inherited:
            if name in self.attributes:
                yield name, of_class(type(self.module), name), self.attributes[name]


def class_with(kind: type, name: str) -> type | None:
    """Return the first class, among a class and its bases, that has an attribute."""
    return next((base for base in kind.__mro__ if name in vars(base)), None)


def of_class(kind: type, name: str) -> Any:
    """Return the raw attribute of a class or of one of its bases."""
    owner = class_with(kind, name)
    return MISSING if owner is None else vars(owner)[name]


def is_in_training(module: nn.Module) -> bool:
    """Return whether a module is in training mode; a module without a mode is."""
    mode = dict_of(module).get("training", True)
    return type(mode) not in (bool, int, type(None)) or bool(mode)


def alike_modes(modes: Mapping[str, bool]) -> Mapping[str, bool]:
    """Return modes for comparison: a model that is in evaluation mode as a whole is trained in training mode."""
    return modes if any(modes.values()) else dict.fromkeys(modes, True)


HOOKS = "forward hooks of modules"
_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
_OF_GRADIENTS = tuple(map(operator.attrgetter, ("_backward_hooks", "_post_accumulate_grad_hooks")))


class Hooks:
    """The present hooks of these modules and parameters. A program runs no backward hooks."""

    def __init__(self, modules: Mapping[str, nn.Module], parameters: list[nn.Parameter]) -> None:
        self._forward = [dict_of(module)[table] for module in modules.values() for table in _FORWARD]
        self._num_forward, self._parameters = sum(map(len, self._forward)), parameters
        self._backward = {
            **{(path, table): dict_of(m)[table] for path, m in modules.items() for table in BACKWARD_HOOKS},
            **{("all modules", table): getattr(torch_module, table) for table in GLOBAL_HOOKS},
        }
        self._last_handle = -1

    def are_same(self) -> bool:
        """Return whether there are as many forward hooks as before, and no hooks that no program runs."""
        return sum(map(len, self._forward)) == self._num_forward and not self._has_backward()

    def _has_backward(self) -> bool:
        """Return whether there are backward hooks. Looks only if torch has made a handle since."""
        if RemovableHandle.next_id == self._last_handle:
            return False
        hooks = [*self._backward.values(), *(get(p) for p in self._parameters for get in _OF_GRADIENTS)]
        self._last_handle = -1 if any(hooks) else RemovableHandle.next_id
        return any(hooks)

    def changes(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[Change]:
        """Yield changes. parameters: with their names."""
        if (now := sum(map(len, self._forward))) != self._num_forward:
            yield Change(HOOKS, self._num_forward, now, is_of_parts=True)
        for (path, table), hooks in self._backward.items():
            if hooks:
                yield Change(f"{table.strip('_').replace('_', ' ')} of {where(path)}", 0, len(hooks), is_of_parts=True)
        for name, parameter in parameters:
            num_hooks = sum(len(get(parameter) or ()) for get in _OF_GRADIENTS)
            if num_hooks:
                yield Change(f"hooks of {name}'s gradient", 0, num_hooks, is_of_parts=True)
