"""What a script does between a step's calls, with gradients, optimiser and parameters in its own hands.

A rank holds parts of gradients and parameters, reduces what was trainable when the program was made, and updates with
the optimiser that it was made with. What a training loop does to these on one process either means the same here, or is
refused here, since it would be dropped or would differ from rank to rank in silence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .flat import Bucket
from .part import Part
from .update import buckets_of


class ByHand:
    """Looks after one rank's step; the same on every rank, as far as scripts do the same there."""

    def __init__(self, parts: Sequence[Part], optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known = {id(parameter) for parameter in _updated(optimizer)}
        self._buckets = buckets_of(parts)
        self._trainable = [bucket for bucket in self._buckets if bucket.key.requires_grad]
        self._holds_wholes = len(parts) == 1 and all(map(_is_whole, self._trainable))
        self._versions: list[int] = []
        self._num_unused = 0

    def before_forward(self) -> None:
        """Raises RuntimeError where the coming gradients would not be those of the script's own backward()."""
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "gradients are switched off around the step (torch.no_grad, torch.inference_mode or "
                "torch.set_grad_enabled(False)): call it outside; step.evaluate gives a loss without gradients"
            )
        for bucket in self._buckets:
            for entry in bucket.entries:
                expected = bucket.key.requires_grad
                is_stored_so = entry.stored is None or entry.stored.requires_grad == expected
                if entry.used.requires_grad != expected or not is_stored_so:
                    was = "frozen" if expected else "made trainable"
                    raise RuntimeError(
                        f"{entry.slot.name} was {was} (requires_grad) after the program was made, which goes on as it "
                        "was: compile the model as it is to be, and load this one's full_state_dict() into its step"
                    )
        if any(id(parameter) not in self._known for parameter in _updated(self._optimizer)):
            raise RuntimeError(
                "parameters were added to the step's optimiser, which the program computes no gradients for: give all "
                "that is to be trained to the optimiser factory, with lr=0 in a group that is to begin later"
            )
        if self._num_unused and self._were_dropped():
            self._num_unused = 0

    def after_backward(self) -> None:
        """Gradients are where the optimiser looks, also after its zero_grad()."""
        for bucket in self._trainable:
            for stored, gradient in bucket.attached:
                stored.grad = gradient
        self._versions = [bucket.gradient._version for bucket in self._trainable]
        self._num_unused += 1

    def before_update(self) -> None:
        """Raises RuntimeError where an update would not be of the last backward's gradients as they were."""
        if not self._num_unused:
            raise RuntimeError("update() without gradients: call forward_backward() before it")
        if self._num_unused > 1:
            raise RuntimeError(
                f"update() after {self._num_unused} calls of forward_backward(), of which it would use the last alone: "
                "to add up gradients, give one batch of all rows, with the constraint micro_batches where memory is "
                "short; to drop some, call step.optimizer.zero_grad() after them"
            )
        self._num_unused = 0
        for bucket, version in zip(self._trainable, self._versions, strict=True):
            is_replaced = any(stored.grad is not gradient for stored, gradient in bucket.attached)
            if is_replaced or (bucket.gradient._version != version and not self._holds_wholes):
                raise RuntimeError(
                    f"gradients were {'replaced' if is_replaced else 'changed'} between forward_backward() and "
                    "update(), and this rank has parts of them: clip with max_grad_norm, and let the optimiser's "
                    "step() do what else is done to them, which is tried on parts when the program is compiled"
                )

    def _were_dropped(self) -> bool:
        """Whether zero_grad() was called; told by what this rank stores, and believed where it stores nothing."""
        attached = (stored for bucket in self._trainable for stored, _ in bucket.attached)
        return all(stored.grad is None for stored in attached)


def _updated(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_whole(bucket: Bucket) -> bool:
    """Whether every rank has all of the bucket's gradients."""
    specs = (entry.slot.spec for entry in bucket.entries)
    return bucket.axis.size == 1 and all(spec.local_shape(bucket.mesh) == spec.shape for spec in specs)
