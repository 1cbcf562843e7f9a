"""Notes on a plan: unknown operators, omitted checks, idle axes, host-bound steps, expert exchanges."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from autopar.costs.expert_exchange import Mixture
from autopar.costs.expert_rows import fullest_load
from autopar.costs.layer_costs import HOST
from autopar.costs.rates import num_local_dim
from autopar.ir.compression import NOTHING_COMPRESSED
from autopar.ir.mesh import Mesh
from autopar.planning.predict import predicted
from autopar.program import GeneratedProgram
from autopar.sharding.call_options import Operator, Option, num_local, routed_axes
from autopar.units import seconds_text
from codegen.capture import why_uncaptured
from codegen.functions import function_of
from cost_models import collective, routing
from cost_models.dispatch import dispatches
from cost_models.machine import Cluster

NOTABLE_WAIT = 0.1
"""Share of a step in which devices wait for the host, from which a report says so."""
EXCHANGES = 4
"""Exchanges of a layer and micro-batch: dispatch and combine, forward and backward."""


def notes_of(compiled: GeneratedProgram) -> tuple[str, ...]:
    """Return the notes, one sentence each."""
    notes: list[str] = []
    unknown = sorted({op.node.op for op in compiled.best.operators.values() if not op.has_rule})
    if unknown:
        notes.append(
            f"every rank computes these without sharding, as they have no sharding rule: {', '.join(unknown)} "
            "(see autopar.register_rule)"
        )
    functions = {
        op.node.op.split(".")[1] for op in compiled.best.operators.values() if op.has_rule and function_of(op.node.op)
    }
    if functions:
        notes.append(f"custom Functions, sharded by the operators that they call: {', '.join(sorted(functions))}")
    values = [f"{guard.text} is {guard.value!r}" for guard in compiled.program.any.guards]
    notes += [f"forward depends on a value of the batch: {text} in the example" for text in values]
    notes += [f"the program omits this check of values: {line}" for line in compiled.best.graph.unchecked]
    if compiled.plan.compression and not compiled.plan.compresses:
        notes.append(NOTHING_COMPRESSED)
    if compiled.best.repeated_work:
        notes.append(compiled.best.repeated_work)
    else:
        notes += [f"nothing is sharded over {axis}: its ranks repeat the same work" for axis in compiled.best.idle_axes]
    return (*notes, *_issued(compiled), *_exchange_notes(compiled))


def _issued(compiled: GeneratedProgram) -> list[str]:
    """Return a note if devices would wait for the host for a notable time: how the program's calls are issued, and
    what that means."""
    prediction = compiled.plan.prediction
    waiting, step = prediction.seconds.get(HOST, 0.0), prediction.step_seconds
    if waiting <= NOTABLE_WAIT * step:
        return []
    if compiled.request is not None and not why_uncaptured(compiled.program):
        request = replace(compiled.request, captures=True)
        replayed = predicted(request, compiled.best).plan.prediction.step_seconds
        return [
            f"the step runs as CUDA graphs, which its host replays: about {seconds_text(replayed)} instead of "
            f"{seconds_text(step)}, the prediction of calls issued one by one"
        ]
    if waiting <= step / 2:
        return []
    return [
        f"the step is bound by the host: its calls take {seconds_text(step)}, the devices' work "
        f"{seconds_text(step - waiting)}. More devices do not help; larger batches do"
        + ("" if compiled.backend == "inductor" else ", and --backend inductor may")
    ]


def _exchange_notes(compiled: GeneratedProgram) -> Iterator[str]:
    """Yield a sentence for each mixture of experts that exchanges rows, with the program's kind of exchange first."""
    cluster, assignment = compiled.cluster, compiled.best.assignment
    if not isinstance(cluster, Cluster) or compiled.plan.pipeline.stage_meshes:
        return
    mesh, notes = compiled.plan.mesh, set[str]()
    for key, operator in compiled.best.operators.items():
        mixture = _mixture(operator, assignment.operators[key], mesh) if operator.route.choices else None
        if mixture is not None and operator.route.dispatches:
            axes = routed_axes(assignment.operators[key].axes)
            names = " and ".join(mesh.axes[axis] for axis in axes)
            notes.add(f"expert rows over {names}, per layer and micro-batch: {kinds_text(mixture, cluster)}")
    yield from sorted(notes)


def kinds_text(mixture: Mixture, cluster: Cluster) -> str:
    """Return `once_per_node 1.9 ms (in this program), all_to_all 3.1 ms; not in programs: hybrid_ep 0.9 ms`: exposed
    seconds."""
    fastest = mixture.fastest([name for name, kind in dispatches().items() if kind.in_programs], cluster)
    seconds = {
        kind: EXCHANGES * (1 - kind.hidden) * mixture.seconds(kind, cluster)
        for kind in dispatches().values()
        if mixture.fits(kind, cluster)
    }
    words = {kind: f"{kind.name} {seconds_text(value)}" for kind, value in seconds.items()}
    words[fastest] += " (in this program)"
    order = sorted(seconds, key=lambda kind: (kind != fastest, seconds[kind]))
    parts = (", ".join(words[kind] for kind in order if kind.in_programs is is_emitted) for is_emitted in (True, False))
    return "; not in programs: ".join(parts)


def _mixture(operator: Operator, option: Option, mesh: Mesh) -> Mixture | None:
    axes = routed_axes(option.axes)
    if not axes:
        return None
    rows, num_experts = operator.inputs[0], operator.inputs[1].shape[0]
    group = collective.Group(math.prod(mesh.sizes[axis] for axis in axes), mesh.stride(mesh.axes[axes[-1]]))
    num_sent = num_local(operator.inputs[2], option.inputs[2], mesh)
    return Mixture(
        group,
        num_experts=num_experts,
        choices=operator.route.choices,
        tokens=num_sent / operator.route.choices,
        row_bytes=num_local_dim(rows, option.inputs[0], mesh) * rows.dtype.itemsize,
        load=fullest_load(operator, option, mesh),
        skew=routing.EXPERT_SKEW,
    )
