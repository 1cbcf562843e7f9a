"""Write `torch.vmap` as the batched calls that it makes.

An export keeps a vmap as brackets with calls of one element between them. They are replayed, below vmap, into the calls
that torch makes for all elements at once, which are ordinary operators. Brackets that cannot be replayed (with regions
without gradients, or kernels of one kind of device between them) stay unchanged, and are refused at their readers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from autopar.errors import TraceError
from autopar.frontend.user_line import user_line

BRACKETS = frozenset(
    {
        "lazy_load_decompositions",
        "_vmap_increment_nesting",
        "_vmap_decrement_nesting",
        "_add_batch_dim",
        "_remove_batch_dim",
    }
)
"""Functions of torch that an export contains where forward calls `torch.vmap`."""

_OF_A_DEVICE = ("_for_cpu", "_flash_", "_efficient_", "_cudnn_")


def write_out(program: torch.export.ExportedProgram) -> None:
    """Write every vmap of a program as the calls that it makes."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for region in _regions(module.graph):
                _replace(module.graph, region)


def _regions(graph: torch.fx.Graph) -> list[list[torch.fx.Node]]:
    """Return the calls of each outermost vmap, its brackets included."""
    regions: list[list[torch.fx.Node]] = []
    depth = 0
    for node in graph.nodes:
        name = _name(node)
        if name == "_vmap_increment_nesting":
            depth += 1
            if depth == 1:
                regions.append([])
        if depth:
            regions[-1].append(node)
        if name == "_vmap_decrement_nesting":
            depth -= 1
    return regions


def _replace(graph: torch.fx.Graph, region: list[torch.fx.Node]) -> None:
    inside = set(region)
    operands = list(
        dict.fromkeys(operand for node in region for operand in node.all_input_nodes if operand not in inside)
    )
    outputs = [node for node in region if any(user not in inside for user in node.users)]
    if any(not _is_plain(node) for node in region) or any(node.op == "get_attr" for node in operands):
        return

    def replayed(*values: Any) -> list[Any]:
        values_of: dict[torch.fx.Node, Any] = dict(zip(operands, values, strict=True))
        for node in region:
            args, kwargs = map_arg((node.args, node.kwargs), values_of.__getitem__)
            values_of[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return [values_of[node] for node in outputs]

    with torch.no_grad():
        written = make_fx(replayed)(*(node.meta["val"] for node in operands)).graph
    if any(word in str(node.target) for node in written.nodes for word in _OF_A_DEVICE):
        return
    drawn = [node for node in written.nodes if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())]
    if drawn:
        raise TraceError(
            "forward draws random numbers within torch.vmap, for one element at a time",
            values=f"{drawn[0].target} at {user_line(region[0].meta.get('stack_trace')) or 'a call of torch.vmap'}",
            alternatives="draw the numbers of all elements before torch.vmap, and pass them to it",
        )
    copies: dict[torch.fx.Node, Any] = {}
    sources = iter(operands)
    about = {key: value for key, value in region[0].meta.items() if key in ("nn_module_stack", "stack_trace")}
    with graph.inserting_before(region[0]):
        for node in written.nodes:
            if node.op == "placeholder":
                copies[node] = next(sources)
            elif node.op == "output":
                results = map_arg(node.args[0], copies.__getitem__)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                copies[node].meta = {**copies[node].meta, **about}
    for node, result in zip(outputs, results, strict=True):
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
    for node in reversed(region):
        graph.erase_node(node)
    for node in list(graph.nodes):
        if _name(node) == "lazy_load_decompositions":
            graph.erase_node(node)


def _is_plain(node: torch.fx.Node) -> bool:
    """Return whether a call of a region can be repeated: a bracket, an operator, or a result taken out of several."""
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    return node.op == "call_function" and (is_operator or _name(node) in BRACKETS or _name(node) == "getitem")


def _name(node: torch.fx.Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""
