"""The squared norm of all gradients of a rank in one launch per dtype (`kernels/grad_norm.py`).

What counts is what `Bucket.squared_norm` counts: this rank's ranges without padding, an element that r ranks of the
world have with weight 1 / r, and of copies on several stages the first. So shares of all ranks sum to the whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.chunk_table import ChunkTable, chunk_table
from ..kernels.grad_norm import squared_norm
from .stage_module import Part


class GradientNorm:
    """The gradient norm of the parts of one rank, whose gradients stay where they are."""

    def __init__(self, parts: Sequence[Part]) -> None:
        rows: dict[torch.dtype, list[tuple[Tensor, float]]] = defaultdict(list)
        for bucket in (bucket for part in parts for bucket in part.trainable()):
            for lo, hi, replicas in bucket.norm_segments():
                rows[bucket.gradient.dtype].append((bucket.gradient[lo:hi], 1.0 / replicas))
        self._tables = [_table(rows_of_device) for rows_of_device in rows.values()]

    def squared(self) -> Tensor | float:
        """This rank's share: 0-dim on the gradients' device; 0.0 where it has none."""
        return sum((squared_norm(table, weights=weights) for table, weights in self._tables), 0.0)


def _table(rows: list[tuple[Tensor, float]]) -> tuple[ChunkTable, Tensor | None]:
    lines, weights = zip(*rows, strict=True)
    is_weighted = any(weight != 1.0 for weight in weights)
    return chunk_table(lines), torch.tensor(weights, device=lines[0].device) if is_weighted else None
