"""A pipeline: its stages, the ranks that run them, the messages between them, and the weights they share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .actions import Link
from .flat import key_of
from .mesh import Mesh
from .parameters import Mode, Module, Param, declared
from .pipeline_ranks import Shape, create_stage_mesh, tiled
from .stage_module import Tied
from .transfer import Edge, StageMesh, plan_slices


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A run of the program's units, and the pipeline rank that runs it.

    program: its root class. layers: class -> the paths of this stage's instances, instead of the class' LAYERS.
    first_layer: class -> how many instances earlier stages have (dropout is numbered through the whole model).
    recompute, offload: class -> one entry per instance, instead of RECOMPUTE and OFFLOAD.
    """

    program: type[Module]
    pipeline_rank: int
    layers: Mapping[type[Module], tuple[str, ...]] | None = None
    first_layer: Mapping[type[Module], int] | None = None
    recompute: Mapping[type[Module], tuple[Mode, ...]] | None = None
    offload: Mapping[type[Module], tuple[bool, ...]] | None = None

    def root(self) -> type[Module]:
        """The root class with this stage's own tables."""
        attributes = {
            "LAYERS": self.layers,
            "FIRST_LAYER": self.first_layer,
            "RECOMPUTE": self.recompute,
            "OFFLOAD": self.offload,
        }
        tables = {name: table for name, table in attributes.items() if table is not None}
        return type(self.program.__name__, (self.program,), tables) if tables else self.program

    def parameters(self) -> Iterator[tuple[str, Param, tuple[str, ...]]]:
        """The (name, spec, aliases) of every parameter, by full names."""
        return declared(self.root())


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """Stages in model order, on pipeline ranks that own consecutive processes.

    axes, sizes: of every pipeline rank's mesh; meshes: one (axes, sizes) per pipeline rank where they differ. tied:
    (name of a parameter, stages that hold a copy of it). first_ranks: the first process of each pipeline rank, if not
    in the order of pipeline ranks. A tensor comes from the latest earlier stage that sends its name. Raises ValueError
    for one that is received and not sent before, for two holders of a parameter that is not tied, for tied weights with
    different layouts, and for pipeline ranks that share processes or leave some out.
    """

    stages: tuple[Stage, ...]
    axes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    meshes: tuple[Shape, ...] | None = None
    tied: tuple[tuple[str, tuple[int, ...]], ...] = ()
    first_ranks: tuple[int, ...] | None = None
    stage_meshes: tuple[StageMesh, ...] = field(init=False)
    """The mesh of each pipeline rank."""

    def __post_init__(self) -> None:
        count = 1 + max(stage.pipeline_rank for stage in self.stages)
        if {stage.pipeline_rank for stage in self.stages} != set(range(count)):
            raise ValueError(
                f"pipeline ranks are numbered from 0, got {[stage.pipeline_rank for stage in self.stages]}"
            )
        shapes = self.meshes or ((self.axes, self.sizes),) * count
        if len(shapes) != count:
            raise ValueError(f"{len(shapes)} meshes for {count} pipeline ranks")
        firsts = tiled([math.prod(sizes) for _, sizes in shapes], self.first_ranks)
        stage_meshes = tuple(StageMesh(axes, sizes, first) for (axes, sizes), first in zip(shapes, firsts, strict=True))
        object.__setattr__(self, "stage_meshes", stage_meshes)
        self._check_names()
        self._check_tied()

    # Ranks ------------------------------------------------------------------------------------------------------------

    @property
    def num_ranks(self) -> int:
        """Processes of all pipeline ranks."""
        return sum(stage_mesh.num_ranks for stage_mesh in self.stage_meshes)

    @property
    def pipeline_ranks(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return tuple(stage.pipeline_rank for stage in self.stages)

    def stage_mesh(self, stage: int) -> StageMesh:
        """The mesh that runs a stage."""
        return self.stage_meshes[self.stages[stage].pipeline_rank]

    def pipeline_rank_of(self, rank: int) -> int:
        """The pipeline rank that a process belongs to."""
        return next(index for index, stage_mesh in enumerate(self.stage_meshes) if rank in stage_mesh.ranks)

    def create_mesh(self, device: torch.device | str = "cpu", timeout: timedelta | None = None) -> Mesh:
        """The mesh of this process' pipeline rank. Every process must call it.

        timeout: of collectives within pipeline ranks and of messages between them, for backends that have one; what the
        default process group was made with holds for what all ranks do together. Raises ValueError if the number of
        processes is not the pipeline's.
        """
        is_up = dist.is_available() and dist.is_initialized()
        running = dist.get_world_size() if is_up else 1
        if running != self.num_ranks:
            raise ValueError(
                f"the pipeline needs {self.num_ranks} processes "
                f"({', '.join(str(mesh.num_ranks) for mesh in self.stage_meshes)} at its pipeline ranks), but "
                f"{running} run: start it with torchrun --nproc-per-node (times --nnodes) = {self.num_ranks}, "
                f"or plan for {running} devices"
            )
        joints = [
            {names for spec in self._specs_at(i) for names in self._joints(spec, stage_mesh)}
            | {names for stage in self.stages if stage.pipeline_rank == i for names in stage.program.JOINTS}
            for i, stage_mesh in enumerate(self.stage_meshes)
        ]
        shapes = [(stage_mesh.axes, stage_mesh.sizes) for stage_mesh in self.stage_meshes]
        firsts = [stage_mesh.first_rank for stage_mesh in self.stage_meshes]
        ordered = [sorted(joint) for joint in joints]
        return create_stage_mesh(shapes, device, first_ranks=firsts, joints=ordered, timeout=timeout)

    def _specs_at(self, pipeline_rank: int) -> Iterator[Param]:
        for stage in self.stages:
            if stage.pipeline_rank == pipeline_rank:
                yield from (spec for _, spec, _ in stage.parameters())

    def _joints(self, spec: Param, stage_mesh: StageMesh) -> tuple[tuple[str, ...], ...]:
        key = key_of(spec, stage_mesh.seen_by(stage_mesh.first_rank))
        return key.others, key.zero_axes

    # What goes between stages -----------------------------------------------------------------------------------------

    def edges(self) -> tuple[Edge, ...]:
        """Every tensor that a stage takes from an earlier one."""
        edges = []
        for target, stage in enumerate(self.stages):
            for name, received in stage.program.RECEIVES.items():
                source = self._sender(name, target)
                sent = self.stages[source].program.SENDS[name]
                there, here = self.stage_mesh(source), self.stage_mesh(target)
                forward = plan_slices(sent, there, received, here)
                dtype = received.dtype
                has_gradient = received.requires_grad and (dtype.is_floating_point or dtype.is_complex)
                backward = plan_slices(received, here, sent, there) if has_gradient else ()
                edges.append(
                    Edge(
                        name=name,
                        source=source,
                        target=target,
                        sent=sent,
                        received=received,
                        dtype=sent.dtype,
                        forward=forward,
                        backward=backward,
                    )
                )
        return tuple(edges)

    def _sender(self, name: str, target: int) -> int:
        senders = [stage for stage in range(target) if name in self.stages[stage].program.SENDS]
        if not senders:
            raise ValueError(f"stage {target} receives {name!r}, which no earlier stage sends")
        return senders[-1]

    def _check_names(self) -> None:
        holders: dict[str, int] = {}
        inputs: dict[tuple[int, str], Param] = {}
        for index, stage in enumerate(self.stages):
            for name, _, _ in stage.parameters():
                is_tied = any(tied == name and index in stages for tied, stages in self.tied)
                if name in holders and not is_tied:
                    raise ValueError(f"stages {holders[name]} and {index} hold {name} and it is not in `tied`")
                holders[name] = index
            for name, spec in stage.program.RECEIVES.items():
                sent = self.stages[self._sender(name, index)].program.SENDS[name]
                if sent.dtype != spec.dtype:
                    raise ValueError(f"{name!r} is sent as {sent.dtype}, stage {index} receives it as {spec.dtype}")
            for name, spec in stage.program.INPUTS.items():
                key = (stage.pipeline_rank, name)
                if inputs.setdefault(key, spec) != spec:
                    raise ValueError(f"stages of pipeline rank {stage.pipeline_rank} take {name!r} in two layouts")

    # Tied weights -----------------------------------------------------------------------------------------------------

    def tied_in(self, stage: int) -> Tied:
        """Return the parameters of a stage that others hold too, and what earlier ones have (of root buffers too)."""
        tied_here = [(name, stages) for name, stages in self.tied if stage in stages]
        aliases = {}
        for name, stages in tied_here:
            tables = (
                (parameter_name, names)
                for other in stages
                for parameter_name, _, names in self.stages[other].parameters()
            )
            aliases[name] = tuple(
                dict.fromkeys(alias for parameter_name, names in tables if parameter_name == name for alias in names)
            )
        copies = {name for name, stages in tied_here if min(stages) != stage}
        before = {name for earlier in self.stages[:stage] for name in earlier.program.BUFFERS}
        return Tied(aliases, frozenset(copies | before.intersection(self.stages[stage].program.BUFFERS)))

    def exchanges(self, name: str, stages: tuple[int, ...]) -> tuple[Edge, ...]:
        """A tied weight's gradient, from every pipeline rank that has it to each other; none where their meshes are
        equal.

        An edge's source and target are the first stages there.
        """
        first_stages = {self.stage_mesh(stage): stage for stage in sorted(stages, reverse=True)}
        stage_meshes = sorted(first_stages, key=first_stages.__getitem__)
        spec = self._parameter(stages[0], name)
        if len({stage_mesh.shape for stage_mesh in stage_meshes}) == 1:
            return ()
        cut: dict[str, Any] = {axis: text for axis, text in spec.placements.items() if text.startswith("S")}
        param = Param(spec.shape, **cut)
        dtype = torch.float64 if spec.dtype == torch.float64 else torch.float32
        return tuple(
            Edge(
                name=name,
                source=first_stages[a],
                target=first_stages[b],
                sent=param,
                received=param,
                dtype=dtype,
                forward=plan_slices(param, a, param, b),
                backward=(),
            )
            for a, b in itertools.permutations(stage_meshes, 2)
        )

    def _parameter(self, stage: int, name: str) -> Param:
        specs = [spec for parameter_name, spec, _ in self.stages[stage].parameters() if parameter_name == name]
        if not specs:
            raise ValueError(f"{name} is tied, but stage {stage} has no parameter of that name")
        return specs[0]

    def _check_tied(self) -> None:
        for name, stages in self.tied:
            copies = []
            for stage in stages:
                spec = self._parameter(stage, name)
                layout = (spec.padded_shape, dict(spec.placements), spec.zero, spec.dtype, spec.requires_grad)
                copies.append(layout)
            if any(copy != copies[0] for copy in copies):
                raise ValueError(f"the copies of {name} in stages {stages} must lie alike on their meshes")

    # For checks -------------------------------------------------------------------------------------------------------

    def links(self) -> list[Link]:
        """The links between stages: which stage waits for which."""
        return [Link(edge.source, edge.target, bool(edge.backward)) for edge in self.edges()]

    def describe(self) -> str:
        """A text that is equal for equal pipelines, as far as ranks must agree on it."""
        stages = (f"{stage.pipeline_rank}:{[(n, s.shape) for n, s, _ in stage.parameters()]}" for stage in self.stages)
        edges = (f"{e.name} {e.source} {e.target} {e.dtype} {e.forward} {e.backward}" for e in self.edges())
        return "\n".join((repr(self.stage_meshes), *stages, *edges, repr(self.tied)))
