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
from codegen.runtime.transfer import MessageSlice, StageMesh, plan_slices

LENGTH = 24


def numel(message_slice: MessageSlice) -> int:
    return math.prod(part.stop - part.start for part in message_slice.target_box)


@st.composite
def layouts(draw: st.DrawFn, first_rank: int) -> tuple[Param, StageMesh]:
    """A tensor of two dims on a mesh of up to two axes."""
    axes = draw(st.sampled_from([(), ("dp",), ("dp", "tp"), ("tp", "dp")]))
    sizes = tuple(draw(st.sampled_from([1, 2, 3, 4])) for _ in axes)
    texts = {axis: draw(st.sampled_from(["R", "S(0)", "S(1)", "S(0/2)"])) for axis in axes}
    finest = 2 * math.prod(sizes)
    return Param((finest * 12, finest * 12), **texts), StageMesh(axes, sizes, first_rank)


@given(st.data())
def test_every_rank_gets_its_part_and_no_element_twice(data: st.DataObject) -> None:
    first, source = data.draw(layouts(0))
    last, target = data.draw(layouts(data.draw(st.sampled_from([0, source.num_ranks]))))
    # A shape that divides on both meshes.
    shape = tuple(math.lcm(a, b) for a, b in zip(first.shape, last.shape, strict=True))
    sent, received = Param(shape, **first.placements), Param(shape, **last.placements)
    whole = torch.arange(math.prod(shape)).view(shape)
    parts = {rank: shard(whole, sent, source.seen_by(rank)) for rank in source.ranks}
    slices = plan_slices(sent, source, received, target)
    for rank in target.ranks:
        expected = shard(whole, received, target.seen_by(rank))
        found = torch.full_like(expected, -1)
        for message_slice in slices:
            if message_slice.target == rank:
                assert (found[message_slice.target_box] == -1).all()
                found[message_slice.target_box] = parts[message_slice.source][message_slice.source_box]
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "placements", [{}, {"dp": "S(0)"}, {"dp": "S(0)", "tp": "S(1)"}, {"dp": "S(0)", "tp": "S(0/2)"}]
)
def test_equal_layouts_send_whole_parts_to_the_rank_of_the_same_index(placements: dict[str, str]) -> None:
    axes, sizes = ("dp", "tp"), (2, 2)
    spec = Param((LENGTH, LENGTH), **placements)
    slices = plan_slices(spec, StageMesh(axes, sizes, 0), spec, StageMesh(axes, sizes, 4))
    assert all(
        message_slice.target == message_slice.source + 4 and message_slice.source_box == message_slice.target_box
        for message_slice in slices
    )
    per_rank = LENGTH * LENGTH // math.prod(size for axis, size in zip(axes, sizes, strict=True) if axis in placements)
    assert all(
        sum(numel(message_slice) for message_slice in slices if message_slice.source == rank) == per_rank
        for rank in range(4)
    )
    if placements.get("tp") != "S(0/2)":
        assert len(slices) == 4


def test_replicas_share_the_load() -> None:
    whole = Param((LENGTH,))
    for num_sources, num_targets in itertools.product((1, 2, 4), (1, 2, 4, 8)):
        source, target = StageMesh(("dp",), (num_sources,), 0), StageMesh(("dp",), (num_targets,), num_sources)
        sent = Counter(message_slice.source for message_slice in plan_slices(whole, source, whole, target))
        assert max(sent.values()) == -(-num_targets // num_sources)
    # What a rank has already it does not get from another.
    stage_mesh = StageMesh(("dp",), (4,))
    assert all(c.source == c.target for c in plan_slices(whole, stage_mesh, Param((LENGTH,), dp="S(0)"), stage_mesh))


def test_scalars_and_errors() -> None:
    one, two = StageMesh((), ()), StageMesh(("dp",), (2,), 1)
    assert plan_slices(Param(()), one, Param(()), two) == (MessageSlice(0, 1, (), ()), MessageSlice(0, 2, (), ()))
    with pytest.raises(ValueError, match=r"shape \(4,\) is received as \(5,\)"):
        plan_slices(Param((4,)), one, Param((5,)), two)
    with pytest.raises(ValueError, match="as R or S"):
        plan_slices(Param((4,)), one, Param((4,), dp="Rp"), two)
    with pytest.raises(ValueError, match="does not divide"):
        plan_slices(Param((5,)), one, Param((5,), dp="S(0)"), two)
