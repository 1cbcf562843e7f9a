"""Lower graph and assignment to a codegen.Program, or to one program per pipeline stage. `scope_lowering.py` makes the
statements."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from autopar.ir.chain import chain, home_of_unread
from autopar.ir.draws import draw_numbers
from autopar.ir.graph import UPDATE_BUFFER, Graph, Input, LayerRun, Node, Ref, ancestors, base_name, batch_key, derived
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements, R
from autopar.lowering.dim_roles import dim_roles
from autopar.lowering.scope_lowering import SUMS, Lowering, Shared, without_waiting
from autopar.lowering.specs import border_of, input_spec, spec_of, unread_specs
from autopar.lowering.stages import Cut, StageGraph, boundary_placements, stage_graphs, tied_parameters
from autopar.sharding.assignment import Assignment
from autopar.sharding.call_options import Operator
from autopar.sharding.scopes import Scope, scopes_of
from codegen.program import Call, ModuleClass, PipelineProgram, PipelineStage, Program, Spec, Statement, Var
from codegen.source.names import argument

Modes = Mapping[str, tuple[tuple[str, int], ...]]
"""Layer class -> (mode, number of consecutive layers), in layer order; omitted classes keep everything."""


class Planned(Protocol):
    """The part of a plan that lowering reads; `mesh` is that of one pipeline rank."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def precision(self) -> str: ...
    @property
    def global_batch_size(self) -> int: ...
    @property
    def num_micro_batches(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Staging:
    """The stages and the schedule of a program that runs as a pipeline.

    boundaries: first unit of each stage. pipeline_ranks: the pipeline rank of each stage. schedule: one line of actions
    per pipeline rank. recompute, offload: for each stage, how its layers recompute ("none", "selective", "full") and
    whether their activations are offloaded ("host", else ""). defers_weights: zero-bubble schedules. meshes,
    first_ranks: of every pipeline rank, where they differ from the plan's mesh and from the order of pipeline ranks.
    """

    boundaries: Cut
    pipeline_ranks: tuple[int, ...]
    schedule_name: str
    schedule: tuple[str, ...]
    recompute: tuple[Modes, ...] = ()
    offload: tuple[Modes, ...] = ()
    defers_weights: bool = False
    meshes: tuple[Mesh, ...] = ()
    first_ranks: tuple[int, ...] = ()

    def mesh(self, stage: int, default: Mesh) -> Mesh:
        """Return the mesh of a stage."""
        return self.meshes[self.pipeline_ranks[stage]] if self.meshes else default


@dataclass(frozen=True, slots=True)
class _Context:
    """The inputs that all stages share.

    graph: the whole graph. keeper: the stage that stores parameters that no call reads. are_alike: whether all stage
    meshes are equal. placements: of sent tensors where they are produced, by (stage, name).
    """

    graph: Graph
    operators: Mapping[tuple[str, str], Operator]
    plan: Planned
    assignment: Assignment
    defers_weights: bool = False
    keeper: int = 0
    are_alike: bool = True
    placements: dict[tuple[int, str], Placements] = field(default_factory=dict)

    def crosses(self, placements: Placements) -> Placements:
        """Return the placements with which a tensor crosses a stage boundary."""
        return boundary_placements(placements, self.are_alike)


def lower(
    graph: Graph,
    operators: Mapping[tuple[str, str], Operator],
    plan: Planned,
    assignment: Assignment,
    *,
    recompute: Modes | None = None,
    offload: Modes | None = None,
) -> Program:
    """Lower a plan without a pipeline."""
    context = _Context(graph=graph, operators=operators, plan=plan, assignment=assignment)
    root_class = graph.name, f"{graph.name} on {plan.mesh}: this rank's part."
    whole = StageGraph(graph, (), (), True)
    return _lower_stage(context, 0, plan.mesh, whole, root_class, recompute or {}, offload or {})


def lower_stages(
    graph: Graph,
    operators: Mapping[tuple[str, str], Operator],
    plan: Planned,
    assignment: Assignment,
    staging: Staging,
) -> PipelineProgram:
    """Lower the stages of a pipeline. `assignment` is for the whole graph on the axes of all pipeline ranks."""
    context = _Context(
        graph=graph,
        operators=operators,
        plan=plan,
        assignment=assignment,
        defers_weights=staging.defers_weights,
        keeper=bisect.bisect(staging.boundaries, chain(graph).index(home_of_unread(graph))) - 1,
        are_alike=not staging.meshes,
    )
    stages = stage_graphs(graph, staging.boundaries)
    programs: list[Program] = []
    for number, stage in enumerate(stages):
        recompute = staging.recompute[number] if staging.recompute else {}
        offload = staging.offload[number] if staging.offload else {}
        root_class = f"Stage{number}", _stage_doc(stage, is_first=number == 0)
        mesh = staging.mesh(number, plan.mesh)
        programs.append(_lower_stage(context, number, mesh, stage, root_class, recompute, offload))
    return PipelineProgram(
        name=graph.name,
        stages=tuple(
            PipelineStage(
                program, pipeline_rank, {k: n for k, n in stage.first_layer.items() if k in program.layer_names}
            )
            for program, stage, pipeline_rank in zip(programs, stages, staging.pipeline_ranks, strict=True)
        ),
        tied=tied_parameters(stages),
        schedule_name=staging.schedule_name,
        schedule=staging.schedule,
        first_ranks=staging.first_ranks,
    )


def _lower_stage(
    context: _Context,
    number: int,
    mesh: Mesh,
    stage: StageGraph,
    root_class: tuple[str, str],
    recompute: Modes,
    offload: Modes,
) -> Program:
    """Lower one stage. root_class: its name and docstring."""
    graph, plan = stage.graph, context.plan
    kept = {name: _latest(context.placements, number, name) for name, _ in stage.received}
    crossing = {name: context.crosses(placements) for name, placements in kept.items()}
    shared = _shared(context, mesh, stage, crossing)
    layers = tuple(_layer_class(shared, scope) for scope in shared.scopes.values() if scope.layer)
    root = Lowering(shared, shared.scopes[""])
    root.receive(kept)
    body, given_sums = _before_and_in_step(stage)
    root.given_sums = {ref: f"{SUMS}[{number}]" for number, ref in enumerate(given_sums)}
    statements = [*root.drain(), *root.run(body)]
    results = _results(context, number, stage, root)
    statements += root.drain()
    logits, giving = _logits(stage, root)
    counting, summing = (Lowering(shared, root.scope, layouts=root.layouts) for _ in range(2))
    count_statements, counts = counting.count_targets(root.losses)
    sum_statements, sums = summing.sums(given_sums) if given_sums else ([], ())
    unread_here = unread_specs(context.graph) if number == context.keeper else {}
    awaited = without_waiting(statements) if stage.has_loss else statements
    return Program(
        name=graph.name,
        axes=mesh.axes,
        axis_sizes=mesh.sizes,
        precision=plan.precision,
        global_batch_size=plan.global_batch_size,
        num_micro_batches=plan.num_micro_batches,
        inputs={batch_key(i.name): input_spec(shared, i.name, i.meta) for i in _inputs(shared) if i.name not in kept},
        layers=layers,
        root=_root_class(root_class, root, awaited, results, unread_here),
        runs=tuple(root.layer_runs),
        count_targets=tuple(count_statements),
        target_counts=counts,
        vocabulary=smallest_vocabulary(context.graph),
        receives={name: border_of(shared, meta, crossing[name]) for name, meta in stage.received},
        sends={n: border_of(shared, root.scope.metas[r], context.crosses(root.placements[r])) for r, n in stage.sends},
        recompute=recompute,
        offload=offload,
        whole_sums=tuple(sum_statements),
        sums=sums,
        dims=dim_roles(context.graph),
        logits=logits,
        giving_logits=giving,
    )


def _shared(context: _Context, mesh: Mesh, stage: StageGraph, crossing: Mapping[str, Placements]) -> Shared:
    """Return the data that a stage's scopes share. crossing: placements of received tensors."""
    entering = {("", Ref(name)): placements for name, placements in crossing.items()}
    return Shared(
        graph=stage.graph,
        operators=context.operators,
        mesh=mesh,
        assignment=replace(context.assignment, tensors={**context.assignment.tensors, **entering}),
        scopes={scope.name: scope for scope in scopes_of(stage.graph)},
        results=stage.results,
        received=frozenset(crossing),
        defers_weights=context.defers_weights,
        numbers=draw_numbers(context.graph),
    )


def _inputs(shared: Shared) -> list[Input]:
    """Return the inputs of a stage's forward: the graph's inputs with a decided placement."""
    return [entry for entry in shared.graph.inputs if ("", Ref(entry.name)) in shared.assignment.tensors]


def _root_class(
    name_and_doc: tuple[str, str],
    root: Lowering,
    body: Sequence[Statement],
    results: tuple[Var, ...],
    unread_here: Mapping[str, Spec],
) -> ModuleClass:
    """Return the class of a stage's top level. unread_here: parameters and buffers that it stores and nothing reads."""
    shared, (name, doc) = root.shared, name_and_doc
    stored = [p for p in shared.graph.parameters if ("", p.name) in shared.assignment.parameters]
    return ModuleClass(
        name=name,
        doc=doc,
        parameters={p.name: spec_of(shared, "", p) for p in stored if not p.is_buffer},
        buffers={p.name: spec_of(shared, "", p) for p in stored if p.is_buffer} | dict(unread_here),
        inputs=tuple(
            root.variable(Ref(i.name), shared.assignment.tensors["", Ref(i.name)], argument(batch_key(i.name)))
            for i in _inputs(shared)
        ),
        body=tuple(body),
        outputs=results,
        layouts=tuple(root.layouts),
    )


def _before_and_in_step(stage: StageGraph) -> tuple[tuple[Node | LayerRun, ...], tuple[Ref, ...]]:
    """Return the pieces that forward runs, and the sums over the whole batch that it receives."""
    graph = stage.graph
    if graph.accumulation is None or not graph.accumulation.whole:
        return graph.body, ()
    whole = set(graph.accumulation.whole)
    needed = set(stage.results) - whole
    read: set[Ref] = set(stage.results) & whole
    kept: list[Node | LayerRun] = []
    for piece in reversed(graph.body):
        is_update = isinstance(piece, Node) and piece.op == UPDATE_BUFFER
        if is_update or any(Ref(piece.name, index) in needed for index in range(len(piece.outputs))):
            kept.append(piece)
            read |= whole & set(piece.inputs)
            needed |= set(piece.inputs) - whole
    return tuple(reversed(kept)), tuple(ref for ref in graph.accumulation.whole if ref in read)


def _results(context: _Context, number: int, stage: StageGraph, root: Lowering) -> tuple[Var, ...]:
    """Return forward's results: the loss, equal on all ranks, or the tensors that later stages receive."""
    if stage.has_loss:
        loss, accumulation = root.use(stage.graph.loss, (R,) * len(context.plan.mesh.axes)), stage.graph.accumulation
        if accumulation is not None and accumulation.loss != 1:
            loss = root.multiply(loss, accumulation.loss, "")
        return (loss,)
    for ref, name in stage.sends:
        context.placements[number, name] = root.placements[ref]
    return tuple(root.use(ref, context.crosses(root.placements[ref])) for ref, _ in stage.sends)


def _logits(stage: StageGraph, root: Lowering) -> tuple[Var | None, tuple[Statement, ...]]:
    """Return the variable of the model's logits, whole on every rank, and the statements that make it.

    The statements only read values that forward computes anyway, which stay unchanged. The variable is None on stages
    without the logits.
    """
    ref, graph = stage.graph.logits, stage.graph
    if ref is None:
        return None, ()
    whole = (R,) * len(root.shared.mesh.axes)
    available = [where for tensor, where in root.available if tensor == ref]
    if not available:
        return None, ()
    root.placements[ref] = whole if whole in available else available[-1]
    root.uses[ref] = root.uses.get(ref, 0) + 1  # forward's own variable keeps its name
    variable = root.use(ref, whole)
    if graph.logits_size is not None:
        dim, size = graph.logits_size
        whole_type = variable.type
        shape = (*whole_type.shape[:dim], size, *whole_type.shape[dim + 1 :])
        cut = Var(root.fresh_name("logits"), replace(whole_type, shape=shape, tensor=("", 0)))
        root.pending.append(Call("aten.slice.Tensor", (variable, dim, 0, size), (), (cut,)))
        variable = cut
    return variable, tuple(root.drain())


def _latest(placements: Mapping[tuple[int, str], Placements], before: int, name: str) -> Placements:
    """Return the placements of `name` on the latest stage before `before` that sends it."""
    return placements[max(stage for stage, sent in placements if sent == name and stage < before), name]


def _stage_doc(stage: StageGraph, is_first: bool) -> str:
    """Describe the part of the model in a stage."""
    paths = [path for piece in stage.graph.body if isinstance(piece, LayerRun) for path in piece.instances]
    if not paths:
        return f"the calls {'before' if is_first else 'after' if stage.has_loss else 'between'} the layers"
    if is_first:
        return "all of the model" if stage.has_loss else f"the model up to {paths[-1]}"
    if stage.has_loss:
        return f"{paths[0]} and all after it, to the loss"
    return paths[0] if len(paths) == 1 else f"{paths[0]} ... {paths[-1]}"


def _layer_class(shared: Shared, scope: Scope) -> ModuleClass:
    layer = scope.layer
    assert layer is not None
    lowering = Lowering(shared, scope)
    inputs = tuple(lowering.available[Ref(name), lowering.placements[Ref(name)]] for name, _ in layer.inputs)
    body = lowering.run(scope.nodes)
    outputs = []
    carried = _carried(shared.graph, layer.name)
    for index, ref in enumerate(layer.outputs):
        where = lowering.placements[ref]
        if index in carried:
            where = shared.assignment.tensors[scope.name, Ref(layer.inputs[carried[index]][0])]
        outputs.append(lowering.use(ref, where))
    body = (*body, *lowering.drain())
    return ModuleClass(
        name=layer.name,
        doc=_layer_doc(scope),
        parameters={p.name: spec_of(shared, scope.name, p) for p in layer.parameters if not p.is_buffer},
        buffers={p.name: spec_of(shared, scope.name, p) for p in layer.parameters if p.is_buffer},
        inputs=inputs,
        body=body,
        outputs=tuple(outputs),
        layouts=tuple(lowering.layouts),
        num_dropout_calls=shared.numbers.per_layer[layer.name],
        dropout_base=shared.numbers.base(layer.name),
    )


def _carried(graph: Graph, name: str) -> dict[int, int]:
    """Map output positions of a layer class to the input positions that they feed."""
    run = next(p for p in graph.body if isinstance(p, LayerRun) and p.layer.name == name)
    return {output: position for position, output in run.carried}


@derived
def smallest_vocabulary(graph: Graph) -> int:
    """Return the limit that integer inputs must stay below: rows of indexed tables, and numbers of classes."""
    inputs = {item.name for item in graph.inputs}
    metas = scopes_of(graph)[0].metas
    sizes = []
    for node in graph.body:
        if isinstance(node, Node) and base_name(node.op) in ("embedding", "cross_entropy_loss"):
            table = metas[node.inputs[0]].shape
            if ancestors(graph, node.inputs[1]) & inputs:
                size = table[0] if base_name(node.op) == "embedding" else table[1]
                sizes.append(graph.vocabularies.get(node.name, size))
    return min(sizes, default=2)


def _layer_doc(scope: Scope) -> str:
    first, last = scope.instances[0], scope.instances[-1]
    return first if first == last else f"{first} ... {last}"
