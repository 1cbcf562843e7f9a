"""The check before a program's first step: its loss of the first batch beside the model's own, on rank 0 alone.

Both are computed forward only, in evaluation mode. Of a program without an evaluation mode the loss that its first step
trains with is compared, with the dropout masks that the program draws (codegen/runtime/reference.py). Training stays as
it is: the model is copied, the copy is gone before the first step, and random states are put back.

It is made unasked where the model's values are in memory, a copy of it with all activations of the whole batch fits
beside the program, by the plan's own figures, and its forward is short. Losses may differ by UNIT, in half precision by
the rounding of one number, or by what fp8 is said to do. Beyond that the model itself is asked: where its loss is as
far from the one in the next wider precision (times FLOORS, as in `verify`), the difference is its own rounding.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import ConstraintError, TrainingError
from autopar.frontend.inputs import NamedBatch
from autopar.frontend.loss_module import LossModule
from autopar.frontend.low_precision import loss_in
from autopar.frontend.skeleton import detached_copy, in_training
from autopar.program import GeneratedProgram
from autopar.settings.fp8 import tolerance
from autopar.units import bytes_text
from autopar.verify_report import FLOORS
from codegen.runtime.precision import compute_dtype
from codegen.runtime.reference import SameDropout

UNIT = 2.0**8 * torch.finfo(torch.float32).eps
"""What two losses in fp32 may differ by, relatively: of 2**16 roundings to either side, the root of as many remain."""
STILL = torch.finfo(torch.float32).eps
"""A difference that is none, however small the losses are."""
LONGEST_SECONDS = 60.0
"""Other ranks wait while rank 0 computes alone: no longer than this, unless the check is asked for."""

_log = logging.getLogger("autopar")

AfterStep = Callable[[float], None]
"""Is given the first step's loss on every rank. Raises TrainingError on all where it is wrong. Collective."""


def check_first_step(
    compiled: GeneratedProgram,
    step: Any,
    batch: NamedBatch,
    evaluate: Callable[[], float],
    *,
    wanted: bool | None = None,
    seed: int = 0,
) -> AfterStep | None:
    """Compares the losses of a whole batch, equal on every rank, before the first step. Collective.

    evaluate: the program's loss in evaluation mode. wanted: None for where it costs little, True for anyhow, False for
    never. seed: of the program's dropout. Returns what the first step's loss is to be given to, where only that can be
    compared.
    Raises TrainingError on every rank where the losses differ, ConstraintError where the check is wanted and cannot be
    made.
    """
    if wanted is False:
        return None
    trains = bool(compiled.program.any.no_evaluation)
    own, reason = None, ""
    if step.mesh.everyone.rank == 0:
        reason = why_not(compiled, is_wanted=wanted is True)
        if not reason:
            own = _Model(compiled, batch, step.mesh.device, (seed, int(step.rng.step)) if trains else None)
            reason = own.compute()
    reason = _of_rank_0(reason)
    if not reason:
        if trains:
            return partial(_compare, own)
        _compare(own, evaluate())
        return None
    if wanted:
        raise ConstraintError(
            "the first step cannot be checked", values=reason, alternatives="first_step_check=None, or False"
        )
    _log.info("the first step is not checked: %s", reason)
    return None


def why_not(compiled: GeneratedProgram, is_wanted: bool = False) -> str:
    """Why the check is not made, in a clause; "" where it is. is_wanted: whatever it costs."""
    plan = compiled.plan
    if any(p.device.type == "meta" for p in compiled.model.parameters()):
        return "the model's values are not in memory"
    if plan.compresses and plan.compression.gather:
        return "the plan rounds parameters on the wire, and the model does not"
    if is_wanted:
        return ""
    if compiled.backend == "inductor":
        return "evaluation would be compiled for it"
    seconds = plan.prediction.step_seconds * plan.num_ranks / 3
    if seconds > LONGEST_SECONDS:
        return f"the other ranks would wait for some {seconds:.0f} s"
    needed, free = needed_bytes(compiled), free_bytes(compiled)
    if needed > free:
        return f"the model on one rank takes {bytes_text(needed)} more, and {bytes_text(free)} are free"
    return ""


def needed_bytes(compiled: GeneratedProgram) -> float:
    """What a copy of the model holds, once more in half precision, and no more than the activations of a whole batch,
    which a forward without gradients frees: those of all ranks and micro-batches."""
    plan, kinds = compiled.plan, compiled.plan.prediction.num_bytes
    own = [*compiled.model.parameters(), *compiled.model.buffers()]
    held = sum(each.numel() * each.element_size() for each in own)
    passing = kinds.get("activations", 0.0) + kinds.get("transient", 0.0)
    copies = 1.0 if compute_dtype(plan.precision) is None else 1.5
    return copies * held + passing * plan.num_ranks * plan.num_micro_batches


def free_bytes(compiled: GeneratedProgram) -> float:
    """What the plan leaves of one rank's memory, or of what a user lets it have."""
    group, request = compiled.plan.fullest_group, compiled.request
    memory = compiled.cluster.groups[group].device.memory_bytes if request is None else request.capacity_bytes(group)
    return max(memory - compiled.plan.prediction.peak_bytes, 0.0)


@dataclass
class _Model:
    """The user's model on this rank. draws: seed and step of the dropout masks of training; None: evaluation."""

    compiled: GeneratedProgram
    batch: NamedBatch
    device: torch.device
    draws: tuple[int, int] | None
    loss: float = math.nan

    def compute(self) -> str:
        """Finds the loss; why there is none."""
        try:
            self.loss = self._loss(is_wider=False)
        except Exception as error:  # whatever a forward raises: the other ranks wait for an answer
            return f"the model's own forward failed: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        return ""

    def error_of(self, found: float, rank: int = 0) -> TrainingError | None:
        """What is wrong with a rank's loss."""
        if not (math.isfinite(found) or math.isfinite(self.loss)):
            return None
        difference, allowed = abs(found - self.loss), self._allowed()
        if difference <= max(allowed * max(abs(found), abs(self.loss)), STILL):
            return None
        rounding = math.nan
        with contextlib.suppress(RuntimeError):  # a model that names dtypes has no wider form
            rounding = abs(self._loss(is_wider=True) - self.loss)
        if difference <= FLOORS * rounding:
            return None
        mode = "evaluation" if self.draws is None else "training"
        return TrainingError(
            f"the program's loss of the first batch ({mode} mode) is not the model's own",
            values={
                f"the program on rank {rank}": f"{found:.9g}",
                "the model on one process": f"{self.loss:.9g}",
                "relative difference that rounding explains": f"{allowed:.1e}",
            },
            alternatives=[
                "`autopar verify` of the same plan, which names what differs; please report it",
                "one model, with equal values on every rank",
                "first_step_check=False, for a forward that gives another loss each time",
            ],
        )

    def _allowed(self) -> float:
        """The largest relative difference that is rounding."""
        low = compute_dtype(self.compiled.plan.precision)
        return max(UNIT, 0.0 if low is None else torch.finfo(low).eps, tolerance(self.compiled.program))

    @torch.no_grad()
    def _loss(self, is_wider: bool) -> float:
        """The loss in the program's precision, or in the next wider one, of a copy of the model."""
        low = compute_dtype(self.compiled.plan.precision)
        wide = torch.float64 if is_wider and low is None else None
        module = LossModule(self.compiled.model, self.compiled.loss_fn, self.batch)
        module = detached_copy(module).to(self.device, wide)
        if self.draws is None:
            module.model.eval()
        else:
            in_training(module.model)

        def here(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(self.device, wide if value.is_floating_point() else None)

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng([self.device] if self.device.type == "cuda" else []))
            if self.draws is not None:
                stack.enter_context(SameDropout(*self.draws))
            return float(loss_in(None if is_wider else low, module, self.batch.map(here)))


def _compare(own: _Model | None, loss: float) -> None:
    """Every rank's loss is judged, as parameters that all have may be wrong on one. own: of rank 0."""
    losses = [loss]
    if _are_several():
        losses = [math.nan] * dist.get_world_size()
        dist.all_gather_object(losses, loss)
    error = None
    if own is not None:
        error = next((found for rank, each in enumerate(losses) if (found := own.error_of(each, rank))), None)
        if error is None:
            _log.info("first step: loss %.9g, of the model itself %.9g", loss, own.loss)
    error = _of_rank_0(error)
    if error is not None:
        raise error


def _are_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _of_rank_0(value: Any) -> Any:
    """What rank 0 has, on every rank."""
    message = [value]
    if _are_several():
        dist.broadcast_object_list(message, src=0)
    return message[0]
