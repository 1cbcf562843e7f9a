"""Turn a candidate into a program: lowered whole, or stage by stage with the plan's schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from autopar.errors import InternalError
from autopar.ir.plan_data import Pipeline, PlanData
from autopar.ir.stage_mesh import first_ranks
from autopar.lowering.dry_run import dry_run
from autopar.lowering.lower import Modes, Staging, lower, lower_stages
from autopar.lowering.passes import Pass
from autopar.sharding.assignment import Candidate
from codegen.check_program import check_types
from codegen.check_source import check_files
from codegen.evaluation import follows_training
from codegen.logits import with_logits
from codegen.program import Call, PipelineProgram, Program
from codegen.schemas import EmissionError
from codegen.source.emit import emit_model
from codegen.source.expressions import expression
from codegen.source.pipeline_source import emit_pipeline
from codegen.strides import with_strides
from cost_models.schedule import make_schedule, placement, schedule_named, schedule_text

HOST = "host"


def program_of(candidate: Candidate, passes: Sequence[Pass]) -> Program | PipelineProgram:
    """Return the program from which code is generated: the lowered candidate after all passes, in order."""
    program = _checked(_lowered(candidate))
    for rewrite in (follows_training, *passes):
        program = _checked(program.map(rewrite))
    return _checked(program.map(with_logits).map(with_strides))


def _checked(program: Program | PipelineProgram) -> Program | PipelineProgram:
    """Return the program if it is consistent (codegen/check_program.py). Raises InternalError if it is not."""
    try:
        for stage_program in program.programs:
            check_types(stage_program)
    except EmissionError as error:
        raise _internal(str(error)) from error
    return program


def _internal(values: str) -> InternalError:
    return InternalError(
        "autopar emitted a program that cannot run; this is a bug in autopar, not in the model",
        values=values,
        alternatives="report it with the model and this message; other constraints may avoid the call",
    )


def _lowered(candidate: Candidate) -> Program | PipelineProgram:
    plan, pipeline = candidate.plan, candidate.plan.pipeline
    common = (candidate.graph, candidate.operators, plan, candidate.assignment)
    if pipeline.num_pipeline_ranks == 1:
        modes, offloaded = _split(pipeline.stages[0].recompute) if pipeline.stages else ({}, {})
        return _stored_as(plan, lower(*common, recompute=modes, offload=offloaded))
    return lower_stages(*common, staging(pipeline, plan.num_micro_batches)).map(partial(_stored_as, plan))


def _stored_as(plan: PlanData, program: Program) -> Program:
    """Return the program with the plan's placement of its state and its compression."""
    home, keeps_shards = home_of(plan.pipeline), plan.pipeline.offload == "parameters"
    compression = plan.compression.names
    return replace(program, offload_optimizer=home, offload_parameters=keeps_shards, compression=compression)


def _split(modes: Modes) -> tuple[Modes, Modes]:
    """Return the recompute modes of layers, and which layers offload their activations to the host."""
    recompute = {
        name: tuple(("none" if mode == "offload" else mode, count) for mode, count in runs)
        for name, runs in modes.items()
    }
    offloaded = {
        name: tuple((HOST if mode == "offload" else "", count) for mode, count in runs)
        for name, runs in modes.items()
        if any(mode == "offload" for mode, _ in runs)
    }
    return recompute, offloaded


def home_of(pipeline: Pipeline) -> str:
    """Return the location of the optimizer's state, as the run time names it."""
    return pipeline.offload if pipeline.offload.startswith("nvme:") else HOST if pipeline.offload else ""


def staging(pipeline: Pipeline, num_micro_batches: int) -> Staging:
    """Return the plan's stages and the lines of its schedule."""
    name, pipeline_ranks, chunks = pipeline.schedule, pipeline.num_pipeline_ranks, pipeline.num_chunks
    lines = schedule_text(make_schedule(name, pipeline_ranks, num_micro_batches, chunks)).splitlines()
    return Staging(
        boundaries=tuple(stage.first for stage in pipeline.stages),
        pipeline_ranks=placement(name, pipeline_ranks, chunks),
        schedule_name=name,
        schedule=tuple(lines),
        recompute=tuple(_split(stage.recompute)[0] for stage in pipeline.stages),
        offload=tuple(_split(stage.recompute)[1] for stage in pipeline.stages),
        defers_weights=schedule_named(name).defers_weights,
        meshes=tuple(stage_mesh.mesh for stage_mesh in pipeline.stage_meshes),
        first_ranks=first_ranks(pipeline.stage_meshes),
    )


def files_of(program: Program | PipelineProgram) -> dict[str, str]:
    """Return the generated files by name, as text.

    Raises InternalError for text that would fail when a rank runs it (codegen/check_source.py, dry_run.py).
    """
    files = text_of(program)
    try:
        dry_run(program, files)
    except EmissionError as error:
        raise _internal(f"{error}{_operator_of(program, error.call)}") from error
    return files


def text_of(program: Program | PipelineProgram) -> dict[str, str]:
    """Return `files_of` without a dry run."""
    try:
        files = emit_pipeline(program) if isinstance(program, PipelineProgram) else {"model.py": emit_model(program)}
        check_files({name: text for name, text in files.items() if name.endswith(".py")})
    except EmissionError as error:
        raise _internal(f"{error}{_operator_of(program, error.call)}") from error
    return files


def _operator_of(program: Program | PipelineProgram, text: str) -> str:
    """Return the operator and module that became `text`, as a clause; "" if it belongs to no call."""
    for cls in (cls for part in program.programs for cls in (*part.layers, part.root)):
        for call in (statement for statement in cls.body if isinstance(statement, Call)):
            if text and (text == call.target or text in _written(call)):
                return f" ({call.target} of {cls.name}{'.' * bool(call.section)}{call.section})"
    return ""


def _written(call: Call) -> str:
    try:
        return expression(call)
    except EmissionError as error:
        return error.call
