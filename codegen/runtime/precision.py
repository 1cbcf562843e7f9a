"""The precisions that a program's layers can compute in."""

from __future__ import annotations

from typing import Final, Literal, get_args

import torch

Precision = Literal["fp32", "bf16", "fp16"]
"""In "fp32" layers compute in the parameters' own dtypes. In "bf16" and "fp16" masters, gradients that are summed and
the optimizer's state stay fp32; "fp16" scales the loss besides (`loss_scale.py`)."""

PRECISIONS: Final[tuple[str, ...]] = get_args(Precision)

_COMPUTE_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(precision: str) -> torch.dtype | None:
    """The dtype of floating-point parameters, inputs and activations in computations; None: as they are."""
    return _COMPUTE_DTYPES.get(precision)


def used_dtype(stored: torch.dtype, computed: torch.dtype | None) -> torch.dtype:
    """Return what a tensor of dtype `stored` is computed with, where floats are with `computed` (None: as they are)."""
    return stored if computed is None or not stored.is_floating_point else computed
