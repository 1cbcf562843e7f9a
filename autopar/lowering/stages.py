"""Cut a graph into pipeline stages: runs of consecutive units of the model's chain (ir/chain.py).

A stage gets tensors that it does not compute from one of two places:

- calls without a gradient that depend on the batch and on buffers only (position tables, masks, rotary cos and sin)
  belong to no unit; every stage that needs them computes them itself;
- everything else (hidden states, an encoder's output, a position bias with a gradient, skip connections) is received
  from the stage that produces it.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.errors import PlanError
from autopar.ir.chain import chain, segments
from autopar.ir.graph import Graph, Input, LayerRun, Node, Ref, TensorMeta, map_refs, repeated_calls
from autopar.ir.placement import Placements, R
from autopar.lowering.names import RESERVED, free_name, readable_names

Cut = tuple[int, ...]
"""The index of each stage's first unit: (0, 3, 5) are three stages."""


@dataclass(frozen=True, slots=True)
class StageGraph:
    """One stage as a separate graph. Calls and layers keep their names, so that an assignment finds them.

    graph: its inputs are the received tensors (batch_dim None), then the batch inputs that the stage reads; `loss` is
    the model's loss in the last stage, elsewhere the first tensor sent. received: (public name, meta) of tensors of
    earlier stages. sends: (ref in `graph`, public name) of tensors that later stages receive. first_layer: layers of
    each class in earlier stages.

    A received name means the tensor of the latest earlier stage that sends one of that name.
    """

    graph: Graph
    received: tuple[tuple[str, TensorMeta], ...]
    sends: tuple[tuple[Ref, str], ...]
    has_loss: bool
    first_layer: Mapping[str, int] = field(default_factory=dict)

    @property
    def results(self) -> tuple[Ref, ...]:
        """Return the results of the stage's forward."""
        return (self.graph.loss,) if self.has_loss else tuple(ref for ref, _ in self.sends)


def stage_graphs(graph: Graph, boundaries: Cut) -> tuple[StageGraph, ...]:
    """Return one graph per stage. Raises PlanError for boundaries that do not cut the chain."""
    division = _divide(graph, boundaries)
    needs = [_needs(division, stage) for stage in range(len(boundaries))]
    names = _public_names(division, [received for _, received in needs])
    graphs: list[StageGraph] = []
    first_layer: dict[str, int] = {}
    for stage, (computed, received) in enumerate(needs):
        pieces = [piece for s, piece in division.placed if s == stage or piece.name in computed]
        graphs.append(
            _stage_graph(division, stage, pieces, {ref: names[ref] for ref in names if ref in received}, names)
        )
        graphs[-1] = replace(graphs[-1], first_layer=dict(first_layer))
        for piece in pieces:
            if isinstance(piece, LayerRun):
                first_layer[piece.layer.name] = first_layer.get(piece.layer.name, 0) + len(piece.instances)
    return tuple(graphs)


def check_cut(boundaries: Cut, num_units: int) -> None:
    """Raise PlanError unless the boundaries are increasing unit indices from 0."""
    is_increasing = all(a < b for a, b in zip(boundaries, boundaries[1:], strict=False))
    if not boundaries or boundaries[0] != 0 or not is_increasing or boundaries[-1] >= num_units:
        raise PlanError(
            "stages must begin at increasing blocks, the first at block 0",
            values=", ".join(map(str, boundaries)),
            alternatives=f"0 and up to {num_units - 1} more of 1 ... {num_units - 1}" if num_units > 1 else "0",
        )


def tied_parameters(stages: tuple[StageGraph, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return (name, stages) of parameters in several stages, in the model's order (tied weights)."""
    holders: dict[str, list[int]] = {}
    for number, stage in enumerate(stages):
        for parameter in stage.graph.parameters:
            if not parameter.is_buffer:
                holders.setdefault(parameter.name, []).append(number)
    return tuple((name, tuple(stages_of)) for name, stages_of in holders.items() if len(stages_of) > 1)


def boundary_placements(placements: Placements, are_alike: bool) -> Placements:
    """Return the placements with which a tensor crosses a boundary: whole or sharded.

    Both sides then have complete values and gradients. Shards in sections cross only if all stage meshes are alike.
    """
    return tuple(p if p.is_shard and (p.sections == 1 or are_alike) else R for p in placements)


# --- cutting ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Division:
    """The body with every run cut at stage boundaries.

    placed: (stage, piece) in order; -1 for repeated calls, which `repeated` has by name. made_in: the stage of every
    other piece.
    """

    graph: Graph
    placed: tuple[tuple[int, Node | LayerRun], ...]
    repeated: Mapping[str, Node | LayerRun]
    made_in: Mapping[str, int]

    @property
    def last(self) -> int:
        return max(self.made_in.values())

    def metas(self) -> dict[Ref, TensorMeta]:
        return {Ref(piece.name, i): meta for _, piece in self.placed for i, meta in enumerate(piece.outputs)}


def _divide(graph: Graph, boundaries: Cut) -> _Division:
    """Divide the body. A run's last part keeps its name, which later pieces refer to; earlier parts get new names."""
    units, top, repeats = chain(graph), segments(graph), repeated_calls(graph)
    check_cut(boundaries, len(units))
    stages = [bisect.bisect(boundaries, index) - 1 for index in range(len(units))]
    taken = _names(graph)
    placed: list[tuple[int, Node | LayerRun]] = []
    index = 0  # of the unit after the last piece's
    for piece in graph.body:
        if isinstance(piece, LayerRun):
            first, index = index, index + len(piece.instances)
            placed += _cut_run(piece, stages[first:index], taken)
        else:
            index = units.index(top[piece.name]) + 1
            placed.append((-1 if piece.name in repeats else stages[index - 1], piece))
    repeated = {piece.name: piece for stage, piece in placed if stage < 0}
    made_in = {piece.name: stage for stage, piece in placed if stage >= 0}
    idle = set(range(len(boundaries))) - set(made_in.values())
    if idle:
        first = boundaries[min(idle)]
        raise PlanError(
            f"stage {min(idle)} computes only masks and tables that every stage computes itself",
            values=f"a stage of the blocks from {first}, {units[first]}",
            alternatives="put these blocks into the stage of the next ones",
        )
    return _Division(graph, tuple(placed), repeated, made_in)


def _cut_run(run: LayerRun, stages: list[int], taken: set[str]) -> list[tuple[int, Node | LayerRun]]:
    """Cut `run` into one part per stage; `stages` has each layer's stage. New names are added to `taken`."""
    parts: list[tuple[int, Node | LayerRun]] = []
    args, start = list(run.args), 0
    for stage in sorted(set(stages)):
        stop = start + stages.count(stage)
        name = run.name if stop == len(stages) else free_name(f"{run.name}_to_{stop}", taken)
        taken.add(name)
        parts.append((stage, replace(run, name=name, instances=run.instances[start:stop], args=tuple(args))))
        for position, output in run.carried:
            args[position] = Ref(name, output)
        start = stop
    return parts


def _needs(division: _Division, stage: int) -> tuple[set[str], set[Ref]]:
    """Return the repeated calls that a stage computes, and the tensors that it receives."""
    open_refs = [ref for s, piece in division.placed if s == stage for ref in piece.inputs]
    open_refs += [division.graph.loss] if stage == division.last else []
    computed: set[str] = set()
    received: set[Ref] = set()
    while open_refs:
        ref = open_refs.pop()
        if ref.node in division.repeated:
            open_refs += division.repeated[ref.node].inputs if ref.node not in computed else ()
            computed.add(ref.node)
        elif division.made_in.get(ref.node, stage) != stage:
            received.add(ref)
    return computed, received


def _stage_graph(
    division: _Division,
    stage: int,
    pieces: list[Node | LayerRun],
    received: Mapping[Ref, str],
    names: Mapping[Ref, str],
) -> StageGraph:
    """Build the graph of a stage from its pieces.

    received: its tensors of other stages. names: all tensors that cross a boundary.
    """
    graph, metas = division.graph, division.metas()

    def renamed(ref: Ref) -> Ref:
        return Ref(received[ref]) if ref in received else ref

    body: list[Node | LayerRun] = []
    for piece in pieces:
        if isinstance(piece, LayerRun):
            body.append(replace(piece, args=tuple(renamed(ref) for ref in piece.args)))
        else:
            body.append(replace(piece, args=map_refs(piece.args, renamed), kwargs=map_refs(piece.kwargs, renamed)))
    sends = tuple((ref, name) for ref, name in names.items() if division.made_in[ref.node] == stage)
    has_loss = stage == division.last
    if not has_loss and not sends:
        raise PlanError(f"stage {stage} computes nothing that the loss needs")
    loss = renamed(graph.loss) if has_loss else sends[0][0]
    used = {ref.node for piece in body for ref in piece.inputs} | {loss.node}
    for run in (piece for piece in body if isinstance(piece, LayerRun)):
        used |= {f"{path}.{parameter.name}" for path in run.instances for parameter in run.layer.parameters}
    entering = tuple((name, metas[ref]) for ref, name in received.items())
    inputs = tuple(Input(name, meta, None) for name, meta in entering)
    inputs += tuple(i for i in graph.inputs if i.name in used)
    parameters = tuple(p for p in graph.parameters if p.name in used)
    logits = renamed(graph.logits) if has_loss and graph.logits is not None else None
    if logits is not None and logits.node not in {piece.name for piece in body} | {name for name, _ in entering}:
        logits = None  # computed by an earlier stage, and not read here
    part = replace(graph, inputs=inputs, parameters=parameters, body=tuple(body), loss=loss, logits=logits)
    return StageGraph(part, entering, sends, has_loss)


# --- names ------------------------------------------------------------------------------------------------------------


def _public_names(division: _Division, received: list[set[Ref]]) -> dict[Ref, str]:
    """Name every tensor that crosses a boundary, in order of production. received: by each stage.

    A tensor passed from layer to layer has the same name at every boundary, so that stages of equal layers are equal
    programs. No stage then receives a wrong tensor: see `_clashes`.
    """
    graph = division.graph
    readers = {ref: [s for s, refs in enumerate(received) if ref in refs] for refs in received for ref in refs}
    wishes = dict(readable_names(graph))
    for _, piece in division.placed:
        if isinstance(piece, LayerRun):
            for position, output in piece.carried:
                formal = piece.layer.inputs[position][0]
                wishes |= {piece.args[position]: formal, Ref(piece.name, output): formal}
    taken = _names(graph) | (RESERVED - {"hidden"})
    names: dict[Ref, str] = {}
    assigned: list[tuple[str, int, list[int]]] = []
    for ref in (Ref(piece.name, index) for _, piece in division.placed for index in range(len(piece.outputs))):
        if ref in readers:
            crossing = division.made_in[ref.node], readers[ref]
            clashing = {name for name, stage, others in assigned if _clashes(crossing, (stage, others))}
            names[ref] = free_name(wishes[ref], taken | clashing)
            assigned.append((names[ref], *crossing))
    return names


def _clashes(first: tuple[int, list[int]], second: tuple[int, list[int]]) -> bool:
    """Whether two tensors (their stage, the stages that receive them) cannot share a name.

    A name means the latest earlier tensor of that name, so neither may be produced between the other and its readers.
    """
    (produced_in, readers), (other_produced_in, other_readers) = first, second
    hides = any(produced_in <= other_produced_in < reader for reader in readers)
    return hides or any(other_produced_in <= produced_in < reader for reader in other_readers)


def _names(graph: Graph) -> set[str]:
    """Return the names of the top level's refs."""
    return {piece.name for piece in graph.body} | {i.name for i in graph.inputs} | {p.name for p in graph.parameters}
