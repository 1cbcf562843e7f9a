"""Tracing runs of equal blocks at reduced depth.

A `ModuleList` whose blocks are equal (same classes, parameter shapes and plain attributes, the layer index aside)
is cut to its first two blocks of the last run before tracing. Two are kept so that a computation that depends on
the block's index shows as two different layers; then the whole model is traced. What looks equal need not act so:
`depth_check.py` says which runs may be cut. Only the last run of a list is cut:
models look masks up by position, and positions must not shift.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

KEPT_BLOCKS = 2
_INDEX_NAMES = ("idx", "index", "layer_id", "layer_number")


@dataclass(frozen=True, slots=True)
class Truncation:
    """`path` has `num_blocks` blocks; those from `first` on are equal; KEPT_BLOCKS of them stay when it is cut."""

    path: str
    num_blocks: int
    first: int


def equal_runs(model: nn.Module) -> tuple[Truncation, ...]:
    """The runs of `model` that look equal and are long enough to be cut (`depth_check.py` says whether they may be)."""
    cuts: list[Truncation] = []
    for path, module in list(model.named_modules()):
        if not isinstance(module, nn.ModuleList) or any(path.startswith(cut.path + ".") for cut in cuts):
            continue
        prints = [fingerprint(block) for block in module]
        first = len(prints)
        while first > 0 and prints[first - 1] == prints[-1]:
            first -= 1
        if len(prints) - first > KEPT_BLOCKS and any(True for _ in module[-1].parameters()):
            cuts.append(Truncation(path, len(prints), first))
    return tuple(cuts)


class Dropped(nn.Module):
    """Stands in place of a block that is to be deleted, in a copy that need not hold it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a block beyond the kept ones is called from outside its list")


def dropped_blocks(model: nn.Module, cuts: tuple[Truncation, ...]) -> tuple[list[nn.Module], list[nn.Module]]:
    """The blocks that `shorten` will delete and nothing else refers to, and all modules that stay."""
    ends = {id(model.get_submodule(cut.path)): cut.first + KEPT_BLOCKS for cut in cuts}
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
        del blocks[cut.first + KEPT_BLOCKS :]


def fingerprint(module: nn.Module) -> Any:
    """What must be equal for two blocks to be traced as one."""
    attributes = tuple(
        (name, _plain(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and not name.endswith(_INDEX_NAMES)
    )
    tensors = tuple(
        (name, tuple(t.shape), t.dtype, t.requires_grad)
        for name, t in (*module._parameters.items(), *module._buffers.items())
        if t is not None
    )
    hooks = tuple(_plain(tuple(table.values())) for table in (module._forward_hooks, module._forward_pre_hooks))
    children = tuple((name, fingerprint(child)) for name, child in module.named_children())
    return (type(module), module.training, attributes, tensors, hooks, children)


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_plain(item) for item in value)
    if isinstance(value, dict):
        return tuple((str(key), _plain(item)) for key, item in value.items())
    if callable(value) and hasattr(value, "__qualname__"):
        return value.__qualname__
    return (type(value), id(value))
