"""Keep Hugging Face models from building a causal mask while they are traced.

Under tracing, transformers builds a B x 1 x S x S mask instead of passing `is_causal=True` to
scaled_dot_product_attention, since an exported graph might be used for decoding. A training graph is not, and the mask
rules out flash attention. The patched functions are private to transformers.masking_utils. Where a version lacks them
nothing is patched, and simplify.py folds the mask if it is small enough. Some models define masks by a function of row,
query and key numbers, called once per element by `vmap`; here it is called once for all.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def plain_masks(packed_positions: bool) -> Iterator[None]:
    """Context manager in which masks without padding are left to `is_causal`.

    packed_positions: the batch carries position_ids, which may pack several sequences in a row; then the packed mask is
    data and stays.
    """
    masking = sys.modules.get("transformers.masking_utils")
    with contextlib.ExitStack() as stack:
        if masking is not None:
            for name in ("is_torchdynamo_exporting", "is_torchdynamo_compiling"):
                if hasattr(masking, name):
                    stack.enter_context(mock.patch.object(masking, name, lambda: False))
            if hasattr(masking, "find_packed_sequence_indices") and not packed_positions:
                stack.enter_context(mock.patch.object(masking, "find_packed_sequence_indices", _not_packed))
            if hasattr(masking, "_vmap_expansion_sdpa") and hasattr(masking, "_non_vmap_expansion_sdpa"):
                broadcast = partial(_broadcast, masking, masking._vmap_expansion_sdpa)
                stack.enter_context(mock.patch.object(masking, "_vmap_expansion_sdpa", broadcast))
        yield


def _broadcast(masking: Any, mapped: Callable[[Any], Any], mask_function: Any) -> Callable[..., torch.Tensor]:
    """Return a mask of all positions by one call of `mask_function` on broadcast numbers, not one call per position.

    A trace keeps nothing of the calls per position (`mapped`). Functions of transformers compare numbers, and tensors
    by them. A user's function, alone or as a part of theirs, may mean something else for all positions at once (a sum
    of what it looks up).
    """
    if not _is_of_transformers(mask_function):
        return mapped(mask_function)  # type: ignore[no-any-return]  # private, untyped

    def of_all(*places: torch.Tensor) -> torch.Tensor:
        mask: torch.Tensor = mask_function(*masking._non_vmap_expansion_sdpa(*places))
        return mask.expand([len(place) for place in places])

    return of_all


def _is_of_transformers(function: Any) -> bool:
    """Return whether a function, and all functions that it combines, are transformers'."""
    parts = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    inner = [closure_part for part in parts for closure_part in (part if isinstance(part, (tuple, list)) else (part,))]
    is_theirs = str(getattr(function, "__module__", "")).startswith("transformers.")
    return is_theirs and all(_is_of_transformers(closure_part) for closure_part in inner if callable(closure_part))


def _not_packed(*args: Any, **kwargs: Any) -> None:
    """Find no packed sequences: rows of positions counted from zero are one sequence each."""
    return
