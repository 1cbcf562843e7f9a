"""A plan in a line: its mesh, and the decisions that are made once for all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar.ir.plan_data import StagePlan
from autopar.plan import Plan


def plan_words(plan: Plan) -> str:
    """A plan in words: `dp2 x tp2, 4 micro-batches`."""
    count = plan.num_micro_batches
    return f"{plan.mesh_text}, {count} micro-batch{'es' if count > 1 else ''}"


def full_words(plan: Plan) -> str:
    """`pp2 x dp2, 4 micro-batches, 1f1b, ZeRO-1, 3 layers recomputed`: the decisions that are made once for a plan."""
    return ", ".join([plan_words(plan), *_further(plan)])


def _further(plan: Plan) -> Iterator[str]:
    if plan.pipeline.schedule:
        yield plan.pipeline.schedule
    if zero_stage(plan):
        yield f"ZeRO-{zero_stage(plan)}"
    modes = recompute_modes(plan)
    yield from (f"{mode} recomputation of {count} layer{'s' if count > 1 else ''}" for mode, count in modes.items())
    if plan.pipeline.offload:
        yield f"{plan.pipeline.offload} on the host"


def zero_stage(plan: Plan) -> int:
    """The highest ZeRO stage of a parameter."""
    return max((s.zero for scope in plan.scopes.values() for s in scope.parameters.values()), default=0)


def recompute_modes(plan: Plan) -> Counter[str]:
    """Layers by mode other than none."""
    found: Counter[str] = Counter()
    for stage in plan.pipeline.stages:
        for runs in stage.recompute.values():
            for mode, count in runs:
                found[mode] += count if mode != "none" else 0
    return +found


def recompute_words(stage: StagePlan) -> str:
    """`3 full, 5 none`, with the class where several are in the stage."""
    several = len(stage.recompute) > 1
    parts = [
        (f"{name}: " if several else "") + ", ".join(f"{count} {mode}" for mode, count in runs)
        for name, runs in stage.recompute.items()
    ]
    return "; ".join(parts) or "none"
