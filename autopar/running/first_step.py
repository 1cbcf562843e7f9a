"""The check in a program's first step: its loss beside the model's own of the same batch, computed on rank 0 alone.

The model's own is of one forward, in training, with the dropout masks that the program draws
(codegen/runtime/reference.py). Training stays as it is: the model is copied, the copy is gone before the program's
forward begins, random states are put back, and where the losses differ it ends before the first update.

Batches of `step.local_batch` are known whole. Where a loop cuts them itself, rank 0 puts together what all
ranks were given (whole_batch.py).

It is made unasked where the model's values are in memory, a copy of it with all activations of the whole batch fits
beside the program, by the plan's own figures, and its forward is short. Losses may differ by UNIT, in half precision by
the rounding of one number, or by what fp8 is said to do. Beyond that the model itself is asked: where its loss is as
far from the one in the next wider precision, or from its own under other random numbers (times FLOORS, as in `verify`),
the difference is its own.
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
from autopar.frontend.loss_module import LossModule
from autopar.frontend.low_precision import loss_in
from autopar.frontend.one_process import as_one_process
from autopar.frontend.skeleton import in_training
from autopar.program import GeneratedProgram
from autopar.running.random_states import kept_random_states, seed_all
from autopar.running.whole_batch import own_share, put_together
from autopar.settings.fp8 import tolerance
from autopar.units import bytes_text
from autopar.verify_report import FLOORS
from codegen.runtime.batch import digest_of, flat_batch
from codegen.runtime.precision import compute_dtype
from codegen.runtime.reference import SameDropout

UNIT = 2.0**8 * torch.finfo(torch.float32).eps
"""What two losses in fp32 may differ by, relatively: of 2**16 roundings to either side, the root of as many remain."""
STILL = torch.finfo(torch.float32).eps
"""A difference that is none, however small the losses are."""
LONGEST_SECONDS = 60.0
"""Other ranks wait while rank 0 computes alone: no longer than this, unless the check is asked for."""

MOST_WAITING = 16
"""Whole batches that are kept until the first step: those of a loop that prepares some ahead."""
CHANGED = "the model or the step was given other values, or the model was changed, since the step was built"

_log = logging.getLogger("autopar")

AfterStep = Callable[[float], None]
"""Is given the first step's loss on every rank. Raises TrainingError on all where it is wrong. Collective."""


class FirstStepCheck:
    """Compares the loss of a step's first batch with the model's own; `Step.first_check`.

    wanted: None for where it costs little, True for anyhow.
    """

    def __init__(self, compiled: GeneratedProgram, step: Any, wanted: bool | None) -> None:
        self._compiled, self._step, self._is_wanted = compiled, step, bool(wanted)
        self._reason = why_not(compiled, self._is_wanted)
        self._values = [] if self._reason else self._values_now()
        self._given: list[tuple[Mapping[str, Tensor], Mapping[str, Any], Callable[[], Mapping[str, Tensor]]]] = []

    def given(
        self, part: Mapping[str, Tensor], whole: Mapping[str, Any], again: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        """A rank's part of a whole batch was made, which `again` makes once more."""
        if not self._reason and len(self._given) < MOST_WAITING:
            self._given.append((part, whole, again))

    def passed(self, part: Mapping[str, Tensor]) -> None:
        """A part was used for something else than a step."""
        self._given = [each for each in self._given if each[0] is not part]

    def __call__(self, part: Mapping[str, Tensor]) -> AfterStep | None:
        """The first step is about to begin with this part of its batch. Collective.

        Raises ConstraintError on every rank where the check is wanted and cannot be made.
        """
        whole, reason = self._whole(part)
        self._given = []
        found = _of_all((reason, None if whole is None else self._digest(whole)))
        reason, digests = next((each for each, _ in found if each), ""), {digest for _, digest in found}
        if not reason and None in digests:
            whole, reason = self._put_together(part)
        elif not reason and len(digests) > 1:
            reason = "ranks were given parts of different batches"
        own = None
        if self._step.mesh.everyone.rank == 0 and whole is not None and not reason:
            own = _Model(self._compiled, whole, self._step.mesh.device, self._step.rng.seed, int(self._step.rng.step))
            reason = own.compute()
        reason = _of_rank_0(reason)
        if not reason:
            return partial(_compare, own)
        if self._is_wanted and reason != CHANGED:
            raise ConstraintError(
                "the first step cannot be checked",
                values=reason,
                alternatives=["first_step_check=None, or False", "batches of step.local_batch"],
            )
        _log.info("the first step is not checked: %s", reason)
        return None

    def _whole(self, part: Mapping[str, Tensor]) -> tuple[NamedBatch | None, str]:
        """The whole batch of which this rank was given a part, None where it was made elsewhere than in
        `step.local_batch`; or why there is no check, as far as this rank knows."""
        nothing = NamedBatch({}, {})
        if self._reason:
            return nothing, self._reason
        values = self._values_now()
        if len(values) != len(self._values) or not all(map(_is_close, self._values, values)):
            return nothing, CHANGED
        given = next((each for each in self._given if each[0] is part), None)
        if given is None:
            return (None, "") if self._step.mesh.everyone.size > 1 else self._named(part)
        if not _makes(given[2], part):
            return nothing, "the batch was changed after step.local_batch"
        return self._named(flat_batch(given[1]))

    def _named(self, values: Mapping[str, Any]) -> tuple[NamedBatch, str]:
        """The whole batch as the model was traced with it, since the program takes inputs by name: in any order, and
        also without what it was made with; or why there is none."""
        form, given = self._compiled.form, {**self._compiled.program.any.fixed_inputs, **values}
        if apart := sorted(given.keys() ^ set(form.names)):
            # A model that lacks what the program does not read might compute otherwise.
            which = "lacks" if apart[0] in form.names else "has"
            return NamedBatch({}, {}), f"the batch {which} {apart[0]}, other than the program's example inputs"
        return form.filled(given), ""

    def _digest(self, whole: NamedBatch) -> str:
        """What tells whether ranks have one batch."""
        if self._step.mesh.everyone.size == 1:
            return ""
        return digest_of(value for value in whole.values() if isinstance(value, Tensor))

    def _put_together(self, part: Mapping[str, Tensor]) -> tuple[NamedBatch | None, str]:
        """On rank 0 the whole batch of the parts that ranks were given, or why there is none. Collective."""
        program, mesh, whole = self._compiled.program, self._step.mesh, None
        reason, share = "", dict[str, Tensor]()
        if program.any.unused_inputs:
            reason = f"step.local_batch did not make it, and no part has all of {', '.join(program.any.unused_inputs)}"
        else:
            share = own_share(program, part, mesh.everyone.rank)
        shares = _on_rank_0(share)
        if shares and not reason:
            try:
                whole, reason = self._named(put_together(program, shares))
            except ValueError as error:
                reason = f"the ranks' parts are not put together: {next(iter(str(error).splitlines()), '')}"
        return whole, reason

    def _values_now(self) -> list[Any]:
        """What tells whether values changed: a sum of each of the step's own, and of the model's on rank 0."""
        stored = [entry.stored for _, entry in self._step.entries() if entry.stored is not None]
        stored += [value for part in self._step.parts for _, _, value in part.model.buffer_slots()]
        if self._step.mesh.everyone.rank > 0:
            return [_sum(value) for value in stored]
        model = self._compiled.model
        return [traits_of(model), *map(_sum, (*stored, *model.parameters(), *model.buffers()))]


def _makes(again: Callable[[], Mapping[str, Tensor]], part: Mapping[str, Tensor]) -> bool:
    """Whether a batch still has this part. One that has lost what it had makes none."""
    try:
        now = again()
    except Exception:  # whatever values of another kind raise: the other ranks wait for an answer
        return False
    return part.keys() == now.keys() and all(torch.equal(value, now[name]) for name, value in part.items())


def _sum(value: Tensor) -> complex:
    if value.is_meta:
        return complex(math.nan)
    wide = torch.complex128 if value.is_complex() else torch.float64
    return complex(value.detach().sum(dtype=wide).item())


def _is_close(one: Any, other: Any) -> bool:
    """Whether two things that tell of values are the same, but for the order of a sum on another device."""
    if isinstance(one, complex) and cmath.isfinite(one):
        return cmath.isclose(one, other, rel_tol=1e-6, abs_tol=1e-6)
    return bool(one == other) or repr(one) == repr(other)


def why_not(compiled: GeneratedProgram, is_wanted: bool = False) -> str:
    """Why the check is not made, in a clause; "" where it is. is_wanted: whatever it costs."""
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


class _Model:
    """The user's model on this rank. seed, step: of its dropout masks."""

    def __init__(
        self, compiled: GeneratedProgram, batch: NamedBatch, device: torch.device, seed: int, step: int
    ) -> None:
        self.compiled, self.batch, self.device, self.draws = compiled, batch, device, (seed, step)
        self.loss = math.nan

    def compute(self) -> str:
        """Finds the loss; why there is none."""
        try:
            self.loss = self._loss()
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
        for other in ({"is_wider": True}, {"is_redrawn": True}):
            with contextlib.suppress(Exception):  # a model that names dtypes has no wider form
                if difference <= FLOORS * abs(self._loss(**other) - self.loss):
                    return None
        return TrainingError(
            "the program's loss of the first batch is not the model's own",
            values={
                f"the program on rank {rank}": f"{found:.9g}",
                "the model on one process": f"{self.loss:.9g}",
                "relative difference that rounding explains": f"{allowed:.1e}",
            },
            alternatives=[
                "`autopar verify` of the same plan, which names what differs; please report it",
                "one model, with equal values on every rank",
                "first_step_check=False, for a forward that depends on more than its batch",
            ],
        )

    def _allowed(self) -> float:
        """The largest relative difference that is rounding."""
        low = compute_dtype(self.compiled.plan.precision)
        return max(UNIT, 0.0 if low is None else torch.finfo(low).eps, tolerance(self.compiled.program))

    @torch.no_grad()
    def _loss(self, is_wider: bool = False, is_redrawn: bool = False) -> float:
        """The loss of a copy of the model in the program's precision, in the next wider one, or with other draws of
        what draws random numbers of its own."""
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


def _compare(own: _Model | None, loss: float) -> None:
    """Every rank's loss is judged, as parameters that all have may be wrong on one. own: of rank 0."""
    losses, error = _of_all(loss), None
    if own is not None:
        error = next((found for rank, each in enumerate(losses) if (found := own.error_of(each, rank))), None)
        if error is None:
            _log.info("first step: loss %.9g, of the model itself %.9g", loss, own.loss)
    error = _of_rank_0(error)
    if error is not None:
        raise error


def _are_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _of_all(value: Any) -> list[Any]:
    """What each rank has, on every rank."""
    found = [value]
    if _are_several():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
    return found


def _on_rank_0(value: Any) -> list[Any]:
    """What each rank has, on rank 0; nothing on others."""
    found: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(value, found or None, dst=0)
    return found


def _of_rank_0(value: Any) -> Any:
    """What rank 0 has, on every rank."""
    message = [value]
    if _are_several():
        dist.broadcast_object_list(message, src=0)
    return message[0]
