"""A graph of micro-batches evaluated as its accumulation says, on tensors: what a generated step computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.accumulation.accumulating_trace import AccumulatingTrace
from autopar.frontend.trace import trace
from autopar.ir.graph import Graph, LayerRun, Node, Ref, ancestors, base_name, map_refs
from autopar.ir.operators import arguments_of
from autopar.rules.families.loss import MEAN, SUM
from tests.autopar.interpret import run_layers, run_node, tensors_of


def traced(model: nn.Module, batch: Mapping[str, Tensor], loss_fn: Callable[..., Tensor] | None) -> AccumulatingTrace:
    """The graphs of the whole batch and of its micro-batches."""
    rows = next(iter(batch.values())).shape[0]
    return AccumulatingTrace(lambda size: trace(model, dict(batch), loss_fn, batch_size=size), rows)


def loss_in_micro_batches(graph: Graph, model: nn.Module, batch: Mapping[str, Tensor], count: int) -> Tensor:
    """The mean of the micro-batches' losses, differentiable in the model's parameters."""
    found = graph.accumulation
    assert found is not None
    parts = [_part(graph, batch, index, count) for index in range(count)]
    tensors = tensors_of(model)
    known: dict[Ref, Tensor | _Summed] = {}
    for part in parts:
        for ref in found.whole:
            value = _run(graph, tensors, part, {}, ancestors(graph, ref))[ref]
            known[ref] = known[ref] + value if ref in known else value
    known |= _counts(graph, tensors, parts)
    assert not any(scope for scope, _ in found.summed), "sums inside layers are for real programs"
    first = [_run(graph, tensors, part, known, None) for part in parts]
    known |= {ref: _Summed([values[ref].detach() for values in first]) for _, ref in found.summed}
    losses = [_run(graph, tensors, part, known, None)[graph.loss] for part in parts]
    return torch.stack([_scaled(loss, found.loss) for loss in losses]).mean()


def _counts(graph: Graph, tensors: Mapping[str, Tensor], parts: list[dict[str, Tensor]]) -> dict[Ref, Tensor]:
    """By the name of each mean of cross-entropies: how many targets a micro-batch has that count, on average."""
    found = {}
    for node in filter(_is_counted, graph.body):
        assert isinstance(node, Node)
        ignored = arguments_of(node)["ignore_index"]
        targets = (_run(graph, tensors, p, {}, ancestors(graph, node.inputs[1]))[node.inputs[1]] for p in parts)
        found[Ref("count", hash(node.name))] = torch.stack([(t != ignored).sum() for t in targets]).double().mean()
    return found


def _is_counted(piece: Node | LayerRun) -> bool:
    """Plain cross-entropies over [N, C], which the run time divides by a number that it is given."""
    if not isinstance(piece, Node) or base_name(piece.op) != "cross_entropy_loss":
        return False
    arguments = arguments_of(piece)
    return arguments["reduction"] == MEAN and arguments["weight"] is None


def _part(graph: Graph, batch: Mapping[str, Tensor], index: int, count: int) -> dict[str, Tensor]:
    is_cut = {i.name: i.batch_dim is not None for i in graph.inputs}
    return {n: value.chunk(count)[index] if is_cut.get(n, False) else value for n, value in batch.items()}


def _run(
    graph: Graph,
    tensors: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    known: Mapping[Ref, Tensor | _Summed],
    only: set[str] | None,
) -> dict[Ref, Tensor]:
    """All values; of `only` these pieces where that is given. known: what is complete already."""
    values: dict[Ref, Tensor] = {Ref(p.name): tensors[p.name] for p in graph.parameters if p.name in tensors}
    values |= {Ref(i.name): batch[i.name] for i in graph.inputs}
    for piece in graph.body:
        if only is not None and piece.name not in only:
            continue
        if isinstance(piece, LayerRun):
            outputs = run_layers(piece, tensors, values)
            values |= {Ref(piece.name, index): value for index, value in enumerate(outputs)}
        else:
            _run_scaled(graph, piece, values, known.get(Ref("count", hash(piece.name))))
        for ref, value in known.items():
            if ref.node == piece.name:
                values[ref] = value.with_gradient_of(values[ref]) if isinstance(value, _Summed) else value
    return values


class _Summed:
    """A sum that a first pass found. parts: of the micro-batches."""

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts

    def with_gradient_of(self, own: Tensor) -> Tensor:
        """The sum, with the gradient of one part times their number."""
        whole = torch.stack(self.parts).sum(0).to(own.dtype)
        return whole + len(self.parts) * (own - own.detach()) if own.requires_grad else whole


def _run_scaled(graph: Graph, node: Node, values: dict[Ref, Tensor], count: Any) -> None:
    assert graph.accumulation is not None
    scales = [graph.accumulation.scales.get(("", node.name, i)) for i in range(len(node.inputs))]
    read = {Ref(f"input {i}"): _scaled(values[ref], scales[i]) for i, ref in enumerate(node.inputs)}
    numbers = iter(read)

    def renamed(value: Any) -> Any:
        return map_refs(value, lambda _: next(numbers))

    args = renamed(node.args)
    kwargs = tuple((name, renamed(value)) for name, value in node.kwargs)
    if count is not None:
        given = arguments_of(node) | {"self": Ref("input 0"), "target": Ref("input 1"), "reduction": SUM}
        order = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
        args, kwargs = tuple(given[name] for name in order), ()
    run_node(Node(node.name, node.op, args, kwargs, node.outputs), read)
    if count is not None:
        read[Ref(node.name)] = read[Ref(node.name)] / float(count)
    values |= {ref: value for ref, value in read.items() if ref.node == node.name}


def _scaled(value: Tensor, scale: Any) -> Tensor:
    if scale is None or scale == 1:
        return value
    return value / scale.denominator if scale.numerator == 1 else value * (scale.numerator / scale.denominator)
