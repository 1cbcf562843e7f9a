"""Checking a program against the single-process model: same weights, same batches, same dropout masks.

The reference is the user's own eager module on one process, full batch, torch's own loss, optimiser and clipping. Only
dropout is replaced, in both, by masks that depend on the element's global position (codegen/runtime/dropout.py).

Errors are relative: ||distributed - reference|| / ||reference|| per tensor (fp32 for fp32 plans). Where the true
gradient is zero (an attention key's bias: softmax does not see it) there is nothing but round-off to compare, and Adam
makes whole steps of it. The rule, judged by the same model's gradient in fp64, which is zero where it is at most
VANISHING times the model's largest:

    a tensor   whose fp32 reference gradient is off by more than ROUND_OFF in norm is left out of the gradients
    elements   whose fp32 reference gradient is off by more than NO_DIGIT (not one digit is right) in some step
               are left out of the parameters; a tensor with more than half of them is left out whole

What is left out is named in the report. What is kept may still be magnified round-off (a bias' gradient is a long sum
that nearly cancels; Adam divides small gradients by their own size): the reference itself is then away from fp64. That
distance is reported beside the error, and an error of at most FLOORS of them is as good as single-process fp32 is.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from autopar.compile import compile_with
from autopar.compiled import CompiledProgram
from autopar.frontend.inputs import NamedBatch, name_inputs
from autopar.frontend.loss_module import LossModule
from autopar.frontend.skeleton import in_training
from autopar.launch import TIMEOUT_SECONDS, group_seconds, run_ranks
from autopar.running.surroundings import check_starting
from autopar.settings.compile_options import VerifyOptions, check_verify, with_options
from autopar.settings.fp8 import tolerance
from autopar.verify_report import VerifyReport
from codegen.runtime.optimizers import call
from codegen.runtime.reference import SameDropout
from cost_models.mixed import AnyCluster

ROUND_OFF = 1e-3
NO_DIGIT = 0.1
VANISHING = 1e-12
STILL = 1e-7
"""A loss that changes by less than this share over the steps does not move."""


@with_options(VerifyOptions)
def verify(model: nn.Module, cluster_spec: AnyCluster | str, options: VerifyOptions) -> VerifyReport:
    """Compile, run `steps` steps in real processes and on one, and compare loss, gradients, parameters and buffers.

    The options are given by keyword: those of autopar.compile, where the optimizer defaults to SGD with momentum, and
    those of VerifyOptions (in autopar.settings.compile_options). Runs on this machine, so the cluster
    must be as many ranks as it can hold.
    """
    check_starting("verify")
    compiled = compile_with(model, cluster_spec, replace(options, optimizer=options.optimizer or sgd_with_momentum))
    return verify_program(
        compiled,
        options.example_inputs,
        steps=options.steps,
        max_grad_norm=options.max_grad_norm,
        seed=options.seed,
    )


def verify_program(
    compiled: CompiledProgram,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    steps: int = 3,
    max_grad_norm: float | None = None,
    seed: int = 0,
) -> VerifyReport:
    """Verifies a program that is compiled already, as `verify` does."""
    check_verify(steps, max_grad_norm, seed)
    check_starting("verify")
    named = name_inputs(compiled.model, example_inputs, compiled.loss_fn)
    batches = [_rotated(named, compiled.plan.global_batch_size, shift) for shift in range(steps)]
    args = (compiled, batches, max_grad_norm, seed)
    compiled.require_runnable()
    patience = group_seconds(compiled)
    reports = run_ranks(_compare, args, compiled.plan.num_ranks, max(TIMEOUT_SECONDS, patience), patience)
    report: VerifyReport = next(r for r in reports if r is not None)
    return report


def sgd_with_momentum(parameters: Any) -> torch.optim.Optimizer:
    """The default of verification: unlike Adam it does not magnify round-off in tiny gradients."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _rotated(batch: NamedBatch, rows: int, shift: int) -> NamedBatch:
    """The batch with `rows` rows (repeated or cut), rotated by `shift`."""
    own = next(v.shape[0] for v in batch.values() if isinstance(v, torch.Tensor) and v.dim() > 0)
    index = (torch.arange(rows) + shift) % own

    def rotate(value: Any) -> Any:
        is_batched = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == own
        return value[index] if is_batched else value

    return batch.map(rotate)


def _compare(
    compiled: CompiledProgram, batches: list[NamedBatch], max_grad_norm: float | None, seed: int
) -> VerifyReport | None:
    """Runs the program on every rank; rank 0 also runs the references and returns the report, others None."""
    step = compiled.build(max_grad_norm=max_grad_norm, non_finite="ignore", seed=seed)
    found = _Comparison(compiled, max_grad_norm, seed) if dist.get_rank() == 0 else None
    for batch in batches:
        loss = float(step.forward_backward(compiled.local_batch(batch)))
        gradients = step.gradients()
        if found is not None:
            found.step(batch, loss, gradients)
        step.update()
    state = step.full_state_dict()
    return None if found is None else found.report(state)


@dataclass
class _Comparison:
    """A program's numbers beside those of the reference, and of the reference in fp64.

    noise: which elements of a parameter have had no right digit. round_off: gradients that are nothing but round-off.
    """

    compiled: CompiledProgram
    max_grad_norm: float | None
    seed: int
    losses: list[tuple[float, float]] = field(default_factory=list)
    noise: dict[str, torch.Tensor] = field(default_factory=dict)
    round_off: set[str] = field(default_factory=set)
    errors: dict[str, float] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
    has_gradient: bool = False

    def __post_init__(self) -> None:
        self.reference = _Reference(self.compiled, self.max_grad_norm, self.seed)
        self.exact = _Reference(self.compiled, self.max_grad_norm, self.seed, torch.float64)

    def step(self, batch: NamedBatch, loss: float, gradients: Mapping[str, torch.Tensor]) -> None:
        """One step of the references, compared with the program's loss and gradients."""
        self.exact.forward_backward(batch)
        self.losses.append((loss, self.reference.forward_backward(batch)))
        for name, (own_error, mask) in self.reference.round_off(batch).items():
            self.round_off |= {name} if own_error > ROUND_OFF else set()
            self.noise[name] = self.noise[name] | mask if name in self.noise else mask
        truth = self.exact.gradients()
        for name, gradient in self.reference.gradients().items():
            found = gradients.get(name, torch.zeros_like(gradient))  # of what the loss does not depend on there is none
            self.errors[name] = max(self.errors.get(name, 0.0), relative_error(found, gradient))
            self.floors[name] = max(self.floors.get(name, 0.0), relative_error(gradient, truth[name]))
            self.has_gradient |= bool(gradient.any())
        self.reference.update()
        self.exact.update()

    def report(self, state: Mapping[str, torch.Tensor]) -> VerifyReport:
        """The report, given the program's state after the last step."""
        initial = dict(self.compiled.model.named_parameters())
        trained, exact = dict(self.reference.model.named_parameters()), dict(self.exact.model.named_parameters())
        parameters, floors = {}, {}
        for name, mask in self.noise.items():
            if mask.double().mean() <= 0.5:
                kept = ~mask
                own = state[name].cpu() if name in state else initial[name].detach()
                parameters[name] = relative_error(own[kept], trained[name][kept])
                floors[name] = relative_error(trained[name][kept], exact[name][kept])
        buffers, buffer_floors = self._buffers(state)
        partly = (n for n, mask in self.noise.items() if mask.any() and n in parameters)
        counted = {f"{n} ({int(self.noise[n].sum())} of {self.noise[n].numel()} elements)" for n in partly}
        return VerifyReport(
            loss=max((_size(abs(own - one) / max(abs(one), 1e-30)) for own, one in self.losses), default=math.inf),
            gradients={n: error for n, error in self.errors.items() if n not in self.round_off},
            parameters=parameters,
            gradient_floors=self.floors,
            floors=floors | buffer_floors,
            round_off=tuple(sorted(self.round_off | counted)),
            losses=tuple(self.losses),
            mesh=self.compiled.plan.mesh_text,
            tolerance=tolerance(self.compiled.program),
            buffers=buffers,
            proves_nothing=self._proves_nothing({n: p for n, p in trained.items() if p.requires_grad}, initial),
        )

    def _buffers(self, state: Mapping[str, torch.Tensor]) -> tuple[dict[str, float], dict[str, float]]:
        """Errors and floors of all persistent buffers; one that the program lacks is infinitely wrong."""
        persistent = self.reference.model.state_dict(keep_vars=True).keys()
        exact = dict(self.exact.model.named_buffers())
        errors, floors = {}, {}
        for name, buffer in self.reference.model.named_buffers():
            if name in persistent:
                errors[name] = _buffer_error(state[name].cpu(), buffer) if name in state else math.inf
                floors[name] = _buffer_error(buffer, exact[name])
        return errors, floors

    def _proves_nothing(
        self, trained: Mapping[str, torch.Tensor], initial: Mapping[str, torch.Tensor]
    ) -> tuple[str, ...]:
        found = []
        losses = [one for _, one in self.losses]
        if not all(math.isfinite(value) for pair in self.losses for value in pair):
            found.append("a loss is not finite")
        elif not self.has_gradient:
            found.append("no parameter of the reference has a gradient")
        elif self.round_off >= self.errors.keys():
            found.append("every gradient of the reference is nothing but round-off")
        elif all(torch.equal(p.cpu(), initial[n].cpu().to(p.dtype)) for n, p in trained.items()):
            found.append("the reference did not train: no step of its optimiser changed a parameter")
        elif len(losses) > 1 and max(losses) - min(losses) <= STILL * max(map(abs, losses)):
            found.append("the reference's loss does not move")
        return tuple(found)


def _buffer_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error of a buffer, where equal infinities (of masks) and truth values are equal too."""
    if found.shape != expected.shape:
        return math.inf
    if found.is_complex() or not expected.is_floating_point():
        return relative_error(found.to(expected.dtype), expected) if not torch.equal(found, expected) else 0.0
    own, one = found.double(), expected.double()
    usual = torch.isfinite(one)
    is_alike = torch.equal(torch.isfinite(own), usual) and torch.equal(own[~usual], one[~usual])
    return relative_error(own[usual], one[usual]) if is_alike else math.inf


def _size(error: float) -> float:
    """An error that can be compared: nan is infinitely wrong."""
    return error if math.isfinite(error) else math.inf


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected|| in fp64; 0 where both vanish, inf where a number is not finite."""
    difference = float((found.detach().double().cpu() - expected.detach().double().cpu()).norm())
    size = float(expected.detach().double().norm())
    return _size(difference / size if size > 0 else difference)


def _cast(batch: NamedBatch, dtype: torch.dtype) -> NamedBatch:
    return batch.map(lambda v: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v)


_GROUPED = getattr(torch, "_grouped_mm", None)
"""What torch.nn.functional.grouped_mm calls."""


class _InDouble(TorchFunctionMode):
    """Within it, what forward makes or casts to fp32 by name is fp64, and grouped products of experts, which torch's
    own lack there, have it too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _GROUPED and args[0].dtype == torch.float64:
            rows, weight, ends = args[0], args[1], kwargs["offs"].tolist()
            return torch.cat([rows[a:b] @ own for a, b, own in zip([0, *ends], ends, weight, strict=False)])
        func = torch.Tensor.double if func is torch.Tensor.float else func
        wide = {n: _wide(v) for n, v in (kwargs or {}).items()}
        return func(*map(_wide, args), **wide)


def _wide(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


_CHECKPOINTING = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")
"""What keeps and recomputes for a checkpoint of torch: until 2.13, and since."""


def _forward_once(*_: Any, **__: Any) -> Iterator[None]:
    """In place of what torch's checkpointing keeps and recomputes: nothing, which has the same gradients."""
    yield


@contextlib.contextmanager
def _as_compared(seed: int, step: int, dtype: torch.dtype | None) -> Iterator[None]:
    """Within it, an eager forward is one that a program can be compared with, in `dtype` if given.

    A checkpointed block is not run again in backward, where dropout would draw other masks.
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


def _copied(model: nn.Module) -> nn.Module:
    """A copy of the model, in which what a module keeps of its last forward (a recurrence's state) has no graph, which
    torch does not copy."""
    held = (tensor for module in model.modules() for tensor in tree_leaves(dict(vars(module))))
    kept = [tensor for tensor in held if isinstance(tensor, torch.Tensor) and not tensor.is_leaf]
    return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in kept})


class _Reference:
    """The user's model trained eagerly on one process, in the model's own precision or in `dtype`."""

    def __init__(
        self, compiled: CompiledProgram, max_grad_norm: float | None, seed: int, dtype: torch.dtype | None = None
    ) -> None:
        self.model = _copied(compiled.model).cpu().to(dtype)
        in_training(self.model)
        self.dtype = dtype
        self.loss_fn, self.seed, self.max_grad_norm = compiled.loss_fn, seed, max_grad_norm
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.optimizer = call(compiled.optimizer, trained)
        self.step = 0
        self.found: dict[str, torch.Tensor] = {}

    def forward_backward(self, batch: NamedBatch) -> float:
        self.model.zero_grad()  # also what the optimiser leaves out
        self.found = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        loss = self._loss(self.model, batch, self.dtype)
        torch.autograd.backward(loss)
        return float(loss.detach())

    def _loss(self, model: nn.Module, batch: NamedBatch, dtype: torch.dtype | None) -> torch.Tensor:
        """The batch's loss, all in dtype if given: the model is so already, a loss with own tensors becomes so."""
        batch = batch if dtype is None else _cast(batch, dtype)
        loss_fn = self.loss_fn
        if isinstance(loss_fn, nn.Module) and dtype is not None:
            loss_fn = copy.deepcopy(loss_fn).to(dtype)
        with _as_compared(self.seed, self.step, dtype):
            loss: torch.Tensor = LossModule(model, loss_fn, batch)(**batch)
            return loss

    def gradients(self) -> dict[str, torch.Tensor]:
        return {
            n: p.grad if p.grad is not None else torch.zeros_like(p)
            for n, p in self.model.named_parameters()
            if p.requires_grad
        }

    def round_off(self, batch: NamedBatch) -> dict[str, tuple[float, torch.Tensor]]:
        """For each parameter, the relative error of its fp32 gradient, and which elements have no right digit."""
        exact = _copied(self.model).double()
        for name, buffer in exact.named_buffers():  # as the step found them, since a forward may read what it counts
            buffer.copy_(self.found[name])
        exact.zero_grad()
        torch.autograd.backward(self._loss(exact, batch, torch.float64))
        truth = {n: p.grad for n, p in exact.named_parameters() if p.grad is not None}
        nothing = VANISHING * max(float(gradient.abs().max()) for gradient in truth.values())
        found = {}
        for name, gradient in self.gradients().items():
            right = truth.get(name, torch.zeros_like(gradient, dtype=torch.float64))
            right = torch.where(right.abs() > nothing, right, 0.0)
            mask = (gradient.double() - right).abs() > NO_DIGIT * right.abs()
            difference, size = float((gradient - right).norm()), float(right.norm())
            found[name] = (difference / size if size else float(difference > 0), mask)
        return found

    def update(self) -> None:
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.step += 1
