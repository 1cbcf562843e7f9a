"""The model without memory: a deep copy of fake tensors, which is traced in its place."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.errors import ModelError
from autopar.frontend import fakes
from autopar.frontend.attributes import attribute, is_a, modules_of, named_modules
from autopar.frontend.copies import deep_copy, own_numbers
from autopar.frontend.depth import Dropped, Truncation, dropped_blocks

Module = TypeVar("Module", bound=nn.Module)


def skeleton_of(
    model: nn.Module,
    fake: FakeTensorMode,
    param_dtype: torch.dtype | None = None,
    cuts: tuple[Truncation, ...] = (),
) -> nn.Module:
    """A deep copy of `model`, `in_training`, with every parameter and buffer fake; ties are kept.

    On the CPU, not on meta, since that is where a tensor lies that forward makes without naming a device. cuts: runs
    that will be shortened: what is deleted then is not copied.
    """
    dropped, kept = dropped_blocks(model, cuts)
    memo: dict[int, Any] = {id(block): Dropped() for block in dropped}
    for parameter in (p for module in kept for p in module._parameters.values() if p is not None):
        if id(parameter) not in memo:
            dtype = param_dtype if param_dtype is not None and parameter.is_floating_point() else parameter.dtype
            memo[id(parameter)] = fakes.parameter(fake, parameter, dtype)
    for buffer in (b for module in kept for b in module._buffers.values() if b is not None):
        if id(buffer) not in memo:
            memo[id(buffer)] = fakes.empty(fake, tuple(buffer.shape), buffer.dtype)
    skeleton = deep_copy(model, memo)
    config = attribute(skeleton, "config")
    if attribute(config, "use_cache") is not None:
        with contextlib.suppress(Exception):  # a frozen one
            config.use_cache = False
    # Not by the copy's: what stands for a dropped block has a mode of its own.
    if not _is_in_training(model):
        skeleton.train()
        return skeleton
    _check_modes(skeleton)
    return skeleton


def loss_skeleton(loss_fn: Any, fake: FakeTensorMode) -> Any:
    """A copy of the loss, of a module with fake tensors: a forward that is recorded writes to what it holds."""
    if not is_a(loss_fn, nn.Module):
        return own_numbers(loss_fn)
    memo: dict[int, Any] = {}
    for module in modules_of(loss_fn):
        for parameter in (p for p in module._parameters.values() if p is not None):
            memo.setdefault(id(parameter), fakes.parameter(fake, parameter, parameter.dtype))
        for buffer in (b for b in module._buffers.values() if b is not None):
            memo.setdefault(id(buffer), fakes.empty(fake, tuple(buffer.shape), buffer.dtype))
    return deep_copy(loss_fn, memo)


def in_training(model: nn.Module) -> nn.Module:
    """The model, in training mode if all of it is in evaluation mode, as pretrained ones come; parts are on purpose."""
    if not _is_in_training(model):
        model.train()
    return model


def _is_in_training(model: nn.Module) -> bool:
    return any(module.training for module in modules_of(model))


def _check_modes(skeleton: nn.Module) -> None:
    """Raises ModelError where a model's own `train()` leaves parts in evaluation mode that are in training mode now: a
    training loop begins with it, so what is meant to be frozen would be trained."""
    if all(getattr(module.train, "__func__", None) is nn.Module.train for module in modules_of(skeleton)):
        return
    before = [(path, module, module.training) for path, module in named_modules(skeleton)]
    skeleton.train()
    frozen = [path or "the model" for path, module, was in before if was and not module.training]
    for _, module, was in before:
        module.training = was
    if frozen:
        raise ModelError(
            "train() of the model leaves parts in evaluation mode, and has not been called",
            values=", ".join(frozen[:4]) + (f" and {len(frozen) - 4} more" if len(frozen) > 4 else ""),
            alternatives="model.train() before the model is given, as a training loop calls it",
        )
