"""The parameters and buffers of a step's programs: which ones they read and change, and values that a script wrote."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.frontend.state.forward_numbers import ForwardOf
from autopar.program import GeneratedProgram
from autopar.running.weights import ValueSource, tables_of


def forward_of(program: GeneratedProgram) -> ForwardOf:
    """Return the forward that a program was made of."""
    assert program.remake is not None
    return program.remake.forward(program)


def unread_of(step: Any, other: Any) -> frozenset[str]:
    """Return this rank's parameters, by name, to which the program of another step gives no gradient."""
    read = {slot.name for part in other.parts for slot in part.model.slots() if slot.spec.requires_grad}
    trained = {entry.slot.name for bucket, entry in step.entries() if bucket.key.requires_grad}
    return frozenset(trained - read)


def values_of(program: GeneratedProgram) -> ValueSource:
    """Return the values of a program's model, of its loss, and of tensors that no module has."""
    return ValueSource(program.model, None, program.loss_fn, tables_of(program.best.graph))


def changed_tables(program: GeneratedProgram, other: GeneratedProgram) -> set[str]:
    """Return the names of the tensors without a module whose values differ between two programs of one model."""
    before, now = tables_of(program.best.graph), tables_of(other.best.graph)
    shared = before.keys() & now.keys()
    return {n for n in shared if before[n].shape == now[n].shape and not torch.equal(before[n], now[n])}


def written_buffers(step: Any) -> set[str]:
    """Return the names of this rank's buffers that a forward in training changes."""
    names: set[str] = set()
    for part in step.parts:
        written = {id(value) for value in part.written_buffers()}
        for name, spec, value in part.model.buffer_slots():
            if id(value) in written:
                names |= {name, *spec.aliases}
    return names


@torch.no_grad()
def write_parameters(step: Any, source: ValueSource, names: Collection[str], is_dry: bool) -> bool:
    """Write the named parameters and buffers of a source into a step; return whether any rank's values differed.

    Collective. Values that are equal in the source's dtype stay: the master is wider than a model in half precision.
    is_dry: write nothing.
    """
    differing = [pair for part in step.parts for pair in _differing(part, source, names)]
    if not is_dry:
        for stored, value in differing:
            stored.data.copy_(value)
        for part in step.parts:
            part.zero.publish()
    return _is_any(bool(differing), step.mesh.device)


def _differing(part: Any, source: ValueSource, names: Collection[str]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the shards that a rank stores, with their new values, where the two differ."""
    shard = importlib.import_module(f"{type(part).__module__.rpartition('.')[0]}.parameters").shard
    for _, entry in part.entries():
        name = next((alias for alias in part.names(entry.slot) if alias in names), None)
        if name is not None and entry.stored is not None:
            local = shard(source(name), entry.slot.spec, part.mesh).reshape(-1)[entry.lo : entry.hi]
            yield from _changed(entry.stored.detach(), local)
    for buffer, spec, value in part.model.buffer_slots():  # includes parameters that forward does not read
        name = next((alias for alias in (buffer, *spec.aliases) if alias in names), None)
        if name is not None and tuple(source.outline(name).shape) == tuple(spec.shape):
            yield from _changed(value, shard(source(name), spec, part.mesh))


def _changed(stored: Tensor, wanted: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    wanted = wanted.reshape(stored.shape).to(stored.device)
    rounded = stored.to(wanted.dtype)
    is_other = (rounded != wanted) & ~(rounded.isnan() & wanted.isnan())
    if bool(is_other.any()):
        yield stored, torch.where(is_other, wanted.to(stored.dtype), stored)


def _is_any(value: bool, device: torch.device) -> bool:
    """Return whether the value is true on any rank."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return value
    flag = torch.tensor([int(value)], device=device if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())
