"""Whether programs of one step may use one parameter."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from .flat import Bucket, Entry, key_of
from .mesh import Mesh
from .parameters import Slot, shards


def has_gradient(slot: Slot, stored: tuple[Bucket, Entry] | None) -> bool:
    """Whether a parameter is there, with a gradient if a program gives it one."""
    return stored is not None and (stored[0].key.requires_grad or not slot.spec.requires_grad)


def may_share(slot: Slot, shared: Slot, mesh: Mesh) -> bool:
    """Whether a program may read a parameter that another one has: it lies where it does, and so does its gradient, if
    the program gives it one."""
    is_alike = _place(slot, mesh) == _place(shared, mesh)
    # Of their own classes as plain values.
    return is_alike and (
        not slot.spec.requires_grad or astuple(key_of(slot.spec, mesh)) == astuple(key_of(shared.spec, mesh))
    )


def _place(slot: Slot, mesh: Mesh) -> tuple[Any, ...]:
    return slot.spec.dtype, slot.spec.shape, slot.spec.local_shape(mesh), shards(slot.spec.placements, mesh)
