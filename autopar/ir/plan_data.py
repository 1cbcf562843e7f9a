"""What was decided, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.compression import Compression
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements, Stored
from autopar.ir.seats import Seat, seats_text

PRECISIONS = ("fp32", "bf16")
RECOMPUTE_MODES = ("none", "offload", "selective", "full")
"""What becomes of a layer's activations until its backward: kept, held by the host, partly or wholly computed again."""
OFFLOADS = ("none", "optimizer", "parameters")
"""What lives in host memory: the optimiser's state and masters; under ZeRO-3 the shards of the parameters too.
`nvme:/a/folder` keeps the optimiser's state and masters in files of that folder."""


def is_offload(text: str) -> bool:
    """Whether `text` is one of OFFLOADS or names a folder."""
    return text in OFFLOADS or (text.startswith("nvme:/") and text.isprintable())


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one optimiser step by kind, and bytes on the fullest rank by kind.

    positions: the same bytes for each pipeline position, where there are several.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    num_bytes: Mapping[str, float] = field(default_factory=dict)
    positions: tuple[Mapping[str, float], ...] = ()

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
    """One pipeline stage: blocks `first` to `last` (not included) of the model's chain of blocks.

    recompute: per layer class, how many of its layers in this stage, in order, run in which mode ("none", "selective",
    "full"); classes that are left out keep everything.
    """

    first: int
    last: int
    recompute: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How the model is cut over `num_positions` groups of ranks, all with the plan's mesh unless there are `seats`.

    schedule: of autopar's schedules ("" with one position). stages: in model order; more than positions where a
    position runs several. offload: of OFFLOADS, "" for none. seats: one per position where they are not alike.
    """

    num_positions: int = 1
    schedule: str = ""
    stages: tuple[StagePlan, ...] = ()
    offload: str = ""
    seats: tuple[Seat, ...] = ()

    @property
    def num_chunks(self) -> int:
        """The number of stages of one position."""
        return max(len(self.stages) // self.num_positions, 1)

    @property
    def is_plain(self) -> bool:
        """One position that keeps all activations and everything on the device."""
        return self.num_positions == 1 and not self.offload and not any(s.recompute for s in self.stages)


@dataclass(frozen=True, slots=True)
class PlanData:
    """All decisions of one plan; `Plan` adds its file.

    mesh: of one pipeline position; where they differ, the envelope of all (seats.py). scopes: "" and layer class names
    with their decisions, which hold for every stage.
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
    source: str = field(default="", compare=False, repr=False)
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_ranks(self) -> int:
        """Ranks of all pipeline positions."""
        return sum(seat.mesh.num_ranks for seat in self.seats)

    @property
    def seats(self) -> tuple[Seat, ...]:
        """The seat of every position."""
        return self.pipeline.seats or (Seat(self.mesh),) * self.pipeline.num_positions

    @property
    def layout(self) -> str:
        """The mesh with the pipeline's axis before it: `pp2 x dp2 x tp2`."""
        if self.pipeline.seats:
            return seats_text(self.pipeline.seats)
        return layout_text(self.pipeline.num_positions, self.mesh)

    @property
    def compresses(self) -> bool:
        """Whether ZeRO's collectives over several ranks are there to be compressed, and are."""
        is_sharded = any(s.zero for scope in self.scopes.values() for s in scope.parameters.values())
        return bool(self.compression) and is_sharded and self.mesh.size("dp") > 1

    @property
    def fullest_group(self) -> int:
        """The group of nodes that the position with the largest share of its memory in use belongs to."""
        positions = self.prediction.positions
        if not self.pipeline.seats or self.prediction.num_bytes not in positions:
            return 0
        return self.pipeline.seats[positions.index(self.prediction.num_bytes)].group

    def place(self, scope: str, *path: str) -> str:
        """`plan.yaml, line 12: layers.Block.calls.linear`, or without the line for a plan that was not read."""
        return self.at(*(("layers", scope) if scope else ("top",)), *path)

    def at(self, *path: str) -> str:
        """The place of any key: `plan.yaml, line 3: pipeline.stages`."""
        line = next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), None)
        line = 1 if line is None and self.lines else line
        return ("" if line is None else f"{self.source}, line {line}: ") + ".".join(path)


def layout_text(num_positions: int, mesh: Mesh) -> str:
    """The mesh with the pipeline's axis before it: `pp2 x dp2 x tp2`."""
    if num_positions == 1:
        return str(mesh)
    return f"pp{num_positions}" + (f" x {mesh}" if mesh.axes else "")


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
