"""A strategy that a person wrote: the mapping of `compile(constraints=...)`, with everything fixed that matters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import ConstraintError
from autopar.ir.mesh import Mesh
from autopar.planning.request import divisors
from autopar.planning.solved_layers import named_mesh
from autopar.settings.constraints import Constraints
from cost_models.framework_profiles import ATTENTIONS, CP_EXCHANGES, Framework, framework
from cost_models.mixed_cluster import AnyCluster
from cost_models.routing import EXPERT_SKEW
from cost_models.schedule import num_chunks

KERNELS = ("on", "off")
OWN_KEYS = ("sp", "attention", "kernels", "cp", "ep", "cp_exchange", "capacity_factor", "expert_skew", "groups")
"""Keys that constraints of a search do not have."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy with all degrees.

    limits: its patterns, and the degrees that the model must allow. pp, mesh, zero, micro_batches, rows: rows of one
    micro-batch on one data-parallel rank. cp_has_experts: whether ranks of cp have different experts, like ranks of ep.
    capacity_factor, expert_skew: the spread of tokens over experts (cost_models/routing.py); None for no capacity.
    groups: of nodes, by pipeline rank, () for the order of the groups (strategies/stage_meshes.py). sp: sequence
    parallelism; None for the framework's default. attention: the kernel; "" for the framework's default. kernels:
    whether generated programs have fused kernels; "" for the default of `compile`. memory_bytes: that a rank may use;
    None for the device's.
    """

    limits: Constraints
    pp: int
    mesh: Mesh
    cp: int
    cp_has_experts: bool
    capacity_factor: float | None
    expert_skew: float
    groups: tuple[int, ...]
    zero: int
    micro_batches: int
    rows: int
    schedule: str
    chunks: int
    recompute: str
    offload: str
    sp: bool | None
    attention: str
    kernels: str
    memory_bytes: int | None


def parse_strategy(pins: Mapping[str, Any], cluster: AnyCluster, global_batch_size: int) -> Strategy:
    """Raises ConstraintError that names missing degrees, or degrees that do not multiply or divide."""
    pins = dict(pins)
    options = {key: pins.pop(key) for key in OWN_KEYS if key in pins}
    limits = _limits(pins)
    cp, ep = (_degree(key, options.get(key, 1)) for key in ("cp", "ep"))
    capacity = (
        _number("capacity_factor", options["capacity_factor"]) if options.get("capacity_factor") is not None else None
    )
    skew = _number("expert_skew", options.get("expert_skew", EXPERT_SKEW))
    if capacity == 0:
        raise ConstraintError("experts need room for tokens", values="capacity_factor=0", alternatives="above 0")
    sp = options.get("sp")
    if sp is not None and not isinstance(sp, bool):
        raise ConstraintError(
            "sp says whether there is sequence parallelism", values=repr(sp), alternatives="true or false"
        )
    attention = _word("attention", options.get("attention") or "", ATTENTIONS)
    kernels = _word("kernels", options.get("kernels") or "", KERNELS)
    exchange = _word("cp_exchange", options.get("cp_exchange") or "", CP_EXCHANGES)
    dp, rows = _data_ranks(limits, pins, cluster, cp, global_batch_size)
    pp, tp, ddp = (limits.degrees.get(axis, 1) for axis in ("pp", "tp", "ddp"))
    schedule = limits.schedule or "1f1b"
    micro_batches = limits.micro_batches
    assert micro_batches is not None
    return Strategy(
        limits=Constraints(
            {axis: size for axis, size in (("cp", cp), ("ep", ep), ("tp", tp)) if size > 1},
            etp=limits.etp,
            parameters=limits.parameters,
            activations=limits.activations,
            forbid_parameters=limits.forbid_parameters,
            forbid_activations=limits.forbid_activations,
            context=exchange.replace("-", "_") if exchange and cp > 1 else None,
        ),
        pp=pp,
        mesh=_mesh(dp, cp, ep, tp, ddp),
        cp=cp,
        cp_has_experts=ep > 1 and ep % cp == 0,
        capacity_factor=capacity,
        expert_skew=skew,
        groups=_groups(options.get("groups", ())),
        zero=limits.zero if dp * cp > 1 and limits.zero else 0,
        micro_batches=micro_batches,
        rows=rows,
        schedule=schedule if pp > 1 else "",
        chunks=num_chunks(schedule, limits.chunks) if pp > 1 else 1,
        recompute=limits.recompute or "none",
        offload=limits.offload or "",
        sp=sp,
        attention=attention,
        kernels=kernels,
        memory_bytes=limits.memory_bytes,
    )


def _mesh(dp: int, cp: int, ep: int, tp: int, ddp: int) -> Mesh:
    """Return the mesh with ep ranks of dp x cp that have different experts; only tp ranks are closer neighbors.

    They are all ranks of cp and some of dp, or some of dp alone. So the ranks of one axis of attention have all
    experts, or as many as there are ranks on it. Raises ConstraintError for other numbers.
    """
    if ep % cp == 0 and dp % (ep // cp) == 0:
        sizes = [("ddp", ddp), ("dp", dp * cp // ep), ("ep", ep // cp), ("cp", cp), ("tp", tp)]
        sizes = [(axis, size) for axis, size in sizes if size > 1]
        return Mesh(tuple(axis for axis, _ in sizes), tuple(size for _, size in sizes))
    if dp % ep == 0:
        return named_mesh(dp // ep, tp, ddp, ep=ep, cp=cp)
    legal = sorted({*divisors(dp), *(cp * n for n in divisors(dp))})
    raise ConstraintError(
        "ep must divide dp, or be cp times a divisor of dp",
        values=f"ep={ep}, dp={dp} x cp={cp}",
        alternatives=f"ep of {', '.join(map(str, legal))}",
    )


def _limits(pins: Mapping[str, Any]) -> Constraints:
    try:
        limits = Constraints.parse(pins)
    except ConstraintError as error:
        if not error.constraint.startswith("unknown constraint"):
            raise
        legal = [error.alternatives] if isinstance(error.alternatives, str) else list(error.alternatives or ())
        raise ConstraintError(
            error.constraint, values=error.values, alternatives=[*legal, f"of a strategy also {', '.join(OWN_KEYS)}"]
        ) from None
    if limits.degrees.get("ttp", 1) > 1:
        raise ConstraintError(
            "a strategy has one axis of tensor parallelism",
            values=f"ttp={limits.degrees['ttp']}",
            alternatives="tp, or `compile` with ttp and tp pinned",
        )
    return limits


def _data_ranks(
    limits: Constraints, pins: Mapping[str, Any], cluster: AnyCluster, cp: int, global_batch_size: int
) -> tuple[int, int]:
    """The pair (dp, rows of a micro-batch on one rank)."""
    pp, tp, ddp = (limits.degrees.get(axis, 1) for axis in ("pp", "tp", "ddp"))
    if "dp" not in limits.degrees:
        raise _missing("dp", pins, f"dp={cluster.num_devices // (pp * tp * ddp * cp) or 1}")
    dp = limits.degrees["dp"]
    if pp * tp * ddp * dp * cp != cluster.num_devices:
        product = f"pp={pp} x ddp={ddp} x dp={dp}" + (f" x cp={cp}" if cp > 1 else "") + f" x tp={tp}"
        raise ConstraintError(
            "the degrees do not make the cluster's number of devices",
            values=f"{product} = {pp * tp * ddp * dp * cp} for {cluster.num_devices} devices",
            alternatives=f"a cluster of {pp * tp * ddp * dp * cp} devices, or other degrees",
        )
    if limits.zero is None and dp * cp > 1:
        raise _missing("zero", pins, "0, 1, 2 or 3")
    if limits.micro_batches is None:
        raise _missing("micro_batches", pins, "the number of micro-batches of a step")
    rows, rest = divmod(global_batch_size, ddp * dp * limits.micro_batches)
    if rest or not rows:
        raise ConstraintError(
            "the batch is not divided by the data-parallel ranks and micro-batches",
            values=f"batch {global_batch_size}, {ddp * dp} data-parallel ranks, {limits.micro_batches} micro-batches",
            alternatives=f"micro_batches of {', '.join(map(str, divisors(global_batch_size // (ddp * dp) or 1)))}",
        )
    return dp, rows


def profile_of(name_or_framework: str | Framework) -> Framework:
    """A framework's profile by name. Raises ConstraintError."""
    if isinstance(name_or_framework, Framework):
        return name_or_framework
    try:
        return framework(name_or_framework)
    except ValueError as error:
        raise ConstraintError(
            "the framework is not one that autopar has", values=repr(name_or_framework), alternatives=str(error)
        ) from None


def _degree(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConstraintError(f"{key} is a number of ranks", values=repr(value), alternatives="1 or more")
    return value


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConstraintError(f"{key} is a number", values=repr(value), alternatives="0 or more")
    return float(value)


def _groups(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(number, int) for number in value):
        raise ConstraintError("groups are numbers of groups of nodes", values=repr(value), alternatives="[0, 0, 1]")
    return tuple(value)


def _word(key: str, value: str, legal: tuple[str, ...]) -> str:
    if value and value not in legal:
        raise ConstraintError(f"{key} is unknown", values=repr(value), alternatives=", ".join(legal))
    return value


def _missing(key: str, pins: Mapping[str, Any], alternatives: str) -> ConstraintError:
    return ConstraintError(
        f"the strategy does not say {key}",
        values=", ".join(f"{k}={v}" for k, v in pins.items()) or "an empty strategy",
        alternatives=alternatives,
    )
