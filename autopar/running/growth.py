"""Let a step take parameters that its model's forward began to read, or to train, after the step was built."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Collection, Sequence
from typing import Any

import torch


def let_grow(step: Any) -> None:
    """Let the step make room for parameters that a later program reads."""
    for part in step.parts:
        part.zero.grow = functools.partial(_grow, step, part)


def _grow(step: Any, part: Any, slots: Sequence[Any]) -> None:
    """Make buckets for parameters, and let the optimizer update them. Raises ValueError where that is impossible.

    Until now they were buffers of the program, as all parameters that forward does not read.
    """
    parameters = _module(part, "parameters")
    slots = [_copied(parameters.Slot, slot, spec=_copied(parameters.Param, slot.spec)) for slot in slots]
    names = {slot.name for slot in slots}
    old = [bucket for bucket in part.zero.buckets if not names.isdisjoint(e.slot.name for e in bucket.entries)]
    reason = _why_not(step, part, slots, old)
    if reason:
        shown = ", ".join(sorted(names)[:3])
        raise ValueError(f"forward reads or trains parameters that it did not before: {shown}; {reason}")
    values: dict[str, torch.Tensor] = {}
    for name, spec, value in part.model.buffer_slots():
        values |= dict.fromkeys((name, *spec.aliases), parameters.unshard(value, spec, part.mesh))
    values = {
        slot.name: parameters.shard(values[slot.name], slot.spec, part.mesh) for slot in slots if slot.name in values
    }
    for bucket in old:
        parts = zip(bucket.entries, bucket.whole(bucket.master), strict=True)
        values |= {entry.slot.name: local.clone() for entry, local in parts}
    left = [entry.slot for bucket in old for entry in bucket.entries if entry.slot.name not in names]
    key_of, groups = _module(part, "flat").key_of, dict[Any, list[Any]]()
    for slot in (*left, *slots):
        groups.setdefault(key_of(slot.spec, part.mesh), []).append(slot)
    new = [part.zero.new_bucket(members) for members in groups.values()]
    for bucket in new:
        for entry in bucket.entries:
            bucket.store(entry, values[entry.slot.name])
    for model in part.zero.models:
        _drop_buffers(model, names)
    part.zero.exchange(old, new)
    part.zero.publish()
    step.train_also()


def _why_not(step: Any, part: Any, slots: Sequence[Any], old: Sequence[Any]) -> str:
    if not step.updates_by_parameter:
        return "parameters are added only where torch's own optimizer updates this rank's shards on the device"
    if any(bucket.key.stage == 3 for bucket in old):
        return "parameters that had no gradient are sharded by ZeRO-3"
    if not step.loaded_states.isdisjoint(slot.name for slot in slots):
        return "the loaded checkpoint has optimizer state of them, for which the step had no room"
    if len(step.parts) > 1 or step.mesh.everyone.size > part.mesh.world_size:
        return "stages of a pipeline may share them"
    return ""


def _drop_buffers(model: Any, names: Collection[str]) -> None:
    """Remove buffers of a program's model that are parameters now."""
    for module in model.units():
        prefix = f"{module.path}." if module.path else ""
        module.BUFFERS = {name: spec for name, spec in module.BUFFERS.items() if prefix + name not in names}


def _copied(kind: Any, value: Any, **others: Any) -> Any:
    """Return a dataclass of another program's runtime as the same dataclass of this one's."""
    copy = object.__new__(kind)
    for field in dataclasses.fields(kind):
        object.__setattr__(copy, field.name, others.get(field.name, getattr(value, field.name)))
    return copy


def _module(part: Any, name: str) -> Any:
    """Import a module of the runtime that the part belongs to."""
    return importlib.import_module(f"{type(part).__module__.rpartition('.')[0]}.{name}")
