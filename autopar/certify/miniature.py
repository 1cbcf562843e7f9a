"""The miniature: the model's own class, small, trained on processes of this machine against one process.

What single calls cannot show is shown here: ZeRO's collectives, gradients over data-parallel ranks, recomputation,
messages between stages in the order of the schedule, the optimiser's step. Axes are cut to two ranks each, and where
that is more processes than MOST_RANKS, several miniatures have some of the axes each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.certify.findings import Findings
from autopar.certify.small_config import SEQUENCE, has_config, small_model
from autopar.certify.small_plan import small_plan
from autopar.compile import compile_with
from autopar.compiled import CompiledProgram
from autopar.errors import AutoparError
from autopar.integrations.batches import random_batch
from autopar.launch import RankError
from autopar.settings.compile_options import CompileOptions
from autopar.verify import sgd_with_momentum, verify_program
from autopar.verify_report import VerifyReport

MOST_RANKS, MOST_MINIATURES, STEPS = 8, 3, 3
Miniature = tuple[nn.Module, Mapping[str, Any] | tuple[Any, ...], Callable[..., torch.Tensor] | None]
"""A model, a batch of any number of rows, and its loss where it does not return one."""


@dataclass(frozen=True, slots=True)
class Trained:
    """One miniature: what it ran on, how many of the plan's decisions it had, and the comparison.

    refused: why the plan's decisions are none that the miniature can have, "" where they are.
    """

    mesh: str
    schedule: str
    kept: int
    calls: int
    report: VerifyReport
    refused: str = ""

    @property
    def text(self) -> str:
        return f"{self.mesh}{f', {self.schedule}' if self.schedule else ''}"


def prove_miniature(compiled: CompiledProgram, given: Miniature | None = None) -> Findings:
    """Trains as many miniatures as the plan's axes need, STEPS steps each."""
    why_not = _why_none(compiled, given)
    if why_not:
        return Findings("miniature", not_proven=(f"{UNSHOWN}: {why_not}",))
    trained, failures, not_proven = [], [], []
    sets = axis_sets(compiled)
    for axes in sets:
        try:
            found = _train(compiled, axes, given)
        except AutoparError as error:
            not_proven.append(f"a miniature on {' x '.join(axes)}: {str(error).splitlines()[0]}")
            continue
        except RankError as error:  # the program was made, and does not run
            failures.append(f"miniature on {' x '.join(axes)}: {error}")
            continue
        except (RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
            reason = str(error).splitlines()[0] if str(error) else ""
            not_proven.append(f"a miniature on {' x '.join(axes)}: {type(error).__name__}: {reason}")
            continue
        trained.append(found)
        if not found.report.ok():
            failures.append(f"miniature on {found.text}: {_fault(found.report)}")
        if found.kept < found.calls:
            why = found.refused or "the plan has no such calls, or options that these sizes do not have"
            own = f"{found.calls - found.kept} of {found.calls} calls of the miniature on {found.mesh}"
            not_proven.append(f"{own} have options of their own: {why}")
    missing = _pairs(_axes(compiled)) - {pair for axes in sets for pair in _pairs(axes)}
    if missing:
        not_proven.append(f"axes that no miniature has together: {', '.join('x'.join(p) for p in sorted(missing))}")
    errors = {t.text: max(t.report.loss, t.report.largest_gradient, t.report.largest_parameter) for t in trained}
    worst = max(errors, key=lambda name: errors[name], default="")
    return Findings(
        subject="miniature",
        counts={
            "miniatures trained": len(trained),
            "steps each": STEPS if trained else 0,
            "processes of the largest": max((math.prod(_cut(compiled, axes).values()) for axes in sets), default=0),
            "calls with the plan's option": sum(t.kept for t in trained),
            "tensors compared in the last": len(trained[-1].report.gradients) if trained else 0,
        },
        largest_error=errors.get(worst),
        worst="; ".join(t.text for t in trained),
        failures=tuple(failures),
        not_proven=(*not_proven, *_beyond(compiled)),
    )


def _why_none(compiled: CompiledProgram, given: Miniature | None) -> str:
    if given is not None:
        return ""
    if not has_config(compiled.model):
        return "the model's class takes no configuration that could be made small; give a miniature"
    if compiled.loss_fn is not None:
        return "the model's loss is a function of its own, whose targets cannot be made up; give a miniature"
    return ""


UNSHOWN = "training as a whole (ZeRO, sums of gradients over ranks, recomputation, messages between stages, updates)"


def _beyond(compiled: CompiledProgram) -> tuple[str, ...]:
    """What the miniatures do otherwise than the program."""
    program = compiled.program
    targets = {
        call.target
        for each in program.programs
        for cls in (*each.layers, each.root)
        for call in cls.body
        if hasattr(call, "target")
    }
    found = []
    kernels = sorted(t for t in targets if t.startswith(("kernels.", "grouped.", "fp8.")))
    if kernels:
        found.append(f"{', '.join(kernels)}: kernels of a GPU; the calls that they stand for were proven")
    beside = sorted(t for t in targets if t.startswith(("overlapped.", "async_tp.")))
    if beside:
        found.append(f"{', '.join(beside)}: run communication beside products on a GPU; here one follows the other")
    if compiled.plan.precision != "fp32":
        found.append(
            f"{compiled.plan.precision}: everything was computed in fp32 or fp64, so that errors mean something"
        )
    if compiled.plan.pipeline.offload:
        found.append(f"offload of {compiled.plan.pipeline.offload} to the host")
    if compiled.plan.pipeline.stage_meshes:
        found.append("stage meshes that are not alike: the miniature has the same mesh on every pipeline rank")
    return tuple(found)


def _axes(compiled: CompiledProgram) -> tuple[str, ...]:
    """Axes of the plan with several ranks, that of the pipeline first."""
    plan = compiled.plan
    own = tuple(axis for axis, size in zip(plan.mesh.axes, plan.mesh.sizes, strict=True) if size > 1)
    return (("pp",) if plan.pipeline.num_pipeline_ranks > 1 else ()) + own


def axis_sets(compiled: CompiledProgram) -> list[tuple[str, ...]]:
    """Which axes each miniature has: all, or of several those that have the most pairs of axes together."""
    axes = _axes(compiled)
    most = int(math.log2(MOST_RANKS))
    if len(axes) <= most:
        return [axes] if axes else []
    candidates = list(itertools.combinations(axes, most))
    chosen: list[tuple[str, ...]] = []
    open_pairs = _pairs(axes)
    while open_pairs and len(chosen) < MOST_MINIATURES:
        best = max(candidates, key=lambda each: len(open_pairs & _pairs(each)))
        chosen.append(best)
        open_pairs -= _pairs(best)
    return chosen


def _pairs(axes: tuple[str, ...]) -> set[tuple[str, str]]:
    return set(itertools.combinations(axes, 2))


def _cut(compiled: CompiledProgram, axes: tuple[str, ...]) -> dict[str, int]:
    """Two ranks on each axis."""
    return dict.fromkeys(axes, 2)


def _train(compiled: CompiledProgram, axes: tuple[str, ...], given: Miniature | None) -> Trained:
    """One miniature, planned under the plan's degrees, stages and schedule, with the plan's decisions where it can."""
    degrees, plan = _cut(compiled, axes), compiled.plan
    num_ranks = math.prod(degrees.values())
    limits = _constraints(compiled, degrees)
    micro_batches = limits["micro_batches"]
    data = math.prod(size for axis, size in degrees.items() if axis in ("dp", "ddp", "ep"))
    rows = 2 * data * micro_batches
    stages = plan.pipeline.num_chunks * degrees.get("pp", 1)
    model, inputs, loss_fn = given or _own_miniature(compiled, max(2, stages), rows)
    options = CompileOptions(
        example_inputs=inputs,
        loss_fn=loss_fn,
        optimizer=sgd_with_momentum,
        global_batch_size=rows,
        constraints=limits,
    )
    cluster = f"{num_ranks} cpu"
    base = compile_with(model, cluster, options)
    kept, calls, program, refused = 0, len(base.best.operators), base, ""
    small = small_plan(compiled.best, base.best)
    try:
        program = compile_with(model, cluster, replace(options, constraints=None, plan=small.plan))
        kept, calls = small.kept, small.calls
    except AutoparError as error:
        refused = str(error).splitlines()[0]
    report = verify_program(program, inputs, steps=STEPS)
    own = program.plan
    return Trained(
        mesh=own.mesh_text, schedule=own.pipeline.schedule, kept=kept, calls=calls, report=report, refused=refused
    )


def _constraints(compiled: CompiledProgram, degrees: Mapping[str, int]) -> dict[str, Any]:
    """What the miniature's own search must keep of the plan: degrees, micro-batches, schedule, ZeRO."""
    plan = compiled.plan
    found: dict[str, Any] = {axis: degrees.get(axis, 1) for axis in ("pp", "ddp", "cp", "ep", "ttp", "tp")}
    found["dp"] = degrees.get("dp", 1) * degrees.get("ddp", 1) * degrees.get("ep", 1)
    found["micro_batches"] = min(plan.num_micro_batches, 4)
    if degrees.get("pp", 1) > 1:
        found["schedule"] = plan.pipeline.schedule
        if plan.pipeline.schedule == "interleaved":
            found["chunks"] = plan.pipeline.num_chunks
    zero = {s.zero for scope in plan.scopes.values() for s in scope.parameters.values()}
    if len(zero - {0}) == 1 and degrees.get("dp", 1) * degrees.get("ep", 1) * degrees.get("cp", 1) > 1:
        found["zero"] = max(zero)
    return found


def _own_miniature(compiled: CompiledProgram, layers: int, rows: int) -> Miniature:
    """A small model of the same class with random weights, and a batch."""
    plan = compiled.plan
    padded = {
        "vocabulary": plan.padded_to > 1 and any(p.padding for p in compiled.best.graph.parameters),
        "heads": plan.heads_padded_to > 1,
        "experts": plan.experts_padded_to > 1,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = small_model(compiled.model, layers, padded)
    model.train()
    return model, random_batch(model, rows, SEQUENCE), None


def _fault(report: VerifyReport) -> str:
    beyond = report.beyond(report.tolerance)
    found = [f"loss is off by {report.loss:.1e}"] if report.loss > report.tolerance else []
    found += [f"{len(beyond)} tensors are off, such as {', '.join(beyond[:3])}"] if beyond else []
    return "; ".join([*found, *report.proves_nothing]) or "not equal"
