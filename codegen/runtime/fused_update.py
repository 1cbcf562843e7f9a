"""The end of a step by kernels: the gradients' norm as one launch, and the clipping update of a `FusedAdamW`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kernels.dispatch import use_triton
from .fused_adamw import FusedAdamW
from .gradient_norm import GradientNorm
from .stage_module import Part


class FusedUpdate:
    """The fused end of one rank's step, where its device runs kernels; elsewhere both are None and nothing changes.

    norm: of this rank's gradients. optimizer: the step's own, if it is a `FusedAdamW` that updates on the device.
    """

    def __init__(self) -> None:
        self.norm: GradientNorm | None = None
        self.optimizer: FusedAdamW | None = None

    def attach(self, parts: Sequence[Part], optimizer: torch.optim.Optimizer, is_offloaded: bool) -> None:
        """Once the parts and the optimizer of the step are made."""
        if not use_triton(torch.empty(1, device=parts[0].mesh.device)):
            return
        self.norm = GradientNorm(parts)
        if isinstance(optimizer, FusedAdamW) and not is_offloaded:
            self.optimizer = optimizer
            optimizer.attach([bucket for part in parts for bucket in part.zero.buckets])
