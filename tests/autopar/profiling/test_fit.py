"""Fits, on times made by a known device and link: the fitted ones must predict what the known ones do."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.profiling import blocks
from autopar.profiling.cases import Topology, linear
from autopar.profiling.fit_device import fit_device, kernel_errors, launch_seconds
from autopar.profiling.fit_link import collective_errors, fit_link, fit_links, hidden_share, predicted_seconds
from autopar.profiling.samples import BlockTime, CollectiveTime, KernelTime, Measurements
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


def test_the_launch_is_that_of_a_block_of_24_kernels_and_10_views_of_a_quarter_each() -> None:
    forward, backward = (10 + 5 / 4) * 20e-6, (14 + 5 / 4) * 20e-6
    measured = replace(synthetic(0.0), forward_seconds=forward / 10, backward_seconds=backward / 14)
    assert launch_seconds(measured) == pytest.approx(20e-6)


@pytest.mark.parametrize("loss", [1.0, 1.25])
def test_rates_are_those_that_whole_blocks_reach(loss: float) -> None:
    """Blocks that take `loss` times what their kernels take one by one, launches aside."""
    measured = synthetic(0.0)
    alone = fit_device(measured, 2**30, "test")
    launch, times = alone.kernel_launch_seconds, []
    for width in (128, 256, 512):
        sizes = {"batch": 2, "length": 64, "width": width, "heads": 4}
        works = tuple(blocks.works(sizes))
        kernels = sum(compute.seconds(work, alone) - launch for work in works)
        times.append(BlockTime(works, loss * kernels + (len(works) + 10 / 4) * launch))
    found = fit_device(replace(measured, blocks=tuple(times)), 2**30, "test")
    for work in (matmul(512, 512, 512), Work("memory", 0.0, 2e7)):
        rest = compute.seconds(work, alone) - launch
        assert compute.seconds(work, found) - launch == pytest.approx(loss * rest, rel=0.02)


def test_a_block_does_the_arithmetic_of_a_transformers() -> None:
    """6 flops per weight and token, and the attention that a causal mask leaves."""
    sizes = {"batch": 2, "length": 32, "width": 64, "heads": 4}
    by_kind = {kind: [w for w in blocks.works(sizes) if w.kind == kind] for kind in ("matmul", "attention")}
    assert sum(w.flops for w in by_kind["matmul"]) == 6 * (12 * 64**2) * 64
    assert sum(w.flops for w in by_kind["attention"]) == 3.5 * 2 * 64 * 32 * 64
    call = blocks.call(sizes, True, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        call()
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counted.items() if "mm" in str(op))
    assert products == 6 * (12 * 64**2) * 64


def test_bandwidth_of_the_cache_and_outside_it() -> None:
    cached = replace(DEVICE, cache_bytes=2**22, cache_bytes_per_second=40e9, memory_ramp_seconds=0.0)
    kernels = [k for k in synthetic(0.0).kernels if k.work.kind != "memory"]
    memory = [Work("memory", 0.0, 2.0**power) for power in (16, 19, 21, 25, 26)]
    kernels += [KernelTime(work, compute.seconds(work, cached)) for work in memory]
    device = fit_device(replace(synthetic(0.0), kernels=tuple(kernels)), 2**30, "test")
    assert device.cache_bytes_per_second > 2 * device.memory_bytes_per_second
    assert 2**21 <= device.cache_bytes <= 2**25
    for work in memory[1:]:
        assert compute.seconds(work, device) == pytest.approx(compute.seconds(work, cached), rel=0.25), work


def test_what_ranks_do_not_lose_of_collectives_beside_their_work() -> None:
    alone = [CollectiveTime("all_gather", 2**22, 4, 10e-3), CollectiveTime("reduce_scatter", 2**22, 4, 20e-3)]
    beside = [CollectiveTime("all_gather", 2**22, 4, 6e-3), CollectiveTime("reduce_scatter", 2**22, 4, 16e-3)]
    assert hidden_share(beside, alone) == pytest.approx((0.4 + 0.2) / 2)
    assert hidden_share([replace(time, seconds=0.1) for time in beside], alone) == 0.0
    assert hidden_share(beside, ()) == hidden_share((), alone) == 0.0


def test_processes_share_cores() -> None:
    assert fit_device(synthetic(0.0), 2**30, "test").core_share == 0.5


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
