"""Fits, on times made by a known device and link: the fitted ones must predict what the known ones do."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest

from autopar.profiling.cases import Topology, linear
from autopar.profiling.fit_device import fit_device, kernel_errors, launch_seconds
from autopar.profiling.fit_link import collective_errors, fit_link, fit_links, predicted_seconds
from autopar.profiling.samples import CollectiveTime, KernelTime, Measurements
from cost_models import compute
from cost_models.collective import Kind
from cost_models.compute import Work
from cost_models.machine import Cluster, Device, Link

DEVICE = Device(
    name="cpu-known",
    memory_bytes=2**30,
    memory_bytes_per_second=12e9,
    peak_flops_per_second={"fp32": 80e9, "bf16": 160e9, "fp64": 40e9},
    kernel_launch_seconds=20e-6,
    matmul_efficiency=0.9,
    memory_efficiency=0.8,
    attention_efficiency=0.5,
    matmul_ramp_seconds=30e-6,
    matmul_tile=8,
    source="test",
)
LINK = Link(
    "known",
    bytes_per_second=1e9,
    latency_seconds=1e-3,
    startup_seconds=0.5e-3,
    latency_factors={"all_gather": 0.7, "reduce_scatter": 1.5, "all_to_all": 0.4},
    rate_factors={"all_gather": 0.6, "reduce_scatter": 0.4},
    source="test",
)
CLUSTER = Cluster(DEVICE, 1, 4, LINK, LINK)
KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def matmul(m: int, n: int, k: int, dtype: str = "fp32") -> Work:
    work = linear(m, n, k, dtype).work
    assert work is not None
    return work


def synthetic(noise: float) -> Measurements:
    """Times of DEVICE and LINK, each off by a random factor of up to 1 + noise, and one in twenty by a factor of 4."""
    generator = random.Random(0)

    def disturbed(seconds: float) -> float:
        return seconds * (1 + noise) ** generator.uniform(-1, 1) * (4 if noise and generator.random() < 0.05 else 1)

    works = [matmul(m, n, k) for m in (4, 64, 512, 1020) for n, k in ((64, 64), (256, 256), (512, 1024), (1024, 128))]
    works += [matmul(256, 512, 512, "bf16"), matmul(256, 512, 512, "fp64")]
    works += [Work("memory", 0.0, 2.0**power) for power in range(14, 27)]
    works.append(Work("attention", 8e7, 1e6))
    sizes = [(kind, 2**power, group) for kind in KINDS for power in (10, 16, 20, 22, 24) for group in (2, 4)]
    blank = [CollectiveTime(*size, seconds=0.0) for size in sizes]
    return Measurements(
        topology=Topology(1, 4),
        num_cores=2.0,
        forward_seconds=13e-6,
        backward_seconds=25e-6,
        process_bytes=2**28,
        kernels=tuple(KernelTime(work, disturbed(compute.seconds(work, DEVICE))) for work in works),
        collectives=tuple(replace(time, seconds=disturbed(predicted_seconds(time, CLUSTER))) for time in blank),
    )


def test_the_launch_is_the_mean_of_ten_forward_and_fourteen_backward_kernels() -> None:
    assert launch_seconds(synthetic(0.0)) == pytest.approx(20e-6)


def test_large_kernels_are_predicted_as_the_known_device_does() -> None:
    fitted = fit_device(synthetic(0.0), 2**30, "test")
    held_out = [matmul(300, 700, 512), matmul(2048, 512, 512), matmul(512, 512, 512, "bf16"), Work("memory", 0.0, 3e7)]
    for work in (*held_out, Work("attention", 3e8, 2e6)):
        assert compute.seconds(work, fitted) == pytest.approx(compute.seconds(work, DEVICE), rel=0.15), work
    assert fitted.memory_bytes == 2**30 and fitted.reserved_bytes == 2**28 and fitted.name.startswith("cpu")


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.1), (0.2, 0.3)])
def test_collectives_are_predicted_as_the_known_link_does(noise: float, tolerance: float) -> None:
    plain = Cluster(DEVICE, 1, 4, *[Link("other", bytes_per_second=1e8, latency_seconds=1e-5, source="test")] * 2)
    cluster = fit_links(plain, synthetic(noise).collectives, "test")
    for kind in KINDS:
        for num_bytes in (2**16, 2**18, 2**21, 2**23, 2**24):
            for group_size in (2, 4):
                time = CollectiveTime(kind, num_bytes, group_size, 0.0)
                known = predicted_seconds(time, CLUSTER)
                assert predicted_seconds(time, cluster) == pytest.approx(known, rel=tolerance), time


def test_no_link_without_collectives() -> None:
    with pytest.raises(ValueError, match="without measured collectives"):
        fit_link(CLUSTER, "intra_node", (), "test")
    assert fit_links(CLUSTER, (), "test") == CLUSTER


def test_rates_of_copies_are_the_slower_direction() -> None:
    rates = {"copy to device": 5e9, "copy to host": 4e9, "disk read": 2e9, "disk write": 5e8, "host update": 7e9}
    device = fit_device(replace(synthetic(0.0), rates=rates), 2**30, "test")
    assert device.host_link_bytes_per_second == 4e9
    assert device.disk_bytes_per_second == 5e8
    assert device.host_memory_bytes_per_second == 7e9
    untouched = fit_device(synthetic(0.0), 2**30, "test")
    assert untouched.disk_bytes_per_second == DEVICE.disk_bytes_per_second


# --- GPUs: nominal figures given, times made by a device and links that are somewhat worse ----------------------------

NOMINAL = Cluster.parse("2x8 h100-sxm")


def worse_cluster() -> Cluster:
    """A cluster of NOMINAL's parts that reaches less."""
    device = replace(NOMINAL.device, matmul_efficiency=0.6, memory_efficiency=0.7, kernel_launch_seconds=3e-6)
    intra = replace(NOMINAL.intra_node, efficiency=0.6, latency_seconds=2 * NOMINAL.intra_node.latency_seconds)
    inter = replace(NOMINAL.inter_node, efficiency=0.5, startup_seconds=2 * NOMINAL.inter_node.startup_seconds)
    return replace(NOMINAL, device=device, intra_node=intra, inter_node=inter)


def gpu_measurements() -> Measurements:
    known = worse_cluster()
    works = [matmul(m, n, k, "bf16") for m in (256, 1024, 4096) for n, k in ((4096, 4096), (14336, 4096), (1024, 4096))]
    works += [matmul(4096, 4096, 4096, "fp32")]
    works += [Work("memory", 0.0, 2.0**power) for power in (12, 22, 26, 30)]
    works.append(Work("attention", 1e12, 1e8, "bf16", (64, 8192, 8192)))
    shapes = Topology(2, 8, on_gpu=True).groups("full")
    blank = [
        CollectiveTime(kind, 2**power, size, 0.0, stride)
        for size, stride in shapes
        for kind in (*KINDS, "p2p")
        for power in (10, 16, 20, 24, 28)
    ]
    return Measurements(
        topology=Topology(2, 8, on_gpu=True),
        num_cores=64.0,
        process_bytes=2**30,
        forward_seconds=8e-6,
        backward_seconds=9e-6,
        kernels=tuple(KernelTime(work, compute.seconds(work, known.device)) for work in works),
        collectives=tuple(replace(time, seconds=predicted_seconds(time, known)) for time in blank),
    )


def test_a_gpu_keeps_its_nominal_figures_and_is_predicted_as_it_was_measured() -> None:
    measured = gpu_measurements()
    device = fit_device(measured, 79 * 2**30, "test", NOMINAL.device)
    assert device.name == NOMINAL.device.name
    assert device.peak("bf16") == NOMINAL.device.peak("bf16")
    assert device.memory_bytes == 79 * 2**30
    # A launch and the ramp of memory-bound kernels cannot be told apart by the times of kernels.
    shortest = Work("memory", 0.0, 2.0**12)
    assert compute.seconds(shortest, device) == pytest.approx(
        compute.seconds(shortest, worse_cluster().device), rel=0.1
    )
    assert {kind: max(map(abs, errors)) < 0.1 for kind, errors in kernel_errors(measured, device).items()} == {
        "matmul": True,
        "memory": True,
        "attention": True,
    }


def test_links_that_nccl_drives_keep_their_name_and_are_predicted_as_they_were_measured() -> None:
    measured = gpu_measurements()
    cluster = fit_links(NOMINAL, measured.collectives, "test")
    for fitted, usual in ((cluster.intra_node, NOMINAL.intra_node), (cluster.inter_node, NOMINAL.inter_node)):
        assert fitted.name == usual.name and fitted.bytes_per_second == usual.bytes_per_second
        assert not fitted.rate_factors and fitted.source == "test"
    before = [abs(e) for errors in collective_errors(measured.collectives, NOMINAL).values() for e in errors]
    after = [abs(e) for errors in collective_errors(measured.collectives, cluster).values() for e in errors]
    assert statistics.median(after) < 0.05 < statistics.median(before)
    assert max(after) < 0.3
