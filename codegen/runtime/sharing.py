"""Several programs of one step: they share parameters, optimizer and position, and take batches of different shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .batch_checks import LocalBatch
from .flat import Bucket, Entry, key_of
from .mesh import Mesh
from .parameters import Module, Slot, shards
from .zero import ZeroUnits

if TYPE_CHECKING:
    from .stage_module import Source
    from .step import Step


class Shared:
    """The parameters, buffers, optimizer and position of a step, for a step of another program of its plan."""

    def __init__(self, step: Step) -> None:
        self.rng, self.loss_scaling, self.optimizer = step.rng, step.loss_scaling, step.optimizer
        self.parts, self.captured = step.parts, step._captured

    def units(self, model: Module, *settings: object, **others: object) -> ZeroUnits:
        """Return the parameters of the part that has this model's, now this one's too, with its buffers."""
        names = {slot.name for slot in model.slots()}
        part = min(self.parts, key=lambda part: len(names ^ {slot.name for slot in part.model.slots()}))
        adopt(part.zero, model)
        model.share_buffers({name: value for name, _, value in part.model.buffer_slots()})
        return part.zero


class Programs:
    """The programs that a step runs, in the order in which they are asked whether they take a batch."""

    def __init__(self, step: Step) -> None:
        self._steps = [step]

    def add(self, other: Step, source: Source) -> None:
        """Train and evaluate batches of the shapes of `other` too, a step that was made of a `Shared`.

        source: as in `load`, for buffers whose shapes are those of its batches.
        """
        for part, theirs in zip(self._steps[0].parts, other.parts, strict=True):
            theirs.load_buffers(source, {id(value) for _, _, value in part.model.buffer_slots()})
        self._steps.append(other)

    def replace(self, current: Step) -> None:
        """Run the step that was added last in the place of `current`."""
        self._steps[self._steps.index(current)] = self._steps.pop()

    def take(self, batch: Mapping[str, Any]) -> bool:
        """Whether a whole global batch has shapes that one of the programs was made for."""
        return any(step._batch.takes(batch, is_local=False) for step in self._steps)

    def of(self, batch: Mapping[str, Any], is_local: bool) -> Step:
        """Return the step whose program takes the batch, or the first, whose check then says what is wrong."""
        first, *others = self._steps
        return next((s for s in (first, *others) if not others or s._batch.takes(batch, is_local)), first)

    def completed(self, local_batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the batch with the inputs that a program reads only since the batch was made."""
        if not isinstance(local_batch, LocalBatch):
            return local_batch
        parts = [part for step in self._steps for part in step.parts]
        computed = {name: value for part in parts for name, value in part.local_batch(local_batch.unread).items()}
        whole = LocalBatch({**computed, **local_batch}, local_batch.unread, local_batch.whole)
        return whole if computed else local_batch


def adopt(zero: ZeroUnits, model: Module) -> None:
    """Put these parameters in the places of another program's model, which has the same ones or fewer: it then uses and
    trains them. Raises ValueError where its parameters are others, or lie otherwise."""
    slots = list(model.slots())
    if strange := [slot for slot in slots if not _has_gradient(slot, zero.entries().get(slot.name))]:
        if zero.grow is None:
            names = ", ".join(sorted(slot.name for slot in strange)[:3])
            raise ValueError(f"forward reads or trains parameters that it did not before: {names}")
        zero.grow(strange)
    entries = zero.entries()
    for slot in slots:
        if not _may_share(slot, entries[slot.name][1].slot, zero.mesh):
            raise ValueError(f"the programs differ in how {slot.name} lies")
    zero.share(model)


def _has_gradient(slot: Slot, stored: tuple[Bucket, Entry] | None) -> bool:
    """Whether a parameter is there, with a gradient if a program gives it one."""
    return stored is not None and (stored[0].key.requires_grad or not slot.spec.requires_grad)


def _may_share(slot: Slot, shared: Slot, mesh: Mesh) -> bool:
    """Whether a program may read a parameter that another one has: it lies where it does, and so does its gradient, if
    the program gives it one."""
    is_alike = _place(slot, mesh) == _place(shared, mesh)
    # Of their own classes as plain values.
    return is_alike and (
        not slot.spec.requires_grad or astuple(key_of(slot.spec, mesh)) == astuple(key_of(shared.spec, mesh))
    )


def _place(slot: Slot, mesh: Mesh) -> tuple[Any, ...]:
    return slot.spec.dtype, slot.spec.shape, slot.spec.local_shape(mesh), shards(slot.spec.placements, mesh)
