"""Gradients that forward takes itself, as ordinary operators: `torch.autograd.grad` and transforms of `torch.func`.

`torch.autograd.grad` is one operator while forward is traced. When the export is read, the calls between its inputs and
outputs are found in the graph, their vector-Jacobian product is traced, and its calls stand in the operator's place
(`write_out`). A transform of `torch.func` is traced below itself where it is called, and the calls that it comes to are
made there (`_Region`). Both give the backward operators of aten, which autograd differentiates again.
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
from autopar.frontend.autograd_functions import outside_functions
from autopar.frontend.backward_calls import traced_below
from autopar.frontend.fakes import in_this_thread
from autopar.frontend.overloads import functional_overload, is_write, written_by
from autopar.frontend.user_line import user_line
from autopar.ir.graph import base_name
from autopar.operators.schemas import may_be_view
from autopar.operators.traits import CONSTANT

_is_inside: ContextVar[bool] = ContextVar("_is_inside", default=False)
"""Whether a region is being traced, in which torch's own functions run."""

_did_differentiate: ContextVar[list[bool] | None] = ContextVar("_did_differentiate", default=None)


@torch.library.custom_op("autopar_inner::gradient", mutates_args=())
def _gradient(outputs: list[Tensor], inputs: list[Tensor], given: list[Tensor], is_graph: bool) -> list[Tensor]:
    """The gradients of outputs by inputs. given: those of the outputs, all ones where the list is empty."""
    return [torch.empty_like(each) for each in inputs]


@_gradient.register_fake
def _(outputs: list[Tensor], inputs: list[Tensor], given: list[Tensor], is_graph: bool) -> list[Tensor]:
    return [torch.empty_like(each, requires_grad=False) for each in inputs]


def _no_backward(context: Any, *gradients: Any) -> Any:
    raise NotImplementedError


_gradient.register_autograd(_no_backward)
GRADIENT = torch.ops.autopar_inner.gradient.default


@contextlib.contextmanager
def traceable_gradients() -> Iterator[None]:
    """Within it, gradients that forward takes are traced."""
    engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run(outputs: Any, given: Any, keep: Any, is_graph: Any, inputs: Any = (), *rest: Any, **named: Any) -> Any:
        if _is_inside.get():
            return engine(outputs, given, keep, is_graph, inputs, *rest, **named)
        return _marked(tuple(outputs), tuple(inputs), tuple(given), bool(is_graph))

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
            own = getattr(owner, name)
            call = in_this_thread(outside_functions(replacement, own), own)
            stack.enter_context(mock.patch.object(owner, name, call))
        yield


# --- torch.func -------------------------------------------------------------------------------------------------------


def _transform(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _note()
        return original(*args, **kwargs) if _is_inside.get() else _Region(original, args, kwargs).result()

    return call


def _vjp(original: Callable[..., Any]) -> Callable[..., Any]:
    """`vjp` as forward, and a function that computes forward again beside its product."""

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

        found = function(*primals)
        return (found[0], pull, found[1]) if options.get("has_aux") else (found, pull)

    return call


def _vmap(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `vmap` of what differentiates is a region; any other stays as it is (`vmaps.py`)."""

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
    """A call traced below all transforms, to be made again, call by call, where it stands."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        leaves, form = tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]

        def traced(*tensors: Tensor) -> list[Any]:
            given = iter(tensors)
            filled = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
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
                alternatives="random numbers drawn before, as an argument of the function",
            )

    def result(self) -> Any:
        """Make the calls on the tensors that were given, and return what the function returned."""
        values: dict[torch.fx.Node, Any] = {}
        given = iter(self.tensors)
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = getattr(self.graph, str(node.target))
            elif node.op == "output":
                return tree_unflatten(map_arg(node.args[0], values.__getitem__), self.form)
            else:
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
        raise AssertionError("a graph without output")


def _like(value: Tensor) -> Tensor:
    """A tensor without memory that no transform, mode or graph knows."""
    if not isinstance(value, FakeTensor):
        return value.detach()
    with value.fake_mode:
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made


# --- torch.autograd.grad ----------------------------------------------------------------------------------------------


def _marked(outputs: tuple[Any, ...], inputs: tuple[Any, ...], given: tuple[Any, ...], is_graph: bool) -> Any:
    if not inputs:
        raise TraceError(
            "forward calls backward, of which a traced graph shows nothing",
            alternatives="torch.autograd.grad for gradients that forward uses, else backward in the training loop",
        )
    if not all(isinstance(each, Tensor) for each in (*outputs, *inputs)):
        raise TraceError(
            "torch.autograd.grad of graph edges, which a traced graph does not have",
            alternatives="tensors as its outputs and inputs",
        )
    ones = [torch.ones_like(out) if one is None else one for out, one in zip(outputs, given, strict=True)]
    return tuple(GRADIENT(list(outputs), list(inputs), ones, is_graph))


def write_out(program: torch.export.ExportedProgram) -> None:
    """Put the calls of backward in the place of every `torch.autograd.grad` of a program."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in list(module.graph.nodes):
                if node.target is GRADIENT:
                    _Gradient(module.graph, node).write_out()


class _Gradient:
    """One `torch.autograd.grad` in a graph."""

    def __init__(self, graph: torch.fx.Graph, node: torch.fx.Node) -> None:
        self.graph, self.node = graph, node
        given: Any = node.args
        self.outputs: list[torch.fx.Node] = list(given[0])
        self.inputs: list[torch.fx.Node] = list(given[1])
        self.given: list[torch.fx.Node] = list(given[2])
        self.is_graph: bool = given[3]

    def refused(self, why: str, at: torch.fx.Node | None = None) -> TraceError:
        line, other = (user_line(each.meta.get("stack_trace")) if each else "" for each in (self.node, at))
        return TraceError(
            "torch.autograd.grad in forward cannot be traced",
            values=f"{why}{f' at {other}' * bool(other)}" + f"\ncalled at {line}" * bool(line),
            alternatives="torch.func.grad or torch.func.vjp of a function, or the derivative written out",
        )

    def calls(self) -> list[torch.fx.Node]:
        """Return the calls that lead from the inputs to the outputs and are differentiated."""
        before = list(self.graph.nodes)
        before = before[: before.index(self.node)]
        reached = set(self.inputs)
        for each in before:
            if each in reached or each.op != "call_function" or not reached & set(each.all_input_nodes):
                continue
            name = getattr(each.target, "__name__", "")
            if isinstance(each.target, torch._ops.OpOverload):
                if base_name(str(each.target)) not in CONSTANT and _is_float(each):
                    reached.add(each)
            elif name == "getitem":
                reached.add(each)
            elif not (name.startswith("wrap_with_set_grad_enabled") and not each.args[0]) and _is_float(each):
                raise self.refused(f"it goes through {name}", each)
        needed = {each for each in self.outputs if each in reached}
        for each in reversed(before):
            if each in needed and each not in self.inputs:
                needed |= {source for source in each.all_input_nodes if source in reached}
        missing = [str(each) for each in self.inputs if each not in needed]
        if missing:
            raise self.refused("the outputs do not depend on all inputs, of which it returns None")
        for each in [each for each in needed if is_write(each) and base_name(str(each.target)) != "batch_norm"]:
            for written in written_by(each):  # which holds what was written to it where the calls stand again
                if not isinstance(written.target, torch._ops.OpOverload):
                    raise self.refused(f"{each.target} writes to a tensor that is used otherwise", each)
                needed.add(written)
        calls = [each for each in before if each in needed and each not in self.inputs]
        self.check_writes(before[before.index(calls[0]) if calls else 0 :], calls)
        return calls

    def check_writes(self, after: list[torch.fx.Node], calls: list[torch.fx.Node]) -> None:
        """Raise TraceError for a write to what the calls read or made, by a call that is none of them."""
        held = {*calls, *self.inputs, *(source for each in calls for source in each.all_input_nodes)}
        for each in after:
            if each in calls or not is_write(each) or base_name(str(each.target)) == "batch_norm":
                continue
            written: Any = each.args[0]
            while written not in held and _may_be_view(written):
                written = written.args[0]
            if written in held:
                raise self.refused(f"{each.target} writes to a tensor that is used otherwise", each)

    def call(self, node: torch.fx.Node) -> Callable[..., Any]:
        """Return what computes a call again, and changes nothing. Raises TraceError for what cannot be."""
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return target  # type: ignore[no-any-return]
        if _is_random(node):
            raise self.refused(f"it goes through {target}, whose random numbers would be drawn anew", node)
        if target._schema.is_mutable and base_name(str(target)) != "batch_norm":
            functional = functional_overload(target)
            same = written_by(node)
            order = {each: position for position, each in enumerate(self.graph.nodes)}
            others = [each for written in same for each in written.users if each not in (node, *same)]
            is_last = all(order[each] < order[node] and not _may_be_view(each) for each in others)
            if functional is None or _may_be_view(same[-1]) or not is_last:
                raise self.refused(f"{target} writes to a tensor that is used otherwise", node)
            return functional
        return target

    def write_out(self) -> None:
        calls = self.calls()
        targets = {each: self.call(each) for each in calls}
        inside = {*calls, *self.inputs}
        taken = [*self.inputs, *self.given]
        taken += [s for each in calls for s in each.all_input_nodes if s not in inside]
        taken = list(dict.fromkeys(taken))

        def product(*values: Tensor) -> Any:
            known: dict[torch.fx.Node, Any] = dict(zip(taken, values, strict=True))

            def forward(*inputs: Tensor) -> list[Any]:
                made = known | dict(zip(self.inputs, inputs, strict=True))
                for each in calls:
                    found: Any = map_arg((each.args, each.kwargs), made.__getitem__)
                    args, kwargs = found
                    if getattr(each.target, "_overloadname", "") and base_name(str(each.target)) == "batch_norm":
                        args = (*args[:3], None, None, *args[5:]) if args[5] else args  # its statistics are kept once
                    made[each] = targets[each](*args, **kwargs)
                return [made[each] for each in self.outputs]

            made: Any = torch.func.vjp(forward, *(known[each] for each in self.inputs))
            return made[1]([known[each] for each in self.given])

        token = _is_inside.set(True)
        try:
            written = traced_below(product, *(_like(each.meta["val"]) for each in taken))
        finally:
            _is_inside.reset(token)
        self.insert(written, taken)

    def insert(self, written: torch.fx.GraphModule, taken: list[torch.fx.Node]) -> None:
        copies: dict[torch.fx.Node, Any] = {}
        sources = iter(taken)
        about = {k: v for k, v in self.node.meta.items() if k in ("nn_module_stack", "stack_trace")}
        with self.graph.inserting_before(self.node):
            for each in written.graph.nodes:
                if each.op == "placeholder":
                    copies[each] = next(sources)
                elif each.op == "get_attr":
                    raise self.refused("it makes a tensor of numbers")
                elif each.op == "output":
                    results = list(map_arg(each.args[0], copies.__getitem__))
                else:
                    if None in (each.meta.get("val") if isinstance(each.meta.get("val"), (tuple, list)) else ()):
                        raise self.refused(f"{each.target} has no form that autopar can differentiate")
                    copies[each] = self.graph.node_copy(each, copies.__getitem__)
                    copies[each].meta = {**copies[each].meta, **about}
            if not self.is_graph:
                for index, each in enumerate(results):
                    results[index] = self.graph.call_function(torch.ops.aten.detach.default, (each,))
                    results[index].meta = {**each.meta, **about}
        for user in list(self.node.users):
            place: Any = user.args[1]
            user.replace_all_uses_with(results[place])
            self.graph.erase_node(user)
        self.graph.erase_node(self.node)


def _is_float(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex()) for each in values)


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
