"""Every parallel config over equal nodes that is searched, in which the meshes of all pipeline ranks are alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from autopar.costs.rates import is_cpu
from autopar.errors import ConstraintError
from autopar.ir.mesh import Mesh
from autopar.ir.stage_mesh import StageMesh
from autopar.options.strategies import num_experts
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.request import Request, divisors
from autopar.planning.solved_layers import MULTIPLIERS, named_mesh
from cost_models.machine import Cluster

GROUP_NODES = (1, 2, 4)
"""ZeRO groups smaller than the data axis fill as many nodes."""

EXPERT_NODES = (1, 2, 4, 8)
"""Nodes over which experts are shared out, on more than FEW_DEVICES devices."""

FEW_DEVICES = 8

TP_NODES = 2
"""Tensor parallelism is searched up to this many nodes; a pinned degree may be any."""


def equal_configs(request: Request, num_units: int) -> Iterator[ParallelConfig]:
    """All that agree with the pinned degrees, the batch and the number of units. Schedules are left open."""
    limits = request.constraints
    legal = shapes(request, num_units)
    rows_of_rank = sorted({request.global_batch_size // dp for _, dp, _ in legal})
    if limits.micro_batches and all(rows % limits.micro_batches for rows in rows_of_rank):
        raise ConstraintError(
            "micro_batches does not divide the batch of one data-parallel rank",
            values=f"{limits.micro_batches} for {', '.join(map(str, rows_of_rank))} rows",
            alternatives=", ".join(map(str, divisors(rows_of_rank[-1]))),
        )
    for pp, dp, tp in legal:
        counts = micro_batch_counts(request.global_batch_size // dp, limits.micro_batches)
        for count in filter(request.splits, counts):
            rows = request.global_batch_size // count
            for zero in zero_stages(request, dp, count):
                for multiplier in MULTIPLIERS:
                    for offload in offloads(request, zero):
                        for mesh in meshes_of(request, dp, tp, zero):
                            yield ParallelConfig(
                                stage_meshes=(StageMesh(mesh),),
                                pipeline_ranks=(pp,),
                                rows=rows,
                                num_micro_batches=count,
                                zero=zero,
                                multiplier=multiplier,
                                offload=offload,
                            )


def zero_stages(request: Request, num_data_ranks: int, count: int) -> tuple[int, ...]:
    """The stages that differ with `count` micro-batches; stage 1 is stage 2 where gradients are not summed."""
    if num_data_ranks == 1:
        return (0,)
    pinned = request.constraints.zero
    if pinned is not None:
        return (pinned,)
    return (0, 2, 3) if count == 1 else (0, 1, 2, 3)


def meshes_of(request: Request, dp: int, tp: int, zero: int) -> Iterator[Mesh]:
    """How `dp` data-parallel and `tp` tensor-parallel ranks may lie on the nodes of a stage mesh.

    ZeRO groups may be smaller than the data axis (ddp x dp): as large as what of one node, or of a few, tp leaves. Its
    gradients are then scattered within a group, summed between groups, and its parameters gathered within a group.
    Neighbours of a group may have different experts, unless there are several groups, which are pinned then.
    tp joins neighbours, unless the links between nodes are faster than those inside.
    """
    cluster, pinned = request.cluster, request.constraints.degrees.get("ddp")
    groups = [pinned] if pinned is not None else [1]
    if pinned is None and zero and "dp" not in request.constraints.degrees:
        ranks = [cluster.devices_per_node * nodes // tp for nodes in GROUP_NODES]
        groups += [dp // size for size in ranks if 1 < size < dp and dp % size == 0]
    is_inverted = inter_node_rate(cluster) > cluster.intra_node.achievable_bytes_per_second
    spans_nodes = dp * tp > cluster.devices_per_node > 1
    degrees = [
        (ddp, ep)
        for ddp in dict.fromkeys(groups)
        if dp % ddp == 0
        for ep in expert_degrees(request, dp // ddp, tp)
        if ddp == 1 or ep == 1 or pinned is not None
    ]
    for ddp, ep in degrees:
        yield named_mesh(dp // ddp // ep, tp, ddp, ep)
        if is_inverted and spans_nodes and 1 < tp < dp * tp:
            yield named_mesh(dp // ddp // ep, tp, ddp, ep, tp_first=True)


def expert_degrees(request: Request, dp: int, tp: int) -> list[int]:
    """Over how many of `dp` ranks experts may be shared out: what divides both, or what is pinned. On many devices
    these are as many as fill, with tp, whole nodes."""
    pinned, experts = request.constraints.degrees.get("ep"), num_experts(request.trace(request.global_batch_size))
    degrees = divisors(math.gcd(dp, experts) if experts else 1)
    if pinned is not None:
        return [ep for ep in degrees if ep == pinned]
    cluster = request.cluster
    whole = {cluster.devices_per_node * nodes // tp for nodes in EXPERT_NODES}
    return [ep for ep in degrees if ep == 1 or ep in whole or cluster.num_devices <= FEW_DEVICES]


def inter_node_rate(cluster: Cluster) -> float:
    """Bytes per second of one device over the links between nodes."""
    link = cluster.inter_node
    return link.achievable_bytes_per_second / (cluster.devices_per_node if link.shared_by_node else 1)


def offloads(request: Request, zero: int) -> tuple[str, ...]:
    """What may live in host memory: parameters only in shards. A rank on a CPU has no memory but its host's."""
    pinned = request.constraints.offload
    if pinned == "parameters" and zero != 3:
        return ()
    if pinned is not None:
        return (pinned,)
    if is_cpu(request.cluster):
        return ("",)
    return ("", "optimizer", "parameters") if zero == 3 else ("", "optimizer")


def shapes(request: Request, num_units: int, most_tp: int | None = None) -> list[tuple[int, int, int]]:
    """(pipeline ranks, dp, tp) whose product is the cluster. most_tp: unless it is pinned, by default that of TP_NODES.

    Raises ConstraintError where pinned degrees leave none.
    """
    devices, degrees = request.cluster.num_devices, request.constraints.degrees
    if degrees.get("pp", 1) > num_units:
        raise ConstraintError(
            "a pipeline of more ranks than the model has blocks",
            values=f"pp={degrees['pp']}, {num_units} block" + "s" * (num_units > 1),
            alternatives=f"a pp that divides {devices} devices: "
            + ", ".join(str(pp) for pp in divisors(devices) if pp <= num_units),
        )
    most = most_tp or TP_NODES * request.cluster.devices_per_node
    found = [
        (pp, devices // pp // tp, tp)
        for pp in divisors(devices)
        if pp <= num_units
        for tp in divisors(devices // pp)
        if tp <= most or tp == degrees.get("tp")
    ]
    wanted = [s for s in found if _agrees(degrees, s) and expert_degrees(request, s[1] // degrees.get("ddp", 1), s[2])]
    if not wanted:
        pinned = " x ".join(f"{a}={n}" for a, n in degrees.items())
        agreeing = [s for s in found if any(degrees.get(a) == n for a, n in zip(("pp", "dp", "tp"), s, strict=True))]
        raise ConstraintError(
            "the pinned degrees do not make the cluster's number of devices",
            values=f"{pinned} for {devices} devices",
            alternatives=[_text(shape) for shape in (agreeing or found)[:8]],
        )
    legal = [s for s in wanted if request.global_batch_size % s[1] == 0]
    if not legal:
        raise ConstraintError(
            "no mesh divides the global batch",
            values=f"batch {request.global_batch_size} on " + ", ".join(f"dp{dp} x tp{tp}" for _, dp, tp in wanted),
            alternatives=f"a batch that is a multiple of {min(dp for _, dp, _ in wanted)}",
        )
    return legal


def _agrees(degrees: Mapping[str, int], shape: tuple[int, int, int]) -> bool:
    """Whether (pipeline ranks, data ranks, tp) has the pinned degrees."""
    pp, data, tp = shape
    ddp, dp = degrees.get("ddp", 1), degrees.get("dp")
    is_data = data % ddp == 0 if dp is None else data == ddp * dp
    return degrees.get("pp", pp) == pp and degrees.get("tp", tp) == tp and is_data


def _text(shape: tuple[int, int, int]) -> str:
    pp, dp, tp = shape
    return (f"pp={pp} x " if pp > 1 else "") + f"dp={dp} x tp={tp}"


def micro_batch_counts(rows: int, pinned: int | None) -> list[int]:
    """Counts that cut the rows of one data-parallel rank into equal micro-batches, one of the two a power of two."""
    if pinned is not None:
        return [pinned] if rows % pinned == 0 else []
    return [count for count in divisors(rows) if _is_power(count) or _is_power(rows // count)]


def _is_power(number: int) -> bool:
    return math.log2(number).is_integer()
