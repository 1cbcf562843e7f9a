"""Train one miniature: a small model of the plan's class, compiled for local processes with the plan's decisions.

First its own plan is searched under the plan's degrees, schedule, ZeRO stage and offload, which gives it stages and
names. Then the plan's decisions replace its own (`miniature_plan.py`).
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
from autopar.certify.miniature_config import SEQUENCE, small_model
from autopar.certify.miniature_plan import SmallPlan, modes_left, modes_of, small_plan
from autopar.compile import compile_with
from autopar.compiled import CompiledProgram
from autopar.costs.updates import DefaultAdamW, OptimizerFactory
from autopar.errors import AutoparError, ConstraintError, InternalError
from autopar.files.scratch import temporary_folder
from autopar.frontend.inputs import NamedBatch, name_inputs
from autopar.ir.chain import chain
from autopar.ir.graph import layer_names
from autopar.ir.mesh import DATA_AXES, PIPELINE_AXIS, ZERO_AXES, Mesh
from autopar.ir.stage_mesh import StageMesh
from autopar.lowering.assembly import files_of, program_of
from autopar.lowering.completion import with_inputs_of
from autopar.lowering.passes import passes
from autopar.models.batches import random_batch
from autopar.settings.compile_options import CompileOptions
from autopar.settings.optimizers import examine
from autopar.sharding.assignment import Candidate
from autopar.verify import roundings, sgd_with_momentum, verify_program
from autopar.verify_report import VerifyReport
from codegen.logits import without_logits
from codegen.program import Call, PipelineProgram, Program
from codegen.runtime.optimizers import takes_names
from cost_models.schedule import schedule_named

STEPS, MOST_MICRO_BATCHES, MOST_LAYERS = 3, 4, 16
Miniature = tuple[nn.Module, Mapping[str, Any] | tuple[Any, ...], Callable[..., torch.Tensor] | None]
"""A model, a batch with any number of rows, and a loss if the model does not return one."""


@dataclass(frozen=True, slots=True)
class Trained:
    """One trained miniature: its mesh, its decisions, and the comparison.

    kept: how many of `calls` have the plan's option. left: parts of the plan that it lacks, in words. lacks: operators
    of the plan's calls that it lacks. targets: functions that its program calls. rounds: its deliberate roundings, in
    words.
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


def train_miniature(
    compiled: CompiledProgram, cut: Cut, miniature: Miniature | None, is_rounded: bool = False
) -> Trained:
    """Train one miniature for STEPS steps. Raises errors of the model's class, the search or a rank. is_rounded: with
    the plan's fp8 and compression."""
    plan = compiled.plan
    micro_batches = min(plan.num_micro_batches, MOST_MICRO_BATCHES)
    rows = 2 * micro_batches * math.prod(cut.degrees.get(axis, 1) for axis in DATA_AXES)
    stages = plan.pipeline.num_chunks * cut.degrees.get(PIPELINE_AXIS, 1)
    model, inputs, loss_fn = miniature or own_miniature(compiled, max(2, stages), rows, is_wide=is_rounded)
    optimizer, substitute = optimizer_of(compiled, model)
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
    left += [substitute] if substitute else []
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
    """Return the miniature's program, the plan's translated decisions, and why it cannot have them ("" if it can)."""
    small = small_plan(compiled.best, base.best)
    plan = small.plan
    if cut.stage_meshes:
        meshes = tuple(StageMesh(mesh.over(plan.mesh.axes)) for mesh in cut.stage_meshes)
        plan = replace(plan, pipeline=replace(plan.pipeline, stage_meshes=meshes))
    planned_options = replace(options, constraints=None, plan=plan)
    try:
        return compile_with(base.model, f"{cut.num_ranks} cpu", planned_options), small, ""
    except InternalError:
        raise
    except AutoparError as error:
        if cut.stage_meshes:
            raise
        return base, small, f"its decisions, which a miniature cannot have: {str(error).splitlines()[0]}"


def _over_nodes(compiled: CompiledProgram, small: CompiledProgram, inputs: NamedBatch) -> CompiledProgram:
    """Lower the miniature as if nodes had half of the expert ranks, if the plan sends rows once per node."""
    if "runtime.NodeRoutes" not in targets_of(compiled.program):
        return small

    def neighbors(_: int, __: int, axes: tuple[str, ...]) -> int:
        return math.prod(small.plan.mesh.size(axis) for axis in axes) // 2

    lowering_passes = passes(fused=small.program.any.kernels, fp8=small.plan.fp8, neighbors=neighbors)
    lowered = program_of(small.best, lowering_passes)
    program = with_inputs_of(lowered.map(without_logits), inputs)
    return replace(small, program=program, files=files_of(program))


def _left(large: Candidate, small: Candidate, translated: SmallPlan) -> tuple[str, ...]:
    """List the decisions of the plan that the miniature does not have."""
    layers = sorted(layer_names(large.graph) - layer_names(small.graph))
    modes = modes_left(large, small.plan)
    small_pipeline, pipeline = small.plan.pipeline, large.plan.pipeline
    is_held = small_pipeline.offload == pipeline.offload or (
        small_pipeline.offload.startswith("nvme:") and pipeline.offload.startswith("nvme:")
    )
    texts = {
        "layers": layers,
        "recompute modes": [mode for mode in modes if mode.split()[0] not in layers],
        "offload": [] if is_held else [pipeline.offload],
        "schedule": [] if small_pipeline.schedule in ("", pipeline.schedule) else [pipeline.schedule],
        "decisions, replaced by others": list(translated.changed),
    }
    return tuple(f"{subject}: {_few(names)}" for subject, names in texts.items() if names)


def _few(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def targets_of(program: Program | PipelineProgram) -> frozenset[str]:
    """Return the names of the functions that a program calls."""
    classes = (cls for stage_program in program.programs for cls in (*stage_program.layers, stage_program.root))
    return frozenset(s.target for cls in classes for s in cls.body if isinstance(s, Call))


def constraints_of(compiled: CompiledProgram, degrees: Mapping[str, int], folder: str) -> dict[str, Any]:
    """Return the constraints of the miniature's search: the plan's degrees, schedule, ZeRO stage and offload.

    folder: of this machine; replaces the plan's folder for the optimizer's state.
    """
    plan = compiled.plan
    pipeline_ranks, mesh = degrees.get(PIPELINE_AXIS, 1), Mesh(tuple(degrees), tuple(degrees.values()))
    constraints: dict[str, Any] = {PIPELINE_AXIS: pipeline_ranks, **mesh.degrees}
    if pipeline_ranks > 1:
        constraints["schedule"] = plan.pipeline.schedule
        if schedule_named(plan.pipeline.schedule).chooses_chunks:
            constraints["chunks"] = plan.pipeline.num_chunks
    zero = {s.zero for scope in plan.scopes.values() for s in scope.parameters.values()} - {0}
    if len(zero) == 1 and any(mesh.size(axis) > 1 for axis in ZERO_AXES):
        constraints["zero"] = max(zero)
    offload = plan.pipeline.offload
    if offload == "parameters" and constraints.get("zero") != 3:
        offload = "optimizer"
    constraints["offload"] = f"nvme:{folder}" if offload.startswith("nvme:") else offload or "none"
    return constraints


def own_miniature(compiled: CompiledProgram, layers: int, rows: int, is_wide: bool = False) -> Miniature:
    """Build a small model of the same class with random weights, of at least `layers` layers, and a batch.

    is_wide: doubles the width, so that shards of more weights are wide enough for fp8.
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
    """Return how many of the model's first layers the miniature needs.

    They contain every class in each of its recompute modes, and at least twice, because one layer is no class. If that
    is more than MOST_LAYERS, they contain every class twice; if that is too many as well, `at_least` layers are taken.
    """
    layers = [unit for unit in chain(best.graph) if unit in layer_names(best.graph)]
    every = {name: max(2, len(modes)) for name, modes in modes_of(best).items()}
    for required in (every, dict.fromkeys(every, 2)):
        counts = Counter(layers[:at_least])
        for number in range(at_least, min(MOST_LAYERS, len(layers)) + 1):
            counts = Counter(layers[:number])
            if all(counts[name] >= count for name, count in required.items()):
                return number
    return at_least


LEAST_RATE, MOST_RATE = 1e-3, 0.1
"""A schedule's first rate may be 0, and a rate that suits a large model may make a small one diverge."""


def optimizer_of(compiled: CompiledProgram, model: nn.Module) -> tuple[OptimizerFactory, str]:
    """Return the factory for a miniature's parameters, and why it is not the plan's ("" if it is)."""
    factory = compiled.optimizer
    if isinstance(factory, DefaultAdamW):
        return factory, ""
    try:
        examine(AtAVisibleRate(factory), model)
    except ConstraintError as error:
        reason = str(error).splitlines()[0]
        return sgd_with_momentum, f"optimizer, as its factory does not take the miniature's parameters: {reason}"
    return AtAVisibleRate(factory), ""


class AtAVisibleRate:
    """A factory of optimizers with learning rates between LEAST_RATE and MOST_RATE."""

    def __init__(self, factory: OptimizerFactory) -> None:
        self._factory, self.takes_names = factory, takes_names(factory)

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        optimizer = self._factory(parameters)
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if isinstance(rate, torch.Tensor):
                group["lr"] = rate.clamp(LEAST_RATE, MOST_RATE)
            elif isinstance(rate, int | float):
                group["lr"] = min(max(rate, LEAST_RATE), MOST_RATE)
        return optimizer
