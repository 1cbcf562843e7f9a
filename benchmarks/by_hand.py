"""A model compiled for one CPU and trained in this process, beside the same model trained by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar.compiled import CompiledProgram
from autopar.frontend.copies import deep_copy
from codegen.runtime.reference import SameDropout

STEPS = 3
TOLERANCE = 1e-5


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Not Adam, which would hide a gradient that is off by a factor."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def decayed_adamw(parameters: Any) -> torch.optim.Optimizer:
    """Moves what has a gradient of zero, too, and passes over what has none."""
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5)


def compiled_for(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Tensor] | None = None,
    cluster: str = "1 cpu",
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    **options: Any,
) -> CompiledProgram:
    """`autopar.compile` without its warnings."""
    with warnings.catch_warnings(action="ignore"):
        return autopar.compile(model, cluster, example_inputs=batch, loss_fn=loss_fn, optimizer=optimizer, **options)


def is_exact(
    model: nn.Module,
    batch: Mapping[str, Any],
    loss_fn: Callable[..., Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    **options: Any,
) -> bool:
    """Whether losses and the whole state dict are those of a loop over the model itself, after STEPS steps."""
    compiled = compiled_for(model, batch, loss_fn, optimizer=optimizer, **options)
    by_hand = deep_copy(model)
    losses, state = _trained(compiled, batch)
    update = optimizer([p for p in by_hand.parameters() if p.requires_grad])
    for index, found in enumerate(losses):
        update.zero_grad()
        with SameDropout(0, index):
            output = by_hand(**{name: value for name, value in batch.items() if loss_fn is None or name != "target"})
            loss = output if loss_fn is None else loss_fn(output, batch["target"])
        torch.autograd.backward(loss)
        update.step()
        wanted = float(loss.detach())
        if abs(found - wanted) > TOLERANCE * max(abs(wanted), 1e-3):
            return False
    return equal_states(state, by_hand.state_dict())


def _trained(compiled: CompiledProgram, batch: Mapping[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and last state of a program of one rank; the process group lives as long as this."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        step = compiled.build(device="cpu")
        losses = [float(step(dict(batch))) for _ in range(STEPS)]
        return losses, step.full_state_dict()
    finally:
        dist.destroy_process_group()


def equal_states(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    """Whether two state dicts have the same names, and values within TOLERANCE of the tensor's norm."""
    if set(found) != set(wanted):
        return False
    for name, value in wanted.items():
        difference = (found[name].double() - value.double()).norm()
        if difference > TOLERANCE * value.double().norm().clamp(min=1e-3):
            return False
    return True
