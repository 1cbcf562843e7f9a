"""Which rank sends what to whom when a tensor changes from one mesh to another."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from codegen.runtime.parameters import Param, shard
from codegen.runtime.transfer import Copy, Place, plan_copies

LENGTH = 24


def numel(copy: Copy) -> int:
    return math.prod(part.stop - part.start for part in copy.target_box)


@st.composite
def layouts(draw: st.DrawFn, first_rank: int) -> tuple[Param, Place]:
    """A tensor of two dims on a mesh of up to two axes."""
    axes = draw(st.sampled_from([(), ("dp",), ("dp", "tp"), ("tp", "dp")]))
    sizes = tuple(draw(st.sampled_from([1, 2, 3, 4])) for _ in axes)
    texts = {axis: draw(st.sampled_from(["R", "S(0)", "S(1)", "S(0/2)"])) for axis in axes}
    finest = 2 * math.prod(sizes)
    return Param((finest * 12, finest * 12), **texts), Place(axes, sizes, first_rank)


@given(st.data())
def test_every_rank_gets_its_part_and_no_element_twice(data: st.DataObject) -> None:
    first, source = data.draw(layouts(0))
    last, target = data.draw(layouts(data.draw(st.sampled_from([0, source.num_ranks]))))
    # A shape that divides on both meshes.
    shape = tuple(math.lcm(a, b) for a, b in zip(first.shape, last.shape, strict=True))
    sent, received = Param(shape, **first.placements), Param(shape, **last.placements)
    whole = torch.arange(math.prod(shape)).view(shape)
    parts = {rank: shard(whole, sent, source.seen_by(rank)) for rank in source.ranks}
    copies = plan_copies(sent, source, received, target)
    for rank in target.ranks:
        expected = shard(whole, received, target.seen_by(rank))
        found = torch.full_like(expected, -1)
        for copy in copies:
            if copy.target == rank:
                assert (found[copy.target_box] == -1).all()
                found[copy.target_box] = parts[copy.source][copy.source_box]
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "placements", [{}, {"dp": "S(0)"}, {"dp": "S(0)", "tp": "S(1)"}, {"dp": "S(0)", "tp": "S(0/2)"}]
)
def test_equal_layouts_send_whole_parts_to_the_rank_of_the_same_index(placements: dict[str, str]) -> None:
    axes, sizes = ("dp", "tp"), (2, 2)
    spec = Param((LENGTH, LENGTH), **placements)
    copies = plan_copies(spec, Place(axes, sizes, 0), spec, Place(axes, sizes, 4))
    assert all(copy.target == copy.source + 4 and copy.source_box == copy.target_box for copy in copies)
    per_rank = LENGTH * LENGTH // math.prod(size for axis, size in zip(axes, sizes, strict=True) if axis in placements)
    assert all(sum(numel(copy) for copy in copies if copy.source == rank) == per_rank for rank in range(4))
    if placements.get("tp") != "S(0/2)":
        assert len(copies) == 4


def test_replicas_share_the_load() -> None:
    whole = Param((LENGTH,))
    for num_sources, num_targets in itertools.product((1, 2, 4), (1, 2, 4, 8)):
        source, target = Place(("dp",), (num_sources,), 0), Place(("dp",), (num_targets,), num_sources)
        sent = Counter(copy.source for copy in plan_copies(whole, source, whole, target))
        assert max(sent.values()) == -(-num_targets // num_sources)
    # What a rank has already it does not get from another.
    place = Place(("dp",), (4,))
    assert all(c.source == c.target for c in plan_copies(whole, place, Param((LENGTH,), dp="S(0)"), place))


def test_scalars_and_errors() -> None:
    one, two = Place((), ()), Place(("dp",), (2,), 1)
    assert plan_copies(Param(()), one, Param(()), two) == (Copy(0, 1, (), ()), Copy(0, 2, (), ()))
    with pytest.raises(ValueError, match=r"shape \(4,\) is received as \(5,\)"):
        plan_copies(Param((4,)), one, Param((5,)), two)
    with pytest.raises(ValueError, match="as R or S"):
        plan_copies(Param((4,)), one, Param((4,), dp="Rp"), two)
    with pytest.raises(ValueError, match="does not divide"):
        plan_copies(Param((5,)), one, Param((5,), dp="S(0)"), two)
