"""Values that a script wrote to its model's parameters and buffers, compared with what the ranks of a step store."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.running.weights import ValueSource


@torch.no_grad()
def write_parameters(step: Any, source: ValueSource, names: Collection[str], is_dry: bool) -> bool:
    """Write the named parameters and buffers of a source into a step; return whether any rank had others. Collective.

    What is equal in the source's dtype stays as it is: masters are wider than a model of half precision. is_dry: write
    nothing.
    """
    differing = [pair for part in step.parts for pair in _differing(part, source, names)]
    if not is_dry:
        for stored, value in differing:
            stored.data.copy_(value)
        for part in step.parts:
            part.zero.publish()
    return _is_any(bool(differing), step.mesh.device)


def _differing(part: Any, source: ValueSource, names: Collection[str]) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts of parameters that a rank stores, with the values that they are to have, where they differ."""
    shard = importlib.import_module(f"{type(part).__module__.rpartition('.')[0]}.parameters").shard
    for _, entry in part.entries():
        name = next((each for each in part.names(entry.slot) if each in names), None)
        if name is not None and entry.stored is not None:
            local = shard(source(name), entry.slot.spec, part.mesh).reshape(-1)[entry.lo : entry.hi]
            yield from _changed(entry.stored.detach(), local)
    for own, spec, value in part.model.buffer_slots():  # which parameters are that forward does not read
        name = next((each for each in (own, *spec.aliases) if each in names), None)
        if name is not None and tuple(source.outline(name).shape) == tuple(spec.shape):
            yield from _changed(value, shard(source(name), spec, part.mesh))


def _changed(own: Tensor, given: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    given = given.reshape(own.shape).to(own.device)
    rounded = own.to(given.dtype)
    is_other = (rounded != given) & ~(rounded.isnan() & given.isnan())
    if bool(is_other.any()):
        yield own, torch.where(is_other, given.to(own.dtype), own)


def _is_any(value: bool, device: torch.device) -> bool:
    """Whether it is true on any rank."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return value
    found = torch.tensor([int(value)], device=device if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())
