"""Prove every reshard of a program on simulated ranks: the emitted statements, forward and backward.

Consecutive reshards of one value form one way, from the placements in which the value was produced to those in which it
is used. The value is sharded by the first placements. Every rank runs the axis methods that the program calls
(`codegen/runtime/mesh.py`, `reshard.py`), and the parts must assemble to the whole value in the last placements. Then a
gradient enters in the conjugate of the last placements, and must be the whole gradient in the conjugate of the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.certify.certificate import Findings, grouped
from autopar.certify.shrunken_call import few_of
from autopar.ir.placement import Placement, Placements, divides
from autopar.proofs.simulated_ranks import (
    Coordinate,
    SimulatedAxis,
    Sizes,
    assembled,
    conjugate,
    distribute,
    meshes,
    run_ranks,
)
from codegen.program import ModuleClass, PipelineProgram, Program, Reshard, Statement, TensorType
from codegen.runtime.mesh import Axis

RANKS = (2, 3)
TOLERANCE = 1e-12


@dataclass(frozen=True, slots=True)
class Way:
    """Consecutive reshards of one value. place: where the first one is. sizes: of the program's axes."""

    place: str
    steps: tuple[Reshard, ...]
    sizes: Mapping[str, int]

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the axes on which the value is not always whole."""
        lying = {axis for tensor_type in self.types for axis, _ in tensor_type.placements} | {
            step.axis for step in self.steps
        }
        return tuple(axis for axis in self.sizes if axis in lying and self.sizes[axis] > 1)

    @property
    def types(self) -> tuple[TensorType, ...]:
        """Return the value's types: before the first reshard and after each one."""
        return (self.steps[0].source.type, *(step.result.type for step in self.steps))

    def placements(self, tensor_type: TensorType) -> Placements:
        return tuple(Placement.parse(tensor_type.placement(axis)) for axis in self.axes)

    def __str__(self) -> str:
        first, last = self.types[0], self.types[-1]
        ways = ", ".join(
            f"{axis} {first.placement(axis)} -> {last.placement(axis)}"
            for axis in self.axes
            if first.placement(axis) != last.placement(axis)
        )
        return f"{self.place}: {ways} by {', '.join(f'{step.axis}.{step.method}' for step in self.steps)}"


def prove_reshards(program: Program | PipelineProgram) -> Findings:
    """Run every distinct way of the program."""
    proven: dict[object, float] = {}
    failures: list[str] = []
    gaps: list[tuple[str, str]] = []
    worst, num_ways, collectives = "", 0, set[str]()
    for way in (way for stage_program in program.programs for way in ways_of(stage_program)):
        num_ways += 1
        collectives |= {sent for step in way.steps for sent in (step.forward, step.backward) if sent}
        for ranks in RANKS:
            small = small_way(way, ranks)
            if small is None:
                gaps.append((str(way), "its dims have no small sizes that divide as they do"))
            elif small.key not in proven:
                error, fault = run_way(small)
                proven[small.key] = error
                failures += [f"{way} on {'x'.join(map(str, small.sizes))} ranks: {fault}"] if fault else []
                worst = str(way) if error >= max(proven.values()) else worst
    return Findings(
        subject="reshards",
        counts={
            "ways of values from placements to others": num_ways,
            "distinct small ways run, forward and backward": len(proven),
            "kinds of collective": len(collectives),
        },
        largest_error=max(proven.values(), default=None),
        worst=worst,
        failures=tuple(failures),
        gaps=grouped(gaps),
    )


def ways_of(program: Program) -> Iterator[Way]:
    """Yield every maximal chain of reshards of each body."""
    sizes = dict(zip(program.axes, program.axis_sizes, strict=True))
    for name, body in bodies(program):
        rows: list[Reshard] = []
        for statement in body:
            if isinstance(statement, Reshard) and rows and _follows(rows[-1], statement):
                rows.append(statement)
                continue
            if rows:
                yield Way(f"{name}, {rows[0].source.name}", tuple(rows), sizes)
            rows = [statement] if isinstance(statement, Reshard) else []
        if rows:
            yield Way(f"{name}, {rows[0].source.name}", tuple(rows), sizes)


def _follows(first: Reshard, second: Reshard) -> bool:
    return first.result == second.source and first.result.type == second.source.type


def bodies(program: Program) -> Iterator[tuple[str, Sequence[Statement]]]:
    """Yield the statement sequences of a program, with the names of their class and function."""
    classes: tuple[ModuleClass, ...] = (*program.layers, program.root)
    for cls in classes:
        yield cls.name, cls.body
    yield f"{program.root.name}.count_targets", program.count_targets
    yield f"{program.root.name}.whole_sums", program.whole_sums


@dataclass(frozen=True, slots=True)
class SmallWay:
    """A way of a small tensor. steps: (axis index, method, arguments). source, target: placements before and after."""

    shape: tuple[int, ...]
    sizes: Sizes
    steps: tuple[tuple[int, str, tuple[tuple[str, Any], ...]], ...]
    source: Placements
    target: Placements
    has_gradient: bool

    @property
    def key(self) -> object:
        return self.shape, self.sizes, self.steps, self.source, self.target, self.has_gradient


def small_way(way: Way, ranks: int) -> SmallWay | None:
    """Return the way with every axis shrunk to `ranks` and every dim to few elements; None if that is impossible."""
    axes = way.axes
    sizes = tuple(min(ranks, way.sizes[axis]) for axis in axes)
    places = [way.placements(tensor_type) for tensor_type in way.types]
    shape, sections = _small_dims(way, axes, sizes, places)
    small = [tuple(_with_sections(p, sections) for p in placements) for placements in places]
    if not all(divides(shape, placements, sizes) for placements in small):
        return None
    steps = []
    for number, step in enumerate(way.steps):
        axis = axes.index(step.axis)
        named = dict(step.kwargs)
        pair = {"split_sections": number + 1, "concat_sections": number}
        pair["sections"] = number if places[number][axis].is_shard else number + 1
        kwargs = tuple(
            (name, _local_sections(small[pair[name]], axis, sizes) if name in pair else value)
            for name, value in named.items()
            if name != "wait"
        )
        steps.append((axis, step.method, kwargs))
    has_gradient = way.types[0].requires_grad and all(s.method not in ("sum_over",) for s in way.steps)
    return SmallWay(
        shape=shape, sizes=sizes, steps=tuple(steps), source=small[0], target=small[-1], has_gradient=has_gradient
    )


Levels = dict[tuple[int, int], int]
"""(dim, sections) -> the sections of the small dim."""


def _small_dims(
    way: Way, axes: tuple[str, ...], sizes: Sizes, places: list[Placements]
) -> tuple[tuple[int, ...], Levels]:
    """Return dims that fit every grid of the value's placements: sections, ranks, and elements of each part."""
    whole = way.types[0].shape
    shape, levels = [], {}
    for dim, length in enumerate(whole):
        sharing: dict[int, set[int]] = {}
        for placements in places:
            for number, placement in enumerate(placements):
                if placement.is_shard and placement.dim == dim:
                    sharing.setdefault(placement.sections, set()).add(number)
        small = product = 1
        for sections in sorted(sharing):
            small *= few_of(max(sections // product, 1), 2)
            levels[dim, sections] = small
            product = sections * math.prod(way.sizes[axes[i]] for i in sharing[sections])
            small *= math.prod(sizes[i] for i in sharing[sections])
        shape.append(small * few_of(max(length // product, 1), 2))
    return tuple(shape), levels


def _with_sections(placement: Placement, levels: Levels) -> Placement:
    if not placement.is_shard:
        return placement
    return Placement("S", placement.dim, levels[placement.dim, placement.sections])


def _local_sections(placements: Placements, axis: int, sizes: Sizes) -> int:
    """Return the sections of the sharded dim in a rank's tensor, after coarser shards of other axes have split it."""
    sharded = placements[axis]
    coarser = (
        sizes[i]
        for i, p in enumerate(placements)
        if i != axis and p.is_shard and p.dim == sharded.dim and p.sections < sharded.sections
    )
    return sharded.sections // math.prod(coarser)


def run_way(small: SmallWay) -> tuple[float, str]:
    """Return the largest error of value and gradient, and the fault, "" if there is none."""
    generator = torch.Generator().manual_seed(0)
    value, grad = (torch.randn(small.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    parts = distribute(value, small.source, small.sizes, generator)
    back = tuple(conjugate(p) for p in small.target)
    grads = distribute(grad, back, small.sizes, generator)
    mesh_of = meshes(small.sizes)

    def work(rank: Coordinate) -> tuple[Tensor, Tensor | None]:
        x = parts[rank].clone().requires_grad_(small.has_gradient)
        moved = x
        for axis, method, kwargs in small.steps:
            moved = _run_step(mesh_of[rank].axes[axis], method, moved, dict(kwargs))
        if not small.has_gradient:
            return moved.detach(), None
        (gradient,) = torch.autograd.grad(moved, x, grads[rank])
        return moved.detach(), gradient

    try:
        results = run_ranks(list(mesh_of), work, together=True)
        error = _largest({rank: part for rank, (part, _) in results.items()}, small.target, small, value)
        if not error <= TOLERANCE:
            return math.inf, "the value differs"
        if small.has_gradient:
            gradients = {rank: gradient for rank, (_, gradient) in results.items() if gradient is not None}
            places = tuple(conjugate(p) for p in small.source)
            error = max(error, _largest(gradients, places, small, grad))
            if not error <= TOLERANCE:
                return math.inf, "the gradient differs"
        return error, ""
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        return math.inf, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _run_step(axis: SimulatedAxis, method: str, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Run a method of the run time's axis on a simulated one; the simulated axis' own methods move the data."""
    simulated = getattr(axis, method, None)
    result: Tensor = simulated(x) if simulated is not None else getattr(Axis, method)(axis, x, **kwargs)
    return result


def _largest(parts: dict[Coordinate, Tensor], places: Placements, small: SmallWay, whole: Tensor) -> float:
    size = float(whole.abs().max())
    wholes = assembled(parts, places, small.sizes, small.shape)
    return max(float((total - whole).abs().max()) / size for total in wholes)
