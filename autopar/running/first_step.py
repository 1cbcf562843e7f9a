"""Compare a program's loss of the first step with the model's own loss of the same batch, computed on rank 0.

Rank 0 runs one forward of the model in training, with the dropout masks that the program draws
(codegen/runtime/reference.py). The check does not change training. It runs a copy of the model, frees the copy before
the program's forward, and restores the random states. Where the losses differ, training ends before its first update.

`step.local_batch` knows the whole batch. Where a loop cuts batches itself, rank 0 assembles the parts of all ranks
(whole_batch.py).

By default the check runs where three things hold: the model's values are in memory; a copy with all activations of the
whole batch fits beside the program, by the plan's figures; and its forward is short. The losses may differ by UNIT; in
half precision by the rounding of one number; or by the error that fp8 is documented to have. A larger difference is
compared with the model's own: its loss in the next wider precision, and its loss under other random numbers. The check
passes where one of those is as far away (times FLOORS, as in `verify`).
"""

from __future__ import annotations

import cmath
import contextlib
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import ConstraintError, TrainingError
from autopar.frontend.admission import traits_of
from autopar.frontend.copies import deep_copy
from autopar.frontend.inputs import NamedBatch
from autopar.frontend.loss_module import LossModule, loss_in
from autopar.frontend.skeleton import in_training
from autopar.frontend.trace_modes.one_process import as_one_process
from autopar.program import GeneratedProgram
from autopar.running.process_state import kept_random_states, seed_all
from autopar.running.whole_batch import assemble, share_of_rank
from autopar.settings.fp8 import tolerance
from autopar.units import bytes_text
from autopar.verify_report import FLOORS
from codegen.runtime.batch_checks import digest_of, flat_batch
from codegen.runtime.precision import compute_dtype
from codegen.runtime.reference import SameDropout

UNIT = 2.0**8 * torch.finfo(torch.float32).eps
"""Relative difference that two losses in fp32 may have: 2**16 roundings to either side, of which the root remains."""
STILL = torch.finfo(torch.float32).eps
"""Absolute difference that counts as none, however small the losses are."""
LONGEST_SECONDS = 60.0
"""Other ranks wait while rank 0 computes alone: at most this long, unless the user asks for the check."""

MOST_WAITING = 16
"""Whole batches that are kept until the first step, for loops that prepare some ahead."""
CHANGED = "the model, or the values of the model or the step, changed since the step was built"

_log = logging.getLogger("autopar")

AfterStep = Callable[[float], None]
"""Takes the first step's loss on every rank, and raises TrainingError on all where it is wrong. Collective."""


class FirstStepCheck:
    """Compares the loss of a step's first batch with the model's own; `Step.first_check`.

    wanted: None runs the check where it costs little, True always.
    """

    def __init__(self, compiled: GeneratedProgram, step: Any, wanted: bool | None) -> None:
        self._compiled, self._step, self._is_wanted = compiled, step, bool(wanted)
        self._reason = why_not(compiled, self._is_wanted)
        self._values = [] if self._reason else self._values_now()
        self._cut_batches: list[tuple[Mapping[str, Tensor], Mapping[str, Any], Callable[[], Mapping[str, Tensor]]]] = []

    def note_part(
        self, part: Mapping[str, Tensor], whole: Mapping[str, Any], again: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        """Note the rank's part of a whole batch. `again` makes the part once more."""
        if not self._reason and len(self._cut_batches) < MOST_WAITING:
            self._cut_batches.append((part, whole, again))

    def forget_part(self, part: Mapping[str, Tensor]) -> None:
        """Forget a part that was used for something other than a step."""
        self._cut_batches = [batch for batch in self._cut_batches if batch[0] is not part]

    def __call__(self, part: Mapping[str, Tensor]) -> AfterStep | None:
        """Prepare the check of the first step, which is about to begin with this part of its batch. Collective.

        Raises ConstraintError on every rank where the user asks for the check and it is impossible.
        """
        whole, reason = self._whole(part)
        self._cut_batches = []
        reasons, digests = zip(*_all_gather((reason, None if whole is None else self._digest(whole))), strict=True)
        reason = next(filter(None, reasons), "")
        if not reason and None in digests:
            whole, reason = self._assemble(part)
        elif not reason and len(set(digests)) > 1:
            reason = "ranks were given parts of different batches"
        model = None
        if self._step.mesh.everyone.rank == 0 and whole is not None and not reason:
            model = _Model(self._compiled, whole, self._step.mesh.device, self._step.rng.seed, int(self._step.rng.step))
            reason = model.compute()
        reason = _broadcast(reason)
        if not reason:
            return partial(_compare, model)
        if self._is_wanted and reason != CHANGED:
            raise ConstraintError(
                "the first step cannot be checked",
                values=reason,
                alternatives=["first_step_check=None, or False", "cut batches with step.local_batch"],
            )
        _log.info("the first step is not checked: %s", reason)
        return None

    def _whole(self, part: Mapping[str, Tensor]) -> tuple[NamedBatch | None, str]:
        """Return the whole batch of this rank's part, or None where `step.local_batch` did not cut it. The text says
        why there is no check, as far as this rank knows."""
        nothing = NamedBatch({}, {})
        if self._reason:
            return nothing, self._reason
        values = self._values_now()
        if len(values) != len(self._values) or not all(map(_is_close, self._values, values)):
            return nothing, CHANGED
        cut = next((batch for batch in self._cut_batches if batch[0] is part), None)
        if cut is None:
            return (None, "") if self._step.mesh.everyone.size > 1 else self._named(part)
        if not _still_gives(cut[2], part):
            return nothing, "the batch was changed after step.local_batch"
        return self._named(flat_batch(cut[1]))

    def _named(self, values: Mapping[str, Any]) -> tuple[NamedBatch, str]:
        """Return the whole batch under the names that the model was traced with, or why that is impossible. Programs
        take inputs by name, in any order, and fill in the values that they were made with."""
        form, inputs = self._compiled.form, {**self._compiled.program.any.fixed_inputs, **values}
        if unmatched := sorted(inputs.keys() ^ set(form.names)):
            # Without an input that the program does not read, the model might compute something else.
            which = "lacks" if unmatched[0] in form.names else "has"
            return NamedBatch({}, {}), f"the batch {which} {unmatched[0]}, other than the program's example inputs"
        return form.filled(inputs), ""

    def _digest(self, whole: NamedBatch) -> str:
        """Return a text that is equal on ranks with one batch."""
        if self._step.mesh.everyone.size == 1:
            return ""
        return digest_of(value for value in whole.values() if isinstance(value, Tensor))

    def _assemble(self, part: Mapping[str, Tensor]) -> tuple[NamedBatch | None, str]:
        """Assemble on rank 0 the whole batch from the ranks' parts; or return why that is impossible. Collective."""
        program, mesh, whole = self._compiled.program, self._step.mesh, None
        reason, share = "", dict[str, Tensor]()
        if program.any.unused_inputs:
            reason = f"step.local_batch did not cut it, and no part has all of {', '.join(program.any.unused_inputs)}"
        else:
            share = share_of_rank(program, part, mesh.everyone.rank)
        shares = _gather(share)
        if shares and not reason:
            try:
                whole, reason = self._named(assemble(program, shares))
            except ValueError as error:
                reason = f"the ranks' parts make no batch: {next(iter(str(error).splitlines()), '')}"
        return whole, reason

    def _values_now(self) -> list[Any]:
        """Return marks that change with values: the sum of each tensor of the step, and on rank 0 of the model."""
        stored = [entry.stored for _, entry in self._step.entries() if entry.stored is not None]
        stored += [value for part in self._step.parts for _, _, value in part.model.buffer_slots()]
        if self._step.mesh.everyone.rank > 0:
            return [_sum(value) for value in stored]
        model = self._compiled.model
        return [traits_of(model), *map(_sum, (*stored, *model.parameters(), *model.buffers()))]


def _still_gives(again: Callable[[], Mapping[str, Tensor]], part: Mapping[str, Tensor]) -> bool:
    """Return whether a batch still gives this part."""
    try:
        now = again()
    except Exception:  # any error of changed values is a no: the other ranks wait for an answer
        return False
    return part.keys() == now.keys() and all(torch.equal(value, now[name]) for name, value in part.items())


def _sum(value: Tensor) -> complex:
    if value.is_meta:
        return complex(math.nan)
    wide = torch.complex128 if value.is_complex() else torch.float64
    return complex(value.detach().sum(dtype=wide).item())


def _is_close(before: Any, now: Any) -> bool:
    """Compare two marks; sums on another device may add in another order."""
    if isinstance(before, complex) and cmath.isfinite(before):
        return cmath.isclose(before, now, rel_tol=1e-6, abs_tol=1e-6)
    return bool(before == now) or repr(before) == repr(now)


def why_not(compiled: GeneratedProgram, is_wanted: bool = False) -> str:
    """Return why the check does not run, in a clause; "" where it does. is_wanted: the user asked, whatever it
    costs."""
    plan = compiled.plan
    if any(p.device.type == "meta" for p in compiled.model.parameters()):
        return "the model's values are not in memory"
    if plan.compresses and plan.compression.gather:
        return "the plan rounds parameters on the wire, and the model does not"
    if is_wanted:
        return ""
    seconds = plan.prediction.step_seconds * plan.num_ranks / 3
    if seconds > LONGEST_SECONDS:
        return f"the other ranks would wait for some {seconds:.0f} s"
    needed, free = needed_bytes(compiled), free_bytes(compiled)
    if needed > free:
        return f"the model on one rank needs {bytes_text(needed)} more, and {bytes_text(free)} are free"
    return ""


def needed_bytes(compiled: GeneratedProgram) -> float:
    """Return the bytes of a copy of the model, of its cast to half precision, and of the activations of a whole batch.

    The activations are an upper bound: a forward without gradients frees most of those of all ranks and micro-batches.
    """
    plan, kinds = compiled.plan, compiled.plan.prediction.num_bytes
    tensors = [*compiled.model.parameters(), *compiled.model.buffers()]
    model_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    passing = kinds.get("activations", 0.0) + kinds.get("transient", 0.0)
    copies = 1.0 if compute_dtype(plan.precision) is None else 1.5
    return copies * model_bytes + passing * plan.num_ranks * plan.num_micro_batches


def free_bytes(compiled: GeneratedProgram) -> float:
    """Return the bytes that the plan leaves free in one rank's memory, or in the user's budget for it."""
    group, request = compiled.plan.fullest_group, compiled.request
    memory = compiled.cluster.groups[group].device.memory_bytes if request is None else request.capacity_bytes(group)
    return max(memory - compiled.plan.prediction.peak_bytes, 0.0)


class _Model:
    """The user's model on this rank. seed, step: those of its dropout masks."""

    def __init__(
        self, compiled: GeneratedProgram, batch: NamedBatch, device: torch.device, seed: int, step: int
    ) -> None:
        self.compiled, self.batch, self.device, self.draws = compiled, batch, device, (seed, step)
        self.loss = math.nan

    def compute(self) -> str:
        """Compute the loss; return why that failed, or ""."""
        try:
            self.loss = self._loss()
        except Exception as error:  # any error of a forward is a reason: the other ranks wait for an answer
            return f"the model's own forward failed: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        return ""

    def error_of(self, loss: float, rank: int = 0) -> TrainingError | None:
        """Return the error of a rank's loss, or None where it is right."""
        if not (math.isfinite(loss) or math.isfinite(self.loss)):
            return None
        difference, allowed = abs(loss - self.loss), self._allowed()
        if difference <= max(allowed * max(abs(loss), abs(self.loss)), STILL):
            return None
        for variation in ({"is_wider": True}, {"is_redrawn": True}):
            with contextlib.suppress(Exception):  # a model that names dtypes has no wider form
                if difference <= FLOORS * abs(self._loss(**variation) - self.loss):
                    return None
        return TrainingError(
            "the program's loss of the first batch is not the model's own",
            values={
                f"the program on rank {rank}": f"{loss:.9g}",
                "the model on one process": f"{self.loss:.9g}",
                "relative difference that rounding explains": f"{allowed:.1e}",
            },
            alternatives=[
                "run `autopar verify` with the same plan: it names the tensors that differ; please report it",
                "give every rank one model with equal values",
                "first_step_check=False, for a forward that depends on more than its batch",
            ],
        )

    def _allowed(self) -> float:
        """Return the largest relative difference that rounding explains."""
        low = compute_dtype(self.compiled.plan.precision)
        return max(UNIT, 0.0 if low is None else torch.finfo(low).eps, tolerance(self.compiled.program))

    @torch.no_grad()
    def _loss(self, is_wider: bool = False, is_redrawn: bool = False) -> float:
        """Return the loss of a copy of the model in the program's precision, in the next wider one, or with other draws
        from the model's own random numbers."""
        low = compute_dtype(self.compiled.plan.precision)
        wide = torch.float64 if is_wider and low is None else None
        module = LossModule(self.compiled.model, self.compiled.loss_fn, self.batch)
        module = deep_copy(module).to(self.device, wide)
        in_training(module.model)

        def here(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(self.device, wide if value.is_floating_point() else None)

        with kept_random_states(self.device), SameDropout(*self.draws), as_one_process():
            if is_redrawn:
                seed_all(torch.initial_seed() + 1)
            return float(loss_in(None if is_wider else low, module, self.batch.map(here)))


def _compare(model: _Model | None, loss: float) -> None:
    """Check every rank's loss: parameters that all ranks hold may be wrong on one of them. model: on rank 0 alone."""
    losses, error = _all_gather(loss), None
    if model is not None:
        error = next(filter(None, map(model.error_of, losses, range(len(losses)))), None)
        if error is None:
            _log.info("first step: loss %.9g, of the model itself %.9g", loss, model.loss)
    error = _broadcast(error)
    if error is not None:
        raise error


def _are_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _all_gather(value: Any) -> list[Any]:
    """Return the values of all ranks, on every rank."""
    values = [value]
    if _are_several():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


def _gather(value: Any) -> list[Any]:
    """Return the values of all ranks on rank 0, and [] on others."""
    values: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(value, values or None, dst=0)
    return values


def _broadcast(value: Any) -> Any:
    """Return rank 0's value, on every rank."""
    message = [value]
    if _are_several():
        dist.broadcast_object_list(message, src=0)
    return message[0]
