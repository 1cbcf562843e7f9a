"""Scripts that handle gradients, optimizer and parameters themselves, between a step's calls.

A rank holds parts of gradients and parameters, reduces what was trainable when the program was made, and updates with
the optimizer that it was made with. What a training loop does to these on one process either means the same here, or is
refused here, since it would be dropped or would differ from rank to rank in silence.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter, is_not
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .flat import Bucket
from .stage_module import Part
from .update import buckets_of

if TYPE_CHECKING:
    # Only programs that try an optimizer have it beside them.
    from .whole_updates import WholeUpdates

_IS_TRAINABLE, _GRADIENT = attrgetter("requires_grad"), attrgetter("grad")


class ByHand:
    """Looks after one rank's step; the same on every rank, as far as scripts do the same there.

    What nobody touched is passed over in loops of C: a step of a small model with many parameters is short.
    """

    def __init__(
        self, parts: Sequence[Part], optimizer: torch.optim.Optimizer, *, wholes: WholeUpdates | None = None
    ) -> None:
        self._optimizer, self._wholes, self._parts = optimizer, wholes, parts
        self._known = {id(parameter) for parameter in _updated(optimizer)}
        self._buckets = buckets_of(parts)
        self._trainable = [bucket for bucket in self._buckets if bucket.key.requires_grad]
        attached = [pair for bucket in self._trainable for pair in bucket.attached]
        self._stored = [stored for stored, _ in attached]
        self._own_gradients = [gradient for _, gradient in attached]
        self._gradients: list[Tensor | None] = list(self._own_gradients)  # what the optimizer is to see
        self._left_out: list[Tensor] = []
        self._names_left_out: Collection[str] = ()
        flags = [
            (parameter, bucket.key.requires_grad, entry.slot.name)
            for bucket in self._buckets
            for entry in bucket.entries
            for parameter in (entry.used, entry.stored)
            if parameter is not None
        ]
        self._parameters = [parameter for parameter, _, _ in flags]
        self._flags, self._names = [flag for _, flag, _ in flags], [name for _, _, name in flags]
        self._holds_wholes = len(parts) == 1 and wholes is None and all(map(_is_whole, self._trainable))
        self._writes: list[int] = []
        self._num_unused = 0

    def of_more(self, parts: Sequence[Part]) -> ByHand:
        """The same, of parts that have more parameters now."""
        by_hand = ByHand(parts, self._optimizer, wholes=self._wholes)
        by_hand._num_unused = self._num_unused
        by_hand.leave_out(self._names_left_out)
        return by_hand

    def leave_out(self, names: Collection[str]) -> None:
        """The optimizer is to see no gradients of these parameters, and those of all others."""
        frozen = {
            id(entry.stored)
            for part in self._parts
            for _, entry in part.entries()
            if not set(part.names(entry.slot)).isdisjoint(names)
        }
        self._names_left_out = names
        pairs = list(zip(self._stored, self._own_gradients, strict=True))
        self._gradients = [None if id(stored) in frozen else gradient for stored, gradient in pairs]
        self._left_out = [gradient for stored, gradient in pairs if id(stored) in frozen]

    def before_forward(self) -> None:
        """Raises RuntimeError where the coming gradients would not be those of the script's own backward()."""
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "gradients are switched off around the step (torch.no_grad, torch.inference_mode or "
                "torch.set_grad_enabled(False)): call it outside; step.evaluate gives a loss without gradients"
            )
        flags = list(map(_IS_TRAINABLE, self._parameters))
        if flags != self._flags:
            at = next(index for index, flag in enumerate(flags) if flag != self._flags[index])
            raise RuntimeError(
                f"{self._names[at]} was {'made trainable' if flags[at] else 'frozen'} (requires_grad) after the "
                "program was made, which goes on as it was: compile the model as it is to be, and load this one's "
                "full_state_dict() into its step"
            )
        if not self._known.issuperset(map(id, _updated(self._optimizer))):
            raise RuntimeError(
                "parameters were added to the step's optimizer, which the program computes no gradients for: give all "
                "that is to be trained to the optimizer factory, with lr=0 in a group that is to begin later"
            )
        if self._num_unused and self._were_dropped():
            self._num_unused = 0

    def after_backward(self) -> None:
        """Gradients are where the optimizer looks, also after its zero_grad()."""
        for gradient in self._left_out:
            gradient.zero_()  # which the norm counts
        if self._are_replaced():
            for stored, seen in zip(self._stored, self._gradients, strict=True):
                stored.grad = seen
        if self._wholes is not None:
            self._wholes.attach()
        self._writes = [_num_writes(bucket.gradient) for bucket in self._trainable]
        self._num_unused += 1

    def take_gradients(self) -> None:
        """The gradients are used otherwise than by an update. Raises RuntimeError without any."""
        if not self._num_unused:
            raise RuntimeError("perturbed() without gradients: call forward_backward() before it")
        self._num_unused = 0

    def before_update(self, is_at_once: bool) -> None:
        """Raises RuntimeError where an update would not be of the last backward's gradients as they were.

        is_at_once: it follows on the backward, and no script had them in its hands.
        """
        if not self._num_unused:
            raise RuntimeError("update() without gradients: call forward_backward() before it")
        if self._num_unused > 1:
            raise RuntimeError(
                f"update() after {self._num_unused} calls of forward_backward(), of which it would use the last alone: "
                "to add up gradients, give one batch of all rows, with the constraint micro_batches where memory is "
                "short; to drop some, call step.optimizer.zero_grad() after them"
            )
        self._num_unused = 0
        if is_at_once:
            return
        is_replaced = self._are_replaced()
        is_written = self._writes != [_num_writes(bucket.gradient) for bucket in self._trainable]
        if is_replaced or (is_written and not self._holds_wholes):
            raise RuntimeError(
                f"gradients were {'replaced' if is_replaced else 'changed'} between forward_backward() and "
                "update(), and this rank has parts of them: clip with max_grad_norm, and let the optimizer's "
                "step() do what else is done to them, which is tried on parts when the program is compiled"
            )

    def _are_replaced(self) -> bool:
        """Whether a parameter has another gradient than the step's own."""
        return any(map(is_not, map(_GRADIENT, self._stored), self._gradients))

    def _were_dropped(self) -> bool:
        """Whether zero_grad() was called; told by what this rank updates, and believed where that is nothing."""
        return all(parameter.grad is None for parameter in _updated(self._optimizer))


def _updated(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _num_writes(value: Tensor) -> int:
    """Return how often a tensor, or a view of it, was written in place: torch counts that for autograd's own check."""
    return value._version


def _is_whole(bucket: Bucket) -> bool:
    """Whether every rank has all of the bucket's gradients."""
    specs = (entry.slot.spec for entry in bucket.entries)
    return bucket.axis.size == 1 and all(spec.local_shape(bucket.mesh) == spec.shape for spec in specs)
