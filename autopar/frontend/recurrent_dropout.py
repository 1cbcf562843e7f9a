"""Recurrent layers with dropout between them as one call per layer, and dropout, whose masks a program draws.

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
    """The calls in the place of `node`, and what takes the place of its results. named: makes a name unique."""
    given = arguments_of(node)
    is_lstm = isinstance(given["hx"], tuple)
    states = given["hx"] if is_lstm else (given["hx"],)
    count, ways, weights = given["num_layers"], 1 + given["bidirectional"], given["params"]
    per_layer = len(weights) // count
    made: list[Node] = []
    known = dict(metas)

    def call(wish: str, op: str, args: tuple[Any, ...], *outputs: TensorMeta, kwargs: Any = ()) -> Node:
        refs = replace(node, args=args, kwargs=kwargs).inputs
        grads = any(known[ref].requires_grad for ref in refs) and node.outputs[0].requires_grad
        results = tuple(replace(meta, requires_grad=grads) for meta in outputs)
        made.append(replace(node, name=named(wish), op=op, args=args, kwargs=kwargs, outputs=results))
        known.update({Ref(made[-1].name, index): meta for index, meta in enumerate(results)})
        return made[-1]

    x, last = given["input"], [[] for _ in states]  # type: ignore[var-annotated]
    for layer in range(count):
        begin, end = layer * ways, (layer + 1) * ways
        own = []
        for state in states:
            meta = replace(known[state], shape=(ways, *known[state].shape[1:]))
            own.append(Ref(call("state", "aten.slice.Tensor", (state, 0, begin, end), meta).name))
        hx = tuple(own) if is_lstm else own[0]
        params = weights[layer * per_layer : (layer + 1) * per_layer]
        rest = (given["has_biases"], 1, 0.0, given["train"], given["bidirectional"], given["batch_first"])
        finals = [replace(meta, shape=(ways, *meta.shape[1:])) for meta in node.outputs[1:]]
        run = call("layer", node.op, (x, hx, params, *rest), node.outputs[0], *finals)
        for index, found in enumerate(last):
            found.append(Ref(run.name, index + 1))
        x = Ref(run.name)
        if layer < count - 1:
            dropped = ("aten.dropout.default", (x, given["dropout"], True))
            x = Ref(call("dropout", *dropped, node.outputs[0]).name)
    ends = [
        Ref(call("state", "aten.cat.default", (tuple(found), 0), meta).name)
        for found, meta in zip(last, node.outputs[1:], strict=True)
    ]
    return made, (x, *ends)
