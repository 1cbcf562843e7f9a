"""Check the program against the plan, decision by decision: storage, sharding, repetition, recomputation.

The program was lowered from the plan. Here each fact is derived again, from the plan and the traced model alone. This
finds a pass that lost a fact: a layer that no stage runs, a parameter whose gradient is not summed, a stage on other
ranks than in its schedule, or a batch divided into other micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.certify.certificate import Findings
from autopar.compiled import CompiledProgram
from autopar.ir.chain import chain
from autopar.ir.graph import LayerRun, Ref, batch_key, layer_names
from autopar.ir.mesh import Mesh
from autopar.ir.plan_data import StagePlan
from autopar.lowering.assembly import text_of
from autopar.lowering.scope_lowering import placement_pairs
from autopar.plan import Plan
from autopar.sharding.assignment import Candidate
from codegen.program import LayerLoop, PipelineProgram, Program, Spec

KINDS = {
    "parameters": "parameters and buffers stored as the plan says, with its ZeRO stage",
    "inputs": "tensors of the batch, cut as the plan says",
    "layers": "layers, each in its stage",
    "modes": "layers that recompute, or are held by the host, as the plan says",
    "stages": "stages on their pipeline ranks and meshes",
    "switches": "rows, micro-batches, precision, offload and compression of the stages",
    "files": "files that are emitted of this program",
}


def check_decisions(compiled: CompiledProgram) -> Findings:
    """Compare the program with the plan's decisions."""
    decisions, program = _Decisions(compiled.best), compiled.program
    stages = decisions.plan.pipeline.stages or (StagePlan(0, len(chain(decisions.best.graph))),)
    decisions.same("stages", "the number of stages", len(program.programs), len(stages))
    if isinstance(program, PipelineProgram):
        decisions.pipeline(program)
    for number, (stage_program, stage) in enumerate(zip(program.programs, stages, strict=False)):
        where = f"stage {number}, " if len(stages) > 1 else ""
        decisions.switches(stage_program, where)
        decisions.stage(stage_program, stage, where)
    decisions.all_layers(program)
    decisions.all_parameters(program)
    decisions.files(compiled)
    return Findings(
        subject="decisions",
        counts={text: decisions.counts[kind] for kind, text in KINDS.items() if decisions.counts[kind]},
        failures=tuple(decisions.failures),
    )


@dataclass
class _Decisions:
    best: Candidate
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def plan(self) -> Plan:
        return self.best.plan

    def same(self, kind: str, fact: str, actual: Any, planned: Any, count: int = 1) -> None:
        """Record whether the program agrees with the plan. count: how many decisions this compares."""
        self.counts[kind] += count
        if actual != planned:
            self.failures.append(f"{fact}: the program has {actual}, the plan says {planned}")

    def pipeline(self, program: PipelineProgram) -> None:
        pipeline = self.plan.pipeline
        ranks = tuple(stage.pipeline_rank for stage in program.stages)
        planned = pipeline_ranks(pipeline.schedule, len(program.stages), pipeline.num_pipeline_ranks)
        self.same("stages", "pipeline ranks of stages", ranks, planned, len(ranks))
        self.same("stages", "schedule", program.schedule_name, pipeline.schedule)
        earlier: Counter[str] = Counter()
        for number, stage in enumerate(program.stages):
            first = {name: earlier[name] for name in stage.first_layer}
            self.same("layers", f"stage {number}, layers before it", dict(stage.first_layer), first, 0)
            earlier.update({name: len(stage.program.paths(name)) for name in stage.program.layer_names})
            mesh = self.plan.stage_meshes[stage.pipeline_rank].mesh
            actual = Mesh(stage.program.axes, stage.program.axis_sizes)
            self.same("stages", f"stage {number}, mesh", str(actual.compact), str(mesh.compact))

    def switches(self, program: Program, where: str) -> None:
        plan = self.plan
        offload = plan.pipeline.offload
        planned = {
            "global_batch_size": plan.global_batch_size,
            "num_micro_batches": plan.num_micro_batches,
            "precision": plan.precision,
            "offload_optimizer": offload if offload.startswith("nvme:") else "host" if offload else "",
            "offload_parameters": offload == "parameters",
            "compression": plan.compression.names,
        }
        for name, value in planned.items():
            self.same("switches", f"{where}{name}", getattr(program, name), value)

    def stage(self, program: Program, stage: StagePlan, where: str) -> None:
        """Compare the storage, the read inputs and the calls of one stage."""
        mesh = Mesh(program.axes, program.axis_sizes)
        classes = [(cls, "" if cls is program.root else cls.name) for cls in (*program.layers, program.root)]
        for cls, scope in classes:
            for name, spec in {**cls.parameters, **cls.buffers}.items():
                self.parameter(spec, scope, name, mesh, f"{where}{cls.name}.{name}")
        batch = {batch_key(entry.name): entry for entry in self.best.graph.inputs}
        for name, spec in program.inputs.items():
            places = self.best.assignment.tensors.get(("", Ref(batch[name].name if name in batch else name)))
            if places is not None:
                self.same("inputs", f"{where}{name}", spec.placements, placement_pairs(places, mesh))
            dim = batch[name].batch_dim if name in batch else None
            if dim is not None:
                whole = spec.shape[dim] * self.plan.num_micro_batches
                self.same("inputs", f"{where}rows of {name}", whole, self.plan.global_batch_size, 0)
        units = chain(self.best.graph)[stage.first : stage.last]
        for name in layer_names(self.best.graph):
            count = units.count(name)
            looped = sum(s.count for s in program.root.body if isinstance(s, LayerLoop) and s.layer == name)
            self.same("layers", f"{where}layers {name} that are run", looped, count, 0)
            self.same("layers", f"{where}layers {name} that are stored", len(program.paths(name)), count, count)
            self.modes(program, stage, name, count, f"{where}recomputation of {name}")

    def modes(self, program: Program, stage: StagePlan, name: str, count: int, fact: str) -> None:
        """Compare each layer's recompute mode, and whether the host holds its kept tensors."""
        modes, homes = (_each(runs, name, count) for runs in (program.recompute, program.offload))
        actual = [(mode or "none", home) for mode, home in zip(modes, homes, strict=False)]
        planned = [mode or "none" for mode in _each(stage.recompute, name, count)]
        expected = [("none", "host") if mode == "offload" else (mode, "") for mode in planned]
        self.same("modes", fact, actual, expected, sum(mode != "none" for mode in planned))

    def parameter(self, spec: Spec, scope: str, name: str, mesh: Mesh, fact: str) -> None:
        stored = self.best.assignment.parameters.get((scope, name))
        if stored is not None:
            planned = placement_pairs(stored.placements, mesh), stored.zero
            self.same("parameters", fact, (spec.placements, spec.zero), planned)

    def all_layers(self, program: Program | PipelineProgram) -> None:
        """Check that every layer of the model is in exactly one stage, in order."""
        for name in sorted(layer_names(self.best.graph)):
            paths = tuple(path for stage_program in program.programs for path in stage_program.paths(name))
            planned = tuple(
                path
                for piece in self.best.graph.body
                if isinstance(piece, LayerRun) and piece.layer.name == name
                for path in piece.instances
            )
            self.same("layers", f"paths of layers {name}", paths, planned, 0)

    def all_parameters(self, program: Program | PipelineProgram) -> None:
        """Check that every trained parameter is in one stage, or tied."""
        tied = {name for name, _ in program.tied} if isinstance(program, PipelineProgram) else set[str]()
        copies = Counter(name for stage_program in program.programs for name in _parameters(stage_program))
        for parameter in self.best.graph.parameters:
            if parameter.meta.requires_grad and not parameter.is_buffer:
                count = copies[parameter.name]
                if count < 1 or (count > 1) != (parameter.name in tied):
                    self.failures.append(f"{parameter.name}: {count} stages hold it, tied are {sorted(tied) or 'none'}")

    def files(self, compiled: CompiledProgram) -> None:
        files = text_of(compiled.program)
        self.counts["files"] += len(files)
        others = sorted(n for n in files.keys() | compiled.files.keys() if files.get(n) != compiled.files.get(n))
        if others:
            self.failures.append(f"files that say something else than the program: {', '.join(others)}")


def pipeline_ranks(schedule: str, num_stages: int, num_pipeline_ranks: int) -> tuple[int, ...]:
    """Return the pipeline rank of each stage: round-robin, or in the shape of a V."""
    turn = tuple(stage % num_pipeline_ranks for stage in range(num_stages))
    return (*turn[:num_pipeline_ranks], *reversed(turn[num_pipeline_ranks:])) if schedule.endswith("-v") else turn


def _parameters(program: Program) -> Iterator[str]:
    """Yield the full names of the parameters that a stage's classes store."""
    yield from program.root.parameters
    for layer in program.layers:
        yield from (f"{path}.{name}" for path in program.paths(layer.name) for name in layer.parameters)


def _each(runs: Mapping[str, Sequence[tuple[str, int]]], name: str, count: int) -> Iterator[str]:
    """Expand runs of equal modes to one mode per layer, "" where none is recorded."""
    for mode, number in runs.get(name, (("", count),)):
        yield from [mode] * number
