"""Embedding lookup, of bags and in a table whose rows are sharded over an axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from .layout import AxisLike


def vocab_embedding(
    ids: Tensor, weight: Tensor, axis: AxisLike | None, padding_idx: int | None = None, own_rows: int | None = None
) -> Tensor:
    """This rank's share of `F.embedding`: the looked-up rows that it holds, zeros for the others (placement P).

    Args:
        ids: integers of any shape in [0, V), equal on all ranks of `axis`.
        weight: [V / axis.size, D]: rows [rank * V / size, (rank + 1) * V / size) of the table.
        axis: the vocabulary's mesh axis; None where all rows are here.
        padding_idx: the row (numbered globally, negative from the end) that gets no gradient.
        own_rows: how many of the first rows are the vocabulary, what follows being padding; all of them by default.

    Returns [*ids.shape, D] in weight's dtype. Raises IndexError for ids outside the vocabulary on CPU; on a GPU, where
    looking would wait for the device, such ids give zeros (F.embedding: a device assertion).
    """
    num_rows = weight.shape[0]
    num_vocabulary = own_rows or num_rows * (1 if axis is None else axis.size)
    if padding_idx is not None:
        if not -num_vocabulary <= padding_idx < num_vocabulary:
            raise ValueError(f"padding_idx {padding_idx} is not one of the {num_vocabulary} rows")
        padding_idx %= num_vocabulary
    if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_vocabulary:
        raise IndexError(f"ids from {int(ids.min())} to {int(ids.max())} in a vocabulary of {num_vocabulary}")
    if axis is None or axis.size == 1:
        return F.embedding(ids, weight, padding_idx)
    local = ids - axis.rank * num_rows
    elsewhere = (local < 0) | (local >= num_rows)
    local_padding = None
    if padding_idx is not None and axis.rank * num_rows <= padding_idx < (axis.rank + 1) * num_rows:
        local_padding = padding_idx - axis.rank * num_rows
    # The other ranks' ids read row 0 here; masked_fill's backward hands that row zeros for them.
    rows = F.embedding(local.masked_fill(elsewhere, 0), weight, local_padding)
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)


def embedding_bag(
    indices: Tensor,
    weight: Tensor,
    *,
    mode: str,
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    """`F.embedding_bag` of bags of one size: ids [N, k] of a table [V, h] -> [N, h]."""
    return F.embedding_bag(indices, weight, mode=mode, per_sample_weights=per_sample_weights, padding_idx=padding_idx)
