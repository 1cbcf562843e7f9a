"""Positions that are not alike: where their ranks lie, their common axes, their text."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.mesh import Mesh
from autopar.ir.seats import Seat, envelope, first_ranks, seats_text
from autopar.planning.bases import named_mesh
from autopar.planning.unequal_configs import submesh_sizes
from cost_models.machine import Cluster

degrees = st.integers(1, 6)
meshes = st.builds(named_mesh, degrees, degrees, degrees)
clusters = st.builds(
    lambda nodes, per_node: Cluster.parse(f"{nodes}x{per_node} a100-80g"), st.integers(1, 6), st.integers(1, 12)
)


@st.composite
def seated(draw: st.DrawFn) -> tuple[tuple[Cluster, ...], tuple[Seat, ...]]:
    """Groups of nodes, and positions that fill them in any order."""
    groups = tuple(draw(st.lists(clusters, min_size=1, max_size=3)))
    seats = []
    for number, group in enumerate(groups):
        left = group.num_devices
        while left:
            size = draw(st.sampled_from([size for size in submesh_sizes(group) if size <= left]))
            seats.append(Seat(Mesh(("dp",), (size,)).compact, number))
            left -= size
    return groups, tuple(draw(st.permutations(seats)))


@given(seated())
def test_positions_tile_the_ranks_and_none_that_fits_a_node_lies_across_two(
    found: tuple[tuple[Cluster, ...], tuple[Seat, ...]],
) -> None:
    groups, seats = found
    firsts = first_ranks(seats)
    spans = sorted((first, first + seat.mesh.num_ranks, seat) for first, seat in zip(firsts, seats, strict=True))
    assert [end for _, end, _ in spans] == [*(first for first, _, _ in spans[1:]), sum(g.num_devices for g in groups)]
    assert spans[0][0] == 0
    starts = list(itertools.accumulate((group.num_devices for group in groups), initial=0))
    for first, end, seat in spans:
        start, group = starts[seat.group], groups[seat.group]
        assert start <= first and end <= start + group.num_devices  # in its own group
        nodes = {(rank - start) // group.devices_per_node for rank in range(first, end)}
        assert len(nodes) == math.ceil(seat.mesh.num_ranks / group.devices_per_node)


@given(clusters)
def test_submeshes_are_parts_of_a_node_or_whole_nodes(cluster: Cluster) -> None:
    sizes, per_node = submesh_sizes(cluster), cluster.devices_per_node
    assert sizes == sorted(set(sizes)) and {per_node, cluster.num_devices} <= set(sizes)
    if cluster.num_nodes == 1:
        assert sizes == list(range(1, per_node + 1))
        return
    for size in sizes:
        assert per_node % size == 0 if size < per_node else size % per_node == 0 and size <= cluster.num_devices


@given(st.lists(meshes, min_size=1, max_size=4))
def test_what_the_envelope_divides_each_mesh_divides(found: list[Mesh]) -> None:
    whole = envelope(found)
    for axis in ("ddp", "dp", "tp"):
        sizes = [mesh.size(axis) for mesh in found]
        assert all(whole.size(axis) % size == 0 for size in sizes)
        smaller = [n for n in range(1, whole.size(axis)) if all(n % size == 0 for size in sizes)]
        assert not smaller, f"{axis}{whole.size(axis)} is not the least for {found}"
    assert all(size > 1 for size in whole.sizes)
    assert list(whole.axes) == [axis for axis in ("ddp", "dp", "tp") if axis in whole.axes]
    assert envelope([whole, *found]) == whole


@given(st.builds(Seat, meshes, st.integers(0, 20)))
def test_the_text_parses_back(seat: Seat) -> None:
    assert Seat.parse(str(seat)) == seat == Seat.parse(f"  {seat} ")
    wide = Seat(seat.mesh.over(("ddp", "dp", "tp")), seat.group)
    assert str(wide) == str(seat)  # axes of one rank are not printed


def test_forms() -> None:
    assert str(Seat(Mesh.parse("dp2 x tp4"))) == "dp2 x tp4"
    assert str(Seat(Mesh((), ()), 2)) == "single of group 2"
    assert Seat.parse("tp2 of group 1") == Seat(Mesh(("tp",), (2,)), 1)


@pytest.mark.parametrize("text", ["", "dp", "dp2 of", "dp2 of group", "dp2 of group one", "of group 1", "2 x 4"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a mesh.*dp2 x tp4"):
        Seat.parse(text)


def test_larger_positions_come_first_within_a_group() -> None:
    """On 8 + 4 devices, by hand: group 0 has ranks 0 to 7, its dp4 first, then its two of two, in pipeline order."""
    texts = ["tp2", "single of group 1", "dp2 x tp2", "dp2", "tp3 of group 1"]
    assert first_ranks([Seat.parse(text) for text in texts]) == (4, 11, 0, 6, 8)


def test_equal_neighbours_are_counted() -> None:
    seats = [Seat.parse(text) for text in ("dp2 x tp4", "dp2 x tp4", "dp4", "single", "dp4")]
    assert seats_text(seats) == "pp5 (2 of dp2 x tp4, dp4, single, dp4)"
