"""Every searched parallel config over equal nodes, with equal meshes on all pipeline ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from autopar.costs.rates import is_cpu
from autopar.errors import ConstraintError
from autopar.ir.mesh import Mesh
from autopar.ir.stage_mesh import StageMesh
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.request import Request, divisors
from autopar.planning.solved_layers import MULTIPLIERS, named_mesh
from autopar.sharding.call_options import has_context, num_experts, sequence_length
from codegen.axis_records import AXES
from cost_models.machine import Cluster

GROUP_NODES = (1, 2, 4)
"""ZeRO groups smaller than the data axis fill this many nodes."""

EXPERT_NODES = (1, 2, 4, 8)
"""Nodes over which experts are shared out, on more than FEW_DEVICES devices."""

FEW_DEVICES = 8

TP_NODES = 2
"""Tensor parallelism is searched up to this many nodes; a pinned degree may be any."""

GRID_DEVICES = 512
"""On more devices grids of tensor parallelism are not searched: planning would take several times as long."""

MIN_POSITIONS = 8192
"""The least positions of a sequence per rank; fewer with a pinned degree of context parallelism."""


class Shape(NamedTuple):
    """Degrees of a parallel config; dp counts all ranks with different rows."""

    pp: int
    dp: int
    cp: int
    ttp: int
    tp: int

    @property
    def tensor(self) -> int:
        """Return the ranks that share out the work on the same tokens."""
        return self.ttp * self.tp

    def __str__(self) -> str:
        named = self._asdict().items()
        return " x ".join(f"{name}={size}" for name, size in named if size > 1 or AXES[name].is_basic)


def equal_configs(request: Request, num_units: int) -> Iterator[ParallelConfig]:
    """Yield all configs that agree with the pinned degrees, the batch and the number of units. Schedules are left
    open."""
    limits = request.constraints
    legal = shapes(request, num_units)
    rows_of_rank = sorted({request.global_batch_size // shape.dp for shape in legal})
    if limits.micro_batches and all(rows % limits.micro_batches for rows in rows_of_rank):
        raise ConstraintError(
            "micro_batches does not divide the batch of one data-parallel rank",
            values=f"{limits.micro_batches} for {', '.join(map(str, rows_of_rank))} rows",
            alternatives=", ".join(map(str, divisors(rows_of_rank[-1]))),
        )
    for shape in legal:
        counts = micro_batch_counts(request.global_batch_size // shape.dp, limits.micro_batches)
        for count in filter(request.splits, counts):
            rows = request.global_batch_size // count
            if not _rows_are_shared(request, shape, rows // shape.dp):
                continue
            for zero in zero_stages(request, shape.dp * shape.cp, count):
                for multiplier in MULTIPLIERS:
                    for offload in offloads(request, zero):
                        for mesh in meshes_of(request, shape, zero):
                            yield ParallelConfig(
                                stage_meshes=(StageMesh(mesh),),
                                pipeline_ranks=(shape.pp,),
                                rows=rows,
                                num_micro_batches=count,
                                zero=zero,
                                multiplier=multiplier,
                                offload=offload,
                            )


def _rows_are_shared(request: Request, shape: Shape, rows: int) -> bool:
    """Return whether rows are shared out before positions. Positions cost an exchange of keys, so rows come first."""
    degrees = request.constraints.degrees
    return math.gcd(rows, shape.cp) == 1 or "cp" in degrees or "dp" in degrees


def zero_stages(request: Request, num_ranks: int, count: int) -> tuple[int, ...]:
    """Return the stages that differ with `count` micro-batches. Stage 1 equals stage 2 if gradients are not summed.
    num_ranks: the ranks over which ZeRO may shard."""
    if num_ranks == 1:
        return (0,)
    pinned = request.constraints.zero
    if pinned is not None:
        return (pinned,)
    return (0, 2, 3) if count == 1 else (0, 1, 2, 3)


def meshes_of(request: Request, shape: Shape, zero: int) -> Iterator[Mesh]:
    """Yield the layouts of a shape's ranks on the nodes of a stage mesh.

    ZeRO groups may be smaller than the data axis (ddp x dp): as large as one node, or a few, divided by tp.
    Gradients are then scattered within a group and summed between groups, and parameters gathered within a group.
    Neighbors of a group may have different experts, unless there are several groups, which are pinned then. ttp x tp
    joins neighbors, unless the links between nodes are faster than those inside.
    """
    _, dp, cp, ttp, tp = shape
    cluster, pinned = request.cluster, request.constraints.degrees.get("ddp")
    groups = [pinned] if pinned is not None else [1]
    if pinned is None and zero and cp == 1 and "dp" not in request.constraints.degrees:
        ranks = [cluster.devices_per_node * nodes // shape.tensor for nodes in GROUP_NODES]
        groups += [dp // size for size in ranks if 1 < size < dp and dp % size == 0]
    is_inverted = inter_node_rate(cluster) > cluster.intra_node.achievable_bytes_per_second
    spans_nodes = dp * cp * shape.tensor > cluster.devices_per_node > 1
    degrees = [
        (ddp, ep)
        for ddp in dict.fromkeys(groups)
        if dp % ddp == 0
        for ep in expert_degrees(request, dp // ddp, shape.tensor)
        if ddp == 1 or ep == 1 or pinned is not None
    ]
    for ddp, ep in degrees:
        yield named_mesh(dp // ddp // ep, tp, ddp, ep, cp, ttp)
        if is_inverted and spans_nodes and 1 < shape.tensor < dp * cp * shape.tensor:
            yield named_mesh(dp // ddp // ep, tp, ddp, ep, cp, ttp, tp_first=True)


def expert_degrees(request: Request, dp: int, tensor: int) -> list[int]:
    """Return over how many of `dp` ranks experts may be shared out: common divisors, or the pinned degree.

    On many devices they fill whole nodes together with the `tensor` ranks of ttp x tp. A rack that is one node may
    be filled by equal groups of eight devices and more. With etp=1 the tensor ranks share experts out, too.
    """
    pinned, graph = request.constraints.degrees.get("ep"), request.trace(request.global_batch_size)
    experts, etp = num_experts(graph), request.constraints.etp
    degrees = divisors(math.gcd(dp, experts) if experts else 1)
    if etp == 1 < tensor:
        divides = sequence_length(graph) % tensor == 0 and sequence_length(graph)
        degrees = [ep for ep in degrees if divides and experts % (ep * tensor) == 0]
    elif etp not in (None, tensor):
        degrees = []
    if pinned is not None:
        return [ep for ep in degrees if ep == pinned]
    cluster = request.cluster
    whole = {cluster.devices_per_node * nodes // tensor for nodes in EXPERT_NODES}
    whole |= {size // tensor for size in divisors(cluster.devices_per_node) if size >= FEW_DEVICES}
    return [ep for ep in degrees if ep == 1 or ep in whole or cluster.num_devices <= FEW_DEVICES]


def tensor_degrees(request: Request, ranks: int, most_tp: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs (ttp, tp) whose product divides `ranks`, with pinned degrees as they are.

    An unpinned ttp is 1, unless the global batch has no more rows than the cluster has nodes. Rows cannot keep the
    ranks of a node busy then, and a grid that fills whole nodes is tried, too. A grid has two sides: ttp alone
    equals tp.
    """
    degrees, cluster = request.constraints.degrees, request.cluster
    pinned, per_node = degrees.get("ttp"), cluster.devices_per_node
    is_searched = request.global_batch_size <= cluster.num_nodes > 1 and cluster.num_devices <= GRID_DEVICES
    for ttp in divisors(ranks) if is_searched else [pinned or 1]:
        for tp in divisors(ranks // ttp) if ranks % ttp == 0 else []:
            is_grid = tp > 1 and ttp * tp <= most_tp and ttp * tp % per_node == 0
            is_tried = ttp == pinned or (pinned is None and (ttp == 1 or is_grid))
            if is_tried and (tp <= most_tp or tp == degrees.get("tp")):
                yield ttp, tp


def context_degrees(request: Request, ranks: int) -> list[int]:
    """Return over how many of `ranks` ranks the positions of a sequence may be shared out: common divisors, or the
    pinned degree. If unpinned, attention must be able to cut the sequence, and a rank keeps MIN_POSITIONS."""
    pinned, graph = request.constraints.degrees.get("cp"), request.trace(request.global_batch_size)
    length = sequence_length(graph)
    degrees = divisors(math.gcd(ranks, length) if length else 1)
    if pinned is not None:
        return [cp for cp in degrees if cp == pinned]
    if length < 2 * MIN_POSITIONS or not has_context(graph):
        return [1]
    return [cp for cp in degrees if cp == 1 or length // cp >= MIN_POSITIONS]


def inter_node_rate(cluster: Cluster) -> float:
    """Return the bytes per second of one device over the links between nodes."""
    link = cluster.inter_node
    return link.achievable_bytes_per_second / (cluster.devices_per_node if link.shared_by_node else 1)


def offloads(request: Request, zero: int) -> tuple[str, ...]:
    """Return the data that host memory may store; parameters only in shards.

    A rank on a CPU has only its host's memory. Unless pinned, nothing is offloaded if an optimizer must see whole
    parameters: the host has only a shard.
    """
    pinned = request.constraints.offload
    if pinned == "parameters" and zero != 3:
        return ()
    if pinned is not None:
        return (pinned,)
    if is_cpu(request.cluster) or request.needs.whole:
        return ("",)
    return ("", "optimizer", "parameters") if zero == 3 else ("", "optimizer")


def shapes(request: Request, num_units: int, most_tp: int | None = None) -> list[Shape]:
    """Return the shapes that multiply to the cluster's devices. most_tp: limit of tp and of a grid, if unpinned; by
    default TP_NODES. Raises ConstraintError if pinned degrees leave none."""
    devices, degrees = request.cluster.num_devices, request.constraints.degrees
    if degrees.get("pp", 1) > num_units:
        raise ConstraintError(
            "the pipeline has more ranks than the model has blocks",
            values=f"pp={degrees['pp']}, {num_units} block" + "s" * (num_units > 1),
            alternatives=f"a pp that divides {devices} devices: "
            + ", ".join(str(pp) for pp in divisors(devices) if pp <= num_units),
        )
    most = most_tp or TP_NODES * request.cluster.devices_per_node
    candidates = [
        Shape(pp=pp, dp=devices // pp // ttp // tp // cp, cp=cp, ttp=ttp, tp=tp)
        for pp in divisors(devices)
        if pp <= num_units
        for ttp, tp in tensor_degrees(request, devices // pp, most)
        for cp in context_degrees(request, devices // pp // ttp // tp)
    ]
    ddp = degrees.get("ddp", 1)
    wanted = [s for s in candidates if _agrees(degrees, s) and expert_degrees(request, s.dp // ddp, s.tensor)]
    if not wanted:
        named = {**degrees, **({"etp": request.constraints.etp} if request.constraints.etp else {})}
        pinned = " x ".join(f"{a}={n}" for a, n in named.items())
        agreeing = [s for s in candidates if any(degrees.get(a) == n for a, n in s._asdict().items())]
        raise ConstraintError(
            "the pinned degrees do not multiply to the cluster's number of devices",
            values=f"{pinned} for {devices} devices",
            alternatives=[str(shape) for shape in (agreeing or candidates)[:8]],
        )
    legal = [s for s in wanted if request.global_batch_size % s.dp == 0]
    if not legal:
        smallest, rows = min(s.dp for s in wanted), request.global_batch_size
        others = sorted((s for s in candidates if rows % s.dp == 0 and s.dp < smallest), key=lambda s: -s.dp)
        raise ConstraintError(
            "no mesh divides the global batch",
            values=f"batch {rows} on "
            + ", ".join(f"dp{s.dp} x " + f"ttp{s.ttp} x " * (s.ttp > 1) + f"tp{s.tp}" for s in wanted),
            alternatives=[f"a batch that is a multiple of {smallest}", *map(str, others[:1])],
        )
    return legal


def _agrees(degrees: Mapping[str, int], shape: Shape) -> bool:
    """Return whether the shape has the pinned degrees."""
    ddp, dp = degrees.get("ddp", 1), degrees.get("dp")
    is_data = shape.dp % ddp == 0 if dp is None else shape.dp == ddp * dp
    return is_data and all(
        degrees.get(axis, size) == size for axis, size in shape._asdict().items() if not AXES[axis].cuts_batch
    )


def micro_batch_counts(rows: int, pinned: int | None) -> list[int]:
    """Return counts that cut the rows of one data-parallel rank into equal micro-batches; the count or the rows of
    one are a power of two."""
    if pinned is not None:
        return [pinned] if rows % pinned == 0 else []
    return [count for count in divisors(rows) if _is_power(count) or _is_power(rows // count)]


def _is_power(number: int) -> bool:
    return math.log2(number).is_integer()
