"""The decisions of a plan, as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.compression import Compression
from autopar.ir.mesh import ZERO_AXES, Mesh
from autopar.ir.placement import Placements, Stored
from autopar.ir.stage_mesh import StageMesh, stage_meshes_text

RECOMPUTE_MODES = ("none", "offload", "selective", "full")
"""Recompute modes by what a layer keeps for its backward: everything; everything, but on the host; the results of its
matmuls and attention; only its inputs."""
OFFLOADS = ("none", "optimizer", "parameters")
"""Tensors in host memory: the optimizer's state and masters; under ZeRO-3 also the shards of the parameters.
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

    parameters: all of them. inputs: batch inputs, or inputs of a layer. calls: axis labels of calls that differ
    from their default. tensors: kept placements ("name" or "name[i]") that differ from their producer's.
    """

    parameters: Mapping[str, Stored]
    inputs: Mapping[str, Placements]
    calls: Mapping[str, tuple[str, ...]]
    tensors: Mapping[str, Placements]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One pipeline stage: units `first` to `last` (exclusive) of the model's chain of units.

    recompute: per layer class, how many of its layers in this stage, in order, run in which mode ("none", "selective",
    "full"). Omitted classes keep everything.
    """

    first: int
    last: int
    recompute: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The cut of the model over `num_pipeline_ranks` groups of ranks. They share the plan's mesh unless there are
    `stage_meshes`.

    schedule: one of autopar's schedules ("" with one pipeline rank). stages: in model order; more than pipeline ranks
    where a pipeline rank runs several. offload: one of OFFLOADS, "" for none. stage_meshes: one per pipeline rank where
    they differ.
    """

    num_pipeline_ranks: int = 1
    schedule: str = ""
    stages: tuple[StagePlan, ...] = ()
    offload: str = ""
    stage_meshes: tuple[StageMesh, ...] = ()

    @property
    def num_chunks(self) -> int:
        """Return the number of stages per pipeline rank."""
        return max(len(self.stages) // self.num_pipeline_ranks, 1)

    @property
    def is_plain(self) -> bool:
        """Whether there is one pipeline rank that keeps all activations and everything on the device."""
        return self.num_pipeline_ranks == 1 and not self.offload and not any(s.recompute for s in self.stages)


@dataclass(frozen=True, slots=True)
class Basis:
    """The conditions of a plan's price besides model, cluster and precision.

    inputs: dtype and shape of every input of the whole batch ("int64 [8, 128]"); empty if not recorded. kernels:
    whether layers have fused kernels. backend: how layers run (codegen/runtime/compiled_layers.py).
    """

    inputs: Mapping[str, str] = field(default_factory=dict)
    kernels: bool = False
    backend: str = "eager"

    @property
    def seq_len(self) -> int | None:
        """Return the length of the first integer input with two dimensions; None if there is none."""
        matches = (re.fullmatch(r"int[0-9]+ \[[0-9]+, ([0-9]+)\]", text) for text in self.inputs.values())
        return next((int(match.group(1)) for match in matches if match), None)

    def differences(self, other: Basis) -> list[str]:
        """Describe the differences: "input_ids: int64 [8, 64] instead of int64 [8, 128]"."""
        names = [name for name in self.inputs if name in other.inputs and self.inputs[name] != other.inputs[name]]
        differences = [f"{name}: {self.inputs[name]} instead of {other.inputs[name]}" for name in names]
        if self.kernels != other.kernels:
            differences.append("with kernels instead of without" if self.kernels else "without kernels instead of with")
        if self.backend != other.backend:
            differences.append(f"backend {self.backend} instead of {other.backend}")
        return differences


@dataclass(frozen=True, slots=True)
class PlanData:
    """All decisions of one plan; `Plan` adds its file.

    mesh: of one pipeline rank; if they differ, the mesh that covers all (stage_mesh.py). scopes: decisions of "" and of
    each layer class, valid in every stage. padded_to, experts_padded_to, heads_padded_to: as in the graph. basis: the
    conditions of its prediction, which are no decision; None if unknown.
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
        """Count the ranks of all pipeline ranks."""
        return sum(stage_mesh.mesh.num_ranks for stage_mesh in self.stage_meshes)

    @property
    def stage_meshes(self) -> tuple[StageMesh, ...]:
        """Return the stage mesh of every pipeline rank."""
        return self.pipeline.stage_meshes or (StageMesh(self.mesh),) * self.pipeline.num_pipeline_ranks

    @property
    def mesh_text(self) -> str:
        """Return the mesh with the pipeline axis first: `pp2 x dp2 x tp2`."""
        if self.pipeline.stage_meshes:
            return stage_meshes_text(self.pipeline.stage_meshes)
        return whole_mesh_text(self.pipeline.num_pipeline_ranks, self.mesh)

    @property
    def compresses(self) -> bool:
        """Whether ZeRO has collectives over several ranks, and compresses them."""
        is_sharded = any(s.zero for scope in self.scopes.values() for s in scope.parameters.values())
        return bool(self.compression) and is_sharded and any(self.mesh.size(axis) > 1 for axis in ZERO_AXES)

    @property
    def fullest_group(self) -> int:
        """Return the group of nodes of the pipeline rank that uses the largest share of its memory."""
        pipeline_ranks = self.prediction.pipeline_ranks
        if not self.pipeline.stage_meshes or self.prediction.num_bytes not in pipeline_ranks:
            return 0
        return self.pipeline.stage_meshes[pipeline_ranks.index(self.prediction.num_bytes)].group

    def place(self, scope: str, *path: str) -> str:
        """Return `plan.yaml, line 12: layers.Block.calls.linear`; without file and line if the plan was not read."""
        return self.at(*(("layers", scope) if scope else ("top",)), *path)

    def at(self, *path: str) -> str:
        """Return the place of any key: `plan.yaml, line 3: pipeline.stages`."""
        line = next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), None)
        line = 1 if line is None and self.lines else line
        return ("" if line is None else f"{self.source}, line {line}: ") + ".".join(path)


def whole_mesh_text(num_pipeline_ranks: int, mesh: Mesh) -> str:
    """Return the mesh with the pipeline axis first: `pp2 x dp2 x tp2`."""
    if num_pipeline_ranks == 1:
        return str(mesh)
    return f"pp{num_pipeline_ranks}" + (f" x {mesh}" if mesh.axes else "")


def placements_text(placements: Placements, mesh: Mesh) -> str:
    """Return placements with their axes: `dp=S(0) tp=R`."""
    return " ".join(f"{axis}={p}" for axis, p in zip(mesh.axes, placements, strict=True))


def labels_text(labels: tuple[str, ...], mesh: Mesh) -> str:
    """Return labels of an option with their axes: `dp=b.0 tp=n`."""
    return " ".join(f"{axis}={label}" for axis, label in zip(mesh.axes, labels, strict=True))


def stored_text(stored: Stored, mesh: Mesh) -> str:
    """Return a parameter's placements and ZeRO stage: `dp=Rp tp=S(0) zero=1`."""
    zero = f" zero={stored.zero}" if stored.zero else ""
    return placements_text(stored.placements, mesh) + zero
