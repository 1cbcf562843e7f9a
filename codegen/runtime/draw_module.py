"""Random tensors in generated classes: functions of the step, and of the place in the model and in the tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .draws import draw
from .dropout_module import DropoutModule
from .layout import Layout


class DrawModule(DropoutModule):
    """Base of generated classes that draw random tensors; draws and masks of dropout are numbered together."""

    def in_training(self, training: Tensor, evaluation: Tensor) -> Tensor:
        """The first in training, the second in evaluation."""
        return training if self.training else evaluation

    def draw(
        self,
        distribution: str,
        *,
        call: int,
        layout: Layout,
        dtype: torch.dtype = torch.float32,
        batched: bool = True,
        **parameters: Any,
    ) -> Tensor:
        """This rank's part of this step's `call`-th draw; equal under every plan (`draws.py`).

        parameters: of the distribution: p, or low and high. batched: dim 0 is the batch, or starts with it; else every
        micro-batch draws the same numbers.
        """
        return draw(
            distribution,
            key=self.dropout_key(call),
            layout=layout,
            mesh=self.mesh,
            device=self.mesh.device,
            dtype=dtype,
            batch_offset=self._rows_before(layout) if batched else 0,
            **parameters,
        )
