"""Replace operators that torch defines by others, and that have no rule, by their definitions.

Autograd differentiates such an operator through its definition, so only the form of the graph changes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from autopar.ir.graph import has_gradients
from autopar.ir.operators import calls_of
from autopar.rules.registry import has_rule

_DEFINED = torch._C.DispatchKey.CompositeImplicitAutograd


def definition(target: OpOverload, node: torch.fx.Node) -> torch.fx.GraphModule | None:
    """Return the calls in the definition of `target`; its placeholders stand for `node.all_input_nodes`.

    Return None for an operator that has a rule or no definition, and where the definition writes, draws random numbers
    or creates tensors.
    """
    is_defined = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), _DEFINED)  # type: ignore[no-untyped-call]
    if not is_defined or target._schema.is_mutable or has_rule(str(target)):
        return None
    operands = [call_node.meta.get("val") for call_node in node.all_input_nodes]
    fakes = [value for value in operands if isinstance(value, FakeTensor)]
    if not fakes or len(fakes) < len(operands):
        return None
    # Some operators decompose only where nothing is differentiated.
    values = [value.detach().requires_grad_(has_gradients(value.dtype)) for value in fakes]

    def call(*tensors: torch.Tensor) -> Any:
        values_of = dict(zip(node.all_input_nodes, tensors, strict=True))
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda operand: values_of[operand])
        return target(*args, **kwargs)

    try:
        with fakes[0].fake_mode, torch.enable_grad():
            graph = calls_of(call, values)
    except RuntimeError:  # a definition that asks for values, which fake tensors lack
        return None
    if not all(_is_plain(call_node) for call_node in graph.graph.nodes):
        return None
    for call_node in graph.graph.nodes:
        call_node.meta |= {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
    return graph


def _is_plain(node: torch.fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return node.op in ("placeholder", "output") or node.target is operator.getitem
    return not node.target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags
