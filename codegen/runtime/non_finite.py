"""Steps whose loss or gradients are not finite, so that one bad sample does not spoil a whole run.

In fp16 gradients that are not finite are usual where the loss is: they were scaled beyond fp16's range. Such a step is
skipped whatever is asked for, and the scale gets smaller. At a scale of 1 and below no scale is to blame any more.

The decision is one number on all ranks: the loss is the global mean, the gradient norm a sum over all ranks, and inf or
nan anywhere makes one of them so. Both are read in one transfer, which takes the place of reading the loss. A skipped
step also takes back what its forward wrote to buffers (running statistics).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .loss_scale import LossScaling  # beside programs in fp16 only

NonFinite = Literal["skip", "stop", "ignore"]

MOST_SKIPS = 10
"""Steps in a row that may be skipped; as many again would come to nothing either."""


class Guard:
    """The guard of one rank's step against losses and gradients that are not finite.

    buffers: those that a forward writes. loss_scaling: in fp16, which then changes with every step.
    num_skipped: steps without an update so far. loss: of the last step, read to the host; None where the guard is off.
    """

    def __init__(
        self, non_finite: NonFinite, buffers: Sequence[Tensor], *, loss_scaling: LossScaling | None = None
    ) -> None:
        if non_finite not in ("skip", "stop", "ignore"):
            raise ValueError(f"non_finite must be 'skip', 'stop' or 'ignore', got {non_finite!r}")
        self.non_finite, self.loss_scaling = non_finite, loss_scaling
        self.num_skipped = 0
        self.loss: Tensor | None = None
        self._in_a_row = 0
        self._device_loss: Tensor | None = None
        self._buffers = list(buffers) if self.is_on else []
        self._before = [torch.empty_like(value) for value in self._buffers]

    @property
    def is_on(self) -> bool:
        """Whether both numbers are read in every step."""
        return self.non_finite != "ignore" or self.loss_scaling is not None

    def before_forward(self) -> None:
        """Keep what the forward may write."""
        for kept, value in zip(self._before, self._buffers, strict=True):
            kept.copy_(value)

    def after_backward(self, loss: Tensor) -> None:
        self._device_loss = loss.detach()

    def lets_pass(self, norm: Tensor | None) -> bool:
        """Whether to update, with this norm of unscaled gradients; if not, buffers are as they were before the forward.

        Raises FloatingPointError where training is to stop instead.
        """
        assert norm is not None and self._device_loss is not None
        both = torch.stack([self._device_loss.double(), norm.double()]).cpu()
        self.loss = both[0].to(self._device_loss.dtype)
        loss, norm_value = both.tolist()
        scale = 1.0 if self.loss_scaling is None else self.loss_scaling.value
        has_overflowed = not math.isfinite(norm_value)
        if self.loss_scaling is not None:
            self.loss_scaling.update(has_overflowed)
        is_ignored = self.non_finite == "ignore"
        if not has_overflowed and (is_ignored or math.isfinite(loss)):
            self._in_a_row = 0
            return True
        for kept, value in zip(self._before, self._buffers, strict=True):
            value.copy_(kept)
        self.num_skipped += 1
        if is_ignored or (math.isfinite(loss) and scale > 1.0):
            return False
        self._in_a_row += 1
        what = f"the loss is {loss} and the gradient norm {norm_value}"
        what += f" with a loss scale of {scale:g}" if self.loss_scaling is not None else ""
        if self.non_finite == "stop":
            raise FloatingPointError(f"{what}: nothing was updated, and training stops (non_finite='stop')")
        if self._in_a_row > MOST_SKIPS:
            raise FloatingPointError(
                f"{what}, and {self._in_a_row - 1} steps before this one were skipped for the same reason: "
                "the data or the learning rate need a look"
            )
        return False
