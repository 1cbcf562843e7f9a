"""The slowdown of a step that waits for the slowest of its ranks.

Devices of one kind differ (manufacturing, temperature, power limits), and a synchronous step ends with the last one.
If the time of a rank is normal with mean t and standard deviation c t, independent of the others', the step takes

    E max of n  =  t (1 + c m(n)),      m(n) = E max of n standard normal variables
                                             = integral over x from 0 to infinity of 1 - Phi(x)^n - (1 - Phi(x))^n

m has a closed form up to n = 5 (H. A. David, H. N. Nagaraja, "Order statistics", 3rd edition, section 3.2). For
more, let Q(s) be the point with -ln Phi(Q) = e^(-s). The maximum is Q(ln n + G), G with Gumbel's distribution, of mean
g = 0.5772 (Euler), variance pi^2 / 6 and third cumulant 2 zeta(3). Expanded around s = ln n + g, with x = Q(s),
p = 1 - Phi(x) and r = p / phi(x) (Mills' ratio) for Q', so that Q'' = r (x r - 1) and Q''' = r^3 + (2 x r - 1) Q'':

    m(n) = x + pi^2 / 12 Q'' + zeta(3) / 3 Q''' + ...                         (within 0.15 % for all n > 5)

m grows like sqrt(2 ln n): 1.4 for 8 ranks, 2.5 for 100, 3.2 for 1,000. c covers only differences between devices that
last longer than a step; noise within a step is averaged over its kernels.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from importlib import resources
from statistics import NormalDist
from typing import Any

from cost_models.machine import Cluster, Device

NORMAL = NormalDist()
EULER = 0.5772156649015329
ZETA_3 = 1.2020569031595942

CLOSED_FORMS = (
    0.0,
    1 / math.sqrt(math.pi),
    3 / (2 * math.sqrt(math.pi)),
    6 * math.atan(math.sqrt(2)) / math.pi**1.5,
    5 / (4 * math.sqrt(math.pi)) + 15 * math.asin(1 / 3) / (2 * math.pi**1.5),
)
"""The values m(1) to m(5) in closed form."""


def slowdown(num_ranks: int, variation: float) -> float:
    """Return the expected time of the slowest of `num_ranks` devices, relative to one: 1 + variation m(num_ranks).

    variation: coefficient of variation of the time that devices take for the same work. Raises ValueError without ranks
    or a negative variation.
    """
    if num_ranks < 1 or not variation >= 0:
        raise ValueError(f"needs at least 1 rank and a variation of 0 or more, got {num_ranks} and {variation}")
    return 1.0 + variation * expected_maximum(num_ranks)


def variation(device: str) -> float:
    """Return the coefficient of variation among devices of the kind called `device`, from ``machines/stragglers.toml``.

    The longest entry that the name begins with applies, else the entry for all others.
    """
    families = _table()["families"]
    matching = [family for family in families if device.startswith(family)]
    return float(families[max(matching, key=len)]["variation"] if matching else _table()["others"]["variation"])


@lru_cache(maxsize=64)
def paced(cluster: Cluster, num_ranks: int) -> Cluster:
    """Return the cluster with devices as fast as the expected slowest of `num_ranks` of them."""
    factor = slowdown(num_ranks, variation(cluster.device.name))
    return cluster if factor == 1.0 else replace(cluster, device=slowed(cluster.device, factor))


def slowed(device: Device, factor: float) -> Device:
    """Return the device with all of its rates divided by `factor`; launches and ramps stay."""
    return replace(
        device,
        peak_flops_per_second={dtype: peak / factor for dtype, peak in device.peak_flops_per_second.items()},
        memory_bytes_per_second=device.memory_bytes_per_second / factor,
        cache_bytes_per_second=device.cache_bytes_per_second / factor,
        special_seconds=device.special_seconds * factor,
    )


@cache
def expected_maximum(count: int) -> float:
    """Return m(count), the expected maximum of `count` independent standard normal variables."""
    if count <= len(CLOSED_FORMS):
        return CLOSED_FORMS[count - 1]
    upper_tail = -math.expm1(-math.exp(-EULER) / count)
    x = -NORMAL.inv_cdf(upper_tail)
    mills = upper_tail / NORMAL.pdf(x)
    second = mills * (x * mills - 1)
    third = mills**3 + (2 * x * mills - 1) * second
    return x + math.pi**2 / 12 * second + ZETA_3 / 3 * third


@cache
def _table() -> Mapping[str, Any]:
    text = resources.files("cost_models").joinpath("machines", "stragglers.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
