"""A loop's stand-ins for its model's values, its loss and its optimizer, with checks of their use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopar.frameworks.accelerate_classes import ProgramOptimizer
from autopar.running.state_follower import followed
from autopar.running.weights import ValueSource, tables_of
from autopar.training.learners import RankLearner


class ModelValues:
    """The values of a script's model, beside those of the step, which train.

    The model's values are updated only where code may look at them. Writes to them reach the step, or are an error
    where the values were old.
    """

    def __init__(self, learner: RankLearner, model: nn.Module) -> None:
        self.learner, self.model = learner, model
        self.note()

    def note(self) -> None:
        """Note that the model's values equal the step's."""
        self._num_steps, self._writes, self._sums = self.learner.num_steps, self._num_writes(), self._all_sums()

    def _num_writes(self) -> tuple[int, ...]:
        """Return how often each parameter was written to, as torch counts for autograd's check."""
        return tuple(parameter._version for parameter in self.model.parameters())

    @torch.no_grad()
    def _all_sums(self) -> list[str]:
        """Return each parameter's sum, which shows a write through `.data` that torch does not count."""
        return [repr(parameter.sum(dtype=torch.float64).item()) for parameter in self.model.parameters()]

    def take(self) -> None:
        """Copy the step's values into the model, on every rank. Collective where training went on since the last
        call."""
        self.give()
        if self._num_steps != self.learner.num_steps:
            self.learner.program.update_model(self.learner.step)
        self.note()

    def give(self) -> None:
        """Copy the model's values into the step if a script wrote to them. Raises RuntimeError if they were old then,
        or if the model's parameters have gradients, which nothing would use."""
        if any(parameter.grad is not None for parameter in self.model.parameters()):
            raise RuntimeError(
                "the model's parameters have gradients of another loss than the model's, which the program would not "
                "use: compute the whole loss in the model"
            )
        sums, self._sums = self._sums, []  # one check after code may have looked: values are old from the next step on
        if self._num_writes() == self._writes and (not sums or sums == self._all_sums()):
            return
        if self._num_steps != self.learner.num_steps:
            raise RuntimeError(
                "the model was written to in the middle of training, when its values were those of an earlier step: "
                "call program.update_model(step) on every rank before that"
            )
        self.learner.step.load(ValueSource(self.model, tables=tables_of(self.learner.program.best.graph)))
        if (follower := followed(self.learner.step)) is not None:
            follower.values_given()
        self.note()


class PendingLoss:
    """The gradients of one call, which the step holds until a backward of `loss` asks for them."""

    def __init__(self) -> None:
        self._is_pending = self._is_taken = self.is_used = False
        self._num_calls = 0

    def loss(self, value: Tensor) -> Tensor:
        """Return the loss for gradients that exist already: a tensor whose backward takes them."""
        self._is_pending, self._is_taken = True, False
        self._num_calls += 1
        return cast(Tensor, _Loss.apply(value.detach().clone().requires_grad_(), self, self._num_calls))  # type: ignore[no-untyped-call]

    def make_room(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare for a new call: drop gradients that no backward asked for. Raises RuntimeError for others."""
        if not self._is_pending:
            return
        if self._is_taken:
            raise RuntimeError(
                "the model was called again before the update: give one batch of all rows, and call model.eval() first "
                "where only the loss is wanted"
            )
        optimizer.zero_grad()
        self._is_pending = False

    def require_taken(self) -> None:
        """Raise RuntimeError where no backward asked for the gradients."""
        if not (self._is_pending and self._is_taken):
            raise RuntimeError("optimizer.step() without backward of the model's loss")

    def drop(self) -> bool:
        """Forget the gradients, unless they still wait for a backward; return whether the optimizer may drop its
        own."""
        if self._is_pending and not self._is_taken:
            return False
        self._is_pending = False
        return True

    def take(self, call: int, factor: float) -> None:
        """Take a call's gradients, times a factor, for a backward. Raises RuntimeError if they are not those."""
        if self.is_used:
            raise RuntimeError("optimizer.zero_grad() was not called since the last update, whose gradients add up")
        if self._is_taken or not self._is_pending or call != self._num_calls:
            raise RuntimeError(
                "backward() was called twice for one call of the model, or after its gradients were gone"
            )
        if factor != 1.0:
            raise RuntimeError(
                f"the loss was multiplied by {factor:g} before backward(), and its gradients are those of the loss "
                "that the model returned: multiply it in the model's forward"
            )
        self._is_taken = True


class _Loss(torch.autograd.Function):
    """The identity; its backward calls a PendingLoss."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, pending: PendingLoss, call: int) -> Tensor:
        ctx.pending, ctx.call = pending, call
        return value.detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.pending.take(ctx.call, float(gradients[0]))
        return None, None, None


class LoopOptimizer(ProgramOptimizer):
    """The optimizer of a loop. It updates by gradients that a backward asked for."""

    def __init__(self, learner: RankLearner, values: ModelValues, pending: PendingLoss) -> None:
        super().__init__(learner)
        self.values, self.pending = values, pending

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update, after a closure that calls backward, if there is one; return the closure's result. Raises
        RuntimeError without a backward, or where the model has other gradients."""
        result = None if closure is None else closure()
        self.pending.require_taken()
        self.values.give()
        super().step()
        self.pending.drop()
        self.pending.is_used = True
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that a backward asked for, even if no update used them."""
        self.pending.is_used = False
        if self.pending.drop():
            super().zero_grad(set_to_none)
