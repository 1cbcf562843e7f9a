"""Random pipeline problems, small and full-sized, that several tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from search.inter_op import InFlight, PipelineProblem, Point, Submesh, Tied


def one_forward_one_backward(num_micro_batches: int) -> InFlight:
    """min(m, p - i): 1F1B (PipeDream-Flush, Narayanan et al. 2021, section 2.2)."""
    return lambda p, i: min(num_micro_batches, p - i)


def all_forward_all_backward(num_micro_batches: int) -> InFlight:
    """m everywhere: GPipe (Huang et al. 2019, section 2.3)."""
    return lambda p, i: num_micro_batches


def in_flight_table(table: Mapping[int, Sequence[float]]) -> InFlight:
    """``table[p][i]``."""
    return lambda p, i: table[p][i]


def random_points(rng: np.random.Generator, whole: bool) -> tuple[Point, ...]:
    """One to three points; ``whole`` numbers make many tied parameters."""

    def figure(most: int) -> float:
        return float(rng.integers(0, most)) if whole else float(rng.random() * most)

    points = []
    trades = rng.random() < 0.6
    for j in range(int(rng.integers(1, 4))):
        fill = figure(8) - (1.0 if rng.random() < 0.1 else 0.0)
        steady = fill if rng.random() < 0.4 and fill >= 0 else figure(8)
        transient = float(rng.integers(0, 6))
        # Time for memory, as recompute and sharding do, or unrelated.
        lean = 1 - fill / 8 if trades else float(rng.random())
        fixed, micro = float(round(12 * lean)), float(round(5 * lean * rng.random()))
        deferred = float(rng.integers(0, 4))
        points.append(Point(f"p{j}", fill, steady, figure(8), fixed, micro, transient, deferred))
    return tuple(points)


def small_problem(seed: int) -> PipelineProblem:
    """At most 6 units of 3 classes, 3 submeshes, 2 groups, 3 points; tight memory, tied parameters, transfers."""
    rng = np.random.default_rng(seed)
    whole = bool(rng.random() < 0.5)
    num_units = int(rng.choice([1, 2, 3, 4, 5, 6, 6]))
    if rng.random() < 0.7:
        units = ("head", *("layer",) * (num_units - 1))[:num_units]
    else:
        units = tuple("abc"[int(c)] for c in rng.integers(0, 3, size=num_units))
    groups = {f"g{k}": int(rng.integers(1, 5)) for k in range(int(rng.choice([1, 1, 2])))}
    memory = int(rng.choice([20, 35, 60, 120]))
    submeshes = tuple(
        Submesh(
            f"m{k}",
            f"g{int(rng.integers(len(groups)))}",
            int(rng.choice([1, 1, 2])),
            float(rng.integers(memory // 2, memory + 1)),
        )
        for k in range(int(rng.integers(1, 4)))
    )
    points = {
        (kind, mesh.name): random_points(rng, whole)
        for kind in sorted(set(units))
        for mesh in submeshes
        if rng.random() < 0.96
    }
    tied = []
    for _ in range(int(rng.choice([0, 0, 0, 1, 2])) if num_units > 1 else 0):
        first, second = (int(b) for b in rng.choice(num_units, size=2, replace=False))
        tied.append(Tied(first, second, float(rng.integers(0, 20)), float(rng.integers(0, 6))))
    names = [mesh.name for mesh in submeshes]
    seconds = {(a, b): float(rng.integers(0, 4)) / 2 for a in names for b in names if rng.random() < 0.8}
    m = int(rng.integers(1, 9))
    table = {p: [float(rng.integers(0, 2 * m)) / 2 for _ in range(p)] for p in range(1, num_units + 1)}
    waiting = {p: [float(rng.integers(0, 4)) for _ in range(p)] for p in range(1, num_units + 1)}
    return PipelineProblem(
        units,
        submeshes,
        groups,
        points,
        one_forward_one_backward(m) if rng.random() < 0.6 else in_flight_table(table),
        m,
        boundary_bytes=tuple(float(v) for v in rng.integers(0, 4, size=num_units)) if rng.random() < 0.7 else (),
        transfer_seconds=seconds if rng.random() < 0.8 else None,
        transfer_is_exposed=bool(rng.random() < 0.5),
        tied=tuple(tied),
        num_stages=None if rng.random() < 0.7 else tuple(int(p) for p in rng.integers(1, 6, size=2)),
        num_deferred=in_flight_table(waiting) if rng.random() < 0.4 else None,
    )


def layers_problem(seed: int) -> PipelineProblem:
    """Four to six units, nearly all layers of one class, on equal submeshes whose memory forces points to mix."""
    rng = np.random.default_rng(seed)
    layers, stages = int(rng.integers(3, 6)), int(rng.integers(1, 4))
    m = int(rng.choice([1, 2, 4, 16]))
    points = []
    for j in range(3):
        seconds = 3.0 + j + float(rng.integers(0, 3)) / 4
        memory = (12.0, 7.0, 2.0)[j] + float(rng.integers(0, 3))
        micro, transient = float(rng.integers(0, 4 - j)), float(rng.integers(0, 3))
        points.append(Point(f"p{j}", seconds, seconds, float(rng.integers(0, 5)), memory, micro, transient))
    per_stage = layers / stages
    memory = float(round(per_stage * rng.uniform(2, 13))) + 4
    return PipelineProblem(
        ("head", *("layer",) * layers),
        (Submesh("mesh", "all", 2, memory),),
        {"all": 2 * stages},
        {("head", "mesh"): (Point("only", 1.0, 1.0, 0.0, 2.0, 0.0, 0.0),), ("layer", "mesh"): tuple(points)},
        one_forward_one_backward(m),
        m,
        tied=(Tied(0, layers, 1.0, 0.5),) if rng.random() < 0.3 else (),
    )


def transformer_points(rng: np.random.Generator, scale: float, *, correlated: bool) -> tuple[Point, ...]:
    """Ten points of a layer: three ZeRO stages times three recompute modes, and optimizer offload.

    Not ``correlated``: random times, and memory roughly inverse to them.
    """
    points = []
    if not correlated:
        for j in range(10):
            time = float(rng.random()) + 0.5
            memory = (1.0 + 0.3 * float(rng.random())) / time
            steady = time * (0.9 + 0.2 * float(rng.random()))
            points.append(
                Point(f"r{j}", scale * time, scale * steady, scale * rng.random(), 2 * memory, 0.3 * memory, 0.1)
            )
        return tuple(points)
    for zero, (fixed, step, exposed) in enumerate(((4.0, 0.5, 0.0), (2.2, 0.45, 0.03), (0.6, 0.1, 0.35))):
        for mode, (extra, micro) in enumerate(((0.0, 0.34), (0.12, 0.19), (1.0, 0.02))):
            time = scale * (3 + exposed + extra + 0.01 * rng.random())
            label = f"zero{zero + 1}-recompute{mode}"
            transient = 0.3 if zero == 2 else 0.1
            points.append(Point(label, time, time, scale * step, fixed, micro, transient))
    points.append(Point("offload", scale * 4.05, scale * 4.05, scale * 2, 0.5, 0.02, 0.1))
    return tuple(points)


def transformer(
    seed: int,
    *,
    num_layers: int = 126,
    num_stages: int = 8,
    memory_share: float = 0.5,
    correlated: bool = True,
    num_micro_batches: int = 512,
) -> PipelineProblem:
    """Head, equal layers, tail on equal submeshes; ``memory_share`` 1 is ample, 0 hardly fits."""
    rng = np.random.default_rng(seed)
    points = {
        ("head", "mesh"): transformer_points(rng, 0.3e-3, correlated=correlated),
        ("layer", "mesh"): transformer_points(rng, 1e-3, correlated=correlated),
        ("tail", "mesh"): transformer_points(rng, 0.8e-3, correlated=correlated),
    }
    per_stage = num_layers / num_stages + 1
    in_flight = min(num_micro_batches, num_stages)
    needs = [p.fixed_bytes + in_flight * p.micro_bytes for p in points[("layer", "mesh")]]
    memory = per_stage * (min(needs) + memory_share * (max(needs) - min(needs))) + 1.0
    return PipelineProblem(
        ("head", *("layer",) * num_layers, "tail"),
        (Submesh("mesh", "all", 8, memory),),
        {"all": 8 * num_stages},
        points,
        one_forward_one_backward(num_micro_batches),
        num_micro_batches,
        boundary_bytes=(1.0,) * (num_layers + 2),
        transfer_seconds={("mesh", "mesh"): 1e-5},
        tied=(Tied(0, num_layers + 1, 0.5, 1e-4),),
    )
