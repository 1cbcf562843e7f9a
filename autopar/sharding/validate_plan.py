"""Check an edited plan: every name is the model's, and every placement and ZeRO stage is one the search could choose.

`LegalPlacements` and `options_of` define the legal choices. Anything else would compute something different, or fail on
the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autopar.errors import PlanError
from autopar.files.text_files import near
from autopar.ir.graph import Graph, Ref, TensorMeta
from autopar.ir.mesh import ZERO_AXES
from autopar.ir.placement import Placements, divides
from autopar.ir.plan_data import ScopePlan, placements_text
from autopar.plan import Plan
from autopar.sharding.legal_placements import LegalPlacements
from autopar.sharding.scopes import Scope

MOST_SHOWN = 12
"""The most alternatives in one message."""


def check_scopes(graph: Graph, offers: LegalPlacements, plan: Plan) -> None:
    """Raise PlanError unless the plan decides for the top level and every layer class, and for nothing else."""
    for name in offers.scopes:
        if name not in plan.scopes:
            raise PlanError(
                f"{plan.at('layers')}: the plan has no decisions for layer class {name!r}",
                values=", ".join(filter(None, plan.scopes)) or "none",
            )
    for name in plan.scopes:
        if name not in offers.scopes:
            where, names = plan.place(name), filter(None, offers.scopes)
            raise PlanError(f"{where}: the model has no layer class {name!r}", alternatives=near(name, names))
    for scope in offers.scopes.values():
        _check_scope(graph, offers, scope, plan)


def _check_scope(graph: Graph, offers: LegalPlacements, scope: Scope, plan: Plan) -> None:
    decided, used = plan.scopes[scope.name], offers.uses[scope.name]
    stored = {p.name: p.meta for p in (scope.layer.parameters if scope.layer else graph.parameters)}
    entering = dict(scope.layer.inputs) if scope.layer else {i.name: i.meta for i in graph.inputs}
    calls = {node.name: node.outputs for node in scope.nodes}
    kept = {
        ref_name(Ref(name, index)): Ref(name, index)
        for name, outputs in calls.items()
        for index in range(len(outputs))
        if len(used.get(Ref(name, index), ())) > 1
    }
    _check_names(scope, plan, "parameters", decided.parameters, stored, "parameter or buffer")
    _check_names(scope, plan, "inputs", decided.inputs, entering, "input")
    _check_names(scope, plan, "calls", decided.calls, calls, "call")
    _check_names(scope, plan, "tensors", {n.partition("[")[0]: None for n in decided.tensors}, calls, "call")
    _check_names(scope, plan, "tensors", decided.tensors, kept, "result with several uses")
    missing = [n for n in stored if Ref(n) in used and n not in decided.parameters]
    missing += [n for n in entering if (scope.layer or Ref(n) in used) and n not in decided.inputs]
    if missing:
        raise PlanError(f"{plan.place(scope.name)} leaves out {', '.join(missing)}")
    for name, at in decided.parameters.items():
        legal = offers.parameter(scope, Ref(name), stored[name])
        _check_placements(scope, plan, ("parameters", name), at.placements, stored[name], legal)
    batch_dims = {i.name: i.batch_dim for i in graph.inputs}
    for name, placements in decided.inputs.items():
        is_batch = not scope.layer
        legal = (
            offers.batch_input(name, entering[name], batch_dims[name]) if is_batch else offers.tensor(scope, Ref(name))
        )
        _check_placements(scope, plan, ("inputs", name), placements, entering[name], legal)
    for name, placements in decided.tensors.items():
        ref = kept[name]
        produced = tuple(option.outputs[ref.index] for option in offers.options[scope.name, ref.node])
        legal = offers.tensor(scope, ref, produced)
        _check_placements(scope, plan, ("tensors", name), placements, scope.metas[ref], legal)
    _check_zero(scope, plan, offers, decided, stored)


def _check_names(
    scope: Scope, plan: Plan, kind: str, names: Iterable[str], legal: Iterable[str], description: str
) -> None:
    """Raise PlanError for a name that the scope does not have."""
    for name in names:
        if name not in legal:
            where = plan.place(scope.name, kind, name)
            raise PlanError(
                f"{where} is not in the model: it has no {description} named {name!r}", alternatives=near(name, legal)
            )


def _check_placements(
    scope: Scope,
    plan: Plan,
    path: tuple[str, str],
    placements: Placements,
    meta: TensorMeta,
    legal: Sequence[Placements],
) -> None:
    """Raise PlanError for placements that are not an option of the tensor."""
    if placements in legal:
        return
    mesh = plan.mesh
    fits = all(not p.is_shard or p.dim < len(meta.shape) for p in placements)
    fits = fits and divides(meta.shape, placements, mesh.sizes)
    texts = [placements_text(choice, mesh) for choice in legal]
    more = [f"... ({len(texts)} in all)"] if len(texts) > MOST_SHOWN else []
    problem = "is not a legal placement" if fits else "does not divide into equal shards"
    raise PlanError(
        f"{plan.place(scope.name, *path)} {problem}",
        values={"placements": placements_text(placements, mesh), "shape": meta.shape, "mesh": str(mesh)},
        alternatives=[*texts[:MOST_SHOWN], *more],
    )


def _check_zero(
    scope: Scope, plan: Plan, offers: LegalPlacements, decided: ScopePlan, stored: Mapping[str, TensorMeta]
) -> None:
    """Raise PlanError for a ZeRO stage of a parameter without a gradient to shard."""
    for name, at in decided.parameters.items():
        if at.zero and not offers.can_shard(stored[name], at.placements):
            is_trained = stored[name].requires_grad
            reason = f"is not Rp on {' or '.join(ZERO_AXES)}" if is_trained else "is not trained"
            raise PlanError(
                f"{plan.place(scope.name, 'parameters', name)} has zero={at.zero} but {reason}",
                values=placements_text(at.placements, plan.mesh),
                alternatives=", or ".join(
                    ["zero=0", *(f"{a}=Rp" for a in ZERO_AXES if a in plan.mesh.axes * is_trained)]
                ),
            )


def ref_name(ref: Ref) -> str:
    """Return a plan file's name of a result: `split` or `split[1]`."""
    return ref.node if ref.index == 0 else f"{ref.node}[{ref.index}]"
