"""Report a trial: its plans with their times, their records in the profile, and notes for later plans."""

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
    """A plan with its predicted and measured seconds per step.

    pins: constraints under which the planner chooses it. measured_seconds: the median of all steps, low_seconds and
    high_seconds their quartiles, round_seconds the median of each round. They are None and empty for a plan that did
    not run, because of `problem`. earlier_seconds: from an earlier trial of the same machine and versions.
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
    """plans: by predicted time, so the first is the one chosen by prediction. chosen: the number of the fastest.
    is_clear: whether that was faster than the first in every round. records: the file that now has them. note: a
    sentence that applies to all figures."""

    model: str
    cluster: str
    plans: tuple[TriedPlan, ...]
    chosen: int
    is_clear: bool
    records: str
    note: str = ""

    @property
    def words(self) -> str:
        """The outcome, in a sentence."""
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
    """Return the degrees of a mesh, `"pp2 x dp2"` -> {"pp": 2, "dp": 2}; None for a text of no single mesh."""
    try:
        mesh = Mesh.parse(mesh_text)
    except ValueError:
        return None
    return dict(zip(mesh.axes, mesh.sizes, strict=True)) if set(mesh.axes) <= set(AXIS_NAMES) else None


def pins_of(plan: Plan) -> dict[str, int]:
    """Return the constraints that leave the planner only this layout."""
    return degrees_of(plan.mesh_text) or {}


def digest_of(plan: Plan) -> str:
    """Return a hash of a plan's decisions, without its prediction."""
    decided = replace(plan, cluster="", prediction=type(plan.prediction)(), runner_ups=(), basis=None)
    return hashlib.sha256(decided.to_yaml().encode()).hexdigest()[:16]


def job_of(request: Request) -> str:
    """Return a hash of a planning job: the model's calls and shapes, the batch, precision, cluster and backend."""
    name, inputs, stored, calls = outline_of(request.trace(request.global_batch_size))
    parts = (name, inputs, stored, sorted(map(str, calls.items())), request.precision, request.fp8, request.backend)
    text = repr((parts, str(request.whole), request.kernels, request.training.compression))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Return the machine and versions that a measurement depends on, as a record has them."""
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{cpu_model()}, {available_cores():g} cores"
    return {"machine": here, "torch": torch.__version__, "autopar": own_version()}


def records_of(report: TrialReport, job: str) -> list[TrialRecord]:
    """Return a record of each plan that ran."""
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return [
        TrialRecord(
            date=date,
            job=job,
            model=report.model,
            cluster=report.cluster,
            plan=tried.digest,
            words=tried.words,
            pins=" ".join(f"{axis}={size}" for axis, size in tried.pins.items()),
            predicted_seconds=tried.predicted_seconds,
            measured_seconds=tried.measured_seconds,
            spread=tried.spread,
            num_steps=tried.num_steps,
            is_chosen=number == report.chosen,
            **versions(),
        )
        for number, tried in enumerate(report.plans)
        if tried.measured_seconds is not None
    ]


def records_of_job(path: Path, job: str) -> list[TrialRecord]:
    """Return the records of a file for a job, on this machine and with these versions."""
    here = versions()
    return [
        record
        for record in read_trials(path)
        if record.job == job and all(getattr(record, name) == value for name, value in here.items())
    ]


def earlier_seconds(path: Path, job: str) -> dict[str, float]:
    """Return measured seconds of earlier trials, by the plan's digest."""
    return {record.plan: record.measured_seconds for record in records_of_job(path, job)}


def trial_notes(compiled: CompiledProgram, profile: str | Path | None) -> tuple[str, ...]:
    """Return notes, in sentences, on an earlier trial on this machine of the program's job; none without one."""
    if compiled.request is None:
        return ()
    records = records_of_job(trials_path(profile), job_of(compiled.request))
    same = next((record for record in records if record.plan == digest_of(compiled.plan)), None)
    best = next((record for record in records if record.is_chosen), None)
    notes = []
    if same is not None:
        measured, predicted = seconds_text(same.measured_seconds), seconds_text(same.predicted_seconds)
        notes.append(
            f"a trial on {same.date} measured {measured} for a step of this plan, and {predicted} was predicted"
        )
    if best is not None and best is not same:
        pins = f"; {' '.join(f'--set {pin}' for pin in best.pins.split())} finds it" if best.pins else ""
        notes.append(
            f"the fastest plan in a trial on {best.date} was {best.words}: {seconds_text(best.measured_seconds)}{pins}"
        )
    return tuple(notes)
