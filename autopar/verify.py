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

Programs in bf16 and fp16 are compared with the same fp32 reference, which they are away from by the rounding of half
precision, everywhere. How far is measured: a third reference computes in the program's precision, on one process, with
fp32 masters. Its distance from fp64 is the floor then. A step that overflows in fp16 is run again with the next loss
scale.

Programs that round on purpose (products in fp8, what ZeRO sends in codes of 8 bits) are judged as the certificates'
miniatures are (`VerifyReport.faults`): by all gradients as one vector, the loss, and updates by their own gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.compile import compile_with
from autopar.compiled import CompiledProgram
from autopar.frontend.inputs import NamedBatch, name_inputs
from autopar.launch import TIMEOUT_SECONDS, group_seconds, run_ranks
from autopar.program import GeneratedProgram
from autopar.running.process_state import check_starting
from autopar.settings.compile_options import VerifyOptions, check_verify, with_options
from autopar.settings.fp8 import tolerance
from autopar.verify_reference import Reference
from autopar.verify_report import VerifyReport
from codegen.fp8 import count_calls
from codegen.runtime.precision import compute_dtype
from cost_models.mixed import AnyCluster

ROUND_OFF = 1e-3
ROOM = 16.0
"""What a rank's loss scale is divided by on one process, where gradients are of all rows and overflow earlier."""
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
    is_replayed: bool = False,
) -> VerifyReport:
    """Verifies a program that is compiled already, as `verify` does.

    is_replayed: one process updates by the program's own gradients, after these were compared with its own. Errors of
    parameters are then those of updates alone, and no round-off in a gradient is magnified by an update. Always so
    where the program rounds on purpose, which is no error of its updates.
    """
    is_replayed = is_replayed or bool(roundings(compiled))
    check_verify(steps, max_grad_norm, seed)
    check_starting("verify")
    named = name_inputs(compiled.model, example_inputs, compiled.loss_fn)
    batches = [_rotated(named, compiled.plan.global_batch_size, shift) for shift in range(steps)]
    guards = compiled.program.any.guards
    batches = [each if all(v.of(each) == v.value for v in guards) else batches[0] for each in batches]
    args = (compiled, batches, max_grad_norm, seed, is_replayed)
    compiled.require_runnable()
    patience = group_seconds(compiled)
    reports = run_ranks(_compare, args, compiled.plan.num_ranks, max(TIMEOUT_SECONDS, patience), patience)
    report: VerifyReport = next(r for r in reports if r is not None)
    return report


def roundings(compiled: GeneratedProgram) -> tuple[str, ...]:
    """What a program rounds on purpose, in words."""
    plan, fp8 = compiled.plan, count_calls(compiled.program)
    return (*(("fp8",) if fp8 else ()), *((f"compression {plan.compression}",) if plan.compresses else ()))


def sgd_with_momentum(parameters: Any) -> torch.optim.Optimizer:
    """The default of verification: unlike Adam it does not magnify round-off in tiny gradients."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _rotated(batch: NamedBatch, rows: int, shift: int) -> NamedBatch:
    """The batch with `rows` rows (repeated or cut), rotated by `shift`; its tensors are leaves, so that steps share no
    graph."""
    own = next(v.shape[0] for v in batch.values() if isinstance(v, torch.Tensor) and v.dim() > 0)
    index = (torch.arange(rows) + shift) % own

    def rotate(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        leaf = value.detach()
        leaf = leaf[index] if leaf.dim() > 0 and leaf.shape[0] == own else leaf
        return leaf.requires_grad_(value.requires_grad)

    return batch.map(rotate)


def _compare(
    compiled: CompiledProgram,
    batches: list[NamedBatch],
    max_grad_norm: float | None,
    seed: int,
    is_replayed: bool = False,
) -> VerifyReport | None:
    """Runs the program on every rank; rank 0 also runs the references and returns the report, others None."""
    step = compiled.build(max_grad_norm=max_grad_norm, non_finite="ignore", seed=seed, first_step_check=False)
    found = _Comparison(compiled, max_grad_norm, seed, is_replayed) if dist.get_rank() == 0 else None
    for batch in batches:
        loss, gradients, scale = _one_step(step, compiled.local_batch(batch), found)
        if found is not None:
            found.step(batch, loss, gradients, scale)
    state = step.full_state_dict()
    return None if found is None else found.report(state)


def _one_step(
    step: Any, batch: Mapping[str, torch.Tensor], found: _Comparison | None
) -> tuple[float, dict[str, torch.Tensor], float]:
    """Loss, gradients and loss scale of a step that the program trains, after those that its scale makes it skip."""
    while True:
        scale, num_skipped = step.loss_scale, step.guard.num_skipped
        loss, gradients = float(step.forward_backward(batch)), step.gradients()
        step.update()
        if step.guard.num_skipped == num_skipped or scale <= 1.0:
            return loss, gradients, scale
        if found is not None:
            found.pass_over()


@dataclass
class _Comparison:
    """A program's numbers beside those of the reference, of the reference in fp64, and of that in half precision.

    noise: which elements of a parameter have had no right digit. round_off: gradients that are nothing but round-off.
    """

    compiled: CompiledProgram
    max_grad_norm: float | None
    seed: int
    is_replayed: bool = False
    losses: list[tuple[float, float]] = field(default_factory=list)
    noise: dict[str, torch.Tensor] = field(default_factory=dict)
    round_off: set[str] = field(default_factory=set)
    errors: dict[str, float] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
    has_gradient: bool = False
    together: float = 0.0

    def __post_init__(self) -> None:
        self.reference = Reference(self.compiled, self.max_grad_norm, self.seed)
        self.exact = Reference(self.compiled, self.max_grad_norm, self.seed, torch.float64)
        self.low_dtype = compute_dtype(self.compiled.plan.precision)
        self.low: Reference | None = None
        if self.low_dtype is not None:
            self.low = Reference(self.compiled, self.max_grad_norm, self.seed, low_dtype=self.low_dtype)

    @property
    def references(self) -> list[Reference]:
        return [self.reference, self.exact, *([] if self.low is None else [self.low])]

    def pass_over(self) -> None:
        """A step was skipped: the dropout masks of the next one are those of its number."""
        for each in self.references:
            each.step += 1

    def step(self, batch: NamedBatch, loss: float, gradients: Mapping[str, torch.Tensor], scale: float) -> None:
        """One step of the references, compared with the program's loss and gradients."""
        self.exact.forward_backward(batch)
        self.losses.append((loss, self.reference.forward_backward(batch)))
        for name, (own_error, mask) in self.reference.round_off(batch).items():
            self.round_off |= {name} if own_error > ROUND_OFF else set()
            mask = torch.zeros_like(mask) if self.is_replayed else mask
            self.noise[name] = self.noise[name] | mask if name in self.noise else mask
        truth = self.exact.gradients()
        low = {} if self.low is None else self.low.gradients_of(batch, max(scale / ROOM, 1.0))
        references = self.reference.gradients()
        self.together = max(self.together, error_together(gradients, references))
        for name, gradient in references.items():
            found = gradients.get(name, torch.zeros_like(gradient))  # of what the loss does not depend on there is none
            self.errors[name] = max(self.errors.get(name, 0.0), relative_error(found, gradient))
            floor = relative_error(low.get(name, gradient), truth[name])
            floor = floor if math.isfinite(floor) else relative_error(gradient, truth[name])
            self.floors[name] = max(self.floors.get(name, 0.0), floor)
            self.has_gradient |= bool(gradient.any())
        for each in self.references:
            if self.is_replayed:
                each.take_gradients(gradients)
            each.update()

    def report(self, state: Mapping[str, torch.Tensor]) -> VerifyReport:
        """The report, given the program's state after the last step."""
        initial = dict(self.compiled.model.named_parameters())
        trained, exact = dict(self.reference.model.named_parameters()), dict(self.exact.model.named_parameters())
        rounded = trained if self.low is None else dict(self.low.model.named_parameters())
        parameters, floors = {}, {}
        for name, mask in self.noise.items():
            if mask.double().mean() <= 0.5:
                kept = ~mask
                own = state[name].cpu() if name in state else initial[name].detach()
                parameters[name] = _stored_error(own[kept], trained[name][kept])
                floors[name] = _stored_error(rounded[name][kept], exact[name][kept])
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
            together=self.together,
            rounds=roundings(self.compiled),
            tolerance=self._tolerance(),
            buffers=buffers,
            proves_nothing=self._proves_nothing({n: p for n, p in trained.items() if p.requires_grad}, initial),
        )

    def _tolerance(self) -> float:
        """What half precision rounds a single number by is no error, nor what fp8 is said to do."""
        unit = 0.0 if self.low_dtype is None else torch.finfo(self.low_dtype).eps
        return max(tolerance(self.compiled.program), unit)

    def _buffers(self, state: Mapping[str, torch.Tensor]) -> tuple[dict[str, float], dict[str, float]]:
        """Errors and floors of all persistent buffers; one that the program lacks is infinitely wrong."""
        persistent = self.reference.model.state_dict(keep_vars=True).keys()
        exact = dict(self.exact.model.named_buffers())
        rounded = {} if self.low is None else dict(self.low.model.named_buffers())
        errors, floors = {}, {}
        for name, buffer in self.reference.model.named_buffers():
            if name in persistent:
                errors[name] = _stored_error(state[name].cpu(), buffer) if name in state else math.inf
                floors[name] = _stored_error(rounded.get(name, buffer), exact[name])
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


def _stored_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error of a parameter or buffer, where equal truth values, infinities (of masks) and nan (of what
    nothing uses) are equal too."""
    if found.shape != expected.shape:
        return math.inf
    if found.is_complex() or not expected.is_floating_point():
        return relative_error(found.to(expected.dtype), expected) if not torch.equal(found, expected) else 0.0
    own, one = found.double(), expected.double()
    usual = torch.isfinite(one)
    is_alike = torch.equal(torch.isfinite(own), usual) and torch.allclose(own[~usual], one[~usual], equal_nan=True)
    return relative_error(own[usual], one[usual]) if is_alike else math.inf


def _size(error: float) -> float:
    """An error that can be compared: nan is infinitely wrong."""
    return error if math.isfinite(error) else math.inf


def error_together(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The relative error of all gradients as one vector."""
    pairs = [(found.get(name, torch.zeros_like(own)), own) for name, own in expected.items()]
    one, other = (torch.cat([pair[i].detach().double().cpu().reshape(-1) for pair in pairs]) for i in (0, 1))
    return relative_error(one, other)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected|| in fp64; 0 where both vanish, inf where a number is not finite."""
    difference = float((found.detach().double().cpu() - expected.detach().double().cpu()).norm())
    size = float(expected.detach().double().norm())
    return _size(difference / size if size > 0 else difference)
