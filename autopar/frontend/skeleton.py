"""The model without memory: a deep copy of fake tensors, which is traced in its place."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from autopar.errors import ModelError
from autopar.frontend import fakes
from autopar.frontend.admission import where
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
    skeleton = _copied(model, memo)
    config = getattr(skeleton, "config", None)
    if config is not None and hasattr(config, "use_cache"):
        config.use_cache = False
    # Not by the copy's: what stands for a dropped block has a mode of its own.
    if not _is_in_training(model):
        return skeleton.train()
    _check_modes(skeleton)
    return skeleton


def detached_copy(model: Module) -> Module:
    """A copy of the model, in which what a module keeps of its last forward (a recurrence's state) has no graph, which
    torch does not copy."""
    held = (tensor for module in model.modules() for tensor in tree_leaves(dict(vars(module))))
    kept = [tensor for tensor in held if isinstance(tensor, torch.Tensor) and not tensor.is_leaf]
    return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in kept})


def in_training(model: nn.Module) -> nn.Module:
    """The model, in training mode if all of it is in evaluation mode, as pretrained ones come; parts are on purpose."""
    return model if _is_in_training(model) else model.train()


def _is_in_training(model: nn.Module) -> bool:
    return any(module.training for module in model.modules())


def _check_modes(skeleton: nn.Module) -> None:
    """Raises ModelError where a model's own `train()` leaves parts in evaluation mode that are in training mode now: a
    training loop begins with it, so what is meant to be frozen would be trained."""
    if all(getattr(module.train, "__func__", None) is nn.Module.train for module in skeleton.modules()):
        return
    before = [(path, module, module.training) for path, module in skeleton.named_modules()]
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


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy. Raises ModelError that names the attribute which has none."""
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever an attribute's class raises
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception as cause:
                    if name in ("_modules", "_parameters", "_buffers"):
                        continue
                    raise ModelError(
                        "the model cannot be copied, which tracing does so that the model itself stays as it is",
                        values=f"{name} of {where(path)}, a {type(value).__name__}: {str(cause).splitlines()[0]}",
                        alternatives=[
                            "keep it out of the module, or give its class __deepcopy__ (locks, files, modules)",
                            "for tensors computed from parameters: torch.nn.utils.parametrizations in place of "
                            "torch.nn.utils.weight_norm, or prune.remove",
                        ],
                    ) from error
        raise ModelError("the model cannot be copied", values=f"{type(error).__name__}: {error}") from error
