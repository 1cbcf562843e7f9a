"""The expected maximum of normal variables against integration, order statistics in tables, and simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist, fmean

import numpy as np
import pytest

from cost_models import catalog, compute, straggler
from cost_models.compute import Work
from cost_models.machine import Cluster

NORMAL = NormalDist()
# H. L. Harter, "Expected values of normal order statistics", Biometrika 48 (1961), table 1.
HARTER = {
    2: 0.56419,
    3: 0.84628,
    4: 1.02938,
    5: 1.16296,
    8: 1.42360,
    10: 1.53875,
    16: 1.76599,
    50: 2.24907,
    100: 2.50759,
}


def integral(count: int) -> float:
    """Of 1 - Phi(x)^n - (1 - Phi(x))^n from 0 to 9, by Simpson's rule."""
    step, points = 0.01, 901
    values = [1 - NORMAL.cdf(i * step) ** count - NORMAL.cdf(-i * step) ** count for i in range(points)]
    weights = [1 if i in (0, points - 1) else 4 if i % 2 else 2 for i in range(points)]
    return step / 3 * math.fsum(w * value for w, value in zip(weights, values, strict=True))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_closed_forms_are_exact(count: int) -> None:
    assert straggler.expected_maximum(count) == pytest.approx(integral(count), abs=1e-8)


@pytest.mark.parametrize("count", [6, 7, 8, 12, 16, 24, 64, 128, 512, 1024, 4096, 16384, 100_000])
def test_the_expansion_follows_the_integral(count: int) -> None:
    assert straggler.expected_maximum(count) == pytest.approx(integral(count), rel=1.5e-3)


@pytest.mark.parametrize(("count", "printed"), HARTER.items())
def test_printed_tables(count: int, printed: float) -> None:
    assert straggler.expected_maximum(count) == pytest.approx(printed, rel=1.5e-3)


def test_more_ranks_never_wait_less() -> None:
    times = [straggler.slowdown(count, 0.02) for count in range(1, 2000)]
    assert all(less < more for less, more in zip(times, times[1:], strict=False))


@pytest.mark.parametrize("count", [4, 8, 256])
def test_steps_simulated_with_ranks_of_different_speed(count: int) -> None:
    ranks = np.random.default_rng(0).normal(2.0, 2.0 * 0.03, size=(4000, count))
    simulated = fmean(float(slowest) for slowest in ranks.max(axis=1)) / 2.0
    assert straggler.slowdown(count, 0.03) == pytest.approx(simulated, rel=1e-3)


def test_one_rank_or_equal_ranks_wait_for_nobody() -> None:
    assert straggler.slowdown(1, 0.3) == 1.0
    assert straggler.slowdown(512, 0.0) == 1.0


@pytest.mark.parametrize(("ranks", "variation"), [(0, 0.1), (-1, 0.1), (8, -0.1), (8, math.nan)])
def test_nonsense_is_refused(ranks: int, variation: float) -> None:
    with pytest.raises(ValueError, match="at least 1 rank and a variation of 0 or more"):
        straggler.slowdown(ranks, variation)


def test_every_device_has_a_variation() -> None:
    """V100 by the range of 8 % between the whiskers of a box plot: quartiles and 1.5 times their distance."""
    quartile = NORMAL.inv_cdf(0.75)
    assert straggler.variation("v100-32g") == pytest.approx(0.08 / (2 * (quartile + 1.5 * 2 * quartile)), abs=5e-4)
    assert all(0 <= straggler.variation(name) < 0.1 for name in catalog.devices())


def test_paced_devices_take_as_long_as_the_slowest() -> None:
    """Any kernel that is no launch, by the factor; processes of one CPU are measured together."""
    cluster = Cluster.parse("128x8 a100-80g")
    slow = straggler.paced(cluster, 1024)
    factor = straggler.slowdown(1024, straggler.variation("a100-80g"))
    for work in (Work("memory", 0, 1e10), Work("matmul", 1e13, 1e9, "bf16", (8192, 8192, 8192))):
        one, other = (compute.seconds(work, replace(c.device, memory_ramp_seconds=0)) for c in (cluster, slow))
        launch = cluster.device.kernel_launch_seconds
        assert (other - launch) / (one - launch) == pytest.approx(factor)
    assert straggler.paced(Cluster.parse("4 cpu"), 4) == Cluster.parse("4 cpu")
