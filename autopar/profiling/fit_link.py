"""Fits links to measured collectives, with the functions that will price them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from autopar.profiling.fit import Parameters, descend, distance
from autopar.profiling.samples import CollectiveTime
from cost_models import collective, nccl
from cost_models.collective import Kind
from cost_models.machine import Cluster, Link

SWEEPS = 4
MOST_HIDDEN = 0.9
"""The largest hidden share that measurements of some milliseconds can show."""
Place = Literal["intra_node", "inter_node"]


def fit_links(cluster: Cluster, times: Sequence[CollectiveTime], source: str) -> Cluster:
    """Return the cluster with fitted links: inside a node by the groups within one, between nodes by the other groups.

    Links without measured groups stay. A cluster of one node has its only link in both places.
    """
    inside = [time for time in times if time.group_size * time.stride <= cluster.devices_per_node]
    across = [time for time in times if time.group_size * time.stride > cluster.devices_per_node]
    if inside:
        cluster = fit_link(cluster, "intra_node", inside, source)
    if across:
        return fit_link(cluster, "inter_node", across, source)
    return replace(cluster, inter_node=cluster.intra_node) if cluster.num_nodes == 1 else cluster


def fit_link(cluster: Cluster, place: Place, times: Sequence[CollectiveTime], source: str) -> Cluster:
    """Return the cluster with one fitted link.

    All kinds share rate, latency and startup. If the library is not NCCL, each kind also has factors of its own, as the
    formulas do not describe gloo's algorithms. They do describe NCCL's: there the link keeps its name, which identifies
    it, and its nominal rate, with a fitted efficiency unless that would exceed 1.

    Raises ValueError if there are no times (a single process).
    """
    if not times:
        raise ValueError("a link cannot be fitted without measured collectives")
    usual: Link = getattr(cluster, place)
    if nccl.drives(usual):
        return placed(cluster, place, _fit_all_kinds(cluster, place, replace(usual, source=source), times))
    rate = max(collective.wire_bytes(t.kind, t.num_bytes, t.group_size) / t.seconds for t in times)
    smallest = min(time.seconds for time in times)
    link = Link("gloo-measured", bytes_per_second=rate, latency_seconds=smallest / 2, source=source)
    link = replace(link, startup_seconds=smallest / 2, shared_by_node=usual.shared_by_node)
    for _ in range(SWEEPS):
        link = _fit_all_kinds(cluster, place, link, times)
        for kind in dict.fromkeys(time.kind for time in times):
            link = _fit_kind(cluster, place, link, kind, [time for time in times if time.kind == kind])
    return placed(cluster, place, link)


def hidden_share(overlaps: Sequence[CollectiveTime], times: Sequence[CollectiveTime]) -> float:
    """Return the median share of a collective that overlaps with compute; 0 without data."""
    alone = {(t.kind, t.num_bytes, t.group_size, t.stride): t.seconds for t in times}
    keys = [(t.kind, t.num_bytes, t.group_size, t.stride) for t in overlaps]
    shares = [1 - t.seconds / alone[key] for t, key in zip(overlaps, keys, strict=True) if key in alone]
    return min(max(statistics.median(shares), 0.0), MOST_HIDDEN) if shares else 0.0


def placed(cluster: Cluster, place: Place, link: Link) -> Cluster:
    """Return the cluster with a link in one place. A single node has it in both places, as no other link leaves it."""
    if place == "intra_node" and cluster.num_nodes == 1:
        return replace(cluster, intra_node=link, inter_node=link)
    return replace(cluster, intra_node=link) if place == "intra_node" else replace(cluster, inter_node=link)


def _fit_all_kinds(cluster: Cluster, place: Place, link: Link, times: Sequence[CollectiveTime]) -> Link:
    """Return the link with rate, latency and startup fitted to all times; the factors stay.

    The search moves the sum of latency and startup and their ratio, as few group sizes hardly tell them apart.
    """

    def fitted(parameters: Parameters) -> Link:
        fixed, hops, rate = parameters["fixed"], parameters["hops"], parameters["rate"]
        is_below = rate <= link.bytes_per_second and nccl.drives(link)
        return replace(
            link,
            bytes_per_second=link.bytes_per_second if is_below else rate,
            efficiency=rate / link.bytes_per_second if is_below else 1.0,
            latency_seconds=fixed * hops,
            startup_seconds=fixed * (1 - hops),
        )

    def error(parameters: Parameters) -> float:
        if parameters["hops"] > 1.0:
            return math.inf
        return _error(times, placed(cluster, place, fitted(parameters)))

    fixed = link.latency_seconds + link.startup_seconds
    start = {"rate": link.achievable_bytes_per_second, "fixed": fixed, "hops": link.latency_seconds / fixed}
    return fitted(descend(error, start))


def _fit_kind(cluster: Cluster, place: Place, link: Link, kind: Kind, times: Sequence[CollectiveTime]) -> Link:
    """Return the link with the factors of one kind fitted to its times."""

    def fitted(factors: Parameters) -> Link:
        return replace(
            link,
            latency_factors={**link.latency_factors, kind: factors["latency"]},
            rate_factors={**link.rate_factors, kind: factors["rate"]},
        )

    def error(factors: Parameters) -> float:
        return _error(times, placed(cluster, place, fitted(factors)))

    start = {"latency": link.latency_factors.get(kind, 1.0), "rate": link.rate_factors.get(kind, 1.0)}
    return fitted(descend(error, start))


def _error(times: Sequence[CollectiveTime], cluster: Cluster) -> float:
    return statistics.fmean(distance(predicted_seconds(time, cluster), time.seconds) for time in times)


def predicted_seconds(time: CollectiveTime, cluster: Cluster) -> float:
    """Return the cost model's prediction for this collective on the cluster."""
    group = collective.Group(time.group_size, time.stride)
    return collective.seconds(time.kind, time.num_bytes, group, cluster)


def collective_errors(times: Sequence[CollectiveTime], cluster: Cluster) -> dict[str, list[float]]:
    """Return predicted / measured - 1 of every collective, by kind."""
    errors: dict[str, list[float]] = {}
    for time in times:
        errors.setdefault(time.kind, []).append(predicted_seconds(time, cluster) / time.seconds - 1)
    return errors
