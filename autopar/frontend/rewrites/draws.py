"""Rewrite random operators of a trace as draws: `autopar.draw` and plain operators.

A draw has the rule of a constructor: any dim may be created sharded. codegen/runtime/random_operators.py computes
torch's operators from draws. The model on one process runs it too, so both draw the same numbers in the same order.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.errors import TraceError
from autopar.frontend import fakes
from autopar.frontend.effects import at, draws, is_random, refused_random
from autopar.frontend.fx_import import FlatGraph, unused_name
from autopar.frontend.overloads import kept_kwargs
from autopar.frontend.rewrites.recurrent_dropout import PADDED, layer_by_layer
from autopar.ir.draws import DRAW, IN_TRAINING
from autopar.ir.graph import Node, Ref, TensorMeta, base_name, has_gradients, map_refs, refs_in
from autopar.operators.schemas import find_op
from autopar.operators.traits import CONSTANT
from codegen.runtime.random_operators import Draws, UndrawnError

_RRELU = "aten.rrelu.default"
_NOUNS = {
    "uniform": "uniform",
    "bernoulli": "bernoulli",
    "exponential": "exponential",
    "normal": "noise",
    "integers": "integers",
}
"""Names of the distributions in a program."""


def write_draws(flat: FlatGraph) -> None:
    """Rewrite all draws. Raises TraceError, with the reason, for a random operator that cannot be written so."""
    writer = _Writer(flat)
    flat.nodes = [call for node in flat.nodes for call in writer.written(node)]
    flat.substitute(writer.renamed)


class _Writer:
    def __init__(self, flat: FlatGraph) -> None:
        self.flat = flat
        self.metas = flat.metas()
        self.names = {ref.node for ref in self.metas}
        self.renamed: dict[Ref, Ref] = {}
        self.traced: dict[Any, torch.fx.GraphModule] = {}

    def written(self, node: Node) -> list[Node]:
        """Return the calls in place of one call; the call itself if it draws nothing."""
        overload = find_op(node.op)
        if overload is None or not draws(overload):
            return [node]
        if node.op in PADDED:
            return self.by_layers(node) if is_random(node) else [node]
        try:
            calls = self.inlined(node, self.parts(node, overload))
            return calls + self.evaluated(node, overload) if node.op == _RRELU and is_random(node) else calls
        except UndrawnError as error:
            raise refused_random(str(error), at(self.flat, node)) from None

    def by_layers(self, node: Node) -> list[Node]:
        """Return the calls of a recurrent operator with dropout inside, layer by layer."""
        calls, results = layer_by_layer(node, self.metas, self.named)
        self.metas |= {Ref(call.name, index): meta for call in calls for index, meta in enumerate(call.outputs)}
        self.renamed |= {Ref(node.name, index): result for index, result in enumerate(results)}
        return calls

    def named(self, wish: str) -> str:
        """Return an unused name."""
        name = unused_name(wish, self.names)
        self.names.add(name)
        return name

    def evaluated(self, node: Node, overload: torch._ops.OpOverload) -> list[Node]:
        """Return the slope that an evaluation uses in place of drawn ones."""
        drawn, args = self.renamed[Ref(node.name)], (*node.args[:3], False, *node.args[4:])
        calls = self.inlined(replace(node, args=args), self.parts(replace(node, args=args), overload))
        name = self.named(f"{node.name}_in_training")
        both = (drawn, self.renamed[Ref(node.name)])
        self.metas[Ref(name)], self.renamed[Ref(node.name)] = node.meta, Ref(name)
        return [*calls, replace(node, name=name, op=IN_TRAINING, args=both, kwargs=())]

    def parts(self, node: Node, overload: torch._ops.OpOverload) -> torch.fx.GraphModule:
        """Return the graph of one call, whose placeholders stand for `node.inputs`."""
        metas = tuple(self.metas[ref] for ref in node.inputs)
        number = {ref: index for index, ref in enumerate(dict.fromkeys(node.inputs))}
        key = overload, map_refs((node.args, node.kwargs), lambda ref: ("tensor", number[ref])), metas
        if key in self.traced:
            return self.traced[key]
        fake = fakes.mode()
        tensors = [fakes.empty(fake, meta.shape, meta.dtype) for meta in metas]

        def call(*tensors_in: torch.Tensor) -> Any:
            feed = iter(tensors_in)
            args, kwargs = map_refs((node.args, tuple(value for _, value in node.kwargs)), lambda _: next(feed))
            with Draws(_draw):
                return overload(*map(_lists, args), **dict(zip(dict(node.kwargs), map(_lists, kwargs), strict=True)))

        with fake, torch.no_grad():
            self.traced[key] = make_fx(call)(*tensors)
        return self.traced[key]

    def inlined(self, node: Node, parts: torch.fx.GraphModule) -> list[Node]:
        """Return the calls of `parts`, renamed for the place of `node`."""
        values: dict[torch.fx.Node, Any] = {}
        inputs = iter(node.inputs)
        has_gradient = any(meta.requires_grad for meta in node.outputs)
        calls: list[Node] = []
        results: Any = ()
        for part in parts.graph.nodes:
            if part.op == "placeholder":
                values[part] = next(inputs)
            elif part.op == "output":
                results = _argument(part.args[0], values)
            elif part.target is operator.getitem:
                values[part] = Ref(values[part.args[0]].node, part.args[1])
            elif isinstance(part.target, torch._ops.OpOverload):
                calls.append(self.call(node, part, values, has_gradient))
                values[part] = Ref(calls[-1].name)
            else:
                raise TraceError(
                    "forward calls a random operator that autopar cannot write as draws",
                    values=f"{node.op}{at(self.flat, node)}",
                    alternatives="pass random tensors as inputs of the batch",
                )
        for index, result in enumerate(results if isinstance(results, tuple) else (results,)):
            self.renamed[Ref(node.name, index)] = result
        return calls

    def call(self, node: Node, part: torch.fx.Node, values: dict[torch.fx.Node, Any], has_gradient: bool) -> Node:
        args = _argument(tuple(part.args), values)
        kwargs = tuple((k, _argument(v, values)) for k, v in kept_kwargs(str(part.target), part.kwargs).items())
        op = str(part.target)
        grads = has_gradient and op != DRAW and base_name(op) not in CONSTANT
        grads = grads and any(self.metas[ref].requires_grad for ref in refs_in((args, kwargs)))
        result = part.meta["val"]
        outputs = tuple(
            TensorMeta(tuple(value.shape), value.dtype, grads and has_gradients(value.dtype))
            for value in (result if isinstance(result, (tuple, list)) else (result,))
        )
        wish = _NOUNS[args[0]] if op == DRAW else op.split(".")[1].strip("_")
        name = self.named(wish)
        self.metas |= {Ref(name, index): meta for index, meta in enumerate(outputs)}
        self.flat.lines[name] = self.flat.lines.get(node.name, "")
        return Node(name=name, op=op, args=args, kwargs=kwargs, outputs=outputs, module=node.module)


def _draw(distribution: str, size: Any, dtype: torch.dtype, device: Any, **parameters: Any) -> torch.Tensor:
    drawn: torch.Tensor = torch.ops.autopar.draw(distribution, list(size), dtype=dtype, device=device, **parameters)
    return drawn


def _argument(value: Any, values: dict[torch.fx.Node, Any]) -> Any:
    if isinstance(value, torch.fx.Node):
        return values[value]
    return tuple(_argument(item, values) for item in value) if isinstance(value, (tuple, list)) else value


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, tuple) else value
