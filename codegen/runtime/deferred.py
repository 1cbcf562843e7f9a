"""Deferred weight gradients: the backward of a stage in two halves, for zero-bubble schedules.

Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024): the stage before waits for the gradient of what it sent, not
for the weights' gradients, which can fill gaps. Generated code of such programs calls `linear` for F.linear and `addmm`
for torch.addmm.
Inside an I action its backward computes the input's gradient only and leaves the rest with the queue that hangs on the
weight; the W action runs it. All other gradients are there after I.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

_ATTRIBUTE = "weight_gradients"


@dataclass(frozen=True, slots=True)
class _Task:
    """The gradients of one call. x [..., in], grad [..., out]; is_transposed: the weight is [in, out]."""

    weight: nn.Parameter
    is_transposed: bool
    bias: nn.Parameter | None
    x: Tensor
    grad: Tensor

    def run(self) -> None:
        if self.weight.requires_grad:
            _accumulate(self.weight, _weight_gradient(self.x, self.grad, self.is_transposed))
        if self.bias is not None and self.bias.requires_grad:
            _accumulate(self.bias, _bias_gradient(self.grad))


class DeferredGradients:
    """The weight gradients of a stage that its W actions have yet to compute, by micro-batch."""

    def __init__(self) -> None:
        self._tasks: dict[int, list[_Task]] = {}
        self._micro_batch: int | None = None

    def attach(self, model: nn.Module) -> None:
        """Attaches the queue to all parameters of a stage, once they are in place."""
        for parameter in model.parameters():
            setattr(parameter, _ATTRIBUTE, self)

    @property
    def is_open(self) -> bool:
        """Whether an I action runs."""
        return self._micro_batch is not None

    @contextmanager
    def collecting(self, micro_batch: int) -> Iterator[None]:
        """The context around the backward of an I action."""
        self._micro_batch = micro_batch
        self._tasks[micro_batch] = []
        try:
            yield
        finally:
            self._micro_batch = None

    def add(self, task: _Task) -> None:
        """Defer what `task` computes to the W of the micro-batch whose I runs."""
        assert self._micro_batch is not None
        self._tasks[self._micro_batch].append(task)

    def run(self, micro_batch: int) -> None:
        """The W action: in the order of the backward, each call's tensors freed when it is done."""
        tasks = self._tasks.pop(micro_batch)
        tasks.reverse()
        with torch.no_grad():
            while tasks:
                tasks.pop().run()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear: x [..., in], weight [out, in], bias [out] -> [..., out]; its weight gradients can be deferred."""
    queue = getattr(weight, _ATTRIBUTE, None)
    # What is computed from a parameter has no such attribute, and its gradient must flow on.
    if queue is None or not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    result: Tensor = _Linear.apply(x, weight, bias, queue, False)  # type: ignore[no-untyped-call]
    return result


def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """torch.addmm: bias [out], x [rows, in], weight [in, out] -> [rows, out]; its weight gradients can be deferred."""
    queue = getattr(weight, _ATTRIBUTE, None)
    if queue is None or not torch.is_grad_enabled():
        return torch.addmm(bias, x, weight)
    result: Tensor = _Linear.apply(x, weight, bias, queue, True)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: DeferredGradients, is_transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(x)
        # Not as saved tensors, of which recomputation makes detached ones: the gradient is for the parameter itself.
        ctx.weight, ctx.bias, ctx.queue, ctx.is_transposed = weight, bias, queue, is_transposed
        if is_transposed:
            assert bias is not None
            return torch.addmm(bias, x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight, bias, is_transposed = ctx.weight, ctx.bias, ctx.is_transposed
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        can_defer_bias = getattr(bias, _ATTRIBUTE, None) is ctx.queue
        grad_x = torch.matmul(grad, weight.t() if is_transposed else weight) if needs_x else None
        if ctx.queue.is_open and (needs_weight or (needs_bias and can_defer_bias)):
            # Detached: what made x, and all that its backward led to, need not wait for W.
            ctx.queue.add(
                _Task(
                    weight=weight,
                    is_transposed=is_transposed,
                    bias=bias if can_defer_bias else None,
                    x=x.detach(),
                    grad=grad,
                )
            )
            return grad_x, None, _bias_gradient(grad) if needs_bias and not can_defer_bias else None, None, None
        grad_weight = _weight_gradient(x, grad, is_transposed) if needs_weight else None
        return grad_x, grad_weight, _bias_gradient(grad) if needs_bias else None, None, None


def _weight_gradient(x: Tensor, grad: Tensor, is_transposed: bool) -> Tensor:
    """The gradient of a weight: [..., in], [..., out] -> [out, in], or [in, out]."""
    if is_transposed:
        x, grad = grad, x
    return grad.flatten(0, -2).t() @ x.flatten(0, -2) if x.ndim > 1 else torch.outer(grad, x)


def _bias_gradient(grad: Tensor) -> Tensor:
    """The gradient [out] of a bias, from that of the result [..., out]."""
    return grad.flatten(0, -2).sum(0) if grad.ndim > 1 else grad


def _accumulate(leaf: nn.Parameter, gradient: Tensor) -> None:
    """Accumulate one leaf's gradient, and tell whoever waits for it, as the end of a backward does.

    The node is called by itself, since a W action would else have a backward of its own per gradient: a step of a GPT-2
    16 wide took 71 ms of CPU with those, on two ranks together, and 62 without.
    """
    node: Any = get_gradient_edge(leaf).node
    node(gradient)
