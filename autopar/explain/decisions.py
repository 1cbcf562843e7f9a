"""The decisions of a plan, and the constraints that change one decision and leave the others open."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.costs.rates import is_cpu
from autopar.errors import ConstraintError
from autopar.ir.mesh import AXIS_NAMES, PIPELINE_AXIS
from autopar.ir.plan_data import OFFLOADS, RECOMPUTE_MODES
from autopar.plan import Plan
from autopar.planning.equal_configs import Shape, expert_degrees, micro_batch_counts, shapes
from autopar.planning.request import Request, divisors
from autopar.report.plan_words import recompute_modes, zero_stage
from autopar.settings.constraints import Constraints
from codegen.axis_records import AXES
from cost_models.schedule import SCHEDULES

PINS = (*AXIS_NAMES, "etp", "zero", "micro_batches", "schedule", "chunks", "recompute", "offload", "context")


@dataclass(frozen=True, slots=True)
class Decision:
    """One changed decision. dimension: a name of constraints; value: its new value, "" for a removed pin."""

    dimension: str
    value: str
    constraints: Constraints


def other_decisions(request: Request, plan: Plan, num_units: int) -> Iterator[Decision]:
    """Yield every decision of a plan, changed by one step to each side. The user's other pins stay."""
    limits = request.constraints
    for name in pins_of(limits):
        yield Decision(name, "", without(limits, (name,)))
    yield from _degrees(request, plan, num_units)
    data_ranks = plan.mesh.num_data_ranks
    for mode in RECOMPUTE_MODES:
        modes = recompute_modes(plan)
        if limits.recompute is None and (bool(modes) if mode == "none" else modes[mode] == 0):
            yield Decision("recompute", mode, replace(limits, recompute=mode))
    if limits.zero is None and data_ranks > 1:
        for stage in range(4):
            if stage != zero_stage(plan):
                yield Decision("zero", str(stage), replace(limits, zero=stage))
    if limits.schedule is None and plan.pipeline.num_pipeline_ranks > 1:
        degrees = {**limits.degrees, PIPELINE_AXIS: plan.pipeline.num_pipeline_ranks}
        for schedule in SCHEDULES:
            if schedule != plan.pipeline.schedule:
                yield Decision("schedule", schedule, replace(limits, schedule=schedule, degrees=degrees))
    if limits.micro_batches is None:
        counts = list(filter(request.splits, micro_batch_counts(request.global_batch_size // data_ranks, None)))
        degrees = {**limits.degrees}
        if not plan.pipeline.stage_meshes:
            # The possible counts depend on a rank's rows and so on dp, which therefore stays.
            degrees |= {axis: plan.mesh.size(axis) for axis in ("ddp", "cp", "ep", "ttp") if axis in plan.mesh.axes}
            degrees["dp"] = data_ranks // plan.mesh.size("ddp")
        for count in neighbors(counts, plan.num_micro_batches):
            yield Decision("micro_batches", str(count), replace(limits, micro_batches=count, degrees=degrees))
    if limits.offload is None and not is_cpu(request.cluster) and not request.needs.whole:
        for offload in OFFLOADS:
            if offload != (plan.pipeline.offload or "none"):
                other = "" if offload == "none" else offload
                yield Decision("offload", offload, replace(limits, offload=other))


def _degrees(request: Request, plan: Plan, num_units: int) -> Iterator[Decision]:
    """Yield a step up and a step down on each axis that is not pinned."""
    limits = request.constraints
    if request.mixed is not None:
        yield from _degrees_of_groups(request, plan, num_units)
        return
    try:
        legal = shapes(request, num_units)
    except ConstraintError:
        return
    mesh = plan.mesh
    degrees = {axis: mesh.size(axis) for axis in ("cp", "ttp", "tp")}
    chosen = Shape(pp=plan.pipeline.num_pipeline_ranks, dp=mesh.num_data_ranks, **degrees)
    for axis, here in chosen._asdict().items():
        if axis not in limits.degrees and not (AXES[axis].cuts_batch and "ddp" in limits.degrees):
            for size in neighbors(sorted({getattr(shape, axis) for shape in legal}), here):
                yield Decision(axis, str(size), replace(limits, degrees={**limits.degrees, axis: size}))
    ep, data = plan.mesh.size("ep"), plan.mesh.num_data_ranks // plan.mesh.size("ddp")
    if "ep" not in limits.degrees:
        for size in neighbors(expert_degrees(request, data, chosen.tensor), ep):
            yield Decision("ep", str(size), replace(limits, degrees={**limits.degrees, "ep": size}))


def _degrees_of_groups(request: Request, plan: Plan, num_units: int) -> Iterator[Decision]:
    """Yield other degrees for groups of unlike nodes, where `dp` differs between pipeline ranks."""
    limits, groups = request.constraints, request.whole.groups
    pipeline_ranks = list(range(len(groups), num_units + 1))
    degrees = divisors(math.lcm(*(g.devices_per_node for g in groups)))
    sizes = (("pp", pipeline_ranks, plan.pipeline.num_pipeline_ranks), ("tp", degrees, plan.mesh.size("tp")))
    for axis, values, chosen in sizes:
        for size in neighbors(values, chosen) if axis not in limits.degrees else ():
            yield Decision(axis, str(size), replace(limits, degrees={**limits.degrees, axis: size}))


def neighbors(values: Sequence[int], chosen: int) -> list[int]:
    """Return the next smaller and the next larger of ascending values."""
    return [v for v in values if v < chosen][-1:] + [v for v in values if v > chosen][:1]


def pins_of(limits: Constraints) -> list[str]:
    """Return the names of the decisions and of the tables of placements that a user pinned."""
    names = [name for name in PINS if name in limits.degrees or getattr(limits, name, None) is not None]
    tables = ("parameters", "activations", "forbid_parameters", "forbid_activations")
    return names + [name for name in tables if getattr(limits, name)]


def pin_text(limits: Constraints, name: str) -> str:
    """Return `tp=2`, or the table's name."""
    if name in limits.degrees:
        return f"{name}={limits.degrees[name]}"
    value = getattr(limits, name)
    return name if isinstance(value, tuple) else f"{name}={'none' if value == '' else value}"


def without(limits: Constraints, names: Sequence[str]) -> Constraints:
    """Return the constraints without some pins."""
    degrees = {axis: n for axis, n in limits.degrees.items() if axis not in names}
    cleared: dict[str, Any] = {
        name: () if isinstance(getattr(limits, name), tuple) else None for name in names if name not in AXIS_NAMES
    }
    return replace(limits, degrees=degrees, **cleared)


def has_decision(plan: Plan, decision: Decision) -> bool:
    """Return whether a plan really makes a decision; some models cannot have every mode and stage."""
    value = decision.value
    if decision.dimension == "recompute":
        return bool(recompute_modes(plan)[value]) if value != "none" else not recompute_modes(plan)
    if decision.dimension == "zero":
        return zero_stage(plan) == int(value or zero_stage(plan))
    if decision.dimension == "offload":
        return plan.pipeline.offload == (value if value != "none" else "") or not value
    if decision.dimension == "schedule":
        return plan.pipeline.schedule == value or not value
    return True
