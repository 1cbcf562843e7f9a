"""What rows of experts take on their way, by every kind of exchange: the program's own, and what others would take."""

from __future__ import annotations

import math
from collections.abc import Iterator

from autopar.costs.expert_exchange import Mixture
from autopar.costs.rates import num_local_dim
from autopar.ir.mesh import Mesh
from autopar.options.strategies import Operator, Option, num_local, routed_axes
from autopar.program import GeneratedProgram
from autopar.units import seconds_text
from cost_models import collective, routing
from cost_models.dispatch import dispatches
from cost_models.machine import Cluster

EXCHANGES = 4
"""There and back, forward and backward."""


def exchange_notes(compiled: GeneratedProgram) -> Iterator[str]:
    """A sentence for each mixture whose rows travel, with the fastest kind that programs have first."""
    cluster, assignment = compiled.cluster, compiled.best.assignment
    if not isinstance(cluster, Cluster) or compiled.plan.pipeline.stage_meshes:
        return
    mesh, told = compiled.plan.mesh, set[str]()
    for key, operator in compiled.best.operators.items():
        mixture = _mixture(operator, assignment.operators[key], mesh) if operator.route.choices else None
        if mixture is not None and operator.route.dispatches:
            axes = routed_axes(assignment.operators[key].axes)
            names = " and ".join(mesh.axes[axis] for axis in axes)
            told.add(f"rows of experts over {names}, a layer and micro-batch: {kinds_text(mixture, cluster)}")
    yield from sorted(told)


def kinds_text(mixture: Mixture, cluster: Cluster) -> str:
    """`once_per_node 1.9 ms (in this program), all_to_all 3.1 ms; not in programs: hybrid_ep 0.9 ms`: seconds in which
    other work waits."""
    own = mixture.fastest([name for name, kind in dispatches().items() if kind.in_programs], cluster)
    seconds = {
        kind: EXCHANGES * (1 - kind.hidden) * mixture.seconds(kind, cluster)
        for kind in dispatches().values()
        if mixture.fits(kind, cluster)
    }
    words = {kind: f"{kind.name} {seconds_text(value)}" for kind, value in seconds.items()}
    words[own] += " (in this program)"
    order = sorted(seconds, key=lambda kind: (kind != own, seconds[kind]))
    parts = (", ".join(words[kind] for kind in order if kind.in_programs is known) for known in (True, False))
    return "; not in programs: ".join(parts)


def _mixture(operator: Operator, option: Option, mesh: Mesh) -> Mixture | None:
    axes = routed_axes(option.axes)
    if not axes:
        return None
    rows, num_experts = operator.inputs[0], operator.inputs[1].shape[0]
    group = collective.Group(math.prod(mesh.sizes[axis] for axis in axes), mesh.stride(mesh.axes[axes[-1]]))
    sent = num_local(operator.inputs[2], option.inputs[2], mesh)
    return Mixture(
        group,
        num_experts=num_experts,
        choices=operator.route.choices,
        tokens=sent / operator.route.choices,
        row_bytes=num_local_dim(rows, option.inputs[0], mesh) * rows.dtype.itemsize,
        load=routing.fullest_load(group.size, num_experts, 1, sent * group.size, routing.EXPERT_SKEW),
        skew=routing.EXPERT_SKEW,
    )
