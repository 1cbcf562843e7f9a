"""Conditions that are changed to see what binds: the request with more of one thing and all else equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.price import is_cpu
from autopar.request import Request
from cost_models.hardware import Device, Link
from cost_models.machine import Cluster

MORE_MEMORY = ((1.1, "10 % more"), (1.25, "25 % more"), (2.0, "twice the"))


@dataclass(frozen=True, slots=True)
class Condition:
    """resource: what there is more of. is_comparable: whether a step does the same work on as many devices, so that
    step times tell what binds. has_same_prices: whether a device and its links are as before."""

    resource: str
    words: str
    request: Request
    is_comparable: bool = True
    has_same_prices: bool = True


def conditions(request: Request) -> Iterator[Condition]:
    """Changed requests, those that tell most first."""
    cluster = request.cluster
    device = cluster.device
    capacity = request.constraints.memory_bytes or device.memory_bytes
    yield _on(request, "compute", "twice the arithmetic rate", replace(cluster, device=faster_compute(device)))
    fast_memory = replace(device, memory_bytes_per_second=2 * device.memory_bytes_per_second)
    yield _on(request, "memory bandwidth", "twice the device's memory bandwidth", replace(cluster, device=fast_memory))
    if cluster.devices_per_node > 1:
        where = "between processes" if is_cpu(cluster) else "inside a node"
        link = faster_link(cluster.intra_node)
        yield _on(request, f"bandwidth {where}", f"twice the bandwidth {where}", replace(cluster, intra_node=link))
    if cluster.num_nodes > 1:
        wider = replace(cluster, inter_node=faster_link(cluster.inter_node))
        yield _on(request, "bandwidth between nodes", "twice the bandwidth between nodes", wider)
    yield _on(request, "latency", "half the time of starting kernels and messages", prompter(cluster))
    for factor, words in reversed(MORE_MEMORY):
        limits = replace(request.constraints, memory_bytes=int(capacity * factor))
        yield Condition("memory", f"{words} memory", replace(request, constraints=limits))
    larger = replace(request, global_batch_size=2 * request.global_batch_size)
    yield Condition("batch", "twice the batch", larger, is_comparable=False)
    nodes = replace(cluster, num_nodes=2 * cluster.num_nodes)
    yield replace(_on(request, "devices", f"twice the devices ({nodes})", nodes), is_comparable=False)


def faster_compute(device: Device, factor: float = 2.0) -> Device:
    """The device with `factor` times the peak of every dtype."""
    peaks = {dtype: factor * peak for dtype, peak in device.peak_flops_per_second.items()}
    return replace(device, peak_flops_per_second=peaks)


def faster_link(link: Link, factor: float = 2.0) -> Link:
    """The link with `factor` times the bandwidth."""
    return replace(link, bytes_per_second=factor * link.bytes_per_second)


def prompter(cluster: Cluster, factor: float = 2.0) -> Cluster:
    """The cluster with a `factor`-th of all fixed times: of kernels, messages and collectives."""

    def prompt(link: Link) -> Link:
        startup = link.startup_seconds / factor
        return replace(link, latency_seconds=link.latency_seconds / factor, startup_seconds=startup)

    launch = cluster.device.kernel_launch_seconds / factor
    device = replace(cluster.device, kernel_launch_seconds=launch)
    return replace(cluster, device=device, intra_node=prompt(cluster.intra_node), inter_node=prompt(cluster.inter_node))


def _on(request: Request, resource: str, words: str, cluster: Cluster) -> Condition:
    return Condition(resource, words, replace(request, cluster=cluster), has_same_prices=False)
