"""Clusters of unlike node groups: parsing, printing, TOML round trips, the link between groups, errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import catalog, mixed_cluster, nccl
from cost_models.machine import Cluster, Device, Link
from cost_models.mixed_cluster import MixedCluster

device_names = st.sampled_from(sorted(catalog.devices()))
built_in_links = st.sampled_from(sorted(catalog.links())).map(catalog.link)
links_of_any_number = built_in_links.filter(lambda link: nccl.mesh_links(link) is None)
counts = st.integers(1, 512)
built_in_groups = st.builds(
    lambda device, nodes, per_node, intra, inter: Cluster(catalog.device(device), nodes, per_node, intra, inter),
    device_names,
    counts,
    counts,
    links_of_any_number,
    built_in_links,
)
positive = st.floats(1e-9, 1e18)
own_links = st.builds(
    Link, name=st.text("abc[]= \"'#", max_size=8), bytes_per_second=positive, latency_seconds=positive,
    source=st.text("x\n[]\"'\\#=", max_size=8), latency_factors=st.just({"all_reduce": 2.0}),
)  # fmt: skip
own_devices = st.builds(
    lambda device, name, source, num_bytes: replace(device, name=name, source=source, memory_bytes=num_bytes),
    device_names.map(catalog.device),
    st.text(max_size=8).filter(lambda name: len(name.splitlines()) <= 1),
    st.text("x\n[]\"'\\#=", max_size=8),
    st.integers(1, 10**15),
)
own_groups = st.builds(Cluster, own_devices, counts, counts, own_links, own_links)
several_built_in = st.lists(built_in_groups, min_size=2, max_size=4).map(tuple)
several = st.lists(st.one_of(built_in_groups, own_groups), min_size=2, max_size=4).map(tuple)


def link(name: str) -> Link:
    return catalog.link(name)


@given(several_built_in, st.one_of(st.none(), built_in_links))
def test_the_short_form_parses_back(groups: tuple[Cluster, ...], between: Link | None) -> None:
    cluster = MixedCluster(groups, between) if between else MixedCluster.of(groups)
    text = str(cluster)
    assert mixed_cluster.parse(text) == cluster == MixedCluster.parse(text.upper())
    assert hash(mixed_cluster.parse(text)) == hash(cluster)
    assert text.count("+") == len(groups) - 1
    assert (" via " in text) == (cluster.between != MixedCluster.of(groups).between)


@given(several, st.one_of(built_in_links, own_links))
def test_every_cluster_round_trips_through_toml(groups: tuple[Cluster, ...], between: Link) -> None:
    for cluster in (MixedCluster(groups, between), MixedCluster.of(groups)):
        assert mixed_cluster.parse_toml(cluster.to_toml()) == cluster


@given(built_in_groups)
def test_one_group_is_a_cluster_as_ever(group: Cluster) -> None:
    assert mixed_cluster.parse(str(group)) == group == Cluster.parse(str(group))
    assert mixed_cluster.parse_toml(group.to_toml()) == group
    assert group.groups == (group,)


def test_usual_form() -> None:
    cluster = mixed_cluster.parse("2x8 a100-80g + 4x8 v100-32g")
    assert isinstance(cluster, MixedCluster)
    assert cluster.groups == (Cluster.parse("2x8 a100-80g"), Cluster.parse("4x8 v100-32g"))
    assert cluster.num_devices == 48
    rates = {group.inter_node.name: group.inter_node.bytes_per_second for group in cluster.groups}
    assert cluster.between.name == min(rates, key=lambda name: rates[name])
    assert str(cluster) == "2x8 a100-80g + 4x8 v100-32g"


def test_groups_are_joined_by_the_slowest_of_their_links_or_by_the_one_named() -> None:
    text = "2x8 a100-80g nvlink3 ib-400g + 8 v100-32g nvlink2 ib-100g + 8 h100-sxm nvlink4 ib-200g"
    assert mixed_cluster.parse(text).between == link("ib-100g")
    named = mixed_cluster.parse(f"{text} via ethernet-10g")
    assert named.between == link("ethernet-10g") and named.groups == mixed_cluster.parse(text).groups
    assert str(named) == str(mixed_cluster.parse(text)) + " via ethernet-10g"
    assert mixed_cluster.parse(f"{text} via ib-100g") == mixed_cluster.parse(text)
    assert str(mixed_cluster.parse(f"{text} via ib-100g")) == str(mixed_cluster.parse(text))


def test_a_changed_link_between_groups_prints_with_a_star_and_is_written_in_full() -> None:
    cluster = mixed_cluster.parse("2 a100-80g + 2 v100-32g")
    assert isinstance(cluster, MixedCluster)
    slow = replace(cluster, between=replace(cluster.between, efficiency=0.01))
    assert str(slow) == f"2 a100-80g + 2 v100-32g via {cluster.between.name}*"
    with pytest.raises(ValueError, match=rf"'{cluster.between.name}\*'"):
        mixed_cluster.parse(str(slow))
    assert mixed_cluster.parse_toml(slow.to_toml()) == slow


def test_memory_and_map_reach_every_group() -> None:
    cluster = mixed_cluster.parse("2 a100-80g + 3 v100-32g")
    assert isinstance(cluster, MixedCluster)
    small = cluster.with_memory(10**9)
    assert [group.device.memory_bytes for group in small.groups] == [10**9, 10**9]
    assert small.between == cluster.between and small.num_devices == 5
    halved = cluster.map(lambda group: replace(group, devices_per_node=1))
    assert [str(group) for group in halved.groups] == ["1 a100-80g", "1 v100-32g"]


TOML = """
[[group]]
num_nodes = 2
devices_per_node = 8
device = "a100-80g"

[[group]]
devices_per_node = 4
intra_node = "pcie4"

[group.device]
name = "mine"
memory_bytes = 1000000000
memory_bytes_per_second = 1e11
peak_flops_per_second = { fp32 = 1e13 }
kernel_launch_seconds = 1e-5
matmul_efficiency = 0.5
memory_efficiency = 0.5
source = "measured"

[group.inter_node]
name = "wire"
bytes_per_second = 1e9
latency_seconds = 1e-4
source = "measured"
"""


def test_a_file_with_a_device_and_links_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(TOML)
    cluster = mixed_cluster.from_toml(path)
    assert isinstance(cluster, MixedCluster)
    first, second = cluster.groups
    wire = Link("wire", 1e9, 1e-4, "measured")
    device = Device("mine", 10**9, 1e11, {"fp32": 1e13}, 1e-5, 0.5, 0.5, "measured")
    assert first == Cluster.parse("2x8 a100-80g")
    assert second == Cluster(device, 1, 4, link("pcie4"), wire)
    assert cluster.between == wire  # the slowest
    assert str(cluster) == "2x8 a100-80g + 4 mine* pcie4 wire*"
    path.write_text('between = "ib-400g"\n' + TOML)
    assert mixed_cluster.from_toml(path) == replace(cluster, between=link("ib-400g"))


@pytest.mark.parametrize("text", ["2 a100-80g +", "+ 2 cpu", "2 cpu + + 2 cpu", "2 cpu + cpu", "2 cpu + 2x cpu"])
def test_a_group_of_another_form_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read cluster.*the form is .*NODESx.*h100-sxm.*nvlink4"):
        mixed_cluster.parse(text)


def test_unknown_names_are_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"device 'v100-33g'\. Did you mean 'v100-32g'\?"):
        mixed_cluster.parse("2 a100-80g + 2 v100-33g")
    with pytest.raises(ValueError, match=r"link 'ib-100h'\. Did you mean 'ib-100g'\?"):
        mixed_cluster.parse("2 a100-80g + 2 v100-32g via ib-100h")
    with pytest.raises(ValueError, match="needs nodes and devices"):
        mixed_cluster.parse("2 a100-80g + 0 v100-32g")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('nodes = 1\n[[group]]\ndevice = "cpu"\ndevices_per_node = 1\n', r"unknown keys \['nodes'\] beside group"),
        ('[[group]]\ndevice = "cpu"\ndevices_per_node = 1\n', "needs two groups of nodes or more, got 1"),
        ('[[group]]\ndevice = "cpu"\n[[group]]\ndevice = "cpu"\n', r"missing keys \['devices_per_node'\]"),
        (TOML + '\n[[group]]\ndevice = "cpu"\ndevices_per_node = 1\ncolour = "red"\n', r"unknown keys \['colour'\]"),
        ('between = "ib-4g"\n' + TOML, "unknown link 'ib-4g'. Did you mean"),
        ("[between]\nbytes_per_second = 1.0\n" + TOML, r"\[between\] needs a name"),
    ],
)
def test_errors_in_a_file_name_the_file_and_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"wrong\.toml: .*{message}"):
        mixed_cluster.from_toml(path)


@pytest.mark.parametrize("mark", ["\x85", "\u2028"])
def test_a_source_may_hold_any_line_mark(mark: str) -> None:
    device = replace(catalog.device("cpu"), source=f"one{mark}two")
    cluster = MixedCluster.of((replace(Cluster.parse("2 cpu"), device=device), Cluster.parse("2 cpu")))
    assert mixed_cluster.parse_toml(cluster.to_toml()) == cluster


@pytest.mark.parametrize("text", ["group = 3", "group = [1, 2]", '[group]\ndevice = "cpu"\ndevices_per_node = 1'])
def test_groups_are_an_array_of_tables(text: str) -> None:
    with pytest.raises(ValueError, match="group"):
        mixed_cluster.parse_toml(text)
