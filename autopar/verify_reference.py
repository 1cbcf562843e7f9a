"""References of a verification: the user's model trained eagerly on one process (`verify.py` has the rule)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from autopar.compiled import CompiledProgram
from autopar.frontend.copies import callable_copy, deep_copy
from autopar.frontend.inputs import NamedBatch
from autopar.frontend.loss_module import LossModule, loss_in
from autopar.frontend.skeleton import in_training
from autopar.frontend.state.model_state import ModelState
from autopar.frontend.state.reads import Reads
from autopar.frontend.state.values import MISSING
from codegen.runtime.optimizers import call
from codegen.runtime.reference import SameDropout

NO_DIGIT = 0.1
VANISHING = 1e-12


def _cast(batch: NamedBatch, dtype: torch.dtype) -> NamedBatch:
    return batch.map(lambda v: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v)


_GROUPED = getattr(torch, "_grouped_mm", None)
"""The function behind torch.nn.functional.grouped_mm."""


class _InDouble(TorchFunctionMode):
    """Let forward make or cast to fp64 what it names fp32, and compute grouped products of experts, which torch lacks
    in fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _GROUPED and args[0].dtype == torch.float64:
            rows, weight, ends = args[0], args[1], kwargs["offs"].tolist()
            return torch.cat([rows[a:b] @ matrix for a, b, matrix in zip([0, *ends], ends, weight, strict=False)])
        func = torch.Tensor.double if func is torch.Tensor.float else func
        wide = {n: _wide(v) for n, v in (kwargs or {}).items()}
        return func(*map(_wide, args), **wide)


def _wide(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


_CHECKPOINTING = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
"""torch's functions that keep and recompute for a checkpoint: until 2.13, and since."""


def _forward_once(*_: Any, **__: Any) -> Iterator[None]:
    """Replaces the keeping and recomputing of torch's checkpoints by nothing, with the same gradients."""
    yield


@contextlib.contextmanager
def _as_compared(seed: int, step: int, dtype: torch.dtype | None) -> Iterator[None]:
    """Make an eager forward comparable with a program's inside the context, in `dtype` if given.

    Backward does not run a checkpointed block again, where dropout would draw other masks.
    """
    usual = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        for name in _CHECKPOINTING:
            if hasattr(checkpoint, name):
                stack.enter_context(mock.patch.object(checkpoint, name, _forward_once))
        stack.enter_context(SameDropout(seed, step))
        if dtype is not None:
            stack.callback(torch.set_default_dtype, usual)
            torch.set_default_dtype(dtype)
            stack.enter_context(_InDouble())
        yield


def _untrained(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers and frozen parameters, which a forward may write to."""
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    return [*model.named_buffers(), *frozen]


def copied_loss(loss_fn: Any, dtype: torch.dtype | None = None) -> Any:
    """Return the loss, copied where a call may change its state; in dtype, if it is a module and dtype is given."""
    return copy.deepcopy(loss_fn).to(dtype) if isinstance(loss_fn, nn.Module) else callable_copy(loss_fn)


class Reference:
    """The user's model trained eagerly on one process: in its own precision, in `dtype`, or in `low_dtype` with
    masters."""

    def __init__(
        self,
        compiled: CompiledProgram,
        max_grad_norm: float | None,
        seed: int,
        dtype: torch.dtype | None = None,
        low_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = deep_copy(compiled.model).cpu().to(dtype)
        in_training(self.model)
        self.dtype, self.low_dtype = dtype, low_dtype
        self.loss_fn, self.seed, self.max_grad_norm = copied_loss(compiled.loss_fn, dtype), seed, max_grad_norm
        self.loss_before = self.loss_fn
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.optimizer = call(compiled.optimizer, trained)
        self.step = 0
        self.before_forward: dict[str, torch.Tensor] = {}
        self.numbers: ModelState | None = None

    def forward_backward(self, batch: NamedBatch, scale: float = 1.0) -> float:
        """Run forward and backward; return the loss. Gradients are scaled while they are computed."""
        self.model.zero_grad()  # also gradients of parameters that the optimizer leaves out
        self.before_forward = {name: value.detach().clone() for name, value in _untrained(self.model)}
        self.numbers = ModelState.of_constants(self.model, None, Reads())
        self.loss_before = copied_loss(self.loss_fn)
        loss = self._loss(self.model, batch, self.dtype, self.low_dtype)
        torch.autograd.backward(loss * scale)
        for parameter in self.model.parameters() if scale != 1.0 else ():
            if parameter.grad is not None:
                parameter.grad.div_(scale)
        return float(loss.detach())

    def gradients_of(self, batch: NamedBatch, scale: float) -> dict[str, torch.Tensor]:
        self.forward_backward(batch, scale)
        return self.gradients()

    def _loss(
        self, model: nn.Module, batch: NamedBatch, dtype: torch.dtype | None, low_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return the batch's loss, all in dtype if given: the model is so already, a loss's tensors are cast."""
        batch = batch if dtype is None else _cast(batch, dtype)
        loss_fn = self.loss_fn
        if isinstance(loss_fn, nn.Module) and dtype not in (None, self.dtype):  # the loss before this step
            loss_fn = copied_loss(self.loss_before, dtype)
        with _as_compared(self.seed, self.step, dtype):
            return loss_in(low_dtype, LossModule(model, loss_fn, batch, keeps_buffers=False), batch)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {
            n: p.grad if p.grad is not None else torch.zeros_like(p)
            for n, p in self.model.named_parameters()
            if p.requires_grad
        }

    def round_off(self, batch: NamedBatch) -> dict[str, tuple[float, torch.Tensor]]:
        """Return, by parameter, the relative error of its fp32 gradient and the mask of elements without a right
        digit."""
        exact = deep_copy(self.model).double()
        for name, value in _untrained(exact):  # as before the step, since a forward may read what it writes
            value.detach().copy_(self.before_forward[name])
        changes = self.numbers.plain_changes() if self.numbers is not None else []
        before = [(c.key, c.old) for c in changes if c.key is not None and c.old is not MISSING]
        ModelState.of_constants(exact, None, Reads()).apply(before)
        exact.zero_grad()
        torch.autograd.backward(self._loss(exact, batch, torch.float64))
        truth = {n: p.grad for n, p in exact.named_parameters() if p.grad is not None}
        nothing = VANISHING * max((float(g.abs().max()) for g in truth.values() if g.numel()), default=0.0)
        errors = {}
        for name, gradient in self.gradients().items():
            right = truth.get(name, torch.zeros_like(gradient, dtype=torch.float64))
            right = torch.where(right.abs() > nothing, right, 0.0)
            mask = (gradient.double() - right).abs() > NO_DIGIT * right.abs()
            difference, size = float((gradient - right).norm()), float(right.norm())
            errors[name] = (difference / size if size else float(difference > 0), mask)
        return errors

    def update(self) -> None:
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.step += 1

    def take_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Replace the gradients by others. A parameter without one is not updated."""
        for name, parameter in self.model.named_parameters():
            gradient = gradients.get(name) if parameter.requires_grad and parameter.grad is not None else None
            parameter.grad = None if gradient is None else gradient.detach().to(parameter, copy=True)
