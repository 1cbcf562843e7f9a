"""The input and the output of the inter-op search: units, submeshes, and the ways to run a unit on a submesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from search.problem import InfeasibleError, largest_allowed

_NEVER_NEGATIVE = (
    "steady_seconds",
    "step_seconds",
    "fixed_bytes",
    "micro_bytes",
    "transient_bytes",
    "deferred_bytes",
)


@dataclass(frozen=True, slots=True)
class Point:
    """One way to run one unit of a class on one submesh: a ZeRO stage, a recompute mode, offload ...

    Args:
        label: comes back in the solution; unique among the points of one class on one submesh.
            fill_seconds: the unit's share of the pipeline's fill and drain (f + b for 1F1B, f + i - w for ZB-H1).
            steady_seconds: time per micro-batch for which the unit occupies the stage.
            step_seconds: once per step: the exposed gradient synchronization and the optimizer.
            fixed_bytes: weights, gradients, optimizer state.
        micro_bytes: per micro-batch in flight at the unit's stage.
        transient_bytes: only while the unit runs; a stage needs the largest of its units.
        deferred_bytes: per micro-batch whose weight gradients the unit's stage has deferred.

    Raises:
        ValueError: a figure is not finite, or a time or size other than ``fill_seconds`` is negative.
    """

    label: str
    fill_seconds: float
    steady_seconds: float
    step_seconds: float
    fixed_bytes: float
    micro_bytes: float
    transient_bytes: float
    deferred_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.fill_seconds):
            raise ValueError(f"point {self.label!r}: fill_seconds is {self.fill_seconds}")
        for name in _NEVER_NEGATIVE:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"point {self.label!r}: {name} must be finite and >= 0, it is {value}")


@dataclass(frozen=True, slots=True)
class Submesh:
    """A shape that a stage may occupy: ``num_devices`` devices of one group with ``memory_bytes`` each."""

    name: str
    group: str
    num_devices: int
    memory_bytes: float

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise ValueError(f"submesh {self.name!r} has {self.num_devices} devices")

    @property
    def largest_allowed(self) -> float:
        """Return the memory plus the rounding slack ``USAGE_TOLERANCE``, in bytes."""
        return largest_allowed(self.memory_bytes)


@dataclass(frozen=True, slots=True)
class Tied:
    """Two units that share a parameter.

    If they are in different stages, the stage of ``second`` needs ``fixed_bytes`` more. Both stages then take
    ``step_seconds`` more per step (the sum of the two gradients).
    """

    first: int
    second: int
    fixed_bytes: float
    step_seconds: float

    def __post_init__(self) -> None:
        if self.first == self.second or min(self.fixed_bytes, self.step_seconds) < 0:
            raise ValueError(f"{self}: the units must differ and no figure may be negative")


InFlight = Callable[[int, int], float]
"""in_flight(p, i): the peak number of micro-batches whose activations stage i of p keeps."""


@dataclass(frozen=True, slots=True, eq=False)
class PipelineProblem:
    """A chain of units to be cut into stages; ``inter_op`` has the objective and the constraints.

    Args:
        units: class name of each unit, in execution order.
            submeshes: the shapes a stage may occupy; names are unique.
            groups: number of devices of each group; all are used.
            points: ways to run a class on a submesh, by (class, submesh name). Without an entry the class cannot run
            there.
            in_flight: micro-batches in flight, by number of stages and stage.
        num_micro_batches: m >= 1, per step.
        boundary_bytes: bytes that cross the boundary between units i - 1 and i in one direction, per micro-batch, at
            index i; entry 0 is not read. Empty means 0 everywhere.
        transfer_seconds: seconds per byte between neighboring stages, by (submesh name, next submesh name); absent
            means 0.
            transfer_is_exposed: whether transfers occupy both neighbors.
        tied: parameters shared by two units.
        num_stages: allowed numbers of stages; None allows all.
            num_deferred: micro-batches whose weight gradients are deferred, by number of stages and stage; None: none
            are.
            uncut: units before which no stage begins.

    Raises:
        ValueError: a name, index or number does not fit the others.
    """

    units: tuple[str, ...]
    submeshes: tuple[Submesh, ...]
    groups: Mapping[str, int]
    points: Mapping[tuple[str, str], tuple[Point, ...]]
    in_flight: InFlight
    num_micro_batches: int
    boundary_bytes: tuple[float, ...] = ()
    transfer_seconds: Mapping[tuple[str, str], float] | None = None
    transfer_is_exposed: bool = False
    tied: tuple[Tied, ...] = ()
    num_stages: Collection[int] | None = None
    num_deferred: InFlight | None = None
    uncut: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.units or self.num_micro_batches < 1:
            raise ValueError(f"{len(self.units)} units, {self.num_micro_batches} micro-batches: both must be >= 1")
        names = [submesh.name for submesh in self.submeshes]
        if len(set(names)) != len(names):
            raise ValueError(f"submesh names repeat: {names}")
        for submesh in self.submeshes:
            if submesh.group not in self.groups:
                raise ValueError(f"submesh {submesh.name!r}: no group {submesh.group!r} among {sorted(self.groups)}")
        if self.boundary_bytes and len(self.boundary_bytes) != len(self.units):
            raise ValueError(f"{len(self.boundary_bytes)} boundary_bytes for {len(self.units)} units")
        if any(value < 0 for value in (self.transfer_seconds or {}).values()) or any(
            b < 0 for b in self.boundary_bytes
        ):
            raise ValueError("transfer_seconds and boundary_bytes must be >= 0")
        for pair in self.tied:
            if not (0 <= pair.first < len(self.units) and 0 <= pair.second < len(self.units)):
                raise ValueError(f"{pair}: there are {len(self.units)} units")
        for (kind, name), points in self.points.items():
            if len({point.label for point in points}) != len(points):
                raise ValueError(f"points of {kind!r} on {name!r} repeat a label")

    def boundary_seconds(self, boundary: int, before: str, after: str) -> float:
        """Return the seconds that one micro-batch adds at a boundary: activations forward, gradients backward."""
        if not self.boundary_bytes or self.transfer_seconds is None:
            return 0.0
        return 2.0 * self.transfer_seconds.get((before, after), 0.0) * self.boundary_bytes[boundary]

    def live_micro_batches(self, num_stages: int, stage: int) -> tuple[float, float]:
        """Return a stage's peak numbers of micro-batches in flight and of those with deferred weight gradients."""
        return float(self.in_flight(num_stages, stage)), float(
            self.num_deferred(num_stages, stage)
        ) if self.num_deferred else 0.0

    def allowed_num_stages(self) -> tuple[int, ...]:
        """List the allowed numbers of stages, ascending, without regard to devices."""
        return tuple(p for p in range(1, len(self.units) + 1) if self.num_stages is None or p in self.num_stages)


@dataclass(frozen=True, slots=True)
class StageChoice:
    """Units ``first`` to ``last`` (inclusive) on one submesh.

    ``counts``: per class in order of appearance, how many of its units take which point, by label; counts are > 0.
    """

    first: int
    last: int
    submesh: str
    counts: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]


@dataclass(frozen=True, slots=True)
class PipelineSolution:
    """The result of the search: seconds per step, and the stages in order."""

    objective: float
    stages: tuple[StageChoice, ...]


def objective(
    problem: PipelineProblem, stages: Sequence[StageChoice], extra_seconds: Sequence[tuple[float, float]] = ()
) -> float:
    """Return the seconds per step of a pipeline, by the closed form of ``inter_op``.

    extra_seconds: for every stage, seconds per micro-batch and per step that belong to no unit.
    """
    steady, step = ([seconds[part] for seconds in extra_seconds] or [0.0] * len(stages) for part in (0, 1))
    fill = sum(steady)
    for number, stage in enumerate(stages):
        for kind, counts in stage.counts:
            points = {point.label: point for point in problem.points[kind, stage.submesh]}
            for label, count in counts:
                fill += count * points[label].fill_seconds
                steady[number] += count * points[label].steady_seconds
                step[number] += count * points[label].step_seconds
        for pair in problem.tied:
            holds = [stage.first <= unit <= stage.last for unit in (pair.first, pair.second)]
            step[number] += pair.step_seconds if holds[0] != holds[1] else 0.0
    for number, (before, after) in enumerate(itertools.pairwise(stages)):
        crossing = problem.boundary_seconds(after.first, before.submesh, after.submesh)
        fill += crossing
        if problem.transfer_is_exposed:
            steady[number], steady[number + 1] = steady[number] + crossing, steady[number + 1] + crossing
    return fill + (problem.num_micro_batches - 1) * max(steady) + max(step)


@dataclass(frozen=True, slots=True)
class StageNeed:
    """The least bytes that units ``first`` to ``last`` need on a submesh, and the bytes the submesh has."""

    first: int
    last: int
    submesh: str
    needed_bytes: float
    memory_bytes: float


class PipelineInfeasibleError(InfeasibleError):
    """No pipeline fits.

    Attributes:
            needs: the least bytes that each stage needs, for the pipeline whose worst stage exceeds its memory by the
            fewest
                bytes. Empty when no cut into stages uses all devices, whatever the memory.
        smallest_excess: bytes by which that worst stage is over its memory; NaN when ``needs`` is empty.
    """

    def __init__(self, needs: Sequence[StageNeed]) -> None:
        self.needs = tuple(needs)
        if not needs:
            self.smallest_excess = float("nan")
            super().__init__(
                "no cut into stages uses all devices: check num_stages, the submesh sizes against the groups, "
                "and that every class has points on some submesh"
            )
            return
        worst = max(needs, key=lambda need: need.needed_bytes - need.memory_bytes)
        self.smallest_excess = worst.needed_bytes - worst.memory_bytes
        super().__init__(
            f"no pipeline fits into memory: in the best of them units {worst.first} to {worst.last} need "
            f"{worst.needed_bytes:.12g} bytes on submesh {worst.submesh!r}, which has {worst.memory_bytes:.12g}, "
            f"{self.smallest_excess:.6g} too few"
        )
