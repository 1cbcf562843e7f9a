"""Tracing runs of blocks that repeat at reduced depth.

A `ModuleList` whose blocks repeat with a period k (same classes, parameter shapes and plain attributes, the layer index
aside; k = 1 where all are equal, 2 where windowed and full attention take turns) is cut before tracing to the first
blocks of its last run: to k + 1 of them, so that a computation that depends on the block's index shows as two different
layers (then the whole model is traced), and to as many more as it takes for the last one to be of the kind that the
last one is. Blocks that look equal may behave differently: `depth_check.py` decides which runs may be cut. Only the
last run of a list is cut: models look masks up by position, and positions must not shift.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autopar.frontend.attributes import (
    FUNCTIONS,
    attribute,
    attributes_of,
    blocks_of,
    children_of,
    is_a,
    named_modules,
    named_parameters,
    summary,
)

_INDEX_NAMES = ("idx", "index", "layer_id", "layer_number")


@dataclass(frozen=True, slots=True)
class Truncation:
    """A run to cut: `path` has `num_blocks` blocks; those from `first` on repeat with `period`, and a cut keeps
    `num_kept` of them.
    """

    path: str
    num_blocks: int
    first: int
    period: int = 1

    @property
    def num_repeating(self) -> int:
        return self.num_blocks - self.first

    @property
    def num_kept(self) -> int:
        least = self.period + 1
        return least + (self.num_repeating - least) % self.period

    @property
    def end(self) -> int:
        """Return the index of the first block that is deleted."""
        return self.first + self.num_kept

    def with_longer_periods(self) -> Iterator[Truncation]:
        """Yield this cut, and cuts with multiples of its period, while they delete anything."""
        for period in range(self.period, self.num_repeating // 2 + 1, self.period):
            cut = replace(self, period=period)
            if cut.num_kept < self.num_repeating:
                yield cut


def equal_runs(model: nn.Module) -> tuple[Truncation, ...]:
    """Return the runs of `model` that look repeated and are long enough to be cut; `depth_check.py` decides which may
    be.
    """
    cuts: list[Truncation] = []
    for path, module in list(named_modules(model)):
        if not isinstance(module, nn.ModuleList) or any(path.startswith(cut.path + ".") for cut in cuts):
            continue
        cut = _longest(path, module)
        if cut is not None:
            cuts.append(cut)
    return tuple(cuts)


def _longest(path: str, blocks: nn.ModuleList) -> Truncation | None:
    """Return the cut that deletes most blocks, with the shortest period."""
    numbers: dict[Any, int] = {}
    kinds = [numbers.setdefault(fingerprint(block), len(numbers)) for block in blocks_of(blocks)]
    best: Truncation | None = None
    for period in range(1, len(kinds) // 2 + 1):
        first = len(kinds) - period
        while first > 0 and kinds[first - 1] == kinds[first - 1 + period]:
            first -= 1
        cut = Truncation(path, len(kinds), first, period)
        num_deleted = cut.num_repeating - cut.num_kept
        if num_deleted > (best.num_repeating - best.num_kept if best else 0) and can_repeat(blocks, cut):
            best = cut
    return best


def can_repeat(blocks: nn.ModuleList, cut: Truncation) -> bool:
    """Return whether the run has parameters, and, where neighbors differ, whether its blocks are layers by themselves,
    of several modules with parameters (`layers.py`).
    """
    owners = [
        {name.rpartition(".")[0] for name, _ in named_parameters(block)} if block is not None else set()
        for block in blocks_of(blocks)[-cut.period :]
    ]
    return min(map(len, owners)) > (cut.period > 1)


class Dropped(nn.Module):
    """Placeholder for a block that will be deleted, in a copy that omits it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a block beyond the kept ones is called from outside its list")


def dropped_blocks(model: nn.Module, cuts: tuple[Truncation, ...]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the blocks that `shorten` will delete and nothing else refers to, and all modules that stay."""
    ends = {id(model.get_submodule(cut.path)): cut.end for cut in cuts}
    kept: dict[int, nn.Module] = {}
    beyond: list[nn.Module] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in kept:
            kept[id(module)] = module
            children = list(module._modules.values())
            end = ends.get(id(module), len(children))
            waiting += [child for child in children[:end] if child is not None]
            beyond += [child for child in children[end:] if child is not None]
    return [block for block in beyond if id(block) not in kept], list(kept.values())


def shorten(model: nn.Module, cuts: tuple[Truncation, ...]) -> None:
    """Delete the blocks of `cuts` beyond the kept ones from `model`."""
    for cut in cuts:
        blocks = model.get_submodule(cut.path)
        assert isinstance(blocks, nn.ModuleList)
        for name in list(blocks._modules)[cut.end :]:
            del blocks._modules[name]


def fingerprint(module: nn.Module | None) -> Any:
    """Return a key, equal for blocks that may be traced as one. None stands for an empty entry of a list."""
    if module is None:
        return None
    attributes = tuple(
        (name, _plain(value))
        for name, value in sorted(attributes_of(module).items())
        if not name.startswith("_") and not name.endswith(_INDEX_NAMES)
    )
    tensors = tuple(
        (name, tuple(t.shape), t.dtype, t.requires_grad)
        for name, t in (*module._parameters.items(), *module._buffers.items())
        if t is not None
    )
    hooks = tuple(_plain(tuple(table.values())) for table in (module._forward_hooks, module._forward_pre_hooks))
    children = tuple((name, fingerprint(child)) for name, child in children_of(module))
    return (type(module), module.training, attributes, tensors, hooks, children)


def _plain(value: Any) -> Any:
    return summary(value, _identity)


def _identity(value: Any) -> Hashable:
    """Return the name of a function, or the identity of any other value."""
    if is_a(value, *FUNCTIONS):
        return attribute(value, "__module__"), attribute(value, "__qualname__")
    return type(value), id(value)
