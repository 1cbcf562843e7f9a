"""Fits a Device to measured kernels, with the functions that will price them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.costs import host
from autopar.profiling import blocks
from autopar.profiling.fit import Parameters, descend, distance
from autopar.profiling.samples import KernelTime, Measurements
from cost_models import compute
from cost_models.machine import Device
from cost_models.straggler import slowed

NAME = "cpu-measured"
TILES = (1, 2, 4, 8, 16, 32)
RATES: Mapping[str, str] = {
    "copy to device": "host_link_bytes_per_second",
    "host update": "host_memory_bytes_per_second",
    "disk read": "disk_bytes_per_second",
}


def fit_device(measured: Measurements, memory_bytes: int, source: str, base: Device | None = None) -> Device:
    """Return the device of one measured process, with `memory_bytes` of memory in all.

    base: of a GPU, whose nominal figures and tile stay. Efficiencies, ramps, launch and copy rates are fitted, and the
    peaks of further dtypes are the measured ones. Without base (a CPU), peaks and bandwidth are the fastest measured.
    Only times above twice the launch are used: shorter ones show only how much that kernel's launch differs from the
    mean.
    """
    launch = launch_seconds(measured, base)
    by_kind = {kind: _large(measured.kernels, kind, launch) for kind in ("matmul", "memory", "attention")}
    first = "fp32" if base is None else statistics.mode(kernel.work.dtype for kernel in by_kind["matmul"])
    plain = [k for k in by_kind["matmul"] if k.work.dtype == first]
    device = base or _of_cpu(measured, plain, by_kind["memory"], memory_bytes)
    device = replace(device, memory_bytes=memory_bytes, kernel_launch_seconds=launch, source=source, **_rates(measured))
    device = _fit_memory(device, by_kind["memory"])
    tiles = TILES if base is None else (device.matmul_tile,)
    # Where the model has processors, a matmul loses only its output's writing besides tiles and waves.
    loss = "output_exposed" if device.num_processors else "matmul_ramp_seconds"
    tiled = [_fit_roof(replace(device, matmul_tile=tile), plain, "matmul_efficiency", loss) for tile in tiles]
    device = min(tiled, key=lambda device: _kernel_error(plain, device))
    for dtype in sorted({k.work.dtype for k in by_kind["matmul"]} - {first}):
        of_dtype = [k for k in by_kind["matmul"] if k.work.dtype == dtype]
        peaks = {dtype: device.peak(first), **device.peak_flops_per_second}
        device = replace(device, peak_flops_per_second=peaks)
        reached = statistics.median(_peak(k, device) for k in of_dtype)
        device = replace(device, peak_flops_per_second={**peaks, dtype: reached})
    usual = device.attention_efficiency
    device = _fit_roof(device, by_kind["attention"], "attention_efficiency")
    # Named kernels are off by the same factor as the kernel that torch chose.
    factor = device.attention_efficiency / usual
    variants = {name: min(rate * factor, 1.0) for name, rate in device.attention_variants.items()}
    device = replace(device, attention_variants=variants)
    return slowed(device, _loss_in_blocks(measured, device)) if measured.blocks else device


def launch_seconds(measured: Measurements, base: Device | None = None) -> float:
    """Return the fixed cost of a kernel in seconds.

    On a CPU the cost model counts as many forward as backward kernels for elementwise operators and attention, and
    twice as many backward for matmuls, so about 10 to 14. On a GPU, where the host runs ahead, it is the nominal
    figure, but at most the time of the shortest kernel: kernel times cannot tell it from the ramps, which are fitted.
    """
    if base is not None:
        return min(base.kernel_launch_seconds, *(kernel.seconds for kernel in measured.kernels))
    forward, backward = blocks.FORWARD_KERNELS, blocks.BACKWARD_KERNELS
    total = forward * measured.forward_seconds + backward * measured.backward_seconds
    return total / (forward + backward + 2 * blocks.VIEWS * host.VIEW)


def _loss_in_blocks(measured: Measurements, device: Device) -> float:
    """Return the median ratio of the kernels' time in whole blocks to their time one by one, without launches."""
    factors = []
    for block in measured.blocks:
        launches = device.kernel_launch_seconds * len(block.works)
        alone = sum(compute.seconds(work, device) for work in block.works)
        views = 2 * blocks.VIEWS * host.VIEW * device.kernel_launch_seconds
        factors.append((block.seconds - launches - views) / (alone - launches))
    return statistics.median(factors)


def kernel_errors(measured: Measurements, device: Device) -> dict[str, list[float]]:
    """Return predicted / measured - 1 of every kernel by kind, without those hardly longer than a launch."""
    errors: dict[str, list[float]] = {}
    for kernel in measured.kernels:
        if kernel.seconds > 2 * device.kernel_launch_seconds:
            error = compute.seconds(kernel.work, device) / kernel.seconds - 1
            errors.setdefault(kernel.work.kind, []).append(error)
    return errors


def _of_cpu(
    measured: Measurements, plain: Sequence[KernelTime], memory: Sequence[KernelTime], memory_bytes: int
) -> Device:
    """Return the CPU with the fastest measured rates as its peaks (bandwidth: outside the caches, and of the last
    level)."""
    streamed = max(k.work.num_bytes for k in measured.kernels if k.work.kind == "memory") / 4
    rates = {k.work.num_bytes: k.work.num_bytes / k.seconds for k in memory if not k.work.specials}
    rate = max(rate for size, rate in rates.items() if size >= streamed)
    in_cache = {size: cached_rate for size, cached_rate in rates.items() if size < streamed and cached_rate > rate}
    # The border lies between the largest fast and the smallest slow size.
    border = math.sqrt(max(in_cache) * min(size for size in rates if size >= streamed)) if in_cache else 0.0
    return Device(
        name=NAME,
        memory_bytes=memory_bytes,
        memory_bytes_per_second=rate,
        cache_bytes=round(border),
        cache_bytes_per_second=max(in_cache.values(), default=0.0),
        peak_flops_per_second={"fp32": max(k.work.flops / k.seconds for k in plain)},
        kernel_launch_seconds=0.0,
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        attention_efficiency=1.0,
        core_share=min(1.0, measured.num_cores / measured.topology.devices_per_node),
        reserved_bytes=measured.process_bytes,
        source="",
    )


def _large(kernels: Sequence[KernelTime], kind: str, launch: float) -> list[KernelTime]:
    """Return the kernels of a kind that take well over `launch` seconds, or the longest if none does."""
    of_kind = [kernel for kernel in kernels if kernel.work.kind == kind]
    return [k for k in of_kind if k.seconds > 2 * launch] or [max(of_kind, key=lambda kernel: kernel.seconds)]


def _rates(measured: Measurements) -> dict[str, Any]:
    """Return copy rates of the slower direction, and file rates likewise."""
    rates = dict(measured.rates)
    for transfer, reverse in (("copy to device", "copy to host"), ("disk read", "disk write")):
        if transfer in rates and reverse in rates:
            rates[transfer] = min(rates[transfer], rates[reverse])
    return {field: float(f"{rates[name]:.3g}") for name, field in RATES.items() if name in rates}


def _fit_roof(device: Device, kernels: Sequence[KernelTime], efficiency: str, ramp: str = "") -> Device:
    """Return the device with one efficiency, at most 1, and its ramp (if any) fitted to the kernels."""

    def fitted(parameters: Parameters) -> Device:
        return replace(device, **parameters)  # type: ignore[arg-type]

    def error(parameters: Parameters) -> float:
        return _kernel_error(kernels, fitted(parameters)) if parameters[efficiency] <= 1.0 else math.inf

    # Start at nominal figures, if any: efficiency and ramp trade off along a valley.
    start = {name: getattr(device, name) for name in (efficiency, ramp) if name}
    usual = {efficiency: 0.7, ramp: 1e-6}
    return fitted(descend(error, {name: value if 0 < value < 1 else usual[name] for name, value in start.items()}))


def _fit_memory(device: Device, kernels: Sequence[KernelTime]) -> Device:
    """Fit the roof of memory-bound kernels; on a CPU of additions alone, plus the time of a special function."""
    if not device.is_cpu:
        return _fit_roof(device, kernels, "memory_efficiency", "memory_ramp_seconds")
    plain = [kernel for kernel in kernels if not kernel.work.specials]
    device = _fit_roof(device, plain, "memory_efficiency", "memory_ramp_seconds")
    launch = device.kernel_launch_seconds
    rates = [(k.seconds - launch) / k.work.specials for k in kernels if k.work.specials and k.seconds > 2 * launch]
    return replace(device, special_seconds=float(f"{statistics.median(rates):.3g}") if rates else 0.0)


def _peak(kernel: KernelTime, device: Device) -> float:
    """Return the peak rate that predicts the kernel's measured time, both without the launch."""
    at_peak = compute.seconds(kernel.work, device) - device.kernel_launch_seconds
    measured = max(kernel.seconds - device.kernel_launch_seconds, 0.1 * kernel.seconds)
    return device.peak(kernel.work.dtype) * at_peak / measured


def _kernel_error(kernels: Sequence[KernelTime], device: Device) -> float:
    return statistics.fmean(distance(compute.seconds(k.work, device), k.seconds) for k in kernels)
