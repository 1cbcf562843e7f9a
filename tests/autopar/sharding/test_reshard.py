"""Step sequences, applied by hand to every rank's part, give exactly the parts that the target placements ask for.

What a rank holds is written element by element below, apart from the library's arithmetic.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.ir.placement import P, Placement, Placements, R, Rp, S, divides, local_shape
from autopar.sharding.reshard import Step, _cheapest, steps

Array = npt.NDArray[np.float64]
Rank = tuple[int, ...]

MESHES = [(2,), (2, 2), (2, 3), (3, 2), (2, 2, 2)]
SHAPES = [(12, 8), (24, 6), (8, 4, 12), (16,), (36, 2)]


def ranks(sizes: Rank) -> list[Rank]:
    return list(itertools.product(*(range(n) for n in sizes)))


@cache
def elements_of(length: int, dim: int, placements: Placements, sizes: Rank, rank: Rank) -> list[int]:
    """The elements of a dim that a rank holds, in order: in every section, the digit of its axes in mixed radix."""
    elements = []
    shards = [(axis, p.sections) for axis, p in enumerate(placements) if p.is_shard and p.dim == dim]
    axes_of = {count: [axis for axis, other in shards if other == count] for _, count in shards}
    for element in range(length):
        keep = True
        for sections, axes in axes_of.items():
            section = length // sections
            part = element % section // (section // math.prod(sizes[i] for i in axes))
            for axis in reversed(axes):
                part, digit = divmod(part, sizes[axis])
                keep = keep and digit == rank[axis]
        if keep:
            elements.append(element)
    return elements


def part_of(whole: Array, placements: Placements, sizes: Rank, rank: Rank) -> Array:
    index = [elements_of(length, dim, placements, sizes, rank) for dim, length in enumerate(whole.shape)]
    return whole[np.ix_(*index)]


def scattered(whole: Array, placements: Placements, sizes: Rank, seed: int) -> dict[Rank, Array]:
    """Every rank's part; on partial axes random summands that add up to the whole."""
    partial = [i for i, p in enumerate(placements) if p == P]
    keys = list(itertools.product(*(range(sizes[i]) for i in partial)))
    summands = np.random.default_rng(seed).integers(-9, 9, (len(keys), *whole.shape)).astype(float)
    summands[-1] = whole - summands[:-1].sum(0)
    by_key = dict(zip(keys, summands, strict=True))
    return {r: part_of(by_key[tuple(r[i] for i in partial)], placements, sizes, r) for r in ranks(sizes)}


def split(local: Array, dim: int, sections: int, size: int, index: int) -> Array:
    """Part `index` of every section of a dim."""
    pieces = np.split(local, sections, axis=dim)
    return np.concatenate([np.split(piece, size, axis=dim)[index] for piece in pieces], axis=dim)


def join(parts: list[Array], dim: int, sections: int) -> Array:
    """The inverse: section by section, every rank's part of it."""
    cut = [np.split(part, sections, axis=dim) for part in parts]
    return np.concatenate([pieces[section] for section in range(sections) for pieces in cut], axis=dim)


def apply(step: Step, parts: dict[Rank, Array], sizes: Rank) -> dict[Rank, Array]:
    """Apply the step by its definition to every group of ranks that differ only on its axis."""
    axis, size, source, target = step.axis, sizes[step.axis], step.source, step.target
    result = {}
    for rank in parts:
        group = [parts[(*rank[:axis], i, *rank[axis + 1 :])] for i in range(size)]
        if source == P:
            value = sum(group[1:], group[0])
        elif source.is_shard:
            value = join(group, source.dim, step.source_sections)
        else:
            value = parts[rank]
            assert all(np.array_equal(value, other) for other in group)
        if target == P:
            value = value if rank[axis] == 0 else np.zeros_like(value)
        elif target.is_shard:
            value = split(value, target.dim, step.target_sections, size, rank[axis])
        result[rank] = value
    return result


def check(source: Placements, target: Placements, shape: Rank, sizes: Rank) -> tuple[Step, ...]:
    whole = np.arange(1.0, math.prod(shape) + 1).reshape(shape)
    path = steps(source, target, sizes)
    assert path is not None
    parts, current = scattered(whole, source, sizes, seed=1), source
    for step in path:
        assert step.source == current[step.axis]
        before = next(iter(parts.values())).size
        parts = apply(step, parts, sizes)
        current = (*current[: step.axis], step.target, *current[step.axis + 1 :])
        assert divides(shape, current, sizes), (path, current)
        after = next(iter(parts.values())).size
        is_exchange = step.forward == "all_to_all"
        assert step.fraction == pytest.approx((before if is_exchange else max(before, after)) / whole.size)
    assert current == target
    partial = [i for i, p in enumerate(target) if p == P]
    for rank in ranks(sizes):
        others = itertools.product(*(range(n) if i in partial else (rank[i],) for i, n in enumerate(sizes)))
        np.testing.assert_array_equal(sum(parts[other] for other in others), part_of(whole, target, sizes, rank))
    return path


def legal(shape: Rank, sizes: Rank, kinds: tuple[Placement, ...] = (R, Rp, P), most: int = 3) -> list[Placements]:
    shards = [S(d, k) for d in range(len(shape)) for k in range(1, most + 1)]
    return [c for c in itertools.product((*kinds, *shards), repeat=len(sizes)) if divides(shape, c, sizes)]


@pytest.mark.parametrize("sizes", [(2,), (3,)])
def test_every_pair_on_one_axis(sizes: Rank) -> None:
    placements = legal((12, 18), sizes)
    assert len(placements) >= 8
    for source, target in itertools.product(placements, repeat=2):
        path = check(source, target, (12, 18), sizes)
        assert len(path) <= 2 and (not path) == (source == target)


@settings(max_examples=200)
@given(data=st.data())
def test_any_pair_on_any_mesh(data: st.DataObject) -> None:
    sizes, shape = data.draw(st.sampled_from(MESHES)), data.draw(st.sampled_from(SHAPES))
    kinds = st.sampled_from([R, Rp, P, *(S(d, k) for d in range(len(shape)) for k in (1, 2, 3, 4))])
    source, target = (data.draw(st.tuples(*(kinds for _ in sizes))) for _ in range(2))
    assume(divides(shape, source, sizes) and divides(shape, target, sizes))
    check(source, target, shape, sizes)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 2)])
def test_every_pair_of_shards_of_one_dim(sizes: Rank) -> None:
    """Several axes and section counts on one dim, where order and sections matter."""
    shape = (72,)
    placements = legal(shape, sizes, kinds=(R,), most=4)
    for source, target in itertools.product(placements, repeat=2):
        check(source, target, shape, sizes)


@settings(max_examples=150)
@given(data=st.data())
def test_divides_and_local_shape_agree_with_counting(data: st.DataObject) -> None:
    """A placement that divides gives every rank equally many elements, and together they are all."""
    sizes, length = data.draw(st.sampled_from(MESHES)), data.draw(st.integers(1, 48))
    options = [R, P, *(S(0, k) for k in (1, 2, 3, 4, 6))]
    placements = data.draw(st.tuples(*(st.sampled_from(options) for _ in sizes)))
    shards = [(p.sections, n) for p, n in zip(placements, sizes, strict=True) if p.is_shard]
    ways = math.prod(n for _, n in shards)
    if len({k for k, _ in shards}) == 1:
        assert divides((length,), placements, sizes) == (length % (shards[0][0] * ways) == 0)
    if divides((length,), placements, sizes):
        parts = [elements_of(length, 0, placements, sizes, rank) for rank in ranks(sizes)]
        assert {len(part) for part in parts} == {length // ways}
        assert sorted(sum(parts, [])) == sorted(list(range(length)) * (math.prod(sizes) // ways))
        assert local_shape((length,), placements, sizes) == (length // ways,)


def test_backward_is_the_forward_of_the_conjugate_step() -> None:
    """The gradient takes the same way back: from the target's conjugate to the source's."""
    conjugate = {"R": R, "Rp": P, "P": R}
    for source, target in itertools.product([R, Rp, P, S(0), S(1)], repeat=2):
        path = steps((source,), (target,), (2,))
        assert path is not None
        for step in path:
            there, back = (conjugate.get(p.kind, p) for p in (step.source, step.target))
            way = steps((back,), (there,), (2,)) or ()
            moved = [s.forward for s in way if s.forward]
            # S -> P has no step of its own: a slice becomes a summand by padding with zeros, which moves nothing.
            assert moved == ([step.backward] if step.backward else []) or (back.is_shard and there == P), step


def test_cheapest_way_is_taken() -> None:
    """Moving a shard costs less than gathering it; and a partial sum is scattered rather than reduced and cut."""
    assert [s.forward for s in steps((S(0),), (S(1),), (4,)) or ()] == ["all_to_all"]
    assert [s.forward for s in steps((P,), (S(1),), (4,)) or ()] == ["reduce_scatter"]
    assert [s.forward for s in steps((S(0), P), (S(0), R), (2, 4)) or ()] == ["all_reduce"]
    two = steps((P, S(0)), (R, R), (2, 4)) or ()
    assert [s.forward for s in two] == ["all_reduce", "all_gather"], "reduce the quarter, then gather"


ANY = [R, Rp, P, *(S(dim, sections) for dim in (0, 1) for sections in (1, 2, 4))]


@given(st.data())
def test_one_changed_axis_takes_the_path_of_the_search(data: st.DataObject) -> None:
    sizes = data.draw(st.sampled_from([(2,), (2, 4), (3, 2), (8, 2, 2)]))
    source = tuple(data.draw(st.sampled_from(ANY)) for _ in sizes)
    axis = data.draw(st.integers(0, len(sizes) - 1))
    target = (*source[:axis], data.draw(st.sampled_from(ANY)), *source[axis + 1 :])
    assume(source != target)
    assert steps(source, target, sizes) == _cheapest(source, target, sizes)
