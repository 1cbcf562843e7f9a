"""Write recurrent layers with dropout between them as one call per layer, and dropout, whose masks a program draws.

The model on one process does the same where a program is compared with it (codegen/runtime/reference.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autopar.ir.graph import Node, Ref, TensorMeta
from autopar.ir.operators import arguments_of
from autopar.operators.traits import RECURRENT

PADDED = frozenset(f"aten.{name}.input" for name in RECURRENT)
"""Recurrent operators over padded sequences; the other overloads take packed ones."""


def layer_by_layer(
    node: Node, metas: Mapping[Ref, TensorMeta], named: Callable[[str], str]
) -> tuple[list[Node], tuple[Ref, ...]]:
    """Return the calls in place of `node`, and the replacements of its results. named: makes a name unique."""
    arguments = arguments_of(node)
    is_lstm = isinstance(arguments["hx"], tuple)
    states = arguments["hx"] if is_lstm else (arguments["hx"],)
    count, ways, weights = arguments["num_layers"], 1 + arguments["bidirectional"], arguments["params"]
    per_layer = len(weights) // count
    calls: list[Node] = []
    metas_of = dict(metas)

    def call(wish: str, op: str, args: tuple[Any, ...], *outputs: TensorMeta, kwargs: Any = ()) -> Node:
        refs = replace(node, args=args, kwargs=kwargs).inputs
        grads = any(metas_of[ref].requires_grad for ref in refs) and node.outputs[0].requires_grad
        results = tuple(replace(meta, requires_grad=grads) for meta in outputs)
        calls.append(replace(node, name=named(wish), op=op, args=args, kwargs=kwargs, outputs=results))
        metas_of.update({Ref(calls[-1].name, index): meta for index, meta in enumerate(results)})
        return calls[-1]

    x, last = arguments["input"], [[] for _ in states]  # type: ignore[var-annotated]
    for layer in range(count):
        begin, end = layer * ways, (layer + 1) * ways
        layer_states = []
        for state in states:
            meta = replace(metas_of[state], shape=(ways, *metas_of[state].shape[1:]))
            layer_states.append(Ref(call("state", "aten.slice.Tensor", (state, 0, begin, end), meta).name))
        hx = tuple(layer_states) if is_lstm else layer_states[0]
        params = weights[layer * per_layer : (layer + 1) * per_layer]
        rest = (
            arguments["has_biases"],
            1,
            0.0,
            arguments["train"],
            arguments["bidirectional"],
            arguments["batch_first"],
        )
        finals = [replace(meta, shape=(ways, *meta.shape[1:])) for meta in node.outputs[1:]]
        run = call("layer", node.op, (x, hx, params, *rest), node.outputs[0], *finals)
        for index, states_of_layers in enumerate(last):
            states_of_layers.append(Ref(run.name, index + 1))
        x = Ref(run.name)
        if layer < count - 1:
            dropped = ("aten.dropout.default", (x, arguments["dropout"], True))
            x = Ref(call("dropout", *dropped, node.outputs[0]).name)
    ends = [
        Ref(call("state", "aten.cat.default", (tuple(states_of_layers), 0), meta).name)
        for states_of_layers, meta in zip(last, node.outputs[1:], strict=True)
    ]
    return calls, (x, *ends)
