"""A strategy that a person wrote: the mapping of `compile(constraints=...)`, with everything fixed that matters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.constraints import Constraints
from autopar.errors import ConstraintError
from autopar.mesh import Mesh
from autopar.planning.bases import named_mesh
from autopar.planning.request import divisors
from cost_models.frameworks import ATTENTIONS
from cost_models.machine import Cluster
from cost_models.schedule import num_chunks

OWN_KEYS = ("sp", "attention", "cp", "ep")
"""Keys that constraints of a search do not have."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """limits: the patterns in it. pp, mesh, zero, micro_batches, rows: of one micro-batch on one data-parallel
    rank. sp: sequence parallelism, None for the framework's own. attention: the kernel, "" for the framework's own."""

    limits: Constraints
    pp: int
    mesh: Mesh
    zero: int
    micro_batches: int
    rows: int
    schedule: str
    chunks: int
    recompute: str
    offload: str
    sp: bool | None
    attention: str


def parse_strategy(given: Mapping[str, Any], cluster: Cluster, global_batch_size: int) -> Strategy:
    """Raises ConstraintError that says what is missing, or what does not multiply or divide."""
    given = dict(given)
    own = {key: given.pop(key) for key in OWN_KEYS if key in given}
    for key in ("cp", "ep"):
        if own.get(key, 1) != 1:
            raise ConstraintError(f"{key} is not modelled yet", values=f"{key}={own[key]}", alternatives=f"{key}=1")
    sp = own.get("sp")
    if sp is not None and not isinstance(sp, bool):
        raise ConstraintError(
            "sp says whether there is sequence parallelism", values=repr(sp), alternatives="true or false"
        )
    attention = own.get("attention") or ""
    if attention and attention not in ATTENTIONS:
        raise ConstraintError("attention is unknown", values=repr(attention), alternatives=", ".join(ATTENTIONS))
    limits = Constraints.parse(given)
    pp, tp, ddp = (limits.degrees.get(axis, 1) for axis in ("pp", "tp", "ddp"))
    if "dp" not in limits.degrees:
        raise _missing("dp", given, f"dp={cluster.num_devices // (pp * tp * ddp) or 1}")
    dp = limits.degrees["dp"]
    if pp * tp * ddp * dp != cluster.num_devices:
        product = f"pp={pp} x ddp={ddp} x dp={dp} x tp={tp}"
        raise ConstraintError(
            "the degrees do not make the cluster's number of devices",
            values=f"{product} = {pp * tp * ddp * dp} for {cluster.num_devices} devices",
            alternatives=f"a cluster of {pp * tp * ddp * dp} devices, or other degrees",
        )
    if limits.zero is None and dp > 1:
        raise _missing("zero", given, "0, 1, 2 or 3")
    if limits.micro_batches is None:
        raise _missing("micro_batches", given, "the number of micro-batches of a step")
    rows, rest = divmod(global_batch_size, ddp * dp * limits.micro_batches)
    if rest or not rows:
        raise ConstraintError(
            "the batch is not divided by the data-parallel ranks and micro-batches",
            values=f"batch {global_batch_size}, {ddp * dp} data-parallel ranks, {limits.micro_batches} micro-batches",
            alternatives=f"micro_batches of {', '.join(map(str, divisors(global_batch_size // (ddp * dp) or 1)))}",
        )
    schedule = limits.schedule or "1f1b"
    chunks = num_chunks(schedule, limits.chunks) if pp > 1 else 1
    return Strategy(
        Constraints(
            {},
            parameters=limits.parameters,
            activations=limits.activations,
            forbid_parameters=limits.forbid_parameters,
            forbid_activations=limits.forbid_activations,
        ),
        pp,
        named_mesh(dp, tp, ddp),
        limits.zero if dp > 1 and limits.zero else 0,
        limits.micro_batches,
        rows,
        schedule if pp > 1 else "",
        chunks,
        limits.recompute or "none",
        limits.offload or "",
        sp,
        attention,
    )


def _missing(key: str, given: Mapping[str, Any], alternatives: str) -> ConstraintError:
    return ConstraintError(
        f"the strategy does not say {key}",
        values=", ".join(f"{k}={v}" for k, v in given.items()) or "an empty strategy",
        alternatives=alternatives,
    )
