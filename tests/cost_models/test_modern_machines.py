"""Machines of 2023 to 2025 against figures that are not in the catalog: totals of racks, units times clock, measured
rates of collectives; and a rack of 72 GPUs as one node."""

from __future__ import annotations

import pytest

from cost_models import catalog, collective
from cost_models.collective import Group, Kind
from cost_models.machine import Cluster

GIB = 2**30


def test_peaks_order_as_the_datasheets_say() -> None:
    groups = [
        {"h20"},
        {"a100-80g", "a800-80g"},
        {"ascend-910b"},
        {"h100-sxm", "h800-sxm"},
        {"mi300x"},
        {"b200", "b300"},
        {"gb200", "gb300"},
    ]
    peaks = [{catalog.device(name).peak("bf16") for name in group} for group in groups]
    assert all(len(same) == 1 for same in peaks)
    assert [max(same) for same in peaks] == sorted(max(same) for same in peaks)
    for name in ("h20", "h800-sxm", "b300", "gb200", "gb300"):
        device = catalog.device(name)
        assert device.peak("fp8") == pytest.approx(2 * device.peak("bf16"), rel=1e-3)
        assert device.peak("tf32") == pytest.approx(device.peak("bf16") / 2, rel=1e-3)
    for cut, whole in (("h800-sxm", "h100-sxm"), ("h20", "h100-sxm"), ("b300", "b200"), ("gb300", "gb200")):
        assert catalog.device(cut).peak("fp64") < catalog.device(whole).peak("fp64") / 20
    for name in ("a800-80g", "mi300x", "ascend-910b"):  # no such products, or not of the format that programs have
        assert catalog.device(name).peak("fp8") == catalog.device(name).peak("fp16")


def test_memory_orders_as_the_datasheets_say() -> None:
    names = ["ascend-910b", "h100-sxm", "h20", "b200", "gb200", "mi300x", "b300", "gb300"]
    sizes = [catalog.device(name).memory_bytes for name in names]
    assert sizes == sorted(sizes)
    sold = {"a800-80g": 80, "h800-sxm": 80, "h20": 96, "gb200": 186, "mi300x": 192, "ascend-910b": 64}
    for name, size in sold.items():
        assert catalog.device(name).memory_bytes == pytest.approx(size * GIB, rel=0.01)
    rates = ["ascend-910b", "a800-80g", "h800-sxm", "h20", "mi300x", "b300", "gb300"]
    assert (figures := [catalog.device(name).memory_bytes_per_second for name in rates]) == sorted(figures)


def test_totals_of_racks_and_units() -> None:
    """NVL72: 180 PFLOP/s of dense bf16, 720 and 1,080 of fp4, 576 TB/s, 130 TB/s of NVLink both ways. HGX B300: 72
    PFLOP/s of sparse fp8.
    MI300X: 304 compute units of 2048 operations per clock at 2.1 GHz, seven links of 128 GB/s both ways."""
    for name in ("gb200", "gb300"):
        device = catalog.device(name)
        assert 72 * device.peak("bf16") == pytest.approx(180e15, rel=0.01)
        assert 72 * device.memory_bytes_per_second == pytest.approx(576e12, rel=0.01)
        assert 72 * 2 * catalog.link(device.intra_link).bytes_per_second == pytest.approx(130e12, rel=0.01)
    assert 8 * 2 * catalog.device("b300").peak("fp8") == pytest.approx(72e15, rel=0.01)
    assert 72 * catalog.device("gb200").peak("nvfp4") == pytest.approx(720e15)
    assert 72 * catalog.device("gb300").peak("nvfp4") == pytest.approx(1080e15)
    for name in ("b200", "b300", "gb200", "gb300"):
        assert catalog.device(name).peak("mxfp8") == catalog.device(name).peak("fp8")
    with pytest.raises(ValueError, match="mxfp8"):
        catalog.device("h100-sxm").peak("mxfp8")  # which no other units can stand for
    assert catalog.device("mi300x").peak("bf16") == pytest.approx(304 * 2048 * 2.1e9, rel=1e-3)
    both_ways = {"mi300x": 7 * 128e9, "ascend-910b": 392e9, "h800-sxm": 400e9, "a800-80g": 400e9, "h20": 900e9}
    for name, rate in both_ways.items():
        assert 2 * catalog.link(catalog.device(name).intra_link).bytes_per_second == pytest.approx(rate)


@pytest.mark.parametrize(
    ("cluster", "kind", "size", "measured"),
    [
        ("8 mi300x", "all_reduce", 2, 47.7),
        ("8 mi300x", "all_reduce", 8, 312.9),
        ("8 ascend-910b", "all_reduce", 2, 18),
        ("8 ascend-910b", "all_reduce", 4, 45),
        ("8 ascend-910b", "all_reduce", 8, 126),
        ("8 ascend-910b", "all_gather", 2, 19),
        ("8 ascend-910b", "all_gather", 4, 48),
        ("8 ascend-910b", "all_gather", 8, 130),
        ("8 h800-sxm", "all_reduce", 8, 215),
    ],
)
def test_bus_bandwidths_that_others_measured(cluster: str, kind: Kind, size: int, measured: float) -> None:
    """GB/s of 4 GB (sources: links.toml). One efficiency per link: what differs by size is how many links serve."""
    num_bytes = 4e9
    seconds = collective.seconds(kind, num_bytes, Group(size, 1), Cluster.parse(cluster))
    passes = 2 if kind == "all_reduce" else 1
    assert passes * (size - 1) / size * num_bytes / seconds / 1e9 == pytest.approx(measured, rel=0.18)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"])
def test_a_rack_of_72_is_one_node(kind: Kind) -> None:
    racks, slow = Cluster.parse("2x72 gb200"), Cluster.parse("2x72 gb200 nvlink5 ib-100g")
    assert (racks.num_devices, racks.devices_per_node, str(racks)) == (144, 72, "2x72 gb200")

    def seconds(cluster: Cluster, size: int, stride: int = 1) -> float:
        return collective.seconds(kind, 1e9, Group(size, stride), cluster)

    for size, stride in ((72, 1), (9, 8), (36, 2), (24, 3)):  # inside a rack: no network
        assert seconds(racks, size, stride) == seconds(slow, size, stride)
    assert seconds(racks, 2, 72) < seconds(slow, 2, 72)  # across racks
    assert seconds(racks, 72) <= seconds(racks, 144) <= seconds(slow, 144)
    boards = Cluster.parse("18x8 gb200")
    assert seconds(racks, 16) < seconds(boards, 16) or kind == "p2p"
    assert seconds(racks, 8) == seconds(boards, 8)


def test_networks_order_by_their_rates() -> None:
    """In groups of one rank per node, whose bytes all cross the network."""

    def seconds(link: str) -> float:
        return collective.seconds("all_gather", 1e9, Group(4, 8), Cluster.parse(f"4x8 b300 nvlink5 {link}"))

    assert seconds("ib-800g") < seconds("ib-400g") < seconds("slingshot-200g") == seconds("ib-200g")
    assert seconds("efa-v3-400g") < seconds("efa-400g")
