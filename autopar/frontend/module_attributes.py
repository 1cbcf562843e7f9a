"""The plain attributes of one module, as a trace read them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from autopar.frontend.state_values import MISSING, is_equal


class ModuleAttributes:
    """Plain attributes by their values, and names that the module's class has, which the module may come to have."""

    def __init__(self, path: str, module: nn.Module, names: tuple[str, ...], inherited: tuple[str, ...]) -> None:
        self.path, self.module, self.names, self.inherited = path, module, names, inherited
        own = vars(module)
        self.own, self.length = own, len(own)
        self.get: Callable[[Any], Any] = operator.itemgetter(*names, *(("training",) if len(names) == 1 else ()))
        self.values: tuple[Any, ...] = self.get(own)

    def of(self, module: nn.Module) -> ModuleAttributes:
        """The same values, asked of another module in this one's place."""
        made = object.__new__(ModuleAttributes)
        vars(made).update(vars(self))
        made.module, made.own = module, vars(module)
        return made

    def is_same(self, is_training: bool) -> bool:
        own = self.own
        if len(own) != self.length and any(name in own for name in self.inherited):
            return False
        try:
            if all(map(operator.is_, self.get(own), self.values)):
                return True
        except KeyError:
            return False
        return (own["training"] == self.values[0] or not is_training) and not any(self.changed())

    def changed(self) -> Iterator[tuple[str, Any, Any]]:
        """(name, old, new) of each, but for the mode."""
        for name, old in zip(self.names, self.values, strict=False):
            new = self.own.get(name, MISSING)
            if name != "training" and new is not old and not is_equal(old, new):
                yield name, old, new
        for name in self.inherited:
            if name in self.own:
                yield name, getattr(type(self.module), name, MISSING), self.own[name]
