"""Fits the cost model's own terms to what `measure` timed: a Device and a Link whose predictions are those times.

Every fit minimises the mean of h(log(predicted / measured)), through the functions that will predict: relative, because
times span four decades, and h is quadratic only up to OUTLIER (P. Huber, 1964), because one disturbed time must not
bend the rest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autopar.measure import CollectiveTime, KernelTime, Measurements
from autopar.measuring_process import BLOCK_BACKWARD_KERNELS, BLOCK_FORWARD_KERNELS
from cost_models import collective, compute
from cost_models.machine import Cluster, Device, Link

OUTLIER = 0.2
FIT_SWEEPS = 4
TILES = (1, 2, 4, 8, 16, 32)
NAME = "cpu-measured"
Parameters = Mapping[str, float]


def fit_device(measured: Measurements, memory_bytes: int, source: str) -> Device:
    """The device of one measured process, with `memory_bytes` of memory in all.

    The launch is what one kernel of a tiny transformer block costs, mean of forward and backward. Bandwidth and peaks
    are the fastest that was seen (bandwidth: outside the caches); efficiencies and ramps are fitted. Only times above
    twice the launch are used: below it, they tell how much cheaper than the mean that kernel's launch is.
    """
    launch = launch_seconds(measured)
    streamed = max(k.work.num_bytes for k in measured.kernels if k.work.kind == "memory") / 4
    by_kind = {
        kind: [k for k in measured.kernels if k.work.kind == kind and k.seconds > 2 * launch]
        or [max((k for k in measured.kernels if k.work.kind == kind), key=lambda k: k.seconds)]
        for kind in ("matmul", "memory", "attention")
    }
    plain = [k for k in by_kind["matmul"] if k.work.dtype == "fp32"]
    start = Device(
        name=NAME,
        memory_bytes=memory_bytes,
        memory_bytes_per_second=max(
            k.work.num_bytes / k.seconds for k in by_kind["memory"] if k.work.num_bytes >= streamed
        ),
        peak_flops_per_second={"fp32": max(k.work.flops / k.seconds for k in plain)},
        kernel_launch_seconds=launch,
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        attention_efficiency=1.0,
        reserved_bytes=measured.process_bytes,
        source=source,
    )
    device = _fit_roof(start, by_kind["memory"], "memory_efficiency", "memory_ramp_seconds")
    tiled = [
        _fit_roof(replace(device, matmul_tile=tile), plain, "matmul_efficiency", "matmul_ramp_seconds")
        for tile in TILES
    ]
    device = min(tiled, key=lambda device: _kernel_error(plain, device))
    others = {k.work.dtype: _peak(k, device) for k in by_kind["matmul"] if k.work.dtype != "fp32"}
    device = replace(device, peak_flops_per_second={**device.peak_flops_per_second, **others})
    return _fit_roof(device, by_kind["attention"], "attention_efficiency")


def launch_seconds(measured: Measurements) -> float:
    """Fixed cost of a kernel as the cost model counts them: as many forward as backward ones for elementwise kernels
    and attention, twice as many backward for matmuls, so about 10 to 14."""
    forward, backward = BLOCK_FORWARD_KERNELS, BLOCK_BACKWARD_KERNELS
    total = forward * measured.forward_seconds + backward * measured.backward_seconds
    return total / (forward + backward)


def fit_link(measured: Measurements, device: Device, source: str) -> Link:
    """The link between the measured processes, each a `device`.

    Startup, latency and rate are of all kinds together, and each kind has its own factors: gloo's algorithms are not
    the ones that the formulas describe.

    Raises ValueError if no collective was measured (a single process).
    """
    times = measured.collectives
    if not times:
        raise ValueError("a link cannot be fitted without measured collectives")
    rate = max(collective.wire_bytes(t.kind, t.num_bytes, t.group_size) / t.seconds for t in times)
    smallest = min(time.seconds for time in times)
    link = Link("gloo-measured", bytes_per_second=rate, latency_seconds=smallest / 2, source=source)
    link = replace(link, startup_seconds=smallest / 2)
    for _ in range(FIT_SWEEPS):
        link = _fit_all_kinds(_joined(device, link, measured), times)
        for kind in dict.fromkeys(time.kind for time in times):
            link = _fit_kind(_joined(device, link, measured), kind, [time for time in times if time.kind == kind])
    return link


def _fit_all_kinds(cluster: Cluster, times: Sequence[CollectiveTime]) -> Link:
    """The cluster's link with rate, latency and startup fitted to all times, the factors being as they are.

    The search moves the sum of latency and startup and its division: groups of few sizes hardly tell them apart.
    """
    link = cluster.intra_node

    def fitted(parameters: Parameters) -> Link:
        fixed, hops = parameters["fixed"], parameters["hops"]
        return replace(
            link,
            bytes_per_second=parameters["rate"],
            latency_seconds=fixed * hops,
            startup_seconds=fixed * (1 - hops),
        )

    def error(parameters: Parameters) -> float:
        if parameters["hops"] > 1.0:
            return math.inf
        return _collective_error(times, replace(cluster, intra_node=fitted(parameters)))

    fixed = link.latency_seconds + link.startup_seconds
    start = {"rate": link.bytes_per_second, "fixed": fixed, "hops": link.latency_seconds / fixed}
    return fitted(_descend(error, start))


def _joined(device: Device, link: Link, measured: Measurements) -> Cluster:
    return Cluster(device, 1, measured.num_processes, link, link)


def _fit_kind(cluster: Cluster, kind: collective.Kind, times: Sequence[CollectiveTime]) -> Link:
    """The cluster's link with the factors of one kind fitted to its times."""
    link = cluster.intra_node

    def fitted(factors: Parameters) -> Link:
        return replace(
            link,
            latency_factors={**link.latency_factors, kind: factors["latency"]},
            rate_factors={**link.rate_factors, kind: factors["rate"]},
        )

    def error(factors: Parameters) -> float:
        return _collective_error(times, replace(cluster, intra_node=fitted(factors)))

    start = {"latency": link.latency_factors.get(kind, 1.0), "rate": link.rate_factors.get(kind, 1.0)}
    return fitted(_descend(error, start))


def _fit_roof(device: Device, kernels: Sequence[KernelTime], efficiency: str, ramp: str = "") -> Device:
    """The device with one efficiency, of at most 1, and its ramp (if any) fitted to the kernels."""

    def fitted(parameters: Parameters) -> Device:
        return replace(device, **parameters)  # type: ignore[arg-type]

    def error(parameters: Parameters) -> float:
        return _kernel_error(kernels, fitted(parameters)) if parameters[efficiency] <= 1.0 else math.inf

    return fitted(_descend(error, {efficiency: 0.7, **({ramp: 1e-6} if ramp else {})}))


def _peak(kernel: KernelTime, device: Device) -> float:
    """The peak rate that makes the kernel take as long as it did."""
    plain = replace(kernel.work, dtype="fp32")
    seconds = compute.seconds(plain, device) - device.kernel_launch_seconds
    return device.peak("fp32") * seconds / (kernel.seconds - device.kernel_launch_seconds)


def _kernel_error(kernels: Sequence[KernelTime], device: Device) -> float:
    return statistics.fmean(_distance(compute.seconds(k.work, device), k.seconds) for k in kernels)


def _collective_error(times: Sequence[CollectiveTime], cluster: Cluster) -> float:
    return statistics.fmean(_distance(predicted_seconds(time, cluster), time.seconds) for time in times)


def _distance(predicted: float, seconds: float) -> float:
    """The smooth form of Huber's loss, of log(predicted / seconds)."""
    return math.hypot(1.0, math.log(predicted / seconds) / OUTLIER) - 1.0


def predicted_seconds(time: CollectiveTime, cluster: Cluster) -> float:
    """What the cost model says that this collective takes on the cluster."""
    return collective.seconds(time.kind, time.num_bytes, collective.Group(time.group_size, 1), cluster)


def _descend(error: Callable[[Parameters], float], start: Parameters) -> dict[str, float]:
    """Coordinate descent over the logarithms of positive parameters, halving the step where no move helps.

    R. Hooke, T. Jeeves, "Direct search solution of numerical and statistical problems", JACM 8 (1961).
    """
    best, lowest, factor = dict(start), error(start), 4.0
    while factor > 1.005:
        improved = False
        for name in best:
            for step in (factor, 1 / factor):
                candidate = {**best, name: best[name] * step}
                if (value := error(candidate)) < lowest - 1e-9:
                    best, lowest, improved = candidate, value, True
        if not improved:
            factor = math.sqrt(factor)
    # More digits than were measured would only make the saved file hard to read.
    return {name: float(f"{value:.3g}") for name, value in best.items()}
