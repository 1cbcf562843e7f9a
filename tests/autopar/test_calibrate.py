"""Fits, on times made by a known device and link: the fitted ones must predict what the known ones do."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.calibrate import fit_device, fit_link, launch_seconds, predicted_seconds
from autopar.measure import CollectiveTime, KernelTime, Measurements
from cost_models import compute
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
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def linear(m: int, n: int, k: int, dtype: str = "fp32") -> Work:
    size = {"fp32": 4, "bf16": 2, "fp64": 8}[dtype]
    return Work("matmul", 2.0 * m * n * k, float(size * (m * k + n * k + m * n)), dtype, (m, n, k))


def synthetic(noise: float) -> Measurements:
    """Times of DEVICE and LINK, each off by a random factor of up to 1 + noise, and one in twenty by a factor of 4."""
    generator = random.Random(0)

    def disturbed(seconds: float) -> float:
        return seconds * (1 + noise) ** generator.uniform(-1, 1) * (4 if noise and generator.random() < 0.05 else 1)

    works = [linear(m, n, k) for m in (4, 64, 512, 1020) for n, k in ((64, 64), (256, 256), (512, 1024), (1024, 128))]
    works += [linear(256, 512, 512, "bf16"), linear(256, 512, 512, "fp64")]
    works += [Work("memory", 0.0, 2.0**power) for power in range(14, 27)]
    works.append(Work("attention", 8e7, 1e6))
    sizes = [(kind, 2**power, group) for kind in KINDS for power in (10, 16, 20, 22, 24) for group in (2, 4)]
    blank = [CollectiveTime(*size, seconds=0.0) for size in sizes]
    return Measurements(
        num_processes=4,
        num_cores=2.0,
        share=1.0,
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
    held_out = [linear(300, 700, 512), linear(2048, 512, 512), linear(512, 512, 512, "bf16"), Work("memory", 0.0, 3e7)]
    for work in (*held_out, Work("attention", 3e8, 2e6)):
        assert compute.seconds(work, fitted) == pytest.approx(compute.seconds(work, DEVICE), rel=0.15), work
    assert fitted.memory_bytes == 2**30 and fitted.reserved_bytes == 2**28 and fitted.name.startswith("cpu")


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.1), (0.2, 0.3)])
def test_collectives_are_predicted_as_the_known_link_does(noise: float, tolerance: float) -> None:
    fitted = fit_link(synthetic(noise), DEVICE, "test")
    cluster = Cluster(DEVICE, 1, 4, fitted, fitted)
    for kind in KINDS:
        for num_bytes in (2**16, 2**18, 2**21, 2**23, 2**24):
            for group_size in (2, 4):
                time = CollectiveTime(kind, num_bytes, group_size, 0.0)
                known = predicted_seconds(time, CLUSTER)
                assert predicted_seconds(time, cluster) == pytest.approx(known, rel=tolerance), time


def test_no_link_without_collectives() -> None:
    with pytest.raises(ValueError, match="without measured collectives"):
        fit_link(replace(synthetic(0.0), collectives=()), DEVICE, "test")
