"""Clusters: parsing, printing, TOML round trips, shipped data, errors."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import catalog, nccl
from cost_models.machine import Cluster, Device, Link

PACKAGE = Path(__file__).resolve().parents[2] / "cost_models"

device_names = st.sampled_from(sorted(catalog.devices()))
link_names = st.sampled_from(sorted(catalog.links()))
counts = st.integers(1, 4096)


def cluster_of(device: str, nodes: int, per_node: int, intra: str, inter: str) -> Cluster:
    """Without a switch a node has as many devices as its link joins, and no more."""
    joined = nccl.mesh_links(catalog.link(intra))
    most = len(joined) if joined else per_node
    return Cluster(catalog.device(device), nodes, min(per_node, most), catalog.link(intra), catalog.link(inter))


clusters = st.builds(cluster_of, device_names, counts, counts, link_names, link_names)
positive = st.floats(1e-9, 1e18)
custom_devices = st.builds(
    Device,
    name=st.text(max_size=12),
    memory_bytes=st.integers(1, 10**15),
    memory_bytes_per_second=positive,
    peak_flops_per_second=st.dictionaries(st.sampled_from(["bf16", "int8", "odd key"]), positive).map(
        lambda peaks: {"fp32": 1e12, **peaks}
    ),
    kernel_launch_seconds=st.floats(0, 1),
    matmul_efficiency=st.floats(0.01, 1),
    memory_efficiency=st.floats(0.01, 1),
    source=st.text(),
    matmul_tile=st.integers(1, 512),
    intra_link=link_names,
    inter_link=link_names,
)
custom_links = st.builds(
    Link,
    name=st.text(max_size=12),
    bytes_per_second=positive,
    latency_seconds=st.floats(0, 1),
    source=st.text(),
    efficiency=st.floats(0.01, 1),
    in_network_reduction=st.booleans(),
    shared_by_node=st.booleans(),
)


@given(clusters)
def test_the_short_form_parses_back(cluster: Cluster) -> None:
    assert Cluster.parse(str(cluster)) == cluster
    assert Cluster.parse(str(cluster).upper()) == cluster
    assert hash(Cluster.parse(str(cluster))) == hash(cluster)


@given(clusters)
def test_built_in_clusters_round_trip_through_toml_by_name(cluster: Cluster) -> None:
    assert Cluster.from_toml_text(cluster.to_toml()) == cluster
    assert "source" not in cluster.to_toml()


@given(custom_devices, custom_links, custom_links, counts, counts)
def test_measured_clusters_round_trip_through_toml(
    device: Device, intra: Link, inter: Link, nodes: int, per_node: int
) -> None:
    cluster = Cluster(device, nodes, per_node, intra, inter)
    assert Cluster.from_toml_text(cluster.to_toml()) == cluster


def test_usual_forms() -> None:
    cluster = Cluster.parse("4x8 h100-sxm")
    assert (cluster.num_nodes, cluster.devices_per_node, cluster.num_devices) == (4, 8, 32)
    assert (cluster.intra_node.name, cluster.inter_node.name) == ("nvlink4", "ib-400g")
    assert str(cluster) == "4x8 h100-sxm"
    assert Cluster.parse("1x8 h100-sxm") == Cluster.parse("8 h100-sxm")
    assert str(Cluster.parse("1x8 h100-sxm")) == "8 h100-sxm"
    other = Cluster.parse("4x8 a100-80g nvlink3 ib-100g")
    assert other.inter_node == catalog.link("ib-100g") and str(other) == "4x8 a100-80g nvlink3 ib-100g"
    assert str(Cluster.parse("4x8 a100-80g nvlink3 ib-200g")) == "4x8 a100-80g"
    assert str(Cluster.parse("2x8 a100-80g pcie4")) == "2x8 a100-80g pcie4"
    assert Cluster.parse("4 cpu").num_devices == 4


def test_names_that_the_design_promises() -> None:
    devices = {"v100-16g", "v100-32g", "a100-40g", "a100-80g", "h100-sxm", "h200-sxm", "b200"}
    devices |= {"a800-80g", "h800-sxm", "h20", "b300", "gb200", "gb300", "mi300x", "ascend-910b"}
    devices |= {"rtx3090", "rtx4090", "l4", "a10g", "l40s", "cpu"}
    links = {"nvlink2", "nvlink3", "nvlink4", "nvlink5", "pcie3", "pcie4", "pcie5", "loopback"}
    links |= {"nvlink3-a800", "nvlink4-h800", "infinity-fabric", "hccs"}
    links |= {"ib-800g", "efa-400g", "efa-v3-400g", "slingshot-200g"}
    links |= {"ethernet-10g", "ethernet-25g", "ethernet-100g"}
    links |= {f"{fabric}-{rate}g" for fabric in ("ib", "roce") for rate in (100, 200, 400)}
    assert devices == set(catalog.devices())
    assert links <= set(catalog.links())


@pytest.mark.parametrize("part", [*catalog.devices().values(), *catalog.links().values()], ids=lambda part: part.name)
def test_every_built_in_figure_has_a_source(part: Device | Link) -> None:
    assert len(part.source) > 5
    if isinstance(part, Device):
        assert {part.intra_link, part.inter_link} <= set(catalog.links())


@pytest.mark.parametrize(
    "text", ["", "h100-sxm", "4x8", "x8 h100-sxm", "4x h100-sxm", "-1 cpu", "8 cpu loopback loopback loopback"]
)
def test_other_forms_are_refused_with_the_legal_ones(text: str) -> None:
    with pytest.raises(ValueError, match=r"NODESx.*h100-sxm.*nvlink4"):
        Cluster.parse(text)


def test_unknown_names_are_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"device 'h100-sxn'\. Did you mean 'h100-sxm'\?.*a100-80g.*nvlink4"):
        Cluster.parse("8 h100-sxn")
    with pytest.raises(ValueError, match=r"link 'nvlnk3'\. Did you mean 'nvlink3'\?.*a100-80g.*nvlink4"):
        Cluster.parse("8 a100-80g nvlnk3")
    with pytest.raises(ValueError, match="needs nodes and devices"):
        Cluster.parse("0x8 cpu")
    with pytest.raises(ValueError, match=r"infinity-fabric joins 8 devices without a switch, and a node has 16"):
        Cluster.parse("16 mi300x")


def test_a_changed_device_does_not_print_as_the_built_in_one() -> None:
    cluster = Cluster.parse("2x8 h100-sxm")
    small = cluster.with_memory(10**9)
    assert small.device.memory_bytes == 10**9 and small.intra_node == cluster.intra_node
    assert replace(small, device=cluster.device) == cluster
    assert str(small) == "2x8 h100-sxm*"
    with pytest.raises(ValueError, match=r"'h100-sxm\*'"):
        Cluster.parse(str(small))
    assert Cluster.from_toml_text(small.to_toml()) == small
    slow = replace(cluster, inter_node=replace(cluster.inter_node, efficiency=0.1))
    assert str(slow) == "2x8 h100-sxm nvlink4 ib-400g*"


def test_from_toml_reads_a_file_and_takes_the_usual_links(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('devices_per_node = 4\ndevice = "l4"\n')
    assert Cluster.from_toml(path) == Cluster.parse("4 l4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('device = "l4"', "devices_per_node"),
        ('devices_per_node = 1.5\ndevice = "l4"', "whole numbers"),
        ('devices_per_node = 1\ndevice = "l5"', "Did you mean 'l4'"),
        ('devices_per_node = 1\ndevice = "l4"\nlink = "pcie4"', r"\['link'\]"),
        ('devices_per_node = 1\n[device]\nname = "x"\nspeed = 3', r"unknown keys \['speed'\], missing keys.*source"),
        ('devices_per_node = 1\n[device]\nname = "x"', "device x: missing keys"),
        ("devices_per_node = 1\n[device]\nspeed = 3", "needs a name"),
        (
            'devices_per_node = 1\ndevice = "l4"\n[intra_node]\nname = "x"\nsource = "y"\n'
            'latency_seconds = 0\nbytes_per_second = "fast"',
            "bytes_per_second has the wrong type: 'fast'",
        ),
        (
            'devices_per_node = 1\ndevice = "l4"\n[intra_node]\nname = "x"\nsource = "y"\n'
            "latency_seconds = -1\nbytes_per_second = 1",
            "latency_seconds must be zero or more",
        ),
        ("devices_per_node =", "cluster.toml"),
    ],
)
def test_wrong_toml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Cluster.from_toml(path)


def test_dtypes_fall_back_to_one_that_holds_them() -> None:
    v100, h100 = catalog.device("v100-32g"), catalog.device("h100-sxm")
    assert v100.peak("bf16") == v100.peak("fp32") == 15.7e12 < v100.peak("fp16")
    assert h100.peak("fp8") == pytest.approx(2 * h100.peak("bf16"), rel=1e-3)
    assert v100.peak("fp8") == v100.peak("fp16")
    assert h100.peak("int64") == h100.peak("fp32") < h100.peak("tf32")
    with pytest.raises(ValueError, match="no peak for dtype 'bfloat16'; known dtypes: bf16"):
        h100.peak("bfloat16")


@pytest.mark.parametrize(
    "change",
    [
        {"memory_bytes": 0},
        {"memory_bytes_per_second": float("nan")},
        {"matmul_efficiency": 1.5},
        {"memory_efficiency": 0.0},
        {"peak_flops_per_second": {"bf16": 1e12}},
        {"kernel_launch_seconds": -1.0},
    ],
)
def test_impossible_devices_are_refused(change: dict[str, object]) -> None:
    device = catalog.device("l4")
    values = {item.name: getattr(device, item.name) for item in fields(device)} | change
    with pytest.raises(ValueError, match=f"device l4: {next(iter(change))}"):
        Device(**values)


def test_an_installed_package_finds_its_data_and_imports_no_torch(tmp_path: Path) -> None:
    """From a zip file, where only importlib.resources can read."""
    archive = tmp_path / "installed.zip"
    with zipfile.ZipFile(archive, "w") as target:
        for path in sorted(PACKAGE.rglob("*")):
            if path.suffix in (".py", ".toml"):
                target.write(path, path.relative_to(PACKAGE.parent))
    code = (
        "import sys, cost_models; print(cost_models.__file__, cost_models.Cluster.parse('2x8 b200'));"
        "print({'torch', 'autopar', 'search', 'codegen'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(archive)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.split("\n")[:2] == [f"{archive}/cost_models/__init__.py 2x8 b200", "set()"]
