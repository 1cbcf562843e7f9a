"""Evaluation: forwards that leave all state as it is, and the model's logits in them, whole on every rank.

Where it is asked for logits, forward of the root (of a pipeline's last stage) gives the logits of each micro-batch
beside the loss it returns. They are of the dtype that the program computes in. One rank needs room for those of the
whole batch, which no plan's prediction of memory has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from . import collectives
from .executor import Executor
from .mesh import Mesh
from .parameters import Module
from .rng_state import RngState

LOGITS_ATTRIBUTES = ("gives_logits", "given_logits")
"""Attributes of a `LogitsModule` beside those of a module."""


class LogitsModule(Module):
    """Base of generated root classes whose forward can give the model's logits."""

    has_logits: ClassVar[bool] = True

    def __init__(self, mesh: Mesh, rng: RngState | None = None, path: str = "", layer_index: int = 0) -> None:
        # Not by __setattr__, which wants modules for what a user calls alike.
        self.__dict__.update(dict.fromkeys(LOGITS_ATTRIBUTES))
        super().__init__(mesh, rng, path, layer_index)
        self.gives_logits = False
        self.given_logits: dict[int, Tensor] = {}

    def give_logits(self, logits: Tensor) -> None:
        """Keeps those of the micro-batch under way; where its forward runs twice, of the last time."""
        self.given_logits[self.rng.micro_batch] = logits.detach()


@contextmanager
def evaluating(executor: Executor, rng: RngState) -> Iterator[None]:
    """The context of a forward in evaluation mode, which leaves all state as it is."""
    kept = (rng.micro_batch, rng.micro_batch_rows)
    rng.micro_batch_rows = 0
    for part in executor.parts:
        part.model.eval()
    try:
        yield
    finally:
        rng.micro_batch, rng.micro_batch_rows = kept
        for part in executor.parts:
            part.model.train()


def require_evaluation(executor: Executor, with_logits: bool) -> None:
    """Raises RuntimeError, on all ranks, for a program that cannot be evaluated so."""
    for part in executor.parts:
        if part.model.NO_EVALUATION:
            raise RuntimeError(
                f"this program has no evaluation mode: {part.model.NO_EVALUATION}. Write the values to the model "
                "(program.update_model(step), on every rank), and call the model itself in evaluation mode"
            )
    if with_logits and not _has_logits(executor.programs[-1]):
        raise RuntimeError(
            "this program has no logits: the model returns no tensor as its logits from which the loss is computed, or "
            "the program does not keep it"
        )


def evaluate_with_logits(executor: Executor, local_batch: Mapping[str, Tensor], mesh: Mesh) -> tuple[Tensor, Tensor]:
    """The global mean loss, and the logits of the whole batch in its order, on every rank. Collective."""
    giving: list[Any] = [part.model for part in executor.parts if _has_logits(type(part.model))]
    logits_of: dict[int, Tensor] = {}
    for module in giving:
        module.gives_logits, module.given_logits = True, logits_of
    try:
        loss = executor.evaluate(local_batch)
    finally:
        for module in giving:
            module.gives_logits, module.given_logits = False, {}
    logits = torch.cat([logits_of[index] for index in sorted(logits_of)]) if logits_of else None
    if executor.result_rank is not None:
        logits = _from_rank(executor.result_rank, logits, mesh)
    assert logits is not None
    return loss, logits


def _has_logits(program: type[Module]) -> bool:
    """Whether a root class is a LogitsModule, of whichever program's run time: a step may take batches of several."""
    return getattr(program, "has_logits", False) is True


def _from_rank(source: int, tensor: Tensor | None, mesh: Mesh) -> Tensor:
    """A tensor of process `source` on every rank."""
    facts: list[Any] = [None if tensor is None else (tensor.shape, tensor.dtype)]
    dist.broadcast_object_list(facts, source, device=mesh.device)
    shape, dtype = facts[0]
    value = torch.empty(shape, dtype=dtype, device=mesh.device) if tensor is None else tensor.contiguous()
    dist.broadcast(collectives.as_sent(value), source)
    return value
