"""Changed conditions that show the bottleneck of a plan: the request with more of one resource, and everything else
equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autopar.costs.rates import is_cpu
from autopar.planning.request import Request
from cost_models.hardware import Device, Link
from cost_models.machine import Cluster

MORE_MEMORY = ((1.1, "10% more"), (1.25, "25% more"), (2.0, "twice the"))


@dataclass(frozen=True, slots=True)
class Condition:
    """A changed request. resource: the resource with more of it. is_comparable: whether as many devices do the same
    work, as step times show a bottleneck only then. has_same_prices: whether devices and links are unchanged."""

    resource: str
    words: str
    request: Request
    is_comparable: bool = True
    has_same_prices: bool = True


def conditions(request: Request) -> Iterator[Condition]:
    """Yield the changed requests, the most informative first."""
    groups = request.whole.groups
    yield _on(request, "compute", "twice the arithmetic rate", _device(faster_compute))
    yield _on(request, "memory bandwidth", "twice the device's memory bandwidth", _device(faster_memory))
    if any(group.devices_per_node > 1 for group in groups):
        place = "between processes" if is_cpu(groups[0]) else "inside a node"
        yield _on(
            request,
            f"bandwidth {place}",
            f"twice the bandwidth {place}",
            lambda group: replace(group, intra_node=faster_link(group.intra_node)),
        )
    if any(group.num_nodes > 1 for group in groups):
        yield _on(
            request,
            "bandwidth between nodes",
            "twice the bandwidth between nodes",
            lambda group: replace(group, inter_node=faster_link(group.inter_node)),
        )
    if request.mixed is not None:
        joined = replace(request.mixed, between=faster_link(request.mixed.between))
        words = "twice the bandwidth between the groups of nodes"
        wider = replace(request, mixed=joined)
        yield Condition("bandwidth between the groups of nodes", words, wider, has_same_prices=False)
    yield _on(request, "latency", "half the latency of kernels and messages", lower_latency)
    for factor, words in reversed(MORE_MEMORY):
        yield Condition("memory", f"{words} memory", with_more_memory(request, factor))
    larger = replace(request, global_batch_size=2 * request.global_batch_size)
    yield Condition("batch", "twice the batch", larger, is_comparable=False)
    more = _changed(request, lambda group: replace(group, num_nodes=2 * group.num_nodes))
    words = f"twice the devices ({more.whole})"
    yield Condition("devices", words, more, is_comparable=False, has_same_prices=False)


def _device(change: Callable[[Device], Device]) -> Callable[[Cluster], Cluster]:
    """Return a change of a cluster's device."""
    return lambda cluster: replace(cluster, device=change(cluster.device))


def with_more_memory(request: Request, factor: float) -> Request:
    """Return the request with `factor` times the memory of every rank."""
    limits = request.constraints
    if request.mixed is not None and limits.memory_bytes is None:
        return _changed(request, lambda group: group.with_memory(int(group.device.memory_bytes * factor)))
    return replace(request, constraints=replace(limits, memory_bytes=int(request.capacity_bytes() * factor)))


def faster_memory(device: Device, factor: float = 2.0) -> Device:
    """Return the device with `factor` times its memory bandwidth."""
    return replace(device, memory_bytes_per_second=factor * device.memory_bytes_per_second)


def faster_compute(device: Device, factor: float = 2.0) -> Device:
    """Return the device with `factor` times the peak of every dtype."""
    peaks = {dtype: factor * peak for dtype, peak in device.peak_flops_per_second.items()}
    return replace(device, peak_flops_per_second=peaks)


def faster_link(link: Link, factor: float = 2.0) -> Link:
    """Return the link with `factor` times the bandwidth."""
    return replace(link, bytes_per_second=factor * link.bytes_per_second)


def lower_latency(cluster: Cluster, factor: float = 2.0) -> Cluster:
    """Return the cluster with all fixed times divided by `factor`: of kernels, hosts, messages and collectives."""

    def faster_start(link: Link) -> Link:
        startup = link.startup_seconds / factor
        return replace(link, latency_seconds=link.latency_seconds / factor, startup_seconds=startup)

    launch = cluster.device.kernel_launch_seconds / factor
    issue = cluster.device.host_call_seconds / factor
    device = replace(cluster.device, kernel_launch_seconds=launch, host_call_seconds=issue)
    intra_node, inter_node = faster_start(cluster.intra_node), faster_start(cluster.inter_node)
    return replace(cluster, device=device, intra_node=intra_node, inter_node=inter_node)


def _on(request: Request, resource: str, words: str, change: Callable[[Cluster], Cluster]) -> Condition:
    return Condition(resource, words, _changed(request, change), has_same_prices=False)


def _changed(request: Request, change: Callable[[Cluster], Cluster]) -> Request:
    """Return the request with every group of equal nodes changed."""
    if request.mixed is None:
        return replace(request, cluster=change(request.cluster))
    mixed = request.mixed.map(change)
    return replace(request, cluster=mixed.groups[0], mixed=mixed)
