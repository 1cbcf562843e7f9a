"""What a trial found: plans with their times, their record in the profile, and what later plans tell of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from autopar.compiled import CompiledProgram
from autopar.ir.mesh import AXIS_NAMES, Mesh
from autopar.plan import Plan
from autopar.planning.ranks import outline_of
from autopar.planning.request import Request
from autopar.profiling.machine import available_cores, cpu_model, own_version
from autopar.profiling.trials import TrialRecord, read_trials, trials_path
from autopar.units import seconds_text


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPlan:
    """A plan with what was predicted and measured of it.

    pins: the constraints with which the planner finds it. measured_seconds: the median of all steps, low_seconds and
    high_seconds their quartiles, round_seconds the median of each round; None and empty for a plan that did not run,
    because of `problem`. earlier_seconds: what an earlier trial of the same machine and versions measured.
    """

    plan: Plan
    words: str
    digest: str
    pins: Mapping[str, int]
    predicted_seconds: float
    measured_seconds: float | None = None
    low_seconds: float | None = None
    high_seconds: float | None = None
    round_seconds: tuple[float, ...] = ()
    num_steps: int = 0
    problem: str = ""
    earlier_seconds: float | None = None

    @property
    def spread(self) -> float:
        """The distance of the quartiles as a share of the median."""
        if self.measured_seconds is None or self.low_seconds is None or self.high_seconds is None:
            return 0.0
        return (self.high_seconds - self.low_seconds) / self.measured_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReport:
    """plans: by predicted time, so that the first is the one chosen by prediction. chosen: the number of the fastest.
    is_clear: whether that was faster than the predicted one in every round. records: the file that has it now. note:
    what bears on all figures, in a sentence."""

    model: str
    cluster: str
    plans: tuple[TriedPlan, ...]
    chosen: int
    is_clear: bool
    records: str
    note: str = ""

    @property
    def words(self) -> str:
        """What came of it, in a sentence."""
        best, expected = self.plans[self.chosen], self.plans[0]
        assert best.measured_seconds is not None
        if len(self.plans) == 1:
            return f"there is one layout: {best.words}"
        if self.chosen == 0:
            return f"prediction and trial choose the same plan: {best.words}"
        if expected.measured_seconds is None:
            return f"the plan chosen by prediction did not run; the trial chooses {best.words}"
        gain = f"{1 - best.measured_seconds / expected.measured_seconds:.0%} less than {expected.words}"
        scatter = "" if self.is_clear else ", but not in every round: the difference is within the scatter"
        return f"the trial chooses {best.words}, which takes {gain}, chosen by prediction{scatter}"


def degrees_of(mesh_text: str) -> dict[str, int] | None:
    """`"pp2 x dp2"` -> {"pp": 2, "dp": 2}; None for what is no one mesh."""
    try:
        mesh = Mesh.parse(mesh_text)
    except ValueError:
        return None
    return dict(zip(mesh.axes, mesh.sizes, strict=True)) if set(mesh.axes) <= set(AXIS_NAMES) else None


def pins_of(plan: Plan) -> dict[str, int]:
    """The constraints that leave the planner this layout."""
    return degrees_of(plan.mesh_text) or {}


def digest_of(plan: Plan) -> str:
    """A hash of what was decided, whatever is predicted of it."""
    decided = replace(plan, cluster="", prediction=type(plan.prediction)(), runner_ups=(), basis=None)
    return hashlib.sha256(decided.to_yaml().encode()).hexdigest()[:16]


def job_of(request: Request) -> str:
    """A hash of what is planned for: the model's calls and shapes with the batch, precision, cluster and backend."""
    name, inputs, stored, calls = outline_of(request.trace(request.global_batch_size))
    parts = (name, inputs, stored, sorted(map(str, calls.items())), request.precision, request.fp8, request.backend)
    text = repr((parts, str(request.whole), request.kernels, request.training.compression))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """What a measurement depends on beside its job, as a record has it."""
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{cpu_model()}, {available_cores():g} cores"
    return {"machine": here, "torch": torch.__version__, "autopar": own_version()}


def records_of(report: TrialReport, job: str) -> list[TrialRecord]:
    """A record of each plan that ran."""
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return [
        TrialRecord(
            date=date,
            job=job,
            model=report.model,
            cluster=report.cluster,
            plan=each.digest,
            words=each.words,
            pins=" ".join(f"{axis}={size}" for axis, size in each.pins.items()),
            predicted_seconds=each.predicted_seconds,
            measured_seconds=each.measured_seconds,
            spread=each.spread,
            num_steps=each.num_steps,
            is_chosen=number == report.chosen,
            **versions(),
        )
        for number, each in enumerate(report.plans)
        if each.measured_seconds is not None
    ]


def of_this_job(path: Path, job: str) -> list[TrialRecord]:
    """The records of a file that hold here and now for a job."""
    own = versions()
    return [
        each for each in read_trials(path) if each.job == job and all(getattr(each, n) == v for n, v in own.items())
    ]


def earlier(path: Path, job: str) -> dict[str, float]:
    """Measured seconds by the plan's digest."""
    return {each.plan: each.measured_seconds for each in of_this_job(path, job)}


def trial_notes(compiled: CompiledProgram, profile: str | Path | None) -> tuple[str, ...]:
    """What an earlier trial on this machine found for a program's job, in sentences; none where there was none."""
    if compiled.request is None:
        return ()
    found = of_this_job(trials_path(profile), job_of(compiled.request))
    own = next((each for each in found if each.plan == digest_of(compiled.plan)), None)
    best = next((each for each in found if each.is_chosen), None)
    notes = []
    if own is not None:
        measured, predicted = seconds_text(own.measured_seconds), seconds_text(own.predicted_seconds)
        notes.append(
            f"a trial on {own.date} measured {measured} for a step of this plan, and {predicted} was predicted"
        )
    if best is not None and best is not own:
        pins = f"; {' '.join(f'--set {pin}' for pin in best.pins.split())} finds it" if best.pins else ""
        notes.append(
            f"the fastest plan in a trial on {best.date} was {best.words}: {seconds_text(best.measured_seconds)}{pins}"
        )
    return tuple(notes)
