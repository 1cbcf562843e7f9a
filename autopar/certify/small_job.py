"""One miniature: a small model of the plan's class, compiled on processes with the plan's decisions, and trained.

Its own plan is searched under the plan's degrees, schedule, ZeRO stage and offload, so that it has stages and names;
then the plan's decisions are put in the place of its own (`small_plan.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.certify.cuts import Cut
from autopar.certify.small_config import SEQUENCE, small_model
from autopar.certify.small_optimizer import optimizer_of
from autopar.certify.small_plan import SmallPlan, modes_left, modes_of, small_plan
from autopar.compile import compile_with
from autopar.compiled import CompiledProgram
from autopar.errors import AutoparError, InternalError
from autopar.files.scratch import temporary_folder
from autopar.frontend.inputs import NamedBatch, name_inputs
from autopar.integrations.batches import random_batch
from autopar.ir.chain import chain
from autopar.ir.graph import layer_names
from autopar.ir.mesh import DATA_AXES, PIPELINE_AXIS, ZERO_AXES, Mesh
from autopar.ir.stage_mesh import StageMesh
from autopar.lowering.assembly import files_of, program_of
from autopar.lowering.passes import passes
from autopar.options.assignment import Candidate
from autopar.running.batch import with_inputs_of
from autopar.settings.compile_options import CompileOptions
from autopar.verify import roundings, verify_program
from autopar.verify_report import VerifyReport
from codegen.logits import without_logits
from codegen.program import Call, PipelineProgram, Program
from cost_models.schedule import schedule_named

STEPS, MOST_MICRO_BATCHES, MOST_LAYERS = 3, 4, 16
Miniature = tuple[nn.Module, Mapping[str, Any] | tuple[Any, ...], Callable[..., torch.Tensor] | None]
"""A model, a batch of any number of rows, and its loss where it does not return one."""


@dataclass(frozen=True, slots=True)
class Trained:
    """One miniature: what it ran on and with, and the comparison.

    kept: calls that have the plan's option, of `calls`. left: what of the plan it does not have, in words. lacks:
    operators of the plan's calls that it does not have. targets: functions that its program calls. rounds: what it
    rounds on purpose, in words.
    """

    mesh: str
    schedule: str
    kept: int
    calls: int
    left: tuple[str, ...]
    lacks: Mapping[str, int]
    targets: frozenset[str]
    report: VerifyReport
    rounds: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return f"{self.mesh}{f', {self.schedule}' if self.schedule else ''}"


def train_miniature(compiled: CompiledProgram, cut: Cut, given: Miniature | None, is_rounded: bool = False) -> Trained:
    """Trains one miniature for STEPS steps. Raises what the model's class, the search or a rank raises.

    is_rounded: with the plan's fp8 and compression.
    """
    plan = compiled.plan
    micro_batches = min(plan.num_micro_batches, MOST_MICRO_BATCHES)
    rows = 2 * micro_batches * math.prod(cut.degrees.get(axis, 1) for axis in DATA_AXES)
    stages = plan.pipeline.num_chunks * cut.degrees.get(PIPELINE_AXIS, 1)
    model, inputs, loss_fn = given or own_miniature(compiled, max(2, stages), rows, is_wide=is_rounded)
    optimizer, other = optimizer_of(compiled, model)
    with temporary_folder() as folder:
        limits = constraints_of(compiled, cut.degrees, str(folder))
        options = CompileOptions(
            example_inputs=inputs,
            loss_fn=loss_fn,
            optimizer=optimizer,
            global_batch_size=rows,
            constraints=limits | {"micro_batches": micro_batches},
            kernels="on" if compiled.program.any.kernels else "off",
            fp8=plan.fp8 and is_rounded,
            compression=plan.compression.names if is_rounded else {},
        )
        base = compile_with(model, f"{math.prod(cut.degrees.values())} cpu", options)
        program, small, refused = _with_decisions(compiled, base, cut, options)
        program = _over_nodes(compiled, program, name_inputs(model, inputs, loss_fn))
        report = verify_program(program, inputs, steps=STEPS, is_replayed=True)
    left = [refused] if refused else list(_left(compiled.best, program.best, small))
    left += [other] if other else []
    return Trained(
        mesh=program.plan.mesh_text,
        schedule=program.plan.pipeline.schedule,
        kept=0 if refused else small.kept,
        calls=len(program.best.operators),
        left=tuple(left),
        lacks=small.lacks,
        targets=targets_of(program.program),
        report=report,
        rounds=roundings(program),
    )


def _with_decisions(
    compiled: CompiledProgram, base: CompiledProgram, cut: Cut, options: CompileOptions
) -> tuple[CompiledProgram, SmallPlan, str]:
    """The miniature's program, what became of the plan's decisions, and why it can have none of them, "" if it can."""
    small = small_plan(compiled.best, base.best)
    plan = small.plan
    if cut.stage_meshes:
        meshes = tuple(StageMesh(mesh.over(plan.mesh.axes)) for mesh in cut.stage_meshes)
        plan = replace(plan, pipeline=replace(plan.pipeline, stage_meshes=meshes))
    given = replace(options, constraints=None, plan=plan)
    try:
        return compile_with(base.model, f"{cut.num_ranks} cpu", given), small, ""
    except InternalError:
        raise
    except AutoparError as error:
        if cut.stage_meshes:
            raise
        return base, small, f"its decisions, which a miniature cannot have: {str(error).splitlines()[0]}"


def _over_nodes(compiled: CompiledProgram, small: CompiledProgram, inputs: NamedBatch) -> CompiledProgram:
    """The miniature as on nodes that hold half of the ranks that share out experts, where rows of the plan's program
    cross between nodes once per node."""
    if "runtime.NodeRoutes" not in targets_of(compiled.program):
        return small

    def neighbours(_: int, __: int, axes: tuple[str, ...]) -> int:
        return math.prod(small.plan.mesh.size(axis) for axis in axes) // 2

    own = passes(fused=small.program.any.kernels, fp8=small.plan.fp8, neighbours=neighbours)
    lowered = program_of(small.best, own)
    program = with_inputs_of(lowered.map(without_logits), inputs)
    return replace(small, program=program, files=files_of(program))


def _left(large: Candidate, small: Candidate, found: SmallPlan) -> tuple[str, ...]:
    """What of the plan's decisions the miniature does not have."""
    layers = sorted(layer_names(large.graph) - layer_names(small.graph))
    modes = modes_left(large, small.plan)
    own, wanted = small.plan.pipeline, large.plan.pipeline
    is_held = own.offload == wanted.offload or (own.offload.startswith("nvme:") and wanted.offload.startswith("nvme:"))
    texts = {
        "layers": layers,
        "recompute modes": [mode for mode in modes if mode.split()[0] not in layers],
        "offload": [] if is_held else [wanted.offload],
        "schedule": [] if own.schedule in ("", wanted.schedule) else [wanted.schedule],
        "decisions, of which there are others": list(found.own),
    }
    return tuple(f"{what}: {_few(names)}" for what, names in texts.items() if names)


def _few(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def targets_of(program: Program | PipelineProgram) -> frozenset[str]:
    """What a program calls, by name."""
    classes = (cls for each in program.programs for cls in (*each.layers, each.root))
    return frozenset(s.target for cls in classes for s in cls.body if isinstance(s, Call))


def constraints_of(compiled: CompiledProgram, degrees: Mapping[str, int], folder: str) -> dict[str, Any]:
    """What the miniature's own search must keep of the plan: degrees, schedule, ZeRO, and where its state lives.

    folder: of this machine, in the place of one that the optimiser's state has.
    """
    plan = compiled.plan
    pipeline_ranks, mesh = degrees.get(PIPELINE_AXIS, 1), Mesh(tuple(degrees), tuple(degrees.values()))
    found: dict[str, Any] = {PIPELINE_AXIS: pipeline_ranks, **mesh.degrees}
    if pipeline_ranks > 1:
        found["schedule"] = plan.pipeline.schedule
        if schedule_named(plan.pipeline.schedule).chooses_chunks:
            found["chunks"] = plan.pipeline.num_chunks
    zero = {s.zero for scope in plan.scopes.values() for s in scope.parameters.values()} - {0}
    if len(zero) == 1 and any(mesh.size(axis) > 1 for axis in ZERO_AXES):
        found["zero"] = max(zero)
    offload = plan.pipeline.offload
    if offload == "parameters" and found.get("zero") != 3:
        offload = "optimizer"
    found["offload"] = f"nvme:{folder}" if offload.startswith("nvme:") else offload or "none"
    return found


def own_miniature(compiled: CompiledProgram, layers: int, rows: int, is_wide: bool = False) -> Miniature:
    """A small model of the same class with random weights, of `layers` layers at least, and a batch.

    is_wide: of twice the width, of which more weights' parts are wide enough for fp8.
    """
    plan = compiled.plan
    padded = {
        "vocabulary": plan.padded_to > 1 and any(p.padding for p in compiled.best.graph.parameters),
        "heads": plan.heads_padded_to > 1,
        "experts": plan.experts_padded_to > 1,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        num_tokens = None if plan.basis is None else plan.basis.seq_len
        model = small_model(compiled.model, layers_needed(compiled.best, layers), padded, num_tokens, is_wide)
    model.train()
    return model, random_batch(model, rows, SEQUENCE), None


def layers_needed(best: Candidate, at_least: int) -> int:
    """How many of the model's first layers have every class in each of its recompute modes, and twice, as one layer is
    no class; if that is more than MOST_LAYERS, every class twice; and if that is, too, `at_least`."""
    layers = [unit for unit in chain(best.graph) if unit in layer_names(best.graph)]
    every = {name: max(2, len(modes)) for name, modes in modes_of(best).items()}
    for wanted in (every, dict.fromkeys(every, 2)):
        counts = Counter(layers[:at_least])
        for number in range(at_least, min(MOST_LAYERS, len(layers)) + 1):
            counts = Counter(layers[:number])
            if all(counts[name] >= count for name, count in wanted.items()):
                return number
    return at_least
