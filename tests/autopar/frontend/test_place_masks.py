"""Masks of transformers that are functions of places: called once for all of them where every part is theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils

from autopar.frontend.trace_modes.hugging_face_masks import plain_masks

PLACES = (torch.arange(2), torch.arange(1), torch.arange(4), torch.arange(4))
BLOCKS = torch.tensor([[0, 0, 1, 1], [2, 0, 0, 2]])


def of_blocks(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return BLOCKS[batch, query] == BLOCKS[batch, key]


def of_a_sum(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """For all places at once the sum would be of all rows."""
    return torch.index_select(BLOCKS, 0, batch.reshape(-1)).sum() > query


@pytest.mark.parametrize(("own", "is_mapped"), [(None, False), (of_blocks, True), (of_a_sum, True)])
def test_a_users_function_is_called_for_each_place(own: Any, is_mapped: bool) -> None:
    calls: list[torch.Size] = []

    def watched(*places: Tensor) -> Any:
        calls.append(places[2].shape)
        return masking_utils.causal_mask_function(*places)  # type: ignore[arg-type]

    watched.__module__ = "transformers.masking_utils"
    parts = [watched] if own is None else [watched, own]
    with masking_utils.TransformGetItemToIndex():
        expected = masking_utils._vmap_expansion_sdpa(masking_utils.and_masks(*parts))(*PLACES)
        calls.clear()
        with plain_masks(packed_positions=False):
            found = masking_utils._vmap_expansion_sdpa(masking_utils.and_masks(*parts))(*PLACES)
    assert torch.equal(found, expected)
    assert calls == [torch.Size([]) if is_mapped else torch.Size([1, 1, 4, 1])]
