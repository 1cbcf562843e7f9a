"""Hooks of a model's modules and parameters: whether they changed since its program was made."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping

from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from autopar.frontend.admission import BACKWARD_HOOKS, GLOBAL_HOOKS, where
from autopar.frontend.attributes import dict_of
from autopar.frontend.state.values import Change

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
