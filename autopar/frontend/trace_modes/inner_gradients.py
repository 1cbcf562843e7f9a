"""Trace gradients that forward takes itself as ordinary operators: `torch.autograd.grad` and transforms of
`torch.func`.

`torch.autograd.grad` is one operator while forward is traced. The import of the export finds the calls between its
inputs and outputs, traces their vector-Jacobian product, and puts these calls in the operator's place (`write_out`). A
transform of `torch.func` is traced below its own level at its call, and the resulting calls are made there (`_Region`).
Both give the backward operators of aten, which autograd differentiates again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._functorch import apis, eager_transforms
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from autopar.errors import TraceError
from autopar.frontend.fakes import in_this_thread
from autopar.frontend.overloads import functional_overload, is_write, written_by
from autopar.frontend.trace_modes.autograd_functions import outside_functions
from autopar.frontend.trace_modes.backward_calls import traced_below
from autopar.frontend.user_line import user_line
from autopar.ir.graph import base_name
from autopar.operators.schemas import may_be_view
from autopar.operators.traits import CONSTANT

_is_inside: ContextVar[bool] = ContextVar("_is_inside", default=False)
"""Whether a region is being traced, in which torch's own functions run."""

_did_differentiate: ContextVar[list[bool] | None] = ContextVar("_did_differentiate", default=None)


@torch.library.custom_op("autopar_inner::gradient", mutates_args=())
def _gradient(outputs: list[Tensor], inputs: list[Tensor], grad_outputs: list[Tensor], is_graph: bool) -> list[Tensor]:
    """Return the gradients of outputs by inputs. grad_outputs: those of the outputs, all ones if the list is empty."""
    return [torch.empty_like(tensor) for tensor in inputs]


@_gradient.register_fake
def _(outputs: list[Tensor], inputs: list[Tensor], grad_outputs: list[Tensor], is_graph: bool) -> list[Tensor]:
    return [torch.empty_like(tensor, requires_grad=False) for tensor in inputs]


def _no_backward(context: Any, *gradients: Any) -> Any:
    raise NotImplementedError


_gradient.register_autograd(_no_backward)
GRADIENT = torch.ops.autopar_inner.gradient.default


@contextlib.contextmanager
def traceable_gradients() -> Iterator[None]:
    """Context manager in which gradients that forward takes are traced."""
    engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run(outputs: Any, grads: Any, keep: Any, is_graph: Any, inputs: Any = (), *rest: Any, **named: Any) -> Any:
        if _is_inside.get():
            return engine(outputs, grads, keep, is_graph, inputs, *rest, **named)
        return _marked(tuple(outputs), tuple(inputs), tuple(grads), bool(is_graph))

    owners: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.autograd, "_engine_run_backward", run),
        (eager_transforms, "_vjp_with_argnums", _vjp(eager_transforms._vjp_with_argnums)),
    ]
    for owner, name in (
        (eager_transforms, "grad_impl"),
        (eager_transforms, "grad_and_value_impl"),
        (eager_transforms, "_jvp_with_argnums"),
    ):
        owners.append((owner, name, _transform(getattr(owner, name))))
    owners.append((apis, "vmap_impl", _vmap(apis.vmap_impl)))  # type: ignore[attr-defined]
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in owners:
            original = getattr(owner, name)
            call = in_this_thread(outside_functions(replacement, original), original)
            stack.enter_context(mock.patch.object(owner, name, call))
        yield


# --- torch.func -------------------------------------------------------------------------------------------------------


def _transform(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _note()
        return original(*args, **kwargs) if _is_inside.get() else _Region(original, args, kwargs).result()

    return call


def _vjp(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `vjp` as forward calls it, whose function runs forward again beside its product."""

    def call(function: Any, *primals: Any, **options: Any) -> Any:
        _note()
        if _is_inside.get():
            return original(function, *primals, **options)

        def pull(*cotangents: Any, **named: Any) -> Any:
            def product(primals: Any, cotangents: Any) -> Any:
                return original(function, *primals, **options)[1](*cotangents, **named)

            if _is_inside.get():
                return product(primals, cotangents)
            return _Region(product, (primals, cotangents), {}).result()

        result = function(*primals)
        return (result[0], pull, result[1]) if options.get("has_aux") else (result, pull)

    return call


def _vmap(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `vmap` with differentiating functions as regions; any other stays as it is (`vmaps.py`)."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_inside.get():
            return original(*args, **kwargs)
        token = _did_differentiate.set([])
        try:
            with contextlib.suppress(Exception):
                region = _Region(original, args, kwargs)
                if _did_differentiate.get():
                    return region.result()
        finally:
            _did_differentiate.reset(token)
        return original(*args, **kwargs)

    return call


def _note() -> None:
    noted = _did_differentiate.get()
    if noted is not None:
        noted.append(True)


class _Region:
    """A call traced below all transforms, to be made again, call by call, in its place."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        leaves, form = tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        def traced(*tensors: Tensor) -> list[Any]:
            leaves_left = iter(tensors)
            filled = [next(leaves_left) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            own_args, own_kwargs = tree_unflatten(filled, form)
            results, self.form = tree_flatten(function(*own_args, **own_kwargs))
            return results

        token = _is_inside.set(True)
        try:
            with (
                _disable_current_modes(),
                torch._C.DisableTorchFunction(),
                torch.inference_mode(False),
                torch.enable_grad(),
            ):
                self.graph = traced_below(traced, *map(_like, self.tensors))
        finally:
            _is_inside.reset(token)
        drawn = next((str(node.target) for node in self.graph.graph.nodes if _is_random(node)), "")
        if drawn:
            raise TraceError(
                "forward draws random numbers in a function that it differentiates with torch.func",
                values=drawn,
                alternatives="draw them before, and pass them as an argument of the function",
            )

    def result(self) -> Any:
        """Make the calls on the given tensors, and return the function's result."""
        values: dict[torch.fx.Node, Any] = {}
        tensors_left = iter(self.tensors)
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(tensors_left)
            elif node.op == "get_attr":
                values[node] = getattr(self.graph, str(node.target))
            elif node.op == "output":
                return tree_unflatten(map_arg(node.args[0], values.__getitem__), self.form)
            else:
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
        raise AssertionError("a graph without output")


def _like(value: Tensor) -> Tensor:
    """Return a fake tensor that no transform, mode or graph tracks."""
    if not isinstance(value, FakeTensor):
        return value.detach()
    with value.fake_mode:
        empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return empty


# --- torch.autograd.grad ----------------------------------------------------------------------------------------------


def _marked(outputs: tuple[Any, ...], inputs: tuple[Any, ...], grad_outputs: tuple[Any, ...], is_graph: bool) -> Any:
    if not inputs:
        raise TraceError(
            "forward calls backward, which a traced graph does not show",
            alternatives="use torch.autograd.grad for gradients that forward needs, else call backward in the "
            "training loop",
        )
    if not all(isinstance(tensor, Tensor) for tensor in (*outputs, *inputs)):
        raise TraceError(
            "forward calls torch.autograd.grad on graph edges, which a traced graph does not have",
            alternatives="pass tensors as its outputs and inputs",
        )
    ones = [torch.ones_like(out) if one is None else one for out, one in zip(outputs, grad_outputs, strict=True)]
    return tuple(GRADIENT(list(outputs), list(inputs), ones, is_graph))


def write_out(program: torch.export.ExportedProgram) -> None:
    """Replace every `torch.autograd.grad` of a program by the calls of its backward."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in list(module.graph.nodes):
                if node.target is GRADIENT:
                    _Gradient(module.graph, node).write_out()


class _Gradient:
    """One `torch.autograd.grad` in a graph."""

    def __init__(self, graph: torch.fx.Graph, node: torch.fx.Node) -> None:
        self.graph, self.node = graph, node
        operands: Any = node.args
        self.outputs: list[torch.fx.Node] = list(operands[0])
        self.inputs: list[torch.fx.Node] = list(operands[1])
        self.grad_outputs: list[torch.fx.Node] = list(operands[2])
        self.is_graph: bool = operands[3]

    def refused(self, why: str, at: torch.fx.Node | None = None) -> TraceError:
        line, other = (user_line(place.meta.get("stack_trace")) if place else "" for place in (self.node, at))
        return TraceError(
            "torch.autograd.grad in forward cannot be traced",
            values=f"{why}{f' at {other}' * bool(other)}" + f"\ncalled at {line}" * bool(line),
            alternatives="use torch.func.grad or torch.func.vjp of a function, or write the derivative out",
        )

    def calls(self) -> list[torch.fx.Node]:
        """Return the differentiated calls that lead from the inputs to the outputs."""
        before = list(self.graph.nodes)
        before = before[: before.index(self.node)]
        reached = set(self.inputs)
        for call_node in before:
            if call_node in reached or call_node.op != "call_function" or not reached & set(call_node.all_input_nodes):
                continue
            name = getattr(call_node.target, "__name__", "")
            if isinstance(call_node.target, torch._ops.OpOverload):
                if base_name(str(call_node.target)) not in CONSTANT and _is_float(call_node):
                    reached.add(call_node)
            elif name == "getitem":
                reached.add(call_node)
            elif not (name.startswith("wrap_with_set_grad_enabled") and not call_node.args[0]) and _is_float(call_node):
                raise self.refused(f"it goes through {name}", call_node)
        needed = {call_node for call_node in self.outputs if call_node in reached}
        for call_node in reversed(before):
            if call_node in needed and call_node not in self.inputs:
                needed |= {source for source in call_node.all_input_nodes if source in reached}
        missing = [str(call_node) for call_node in self.inputs if call_node not in needed]
        if missing:
            raise self.refused("the outputs do not depend on all inputs, and it returns None for these")
        for write in [w for w in needed if is_write(w) and base_name(str(w.target)) != "batch_norm"]:
            for written in written_by(write):  # whose memory has been written to by the time the calls run again
                if not isinstance(written.target, torch._ops.OpOverload):
                    raise self.refused(f"{write.target} writes to a tensor that is used otherwise", write)
                needed.add(written)
        calls = [call_node for call_node in before if call_node in needed and call_node not in self.inputs]
        self.check_writes(before[before.index(calls[0]) if calls else 0 :], calls)
        return calls

    def check_writes(self, after: list[torch.fx.Node], calls: list[torch.fx.Node]) -> None:
        """Raise TraceError for a write to operands or results of the calls by any other call."""
        regular = {*calls, *self.inputs, *(source for write in calls for source in write.all_input_nodes)}
        for write in after:
            if write in calls or not is_write(write) or base_name(str(write.target)) == "batch_norm":
                continue
            written: Any = write.args[0]
            while written not in regular and _may_be_view(written):
                written = written.args[0]
            if written in regular:
                raise self.refused(f"{write.target} writes to a tensor that is used otherwise", write)

    def call(self, node: torch.fx.Node) -> Callable[..., Any]:
        """Return calls that compute a call again, without side effects. Raises TraceError where that is impossible."""
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return target  # type: ignore[no-any-return]
        if _is_random(node):
            raise self.refused(f"it goes through {target}, whose random numbers would be drawn anew", node)
        if target._schema.is_mutable and base_name(str(target)) != "batch_norm":
            functional = functional_overload(target)
            same = written_by(node)
            order = {user: position for position, user in enumerate(self.graph.nodes)}
            others = [user for written in same for user in written.users if user not in (node, *same)]
            is_last = all(order[user] < order[node] and not _may_be_view(user) for user in others)
            if functional is None or _may_be_view(same[-1]) or not is_last:
                raise self.refused(f"{target} writes to a tensor that is used otherwise", node)
            return functional
        return target

    def write_out(self) -> None:
        calls = self.calls()
        targets = {call_node: self.call(call_node) for call_node in calls}
        inside = {*calls, *self.inputs}
        operands = [*self.inputs, *self.grad_outputs]
        operands += [s for call_node in calls for s in call_node.all_input_nodes if s not in inside]
        operands = list(dict.fromkeys(operands))

        def product(*values: Tensor) -> Any:
            values_of: dict[torch.fx.Node, Any] = dict(zip(operands, values, strict=True))

            def forward(*inputs: Tensor) -> list[Any]:
                results = values_of | dict(zip(self.inputs, inputs, strict=True))
                for call_node in calls:
                    mapped: Any = map_arg((call_node.args, call_node.kwargs), results.__getitem__)
                    args, kwargs = mapped
                    target = call_node.target
                    if getattr(target, "_overloadname", "") and base_name(str(target)) == "batch_norm":
                        # Its statistics are updated once.
                        args = (*args[:3], None, None, *args[5:]) if args[5] else args
                    results[call_node] = targets[call_node](*args, **kwargs)
                return [results[call_node] for call_node in self.outputs]

            pullback: Any = torch.func.vjp(forward, *(values_of[operand] for operand in self.inputs))
            return pullback[1]([values_of[operand] for operand in self.grad_outputs])

        token = _is_inside.set(True)
        try:
            written = traced_below(product, *(_like(call_node.meta["val"]) for call_node in operands))
        finally:
            _is_inside.reset(token)
        self.insert(written, operands)

    def insert(self, written: torch.fx.GraphModule, taken: list[torch.fx.Node]) -> None:
        copies: dict[torch.fx.Node, Any] = {}
        sources = iter(taken)
        about = {k: v for k, v in self.node.meta.items() if k in ("nn_module_stack", "stack_trace")}
        with self.graph.inserting_before(self.node):
            for written_node in written.graph.nodes:
                if written_node.op == "placeholder":
                    copies[written_node] = next(sources)
                elif written_node.op == "get_attr":
                    raise self.refused("it makes a tensor of numbers")
                elif written_node.op == "output":
                    results = list(map_arg(written_node.args[0], copies.__getitem__))
                else:
                    value = written_node.meta.get("val")
                    if isinstance(value, (tuple, list)) and None in value:
                        raise self.refused(f"{written_node.target} has no form that autopar can differentiate")
                    copies[written_node] = self.graph.node_copy(written_node, copies.__getitem__)
                    copies[written_node].meta = {**copies[written_node].meta, **about}
            if not self.is_graph:
                for index, written_node in enumerate(results):
                    results[index] = self.graph.call_function(torch.ops.aten.detach.default, (written_node,))
                    results[index].meta = {**written_node.meta, **about}
        for user in list(self.node.users):
            place: Any = user.args[1]
            user.replace_all_uses_with(results[place])
            self.graph.erase_node(user)
        self.graph.erase_node(self.node)


def _is_float(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(item, Tensor) and (item.is_floating_point() or item.is_complex()) for item in values)


def _may_be_view(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and may_be_view(str(node.target))


def _is_random(node: torch.fx.Node) -> bool:
    """Return whether a call draws random numbers; a dropout that drops nothing does not."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    name = base_name(str(node.target))
    if name == "dropout":
        return bool(node.args[1] and node.args[2])
    if name == "scaled_dot_product_attention":
        return len(node.args) > 4 and bool(node.args[4])
    return True
