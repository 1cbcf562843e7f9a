"""The prediction of one set of choices, by kind: the same prices that the search added up, told apart.

`test_predict` holds that the seconds add up to the search's objective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from autopar.choices import Choices
from autopar.graph import Graph, LayerRun, Ref, TensorMeta
from autopar.placement import Placements, R
from autopar.plan import Prediction
from autopar.price import Pricer
from autopar.reshard import steps
from autopar.saved import VIEWS, base_name, saved_tensors
from autopar.strategies import Operator, Scope, num_local, scopes_of
from cost_models.memory import workspace_bytes


def predict(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], pricer: Pricer, choices: Choices
) -> Prediction:
    """Seconds per step and bytes per rank, by kind."""
    seconds: dict[str, float] = defaultdict(float)
    num_bytes: dict[str, float] = defaultdict(float)
    meter = _Meter(graph, operators, pricer, choices, seconds, num_bytes)
    for scope in scopes_of(graph):
        meter.compute(scope)
        meter.parameters(scope)
    meter.moves()
    num_bytes["transient"] = transient_bytes(graph, operators, pricer, choices)
    if not pricer.cluster.device.name.startswith("cpu"):
        num_bytes["workspace"] = float(workspace_bytes(pricer.cluster.device))
    return Prediction(dict(seconds), dict(num_bytes))


class _Meter:
    def __init__(
        self,
        graph: Graph,
        operators: Mapping[tuple[str, str], Operator],
        pricer: Pricer,
        choices: Choices,
        seconds: dict[str, float],
        num_bytes: dict[str, float],
    ) -> None:
        self.graph, self.operators, self.pricer, self.choices = graph, operators, pricer, choices
        self.seconds, self.num_bytes = seconds, num_bytes
        self.micro = pricer.training.num_micro_batches
        self.scopes = {scope.name: scope for scope in scopes_of(graph)}

    def compute(self, scope: Scope) -> None:
        parameters = frozenset(p.name for p in self.graph.parameters) | frozenset(
            p.name for p in (scope.layer.parameters if scope.layer else ())
        )
        kept = saved_tensors(scope.nodes, scope.metas, parameters)
        for node in scope.nodes:
            operator, option = self.operators[scope.name, node.name], self.choices.operators[scope.name, node.name]
            forward, backward = self.pricer.operator_seconds(operator, option)
            self.seconds["forward compute"] += forward * scope.count * self.micro
            self.seconds["backward compute"] += backward * scope.count * self.micro
            self.num_bytes["activations"] += (
                self.pricer.saved_bytes(operator, option, kept.get(node.name, ())) * scope.count
            )

    def parameters(self, scope: Scope) -> None:
        chosen = {n: s for (owner, n), s in self.choices.parameters.items() if owner == scope.name}
        unit = sum(scope.metas[Ref(n)].num_bytes for n in chosen if scope.metas[Ref(n)].requires_grad)
        hidden = self.pricer.hidden_fraction
        for name, stored in chosen.items():
            meta = scope.metas[Ref(name)]
            exposed = self.pricer.sync_seconds(meta, stored, unit) * scope.count
            self.seconds["gradient and parameter synchronisation"] += exposed
            self.seconds["hidden communication"] += exposed * hidden / (1.0 - hidden)
            self.seconds["optimizer"] += self.pricer.optimizer_seconds(meta, stored) * scope.count
            weights, gradients, state = self.pricer.parameter_bytes(meta, stored)
            self.num_bytes["parameters"] += weights * scope.count
            self.num_bytes["gradients"] += gradients * scope.count
            self.num_bytes["optimizer state"] += state * scope.count

    def moves(self) -> None:
        """Every reshard that the plan pays for, as in space.py."""
        for scope in self.scopes.values():
            for node in scope.nodes:
                option = self.choices.operators[scope.name, node.name]
                for position, ref in enumerate(node.inputs):
                    self.move(self.where(scope, ref), option.inputs[position], scope.metas[ref], scope.count)
                for index, placements in enumerate(option.outputs):
                    kept = self.choices.tensors.get((scope.name, Ref(node.name, index)))
                    if kept is not None:
                        self.move(placements, kept, node.outputs[index], scope.count)
        for run in (piece for piece in self.graph.body if isinstance(piece, LayerRun)):
            layer = self.scopes[run.layer.name]
            for position, ref in enumerate(run.args):
                target = self.choices.tensors[layer.name, Ref(run.layer.inputs[position][0])]
                self.move(self.where(self.scopes[""], ref), target, self.scopes[""].metas[ref], 1)
            for position, output in run.carried:
                target = self.choices.tensors[layer.name, Ref(run.layer.inputs[position][0])]
                ref = run.layer.outputs[output]
                self.move(self.where(layer, ref), target, layer.metas[ref], len(run.instances))
        loss = self.graph.loss
        self.move(self.where(self.scopes[""], loss), (R,) * len(self.pricer.mesh.axes), self.scopes[""].metas[loss], 1)

    def move(self, source: Placements, target: Placements, meta: TensorMeta, count: int) -> None:
        for step in steps(source, target, self.pricer.mesh.sizes) or ():
            forward, backward = self.pricer.step_seconds(step, meta)
            axis = self.pricer.mesh.axes[step.axis]
            self.seconds[f"{step.forward} {axis}" if step.forward else "local resharding"] += (
                forward * count * self.micro
            )
            self.seconds[f"{step.backward} {axis}" if step.backward else "local resharding"] += (
                backward * count * self.micro
            )

    def where(self, scope: Scope, ref: Ref) -> Placements:
        kept = self.choices.tensors.get((scope.name, ref))
        if kept is not None:
            return kept
        stored = self.choices.parameters.get((scope.name, ref.node))
        if stored is not None:
            return stored.placements
        option = self.choices.operators.get((scope.name, ref.node))
        if option is not None:
            return option.outputs[ref.index]
        run = next(p for p in self.graph.body if isinstance(p, LayerRun) and p.name == ref.node)
        for position, output in run.carried:
            if output == ref.index:
                return self.choices.tensors[run.layer.name, Ref(run.layer.inputs[position][0])]
        return self.where(self.scopes[run.layer.name], run.layer.outputs[ref.index])


def transient_bytes(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], pricer: Pricer, choices: Choices
) -> float:
    """The most that is alive for a moment beside what is kept.

    In one scope at a time: results of calls that nothing keeps (a generated forward holds its local variables until it
    returns), twice the largest tensor (a gradient coming in and one going out), and under ZeRO-2/3 the scope's whole
    parameters and gradients while they are gathered.
    """
    worst = 0.0
    for scope in scopes_of(graph):
        parameters = frozenset(n for owner, n in choices.parameters if owner == scope.name)
        kept = {ref for refs in saved_tensors(scope.nodes, scope.metas, parameters).values() for ref in refs}
        loose, largest = 0.0, 0.0
        for node in scope.nodes:
            option = choices.operators[scope.name, node.name]
            for index, (meta, placements) in enumerate(zip(node.outputs, option.outputs, strict=True)):
                size = num_local(meta, placements, pricer.mesh) * meta.dtype.itemsize
                largest = max(largest, size)
                if Ref(node.name, index) not in kept and base_name(node.op) not in VIEWS:
                    loose += size
        worst = max(worst, loose + 2 * largest + _gathered_bytes(scope, pricer, choices))
    return worst * (1.0 + pricer.fragmentation)


def _gathered_bytes(scope: Scope, pricer: Pricer, choices: Choices) -> float:
    total = 0.0
    for (owner, name), stored in choices.parameters.items():
        if owner == scope.name and stored.zero >= 2:
            local = num_local(scope.metas[Ref(name)], stored.placements, pricer.mesh)
            total += local * (
                pricer.training.gradient_bytes + (pricer.training.compute_bytes if stored.zero == 3 else 0)
            )
    return total
