"""Check a program against the single-process model: same weights, same batches, same dropout masks.

The reference is the user's own eager module on one process, with the full batch and torch's own loss, optimizer and
clipping. Only dropout is replaced, in both, by masks that depend on the element's global position
(codegen/runtime/dropout.py).

Errors are relative: ||distributed - reference|| / ||reference|| per tensor (fp32 for fp32 plans). Where the true
gradient is zero (an attention key's bias: softmax does not see it) only round-off is left to compare, and Adam makes
whole steps of it. The rule compares with the same model's gradient in fp64, which counts as zero where it is at most
VANISHING times the model's largest:

    a tensor   whose fp32 reference gradient is off by more than ROUND_OFF in norm is left out of the gradients
    elements   whose fp32 reference gradient is off by more than NO_DIGIT (not one digit is right) in some step
               are left out of the parameters; a tensor with more than half of them is left out as a whole

The report names what is left out. What remains may still be magnified round-off (a bias' gradient is a long sum that
nearly cancels; Adam divides small gradients by their own size). The reference itself then differs from fp64. The report
has that distance beside the error: an error of at most FLOORS of them is as good as single-process fp32.

Programs in bf16 and fp16 are compared with the same fp32 reference, from which half precision's rounding separates them
everywhere. A third reference measures how far: it computes in the program's precision, on one process, with fp32
masters. Its distance from fp64 is then the floor. A step that overflows in fp16 runs again with the next loss scale.

Programs that round on purpose (products in fp8, ZeRO's exchanges in codes of 8 bits) are judged as the certificates'
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
from codegen.passes.fp8 import count_calls
from codegen.runtime.precision import compute_dtype
from cost_models.mixed_cluster import AnyCluster

ROUND_OFF = 1e-3
ROOM = 16.0
"""Divides a rank's loss scale on one process, where gradients are of all rows and overflow earlier."""
STILL = 1e-7
"""A loss that changes by less than this share over the steps counts as constant."""


@with_options(VerifyOptions)
def verify(model: nn.Module, cluster_spec: AnyCluster | str, options: VerifyOptions) -> VerifyReport:
    """Compile, run `steps` steps in real processes and on one, and compare loss, gradients, parameters and buffers.

    The options are given by keyword: those of autopar.compile, where the optimizer defaults to SGD with momentum, and
    those of VerifyOptions (in autopar.settings.compile_options). It runs on this machine, so the cluster must have as
    many ranks as the machine can hold.
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
    """Verify a compiled program, as `verify` does.

    is_replayed: after the comparison of gradients, one process updates by the program's gradients. Errors of parameters
    are then those of updates alone, and no update magnifies round-off in a gradient. Always so for a program that
    rounds on purpose, which is no error of its updates.
    """
    is_replayed = is_replayed or bool(roundings(compiled))
    check_verify(steps, max_grad_norm, seed)
    check_starting("verify")
    named = name_inputs(compiled.model, example_inputs, compiled.loss_fn)
    batches = [_rotated(named, compiled.plan.global_batch_size, shift) for shift in range(steps)]
    guards = compiled.program.any.guards
    batches = [batch if all(v.of(batch) == v.value for v in guards) else batches[0] for batch in batches]
    args = (compiled, batches, max_grad_norm, seed, is_replayed)
    compiled.require_runnable()
    patience = group_seconds(compiled)
    reports = run_ranks(_compare, args, compiled.plan.num_ranks, max(TIMEOUT_SECONDS, patience), patience)
    report: VerifyReport = next(r for r in reports if r is not None)
    return report


def roundings(compiled: GeneratedProgram) -> tuple[str, ...]:
    """Return the exchanges and products that a program rounds on purpose, in words."""
    plan, fp8 = compiled.plan, count_calls(compiled.program)
    return (*(("fp8",) if fp8 else ()), *((f"compression {plan.compression}",) if plan.compresses else ()))


def sgd_with_momentum(parameters: Any) -> torch.optim.Optimizer:
    """Return verification's default optimizer: unlike Adam it does not magnify round-off in tiny gradients."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _rotated(batch: NamedBatch, rows: int, shift: int) -> NamedBatch:
    """Return the batch with `rows` rows (repeated or cut), rotated by `shift`. Its tensors are leaves, so that steps
    share no graph."""
    num_rows = next(v.shape[0] for v in batch.values() if isinstance(v, torch.Tensor) and v.dim() > 0)
    index = (torch.arange(rows) + shift) % num_rows

    def rotate(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        leaf = value.detach()
        leaf = leaf[index] if leaf.dim() > 0 and leaf.shape[0] == num_rows else leaf
        return leaf.requires_grad_(value.requires_grad)

    return batch.map(rotate)


def _compare(
    compiled: CompiledProgram,
    batches: list[NamedBatch],
    max_grad_norm: float | None,
    seed: int,
    is_replayed: bool = False,
) -> VerifyReport | None:
    """Run the program on every rank. Rank 0 also runs the references and returns the report; others return None."""
    step = compiled.build(max_grad_norm=max_grad_norm, non_finite="ignore", seed=seed, first_step_check=False)
    comparison = _Comparison(compiled, max_grad_norm, seed, is_replayed) if dist.get_rank() == 0 else None
    for batch in batches:
        loss, gradients, scale = _one_step(step, compiled.local_batch(batch), comparison)
        if comparison is not None:
            comparison.step(batch, loss, gradients, scale)
    state = step.full_state_dict()
    return None if comparison is None else comparison.report(state)


def _one_step(
    step: Any, batch: Mapping[str, torch.Tensor], comparison: _Comparison | None
) -> tuple[float, dict[str, torch.Tensor], float]:
    """Return loss, gradients and loss scale of a step with an update, after steps that its scale makes it skip."""
    while True:
        scale, num_skipped = step.loss_scale, step.guard.num_skipped
        loss, gradients = float(step.forward_backward(batch)), step.gradients()
        step.update()
        if step.guard.num_skipped == num_skipped or scale <= 1.0:
            return loss, gradients, scale
        if comparison is not None:
            comparison.skip_step()


@dataclass
class _Comparison:
    """Compares a program's numbers with those of the reference, of one in fp64, and of one in half precision.

    noise: elements of a parameter that had no right digit. round_off: gradients that are nothing but round-off.
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

    def skip_step(self) -> None:
        """Count a skipped step, so that the next one has the dropout masks of its number."""
        for reference in self.references:
            reference.step += 1

    def step(self, batch: NamedBatch, loss: float, gradients: Mapping[str, torch.Tensor], scale: float) -> None:
        """Run one step of the references, and compare the program's loss and gradients with theirs."""
        self.exact.forward_backward(batch)
        self.losses.append((loss, self.reference.forward_backward(batch)))
        for name, (error, mask) in self.reference.round_off(batch).items():
            self.round_off |= {name} if error > ROUND_OFF else set()
            mask = torch.zeros_like(mask) if self.is_replayed else mask
            self.noise[name] = self.noise[name] | mask if name in self.noise else mask
        truth = self.exact.gradients()
        low = {} if self.low is None else self.low.gradients_of(batch, max(scale / ROOM, 1.0))
        references = self.reference.gradients()
        self.together = max(self.together, error_together(gradients, references))
        for name, gradient in references.items():
            computed = gradients.get(name, torch.zeros_like(gradient))  # none where the loss does not depend on it
            self.errors[name] = max(self.errors.get(name, 0.0), relative_error(computed, gradient))
            floor = relative_error(low.get(name, gradient), truth[name])
            floor = floor if math.isfinite(floor) else relative_error(gradient, truth[name])
            self.floors[name] = max(self.floors.get(name, 0.0), floor)
            self.has_gradient |= bool(gradient.any())
        for reference in self.references:
            if self.is_replayed:
                reference.take_gradients(gradients)
            reference.update()

    def report(self, state: Mapping[str, torch.Tensor]) -> VerifyReport:
        """Return the report. state: the program's after the last step."""
        initial = dict(self.compiled.model.named_parameters())
        trained, exact = dict(self.reference.model.named_parameters()), dict(self.exact.model.named_parameters())
        rounded = trained if self.low is None else dict(self.low.model.named_parameters())
        parameters, floors = {}, {}
        for name, mask in self.noise.items():
            if mask.double().mean() <= 0.5:
                kept = ~mask
                value = state[name].cpu() if name in state else initial[name].detach()
                parameters[name] = _stored_error(value[kept], trained[name][kept])
                floors[name] = _stored_error(rounded[name][kept], exact[name][kept])
        buffers, buffer_floors = self._buffers(state)
        partly = (n for n, mask in self.noise.items() if mask.any() and n in parameters)
        counted = {f"{n} ({int(self.noise[n].sum())} of {self.noise[n].numel()} elements)" for n in partly}
        return VerifyReport(
            loss=max((_relative(loss, right) for loss, right in self.losses), default=math.inf),
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
        """Return the relative error that is none: of half precision's rounding of one number, or fp8's documented
        one."""
        unit = 0.0 if self.low_dtype is None else torch.finfo(self.low_dtype).eps
        return max(tolerance(self.compiled.program), unit)

    def _buffers(self, state: Mapping[str, torch.Tensor]) -> tuple[dict[str, float], dict[str, float]]:
        """Return errors and floors of all persistent buffers. A buffer that the program lacks has an infinite error."""
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
        reasons = []
        losses = [reference_loss for _, reference_loss in self.losses]
        if not all(math.isfinite(value) for pair in self.losses for value in pair):
            reasons.append("a loss is not finite")
        elif not self.has_gradient:
            reasons.append("no parameter of the reference has a gradient")
        elif self.round_off >= self.errors.keys():
            reasons.append("every gradient of the reference is nothing but round-off")
        elif all(torch.equal(p.cpu(), initial[n].cpu().to(p.dtype)) for n, p in trained.items()):
            reasons.append("the reference did not train: no step of its optimizer changed a parameter")
        elif len(losses) > 1 and max(losses) - min(losses) <= STILL * max(map(abs, losses)):
            reasons.append("the reference's loss does not move")
        return tuple(reasons)


def _stored_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error of a parameter or buffer. Equal truth values, infinities (of masks) and nan (of unused
    elements) count as equal."""
    if value.shape != expected.shape:
        return math.inf
    if value.is_complex() or not expected.is_floating_point():
        return relative_error(value.to(expected.dtype), expected) if not torch.equal(value, expected) else 0.0
    wide, right = value.double(), expected.double()
    usual = torch.isfinite(right)
    is_alike = torch.equal(torch.isfinite(wide), usual) and torch.allclose(wide[~usual], right[~usual], equal_nan=True)
    return relative_error(wide[usual], right[usual]) if is_alike else math.inf


def _relative(loss: float, right: float) -> float:
    return _size(abs(loss - right) / max(abs(right), 1e-30))


def _size(error: float) -> float:
    """Return a comparable error: nan is infinitely wrong."""
    return error if math.isfinite(error) else math.inf


def error_together(computed: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the relative error of all gradients as one vector."""
    pairs = [(computed.get(name, torch.zeros_like(right)), right) for name, right in expected.items()]
    vectors = (torch.cat([pair[i].detach().double().cpu().reshape(-1) for pair in pairs]) for i in (0, 1))
    return relative_error(*vectors)


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ||value - expected|| / ||expected|| in fp64; 0 where both vanish, inf where a number is not finite."""
    difference = float((value.detach().double().cpu() - expected.detach().double().cpu()).norm())
    size = float(expected.detach().double().norm())
    return _size(difference / size if size > 0 else difference)
