"""Pipeline ranks that are not alike: where their ranks lie, their common axes, their text."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.mesh import Mesh
from autopar.ir.stage_mesh import StageMesh, envelope, first_ranks, stage_meshes_text
from autopar.planning.solved_layers import named_mesh
from autopar.planning.unequal_configs import submesh_sizes
from cost_models.machine import Cluster

degrees = st.integers(1, 6)
meshes = st.builds(named_mesh, degrees, degrees, degrees)
clusters = st.builds(
    lambda nodes, per_node: Cluster.parse(f"{nodes}x{per_node} a100-80g"), st.integers(1, 6), st.integers(1, 12)
)


@st.composite
def laid(draw: st.DrawFn) -> tuple[tuple[Cluster, ...], tuple[StageMesh, ...]]:
    """Groups of nodes, and pipeline ranks that fill them in any order."""
    groups = tuple(draw(st.lists(clusters, min_size=1, max_size=3)))
    stage_meshes = []
    for number, group in enumerate(groups):
        left = group.num_devices
        while left:
            size = draw(st.sampled_from([size for size in submesh_sizes(group) if size <= left]))
            stage_meshes.append(StageMesh(Mesh(("dp",), (size,)).compact, number))
            left -= size
    return groups, tuple(draw(st.permutations(stage_meshes)))


@given(laid())
def test_pipeline_ranks_tile_the_ranks_and_none_that_fits_a_node_lies_across_two(
    groups_and_meshes: tuple[tuple[Cluster, ...], tuple[StageMesh, ...]],
) -> None:
    groups, stage_meshes = groups_and_meshes
    firsts = first_ranks(stage_meshes)
    spans = sorted(
        (first, first + stage_mesh.mesh.num_ranks, stage_mesh)
        for first, stage_mesh in zip(firsts, stage_meshes, strict=True)
    )
    assert [end for _, end, _ in spans] == [*(first for first, _, _ in spans[1:]), sum(g.num_devices for g in groups)]
    assert spans[0][0] == 0
    starts = list(itertools.accumulate((group.num_devices for group in groups), initial=0))
    for first, end, stage_mesh in spans:
        start, group = starts[stage_mesh.group], groups[stage_mesh.group]
        assert start <= first and end <= start + group.num_devices  # in its own group
        nodes = {(rank - start) // group.devices_per_node for rank in range(first, end)}
        assert len(nodes) == math.ceil(stage_mesh.mesh.num_ranks / group.devices_per_node)


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


@given(st.builds(StageMesh, meshes, st.integers(0, 20)))
def test_the_text_parses_back(stage_mesh: StageMesh) -> None:
    assert StageMesh.parse(str(stage_mesh)) == stage_mesh == StageMesh.parse(f"  {stage_mesh} ")
    wide = StageMesh(stage_mesh.mesh.over(("ddp", "dp", "tp")), stage_mesh.group)
    assert str(wide) == str(stage_mesh)  # axes of one rank are not printed


def test_forms() -> None:
    assert str(StageMesh(Mesh.parse("dp2 x tp4"))) == "dp2 x tp4"
    assert str(StageMesh(Mesh((), ()), 2)) == "single of group 2"
    assert StageMesh.parse("tp2 of group 1") == StageMesh(Mesh(("tp",), (2,)), 1)


@pytest.mark.parametrize("text", ["", "dp", "dp2 of", "dp2 of group", "dp2 of group one", "of group 1", "2 x 4"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a mesh.*dp2 x tp4"):
        StageMesh.parse(text)


def test_larger_pipeline_ranks_come_first_within_a_group() -> None:
    """On 8 + 4 devices, by hand: group 0 has ranks 0 to 7, its dp4 first, then its two of two, in pipeline order."""
    texts = ["tp2", "single of group 1", "dp2 x tp2", "dp2", "tp3 of group 1"]
    assert first_ranks([StageMesh.parse(text) for text in texts]) == (4, 11, 0, 6, 8)


def test_equal_neighbors_are_counted() -> None:
    stage_meshes = [StageMesh.parse(text) for text in ("dp2 x tp4", "dp2 x tp4", "dp4", "single", "dp4")]
    assert stage_meshes_text(stage_meshes) == "pp5 (2 of dp2 x tp4, dp4, single, dp4)"
