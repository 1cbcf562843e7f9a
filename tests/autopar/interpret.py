"""Run a Graph node by node with torch's own operators: the reference for what a trace means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.ir.graph import Graph, LayerRun, Node, Ref, map_refs


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under every name they have, tied ones included."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return dict(named)


def run_graph(graph: Graph, tensors: Mapping[str, Tensor], batch: Mapping[str, Any]) -> Tensor:
    """The loss, differentiable in `tensors`."""
    values: dict[Ref, Tensor] = {Ref(p.name): tensors[p.name] for p in graph.parameters if p.name in tensors}
    values |= {Ref(i.name): batch[i.name] for i in graph.inputs}
    for piece in graph.body:
        if isinstance(piece, LayerRun):
            outputs = run_layers(piece, tensors, values)
            values |= {Ref(piece.name, index): value for index, value in enumerate(outputs)}
        else:
            run_node(piece, values)
    return values[graph.loss]


def run_layers(run: LayerRun, tensors: Mapping[str, Tensor], outer: Mapping[Ref, Tensor]) -> tuple[Tensor, ...]:
    """The last layer's outputs; each layer is fed by the one before it as `carried` says."""
    entering = [outer[ref] for ref in run.args]
    leaving: tuple[Tensor, ...] = ()
    for path in run.instances:
        values = {Ref(name): value for (name, _), value in zip(run.layer.inputs, entering, strict=True)}
        values |= {Ref(p.name): tensors[f"{path}.{p.name}"] for p in run.layer.parameters}
        for node in run.layer.nodes:
            run_node(node, values)
        leaving = tuple(values[ref] for ref in run.layer.outputs)
        for position, output in run.carried:
            entering[position] = leaving[output]
    return leaving


def run_node(node: Node, values: dict[Ref, Tensor]) -> None:
    """One call; checks that shapes and dtypes are what the graph says."""
    overload: Any = torch.ops
    for part in node.op.split("."):
        overload = getattr(overload, part)
    arguments = [_as_lists(map_refs(value, values.__getitem__)) for value in node.args]
    keywords = {name: _as_lists(map_refs(value, values.__getitem__)) for name, value in node.kwargs}
    with torch.set_grad_enabled(any(meta.requires_grad for meta in node.outputs)):
        result = overload(*arguments, **keywords)
    results = result if isinstance(result, (tuple, list)) else (result,)
    tensors = [value for value in results if isinstance(value, Tensor)]
    for index, (tensor, meta) in enumerate(zip(tensors, node.outputs, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype) == (meta.shape, meta.dtype), node
        values[Ref(node.name, index)] = tensor


def _as_lists(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")  # a trace's device is not where it runs
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value


def assert_equals_eager(graph: Graph, model: nn.Module, batch: dict[str, Tensor], loss: Tensor) -> None:
    """Loss and all gradients equal: the same operators on the same numbers leave no room for rounding."""
    parameters = dict(model.named_parameters())
    traced = run_graph(graph, tensors_of(model), batch)
    expected = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    found = torch.autograd.grad(traced, list(parameters.values()), allow_unused=True)
    torch.testing.assert_close(traced, loss, rtol=1e-6, atol=0)
    for name, want, have in zip(parameters, expected, found, strict=True):
        assert (want is None) == (have is None), f"{name} has a gradient in one of the two only"
        if want is not None and have is not None:
            torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")
