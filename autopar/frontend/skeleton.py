"""Build the model without memory: a deep copy of fake tensors, which is traced in its place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.errors import ModelError
from autopar.frontend import fakes
from autopar.frontend.attributes import attribute, is_a, modules_of, named_modules
from autopar.frontend.copies import callable_copy, deep_copy
from autopar.frontend.depth import Dropped, Truncation, dropped_blocks

Module = TypeVar("Module", bound=nn.Module)

VALUE = "_autopar_value"
"""The attribute of a fake buffer with the value of the model's, if that is small."""
_SMALL = 16
"""The most elements of buffers whose values a trace knows."""


def skeleton_of(
    model: nn.Module,
    fake: FakeTensorMode,
    param_dtype: torch.dtype | None = None,
    cuts: tuple[Truncation, ...] = (),
) -> nn.Module:
    """Return a deep copy of `model`, `in_training`, with every parameter and buffer fake; ties are kept.

    On the CPU, not on meta, since tensors that forward makes without naming a device are there. cuts: runs that will be
    shortened: blocks to be deleted are not copied.
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
    for buffer in _valued_buffers(model):
        if id(buffer) in memo:
            setattr(memo[id(buffer)], VALUE, buffer.detach().clone())
    skeleton = deep_copy(model, memo)
    config = attribute(skeleton, "config")
    if attribute(config, "use_cache") is not None:
        with contextlib.suppress(Exception):  # a frozen one
            config.use_cache = False
    # Not the copy's mode: a placeholder for a dropped block has a mode of its own.
    if not _is_in_training(model):
        skeleton.train()
        return skeleton
    _check_modes(skeleton)
    return skeleton


def _valued_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Yield small buffers with equal values in all modules of a class, as equal blocks are traced once.

    Of floats only single numbers: norms write to the others within operators.
    """
    buffers_of: dict[tuple[type, str], list[Tensor]] = {}
    for module in modules_of(model):
        for name, buffer in module._buffers.items():
            if buffer is not None and is_a(buffer, Tensor):
                buffers_of.setdefault((type(module), name), []).append(buffer)
    for first, *others in buffers_of.values():
        is_plain = not first.is_floating_point() and not first.is_complex()
        is_small = first.numel() <= _SMALL and not first.is_meta and (is_plain or first.dim() == 0)
        if is_small and type(first) is Tensor and all(_is_equal(first, other) for other in others):
            yield from (first, *others)


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return not other.is_meta and one.shape == other.shape and torch.equal(one, other)


def loss_skeleton(loss_fn: Any, fake: FakeTensorMode) -> Any:
    """Return a copy of the loss; of a module with fake tensors, since a recorded forward writes to them."""
    if not is_a(loss_fn, nn.Module):
        return callable_copy(loss_fn)
    memo: dict[int, Any] = {}
    for module in modules_of(loss_fn):
        for parameter in (p for p in module._parameters.values() if p is not None):
            memo.setdefault(id(parameter), fakes.parameter(fake, parameter, parameter.dtype))
        for buffer in (b for b in module._buffers.values() if b is not None):
            memo.setdefault(id(buffer), fakes.empty(fake, tuple(buffer.shape), buffer.dtype))
    return deep_copy(loss_fn, memo)


def in_training(model: nn.Module) -> nn.Module:
    """Return the model, in training mode if it is in evaluation mode as a whole, as pretrained ones are.

    Parts in evaluation mode are taken as intended.
    """
    if not _is_in_training(model):
        model.train()
    return model


def _is_in_training(model: nn.Module) -> bool:
    return any(module.training for module in modules_of(model))


def _check_modes(skeleton: nn.Module) -> None:
    """Raise ModelError where a model's own `train()` leaves parts in evaluation mode that are in training mode now.

    A training loop begins with `train()`, and would train parts that are meant to be frozen.
    """
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
            alternatives="call model.train() before compiling, as a training loop does",
        )
