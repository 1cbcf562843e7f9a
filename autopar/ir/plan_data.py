"""What was decided, as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.compression import Compression
from autopar.ir.mesh import ZERO_AXES, Mesh
from autopar.ir.placement import Placements, Stored
from autopar.ir.stage_mesh import StageMesh, stage_meshes_text

RECOMPUTE_MODES = ("none", "offload", "selective", "full")
"""What becomes of a layer's activations until its backward: kept, held by the host, partly or wholly computed again."""
OFFLOADS = ("none", "optimizer", "parameters")
"""What lives in host memory: the optimizer's state and masters; under ZeRO-3 the shards of the parameters too.
`nvme:/a/folder` keeps the optimizer's state and masters in files of that folder."""


def is_offload(text: str) -> bool:
    """Whether `text` is one of OFFLOADS or names a folder."""
    return text in OFFLOADS or (text.startswith("nvme:/") and text.isprintable())


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one optimizer step by kind, and bytes on the fullest rank by kind.

    pipeline_ranks: the same bytes for each pipeline rank, where there are several.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    num_bytes: Mapping[str, float] = field(default_factory=dict)
    pipeline_ranks: tuple[Mapping[str, float], ...] = ()

    @property
    def step_seconds(self) -> float:
        return sum(value for kind, value in self.seconds.items() if kind != "hidden communication")

    @property
    def peak_bytes(self) -> float:
        return sum(self.num_bytes.values())


@dataclass(frozen=True, slots=True)
class ScopePlan:
    """Decisions of the top level ("") or of one layer class.

    parameters: all of them. inputs: batch inputs, or what enters a layer. calls: axis labels of calls that differ
    from their default. tensors: kept placements ("name" or "name[i]") that differ from their producer's.
    """

    parameters: Mapping[str, Stored]
    inputs: Mapping[str, Placements]
    calls: Mapping[str, tuple[str, ...]]
    tensors: Mapping[str, Placements]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One pipeline stage: units `first` to `last` (not included) of the model's chain of units.

    recompute: per layer class, how many of its layers in this stage, in order, run in which mode ("none", "selective",
    "full"); classes that are left out keep everything.
    """

    first: int
    last: int
    recompute: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How the model is cut over `num_pipeline_ranks` groups of ranks, all with the plan's mesh unless there are
    `stage_meshes`.

    schedule: of autopar's schedules ("" with one pipeline rank). stages: in model order; more than pipeline ranks where
    a pipeline rank runs several. offload: of OFFLOADS, "" for none. stage_meshes: one per pipeline rank where they are
    not alike.
    """

    num_pipeline_ranks: int = 1
    schedule: str = ""
    stages: tuple[StagePlan, ...] = ()
    offload: str = ""
    stage_meshes: tuple[StageMesh, ...] = ()

    @property
    def num_chunks(self) -> int:
        """The number of stages of one pipeline rank."""
        return max(len(self.stages) // self.num_pipeline_ranks, 1)

    @property
    def is_plain(self) -> bool:
        """One pipeline rank that keeps all activations and everything on the device."""
        return self.num_pipeline_ranks == 1 and not self.offload and not any(s.recompute for s in self.stages)


@dataclass(frozen=True, slots=True)
class Basis:
    """What a plan's price is for, beside its model, cluster and precision.

    inputs: of every input the whole batch's numbers and shape ("int64 [8, 128]"); none where it was not noted. kernels:
    whether layers have fused kernels. backend: what runs them (codegen/runtime/compiled_layers.py).
    """

    inputs: Mapping[str, str] = field(default_factory=dict)
    kernels: bool = False
    backend: str = "eager"

    @property
    def seq_len(self) -> int | None:
        """The length of the first input of integers with two dimensions; None without."""
        found = (re.fullmatch(r"int[0-9]+ \[[0-9]+, ([0-9]+)\]", text) for text in self.inputs.values())
        return next((int(match.group(1)) for match in found if match), None)

    def differences(self, other: Basis) -> list[str]:
        """In words, what is otherwise there: "input_ids: int64 [8, 64] instead of int64 [8, 128]"."""
        names = [name for name in self.inputs if name in other.inputs and self.inputs[name] != other.inputs[name]]
        found = [f"{name}: {self.inputs[name]} instead of {other.inputs[name]}" for name in names]
        if self.kernels != other.kernels:
            found.append("with kernels instead of without" if self.kernels else "without kernels instead of with")
        if self.backend != other.backend:
            found.append(f"backend {self.backend} instead of {other.backend}")
        return found


@dataclass(frozen=True, slots=True)
class PlanData:
    """All decisions of one plan; `Plan` adds its file.

    mesh: of one pipeline rank; where they differ, the envelope of all (stage_mesh.py). scopes: "" and layer class names
    with their decisions, which hold for every stage. padded_to, experts_padded_to, heads_padded_to: as the
    graph's. basis: what its prediction is for, which is no decision; None where that is not known.
    """

    model: str
    cluster: str
    mesh: Mesh
    global_batch_size: int
    num_micro_batches: int
    precision: str
    scopes: Mapping[str, ScopePlan]
    prediction: Prediction = Prediction()
    runner_ups: tuple[tuple[str, float, str], ...] = ()
    pipeline: Pipeline = Pipeline()
    compression: Compression = Compression()
    fp8: bool = False
    padded_to: int = 1
    experts_padded_to: int = 1
    heads_padded_to: int = 1
    basis: Basis | None = field(default=None, compare=False)
    source: str = field(default="", compare=False, repr=False)
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_ranks(self) -> int:
        """Ranks of all pipeline ranks."""
        return sum(stage_mesh.mesh.num_ranks for stage_mesh in self.stage_meshes)

    @property
    def stage_meshes(self) -> tuple[StageMesh, ...]:
        """The stage mesh of every pipeline rank."""
        return self.pipeline.stage_meshes or (StageMesh(self.mesh),) * self.pipeline.num_pipeline_ranks

    @property
    def mesh_text(self) -> str:
        """The mesh with the pipeline's axis before it: `pp2 x dp2 x tp2`."""
        if self.pipeline.stage_meshes:
            return stage_meshes_text(self.pipeline.stage_meshes)
        return whole_mesh_text(self.pipeline.num_pipeline_ranks, self.mesh)

    @property
    def compresses(self) -> bool:
        """Whether ZeRO's collectives over several ranks are there to be compressed, and are."""
        is_sharded = any(s.zero for scope in self.scopes.values() for s in scope.parameters.values())
        return bool(self.compression) and is_sharded and any(self.mesh.size(axis) > 1 for axis in ZERO_AXES)

    @property
    def fullest_group(self) -> int:
        """The group of nodes that the pipeline rank with the largest share of its memory in use belongs to."""
        pipeline_ranks = self.prediction.pipeline_ranks
        if not self.pipeline.stage_meshes or self.prediction.num_bytes not in pipeline_ranks:
            return 0
        return self.pipeline.stage_meshes[pipeline_ranks.index(self.prediction.num_bytes)].group

    def place(self, scope: str, *path: str) -> str:
        """`plan.yaml, line 12: layers.Block.calls.linear`, or without the line for a plan that was not read."""
        return self.at(*(("layers", scope) if scope else ("top",)), *path)

    def at(self, *path: str) -> str:
        """The place of any key: `plan.yaml, line 3: pipeline.stages`."""
        line = next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), None)
        line = 1 if line is None and self.lines else line
        return ("" if line is None else f"{self.source}, line {line}: ") + ".".join(path)


def whole_mesh_text(num_pipeline_ranks: int, mesh: Mesh) -> str:
    """The mesh with the pipeline's axis before it: `pp2 x dp2 x tp2`."""
    if num_pipeline_ranks == 1:
        return str(mesh)
    return f"pp{num_pipeline_ranks}" + (f" x {mesh}" if mesh.axes else "")


def placements_text(placements: Placements, mesh: Mesh) -> str:
    """Placements with their axes: `dp=S(0) tp=R`."""
    return " ".join(f"{axis}={p}" for axis, p in zip(mesh.axes, placements, strict=True))


def labels_text(labels: tuple[str, ...], mesh: Mesh) -> str:
    """Labels of an option with their axes: `dp=b.0 tp=n`."""
    return " ".join(f"{axis}={label}" for axis, label in zip(mesh.axes, labels, strict=True))


def stored_text(stored: Stored, mesh: Mesh) -> str:
    """A parameter's placements and ZeRO stage: `dp=Rp tp=S(0) zero=1`."""
    zero = f" zero={stored.zero}" if stored.zero else ""
    return placements_text(stored.placements, mesh) + zero
