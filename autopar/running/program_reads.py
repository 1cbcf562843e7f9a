"""The parameters and buffers that the programs of one step read, write and give gradients."""

from __future__ import annotations

from typing import Any

import torch

from autopar.frontend.forward_numbers import ForwardOf
from autopar.program import GeneratedProgram
from autopar.running.weights import ValueSource, tables_of


def forward_of(program: GeneratedProgram) -> ForwardOf:
    """The forward that a program was made of."""
    assert program.remake is not None
    return program.remake.forward(program)


def unread_of(step: Any, other: Any) -> frozenset[str]:
    """The names of this rank's parameters that the program of another step gives no gradients."""
    read = {slot.name for part in other.parts for slot in part.model.slots() if slot.spec.requires_grad}
    trained = {entry.slot.name for bucket, entry in step.entries() if bucket.key.requires_grad}
    return frozenset(trained - read)


def values_of(program: GeneratedProgram) -> ValueSource:
    """The values of a program's model, of its loss and of tensors that no module has."""
    return ValueSource(program.model, None, program.loss_fn, tables_of(program.best.graph))


def changed_tables(program: GeneratedProgram, other: GeneratedProgram) -> set[str]:
    """The names of the tensors without a module that two programs of one model have with other values."""
    before, now = tables_of(program.best.graph), tables_of(other.best.graph)
    shared = before.keys() & now.keys()
    return {n for n in shared if before[n].shape == now[n].shape and not torch.equal(before[n], now[n])}


def written_buffers(step: Any) -> set[str]:
    """The names of this rank's buffers that a forward in training changes."""
    found: set[str] = set()
    for part in step.parts:
        written = {id(value) for value in part.written_buffers()}
        for name, spec, value in part.model.buffer_slots():
            if id(value) in written:
                found |= {name, *spec.aliases}
    return found
