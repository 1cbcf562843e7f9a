"""The run of a step's micro-batches through this rank's parts of a program; of a pipeline in
`pipeline_executor.py`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from . import watch
from .mesh import Mesh
from .parameters import Module, classes_of
from .rng_state import RngState
from .stage_module import Batches, Part, PartOptions, What, loss_gradient, mean_loss


class Executor(Protocol):
    """Runs the micro-batches of a step through this rank's parts of the program."""

    parts: tuple[Part, ...]
    executed: list[str]
    programs: tuple[type[Module], ...]
    """The root classes of all ranks: one, or that of each stage."""
    result_rank: int | None
    """A process that has what forward makes; None where all have it."""

    def train(self, local_batch: Mapping[str, Tensor]) -> Tensor:
        """Forward and backward of all, gradients reduced; the global mean loss."""
        ...

    def evaluate(self, local_batch: Mapping[str, Tensor]) -> Tensor:
        """Forward of all; the global mean loss."""
        ...

    def read(self, what: What, rank0_only: bool) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Whole tensors by their names, on every rank or at least on rank 0."""
        ...

    def reads_others(self, what: What) -> bool:
        """Whether `read` brings something from other ranks."""
        ...


class Accumulation:
    """One module on all ranks: micro-batches in turn, gradients added up."""

    def __init__(self, program: type[Module], mesh: Mesh, rng: RngState, options: PartOptions) -> None:
        self.programs: tuple[type[Module], ...] = (program,)
        self.parts: tuple[Part, ...] = (Part(program(mesh, rng), options),)
        self.executed: list[str] = []
        self.result_rank: int | None = None
        self.mesh = mesh
        self.rng = rng
        self.loss_scaling = options.loss_scaling

    def train(self, local_batch: Mapping[str, Tensor]) -> Tensor:
        """Trains as `Executor.train` says."""
        (part,) = self.parts
        batches, targets = self._prepare(local_batch)
        losses = []
        for index, inputs in enumerate(batches):
            self.rng.micro_batch = index
            part.zero.begin(accumulate=index > 0, is_last=index == len(batches) - 1)
            loss = part.model(**inputs, **targets)
            loss.backward(loss_gradient(loss, len(batches), loss_scaling=self.loss_scaling))
            part.zero.end()
            losses.append(loss.detach())
        self.mesh.finish()
        return mean_loss(losses)

    def evaluate(self, local_batch: Mapping[str, Tensor]) -> Tensor:
        """Evaluates as `Executor.evaluate` says."""
        return mean_loss(self._forwards(self._prepare(local_batch)))

    def _prepare(self, local_batch: Mapping[str, Tensor]) -> Batches:
        """Return the arguments of each forward, with sums over all micro-batches where the program needs them."""
        (part,) = self.parts
        prepared = part.prepare(local_batch)
        if any(cls.needs_first_pass for cls in classes_of(self.programs)):
            with part.first_pass():
                self._forwards(prepared)
        return prepared

    def _forwards(self, prepared: Batches) -> list[Tensor]:
        """The losses of all micro-batches; gradients must be off."""
        (part,) = self.parts
        batches, targets = prepared
        losses = []
        for index, inputs in enumerate(batches):
            self.rng.micro_batch = index
            part.zero.begin(accumulate=False, is_last=True)
            losses.append(part.model(**inputs, **targets))
            part.zero.end(has_backward=False)
        self.mesh.finish()
        return losses

    def read(self, what: What, rank0_only: bool) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Reads as `Executor.read` says; all ranks get everything anyway."""
        (part,) = self.parts
        for whole, value in zip(part.describe(what), part.read(what), strict=True):
            yield whole.names, value

    def reads_others(self, what: What) -> bool:
        """Whether this module's ranks store parts of what `read` gives."""
        (part,) = self.parts
        return part.reads_others(what)


def reading(executor: Executor, what: What, step: int) -> AbstractContextManager[None]:
    """The context of a `read`: where other ranks have parts of it, a call that all of them must make."""
    if not executor.reads_others(what):
        return nullcontext()
    name = "step.gradients" if what == "gradients" else "step.full_state_dict (or whole_tensors, save)"
    return watch.entered(f"{name} after step {step}")
