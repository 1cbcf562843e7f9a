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

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.compile import compile
from autopar.compiled import CompiledProgram
from autopar.costs.updates import OptimizerFactory
from autopar.fp8 import EXACT, tolerance
from autopar.launch import TIMEOUT_SECONDS, group_seconds, run_ranks
from autopar.tracing.trace import _LossModule, name_inputs
from codegen.runtime.reference import SameDropout
from cost_models.mixed import AnyCluster

ROUND_OFF = 1e-3
NO_DIGIT = 0.1
VANISHING = 1e-12
FLOORS = 4.0
RESOLUTION = 2.0**-23


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Largest relative errors over all steps, and where they are.

    gradients, parameters: error by name (parameters after the last step). gradient_floors, floors: the reference's own
    error against the same training in fp64. round_off: names left out by the rule. losses: (program, reference) of
    each step. tolerance: what may be expected of the program (autopar/fp8.py).
    """

    loss: float
    gradients: Mapping[str, float]
    parameters: Mapping[str, float]
    gradient_floors: Mapping[str, float]
    floors: Mapping[str, float]
    round_off: tuple[str, ...]
    losses: tuple[tuple[float, float], ...]
    mesh: str
    tolerance: float = EXACT

    @property
    def largest_gradient(self) -> float:
        return max(self.gradients.values(), default=0.0)

    @property
    def largest_parameter(self) -> float:
        return max(self.parameters.values(), default=0.0)

    def ok(self, tolerance: float | None = None) -> bool:
        """Whether every error is within `tolerance` (by default the report's), or FLOORS times the reference's own."""
        tolerance = self.tolerance if tolerance is None else tolerance
        return self.loss <= tolerance and not self.beyond(tolerance)

    def beyond(self, tolerance: float = 1e-5) -> tuple[str, ...]:
        """Tensors that are off by more than `tolerance` and by more than the reference's own round-off explains.

        A tolerance below fp32's resolution is taken literally: round-off then explains nothing.
        """
        factor = FLOORS if tolerance >= RESOLUTION else 0.0
        return tuple(n for n, error, floor in self._errors() if error > max(tolerance, factor * floor))

    def explained(self, tolerance: float = 1e-5) -> tuple[str, ...]:
        """Tensors that are off by more than `tolerance`, as the reference itself is."""
        outside = set(self.beyond(tolerance))
        return tuple(dict.fromkeys(n for n, error, _ in self._errors() if error > tolerance and n not in outside))

    def _errors(self) -> Iterator[tuple[str, float, float]]:
        """(name, error, the reference's own error) of all gradients and parameters."""
        for errors, floors in ((self.gradients, self.gradient_floors), (self.parameters, self.floors)):
            yield from ((name, error, floors[name]) for name, error in errors.items())

    def __str__(self) -> str:
        def worst(errors: Mapping[str, float]) -> str:
            name = max(errors, key=lambda n: errors[n], default="-")
            return f"{errors.get(name, 0.0):.2e} ({name})"

        left_out = f"; pure round-off, left out: {', '.join(self.round_off)}" if self.round_off else ""
        return (
            f"{self.mesh}: largest relative error of the loss {self.loss:.2e}, of a gradient {worst(self.gradients)}, "
            f"of a parameter after {len(self.losses)} steps {worst(self.parameters)}{left_out}"
        )


def verify(
    model: nn.Module,
    cluster_spec: AnyCluster | str,
    *,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    loss_fn: Callable[..., torch.Tensor] | None = None,
    global_batch_size: int | None = None,
    optimizer: OptimizerFactory | None = None,
    precision: str = "fp32",
    constraints: Mapping[str, Any] | None = None,
    kernels: str = "auto",
    backend: str = "eager",
    compression: Mapping[str, str] | None = None,
    fp8: bool = False,
    steps: int = 3,
    max_grad_norm: float | None = None,
    seed: int = 0,
) -> VerifyReport:
    """Compile, run `steps` steps in real processes and on one, and compare loss, gradients and parameters.

    Arguments as autopar.compile; optimizer defaults to SGD with momentum. Each step uses the batch with its rows
    rotated by one more. Runs on this machine, so the cluster must be as many ranks as it can hold.
    """
    factory = optimizer or sgd_with_momentum
    compiled = compile(
        model,
        cluster_spec,
        example_inputs=example_inputs,
        loss_fn=loss_fn,
        global_batch_size=global_batch_size,
        optimizer=factory,
        precision=precision,
        constraints=constraints,
        kernels=kernels,
        fp8=fp8,
        backend=backend,
        compression=compression,
    )
    return verify_program(compiled, example_inputs, steps=steps, max_grad_norm=max_grad_norm, seed=seed)


def verify_program(
    compiled: CompiledProgram,
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    steps: int = 3,
    max_grad_norm: float | None = None,
    seed: int = 0,
) -> VerifyReport:
    """`verify` of a program that is compiled already."""
    named = name_inputs(compiled.model, example_inputs, compiled.loss_fn)
    batches = [_rotated(named, compiled.plan.global_batch_size, shift) for shift in range(steps)]
    args = (compiled, batches, max_grad_norm, seed)
    compiled.require_backend()
    patience = group_seconds(compiled)
    reports = run_ranks(_compare, args, compiled.plan.num_ranks, max(TIMEOUT_SECONDS, patience), patience)
    report: VerifyReport = next(r for r in reports if r is not None)
    return report


def sgd_with_momentum(parameters: Any) -> torch.optim.Optimizer:
    """The default of verification: unlike Adam it does not magnify round-off in tiny gradients."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _rotated(batch: Mapping[str, Any], rows: int, shift: int) -> dict[str, Any]:
    """The batch with `rows` rows (repeated or cut), rotated by `shift`."""
    own = next(v.shape[0] for v in batch.values() if isinstance(v, torch.Tensor) and v.dim() > 0)
    index = (torch.arange(rows) + shift) % own

    def rotate(value: Any) -> Any:
        is_batched = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == own
        return value[index] if is_batched else value

    return {name: rotate(value) for name, value in batch.items()}


def _compare(
    compiled: CompiledProgram, batches: list[dict[str, Any]], max_grad_norm: float | None, seed: int
) -> VerifyReport | None:
    """On every rank: run the program; rank 0 also runs the references and returns the report."""
    step = compiled.build(max_grad_norm=max_grad_norm, seed=seed)
    is_first = dist.get_rank() == 0
    reference = _Reference(compiled, max_grad_norm, seed) if is_first else None
    exact = _Reference(compiled, max_grad_norm, seed, torch.float64) if is_first else None
    loss_errors, losses = [], []
    noise: dict[str, torch.Tensor] = {}
    round_off: set[str] = set()
    gradient_errors: dict[str, float] = {}
    gradient_floors: dict[str, float] = {}
    for batch in batches:
        loss = float(step.forward_backward(compiled.local_batch(batch)))
        gradients = step.gradients()
        if reference is not None and exact is not None:
            exact.forward_backward(batch)
            expected = reference.forward_backward(batch)
            loss_errors.append(abs(loss - expected) / max(abs(expected), 1e-30))
            losses.append((loss, expected))
            for name, (own_error, mask) in reference.round_off(batch).items():
                round_off |= {name} if own_error > ROUND_OFF else set()
                noise[name] = noise[name] | mask if name in noise else mask
            truth = exact.gradients()
            for name, gradient in reference.gradients().items():
                error = relative_error(gradients[name], gradient)
                gradient_errors[name] = max(gradient_errors.get(name, 0.0), error)
                floor = relative_error(gradient, truth[name])
                gradient_floors[name] = max(gradient_floors.get(name, 0.0), floor)
            reference.update()
            exact.update()
        step.update()
    state = step.full_state_dict()
    if reference is None or exact is None:
        return None
    parameters, floors = {}, {}
    for name, mask in noise.items():
        if mask.double().mean() <= 0.5:
            kept = ~mask
            trained = reference.model.get_parameter(name)
            parameters[name] = relative_error(state[name].cpu()[kept], trained[kept])
            floors[name] = relative_error(trained[kept], exact.model.get_parameter(name)[kept])
    partly = {f"{n} ({int(m.sum())} of {m.numel()} elements)" for n, m in noise.items() if m.any() and n in parameters}
    return VerifyReport(
        max(loss_errors),
        {n: e for n, e in gradient_errors.items() if n not in round_off},
        parameters,
        gradient_floors,
        floors,
        tuple(sorted(round_off | partly)),
        tuple(losses),
        compiled.plan.layout,
        tolerance(compiled.program),
    )


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected|| in fp64; 0 where both vanish."""
    difference = float((found.detach().double().cpu() - expected.detach().double().cpu()).norm())
    size = float(expected.detach().double().norm())
    return difference / size if size > 0 else difference


def _cast(batch: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {n: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for n, v in batch.items()}


class _Reference:
    """The user's model trained eagerly on one process, in the model's own precision or in `dtype`."""

    def __init__(
        self, compiled: CompiledProgram, max_grad_norm: float | None, seed: int, dtype: torch.dtype | None = None
    ) -> None:
        self.model = copy.deepcopy(compiled.model).train().cpu().to(dtype)
        self.dtype = dtype
        self.loss_fn, self.seed, self.max_grad_norm = compiled.loss_fn, seed, max_grad_norm
        self.optimizer = compiled.optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.step = 0

    def forward_backward(self, batch: Mapping[str, Any]) -> float:
        self.optimizer.zero_grad()
        loss = self._loss(self.model, batch if self.dtype is None else _cast(batch, self.dtype))
        torch.autograd.backward(loss)
        return float(loss.detach())

    def _loss(self, model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        with SameDropout(self.seed, self.step):
            loss: torch.Tensor = _LossModule(model, self.loss_fn, tuple(batch))(**batch)
            return loss

    def gradients(self) -> dict[str, torch.Tensor]:
        return {
            n: p.grad if p.grad is not None else torch.zeros_like(p)
            for n, p in self.model.named_parameters()
            if p.requires_grad
        }

    def round_off(self, batch: Mapping[str, Any]) -> dict[str, tuple[float, torch.Tensor]]:
        """Per parameter: the relative error of its fp32 gradient, and which elements have no right digit."""
        exact = copy.deepcopy(self.model).double()
        exact.zero_grad()
        torch.autograd.backward(self._loss(exact, _cast(batch, torch.float64)))
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
