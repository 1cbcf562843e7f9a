"""Several ranks in one process, one after the other: what an operation gathers must not depend on what it gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


class ReplayedAxis:
    """Records this rank's parts; given every rank's recorded parts, answers with them."""

    def __init__(self, size: int, rank: int, recorded: list[list[torch.Tensor]] | None = None) -> None:
        self.size, self.rank, self.recorded = size, rank, recorded
        self.parts: list[torch.Tensor] = []

    def gather_parts(self, part: torch.Tensor) -> torch.Tensor:
        self.parts.append(part.detach().clone())
        if self.recorded is None:
            return torch.stack([part] * self.size)
        call = len(self.parts) - 1
        assert torch.equal(part, self.recorded[self.rank][call]), "a part depends on what was gathered before"
        return torch.stack([parts[call] for parts in self.recorded])


def on_ranks(size: int, work: Callable[[ReplayedAxis], Result]) -> tuple[list[Result], int]:
    """(work(axis) of every rank, in rank order; how many collectives each of them took)."""
    recorded = []
    for rank in range(size):
        axis = ReplayedAxis(size, rank)
        work(axis)
        recorded.append(axis.parts)
    return [work(ReplayedAxis(size, rank, recorded)) for rank in range(size)], len(recorded[0])
