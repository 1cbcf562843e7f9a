"""Nodes without a switch: links counted by `mesh` against rings laid by hand and by search, and measured steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from cost_models import direct_links, nccl
from cost_models.catalog import link
from cost_models.collective import Group, Kind, seconds, wire_bytes
from cost_models.machine import Cluster

MB = 2**20
NODE = Cluster.parse("8 v100-32g nvlink2-mesh")
# nvidia-smi topo -m of a DGX-1 with V100, NV1 and NV2 as 1 and 2, other ways as 0.
DGX1 = """
    X 1 1 2 2 0 0 0
    1 X 2 1 0 2 0 0
    1 2 X 2 0 0 1 0
    2 1 2 X 0 0 0 1
    2 0 0 0 X 1 1 2
    0 2 0 0 1 X 2 1
    0 0 1 0 1 2 X 2
    0 0 0 1 2 1 2 X
"""
LINKS = [[0 if word == "X" else int(word) for word in line.split()] for line in DGX1.split("\n") if line.strip()]


def most_rings(links: Sequence[Sequence[int]], members: Sequence[int]) -> int:
    """The most directed Hamiltonian cycles that share no direction of a link, by search through all choices."""
    first, *others = members
    cycles = [tuple(itertools.pairwise((first, *order, first))) for order in itertools.permutations(others)]

    def lay(start: int, used: dict[tuple[int, int], int]) -> int:
        best = 0
        for number in range(start, len(cycles)):
            if all(used.get(edge, 0) < links[edge[0]][edge[1]] for edge in cycles[number]):
                more = dict(used)
                for edge in cycles[number]:
                    more[edge] = more.get(edge, 0) + 1
                best = max(best, 1 + lay(number, more))
        return best

    return lay(0, {})


def test_every_gpu_has_its_six_links() -> None:
    for name, devices in (("nvlink2-mesh", 8), ("nvlink2-quad", 4)):
        links = nccl.mesh_links(link(name))
        assert links is not None and len(links) == devices
        assert [sum(row) for row in links] == [6] * devices
        assert [list(column) for column in zip(*links, strict=True)] == [list(row) for row in links]
        assert all(links[device][device] == 0 for device in range(devices))
    assert nccl.mesh_links(link("nvlink2-mesh")) == LINKS
    assert nccl.mesh_links(link("nvlink3")) is None


@pytest.mark.parametrize("size", [2, 3, 4])
def test_there_are_never_more_rings_than_the_smallest_cut_has_links(size: int) -> None:
    for members in itertools.combinations(range(8), size):
        assert direct_links.rings(LINKS, members) >= most_rings(LINKS, members)


@pytest.mark.parametrize("stride", [1, 2, 4])
def test_the_groups_of_axes_have_as_many_rings_as_the_smallest_cut_has_links(stride: int) -> None:
    for size in (2, 4):
        for start in range(0, 8 - size * stride + 1, size * stride):
            for base in range(start, start + stride):
                members = range(base, base + size * stride, stride)
                assert direct_links.rings(LINKS, members) == most_rings(LINKS, members) > 0


@pytest.mark.parametrize(
    ("group", "devices", "num_links"),
    [
        (Group(2, 1), 8, 1),  # (0, 1) has one link, (2, 3) two
        (Group(2, 1), 4, 1),
        (Group(2, 4), 8, 1),  # (2, 6)
        (Group(4, 1), 8, 4),
        (Group(4, 1), 4, 4),
        (Group(4, 2), 8, 2),  # 0, 2, 4, 6: one ring around, both ways
        (Group(8, 1), 8, 6),
        (Group(16, 1), 8, 6),
        (Group(4, 4), 8, 1),  # two of each node
    ],
)
def test_the_worst_group_of_an_axis_decides(group: Group, devices: int, num_links: int) -> None:
    assert direct_links.collective_links(LINKS, group.size, group.stride, devices) == num_links
    cluster = Cluster.parse(f"{devices} v100-32g nvlink2-mesh")
    if group.size * group.stride <= devices:
        rate = num_links * 25e9 * cluster.intra_node.efficiency
        steps = 2 * (group.size - 1) / group.size
        assert seconds("all_reduce", 1e12, group, cluster) == pytest.approx(steps * 1e12 / rate, rel=1e-3)


def test_a_quad_of_pairs_gives_two_links_to_a_pair_and_six_to_all() -> None:
    cluster = Cluster.parse("4 v100-16g nvlink2-quad")
    rate = 25e9 * cluster.intra_node.efficiency
    for size, stride, num_links in ((2, 1, 2), (2, 2, 2), (4, 1, 6)):
        expected = 2 * (size - 1) / size * 1e12 / (num_links * rate)
        assert seconds("all_reduce", 1e12, Group(size, stride), cluster) == pytest.approx(expected, rel=1e-3)


def test_messages_have_the_links_between_two_devices() -> None:
    """Neighbors 0 and 1 have one; 3 and 4 none, so that GPU 0 passes on what 3 sends to 4, over two and two."""
    assert direct_links.pair(LINKS, 0, 1) == 1
    assert (LINKS[3][4], direct_links.pair(LINKS, 3, 4)) == (0, 2)
    assert all(direct_links.pair(LINKS, a, b) > 0 for a, b in itertools.permutations(range(8), 2))
    rate = 25e9 * NODE.intra_node.efficiency
    assert seconds("p2p", 1e12, Group(8, 1), NODE) == pytest.approx(1e12 / rate, rel=1e-3)


def test_an_exchange_waits_for_the_worst_two() -> None:
    """All of a quad at once: the quarter that 0 sends to 1 takes as long as one link needs; the quarter that stays is
    copied beside it at the rate of three."""
    rate = 25e9 * NODE.intra_node.efficiency
    expected = 1e12 / 4 / rate * (3 + 0.5) / 3
    assert seconds("all_to_all", 1e12, Group(4, 1), NODE) == pytest.approx(expected, rel=1e-3)


def test_nodes_larger_than_the_mesh_are_refused() -> None:
    with pytest.raises(ValueError, match="nvlink2-mesh joins 8 devices without a switch, and a node has 16"):
        Cluster.parse("16 v100-32g nvlink2-mesh")


@pytest.mark.parametrize(("ranks", "published"), [(2, 19.3), (4, 79.4), (8, 108.5)])
def test_all_reduce_as_step_times_of_libai_imply(ranks: int, published: float) -> None:
    """measured_runs.jsonl, r0257, r0239, r0241: 134 MB; what tensor parallelism adds over a model of the rest."""
    kind: Kind = "all_reduce"
    group = Group(ranks, 1)
    predicted = wire_bytes(kind, 128 * MB, ranks) / seconds(kind, 128 * MB, group, NODE) / 1e9
    assert predicted == pytest.approx(published, rel=0.15)
    if ranks == 2:
        four = Cluster.parse("4 v100-32g nvlink2-mesh")
        assert seconds(kind, 128 * MB, group, four) == seconds(kind, 128 * MB, group, NODE)
