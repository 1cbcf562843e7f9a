"""Import an ExportedProgram as flat nodes.

Devices, layouts and pinning are left out (the emitted program sets its device). Submodules that export makes for
`no_grad` regions are inlined with their outputs detached, and tied parameters get one name.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from autopar.errors import TraceError
from autopar.frontend.attributes import named_modules, named_tensors, persistent_names
from autopar.frontend.overloads import kept_kwargs
from autopar.frontend.rewrites import vmaps
from autopar.frontend.rewrites.composites import definition
from autopar.frontend.rewrites.vmaps import BRACKETS
from autopar.frontend.selected_rows import replacement
from autopar.frontend.trace_modes import inner_gradients
from autopar.frontend.untraceable import takes_number
from autopar.frontend.user_line import user_line
from autopar.ir.graph import Node, Parameter, Ref, TensorMeta, base_name, has_gradients, input_name, refs_in, with_refs
from autopar.ir.operators import arguments_of, shares_memory
from autopar.operators.traits import CONSTANT

LOGITS = "autopar.logits.default"
"""The op of the last node, which reads the model's logits: it keeps them in use while a trace is simplified. Only
logits that the loss is computed from have it.
"""

_ROOT = "model."
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)


@dataclass(slots=True)
class FlatGraph:
    """Nodes in execution order, before layers are folded. Mutable: the simplification passes rewrite it.

    lines: node -> the user's stack at its call, as Python prints one. unchecked, no_evaluation: as in a Graph.
    """

    parameters: dict[str, Parameter]
    inputs: dict[str, TensorMeta]
    nodes: list[Node]
    loss: Ref
    classes: dict[str, str]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    unchecked: tuple[str, ...] = ()
    no_evaluation: str = ""

    def copy(self) -> FlatGraph:
        """Return a copy that passes may rewrite without changing this graph."""
        return replace(self, **{field_.name: copy.copy(getattr(self, field_.name)) for field_ in fields(self)})

    def metas(self) -> dict[Ref, TensorMeta]:
        metas = {Ref(name): parameter.meta for name, parameter in self.parameters.items()}
        metas |= {Ref(name): meta for name, meta in self.inputs.items()}
        for node in self.nodes:
            metas |= {Ref(node.name, index): meta for index, meta in enumerate(node.outputs)}
        return metas

    def substitute(self, renamed: Mapping[Ref, Ref]) -> None:
        """Replace every Ref that `renamed` maps by its final target."""

        def target(ref: Ref) -> Ref:
            while ref in renamed:
                ref = renamed[ref]
            return ref

        self.nodes = [with_refs(node, target) for node in self.nodes]
        self.loss = target(self.loss)


def unused_name(wish: str, taken: Container[str], first: int = 1) -> str:
    """Return `wish`, or `wish_1`, `wish_2` ...: the first from number `first` on that is not in `taken`."""
    name, count = wish, first
    while name in taken:
        name, count = f"{wish}_{count}", count + 1
    return name


def is_view(node: Node, metas: Mapping[Ref, TensorMeta]) -> bool:
    """Return whether the results share memory with the first operand. A `contiguous` left in a trace is a copy."""
    if not node.args or not isinstance(node.args[0], Ref):
        return False
    name = base_name(node.op)
    if name == "to":
        return metas[node.args[0]].dtype == node.meta.dtype
    if name == "dropout":  # which returns its operand where it drops nothing
        arguments = arguments_of(node)
        return not arguments["train"] or arguments["p"] == 0
    return shares_memory(node.op)


def import_program(
    program: torch.export.ExportedProgram, module: nn.Module, batch: Mapping[str, Any], model: nn.Module
) -> FlatGraph:
    """Convert the exported graph of `module`, a loss_module.LossModule of a copy of `model`.

    batch: by name, in the order in which it was exported. Raises TraceError where a graph would differ from forward.
    """
    vmaps.write_out(program)
    inner_gradients.write_out(program)
    replacement.write_out(program)
    return _Importer(program, module, batch, model).run()


class _Importer:
    def __init__(
        self, program: torch.export.ExportedProgram, module: nn.Module, batch: Mapping[str, Any], model: nn.Module
    ) -> None:
        self.model = model
        self.program = program
        self.module = module
        self.flat = FlatGraph(
            parameters=_parameters(module), inputs={}, nodes=[], loss=Ref(""), classes=_class_names(module)
        )
        self.values: dict[torch.fx.Node, Any] = {}
        self.names = set(self.flat.parameters)
        # The graph has an input per item of a list of plain data, and none for an empty list.
        self.batch = iter([name for name, value in batch.items() for _ in tree_leaves(value)])
        self.roots: dict[Ref, Ref] = {}  # a view -> the tensor whose memory it shows

    def run(self) -> FlatGraph:
        signature = self.program.graph_signature
        stored = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        first_name = _first_names(self.module)
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            if node.name in stored:
                self.values[node] = Ref(first_name[stored[node.name]])
            elif node.name in signature.inputs_to_lifted_tensor_constants:
                self.values[node] = self._constant(node, signature.inputs_to_lifted_tensor_constants[node.name])
            else:
                self.values[node] = self._input(node)
        self.metas = self.flat.metas()
        _leave_out_unneeded(self.program.graph)
        output = self._import_nodes(self.program.graph_module, no_grad=False)
        self.flat.loss, *logits = refs_in(output)
        if logits:
            name, outputs = unused_name("given_logits", self.names), (self.metas[logits[0]],)
            self.flat.nodes.append(Node(name=name, op=LOGITS, args=(logits[0],), kwargs=(), outputs=outputs))
        return self.flat

    def _input(self, node: torch.fx.Node) -> Any:
        """Return the batch's name of an input: torch.export changes names that are not plain identifiers."""
        value = node.meta.get("val")
        name = next(self.batch)
        if not isinstance(value, torch.Tensor):
            return value
        name = input_name(name, self.flat.parameters)
        self.flat.inputs[name] = _meta(value)
        self.names.add(name)
        return Ref(name)

    def _constant(self, node: torch.fx.Node, target: str) -> Ref:
        value = self.program.constants[target]
        if isinstance(value, FakeTensor) and node.users:
            line = user_line(next(iter(node.users)).meta.get("stack_trace"))
            raise TraceError(
                "forward uses the .data of a tensor, which a traced graph takes for a constant",
                values=line or f"a tensor of shape {tuple(value.shape)}",
                alternatives="use detach() to read it; change parameters and buffers in the training loop",
            )
        if node.users and (value.is_meta or (memory_name := _name_of_memory(value, self.model))):
            line = user_line(next(iter(node.users)).meta.get("stack_trace"))
            raise TraceError(
                "forward or the loss reaches the model itself, past the copy that is traced, and would take its "
                "parameters and buffers for constants",
                values=("a tensor on meta" if value.is_meta else memory_name) + f" at {line}" * bool(line),
                alternatives=[
                    "for a forward that is set on an instance: types.MethodType(function, module), whose first "
                    "argument is the module",
                    "for a loss_fn: pass it outputs of forward, or compute the loss in the model",
                ],
            )
        name = _root(target)
        self.flat.constants[name] = value.detach().clone()
        self.flat.parameters[name] = Parameter(name, _meta(value), is_buffer=True, persistent=False)
        self.names.add(name)
        return Ref(name)

    def _import_nodes(self, graph_module: torch.fx.GraphModule, no_grad: bool) -> Any:
        """Append the calls of `graph_module`; return its output with fx nodes replaced by Refs."""
        for node in graph_module.graph.nodes:
            if node.op == "output":
                return self._argument(node.args[0])
            if node.op == "call_function":
                self.values[node] = self._call(graph_module, node, no_grad)
            elif node.op == "get_attr":
                self.values[node] = getattr(graph_module, str(node.target))
            elif node.op != "placeholder":
                raise TraceError(
                    "the exported graph has a node that autopar does not support",
                    values=f"{node.op} {node.target}",
                    alternatives="write this call with torch operators",
                )
        return ()

    def _call(self, owner: torch.fx.GraphModule, node: torch.fx.Node, no_grad: bool) -> Any:
        target = node.target
        if target is operator.getitem:
            return self._argument(node.args[0])[node.args[1]]
        name = getattr(target, "__name__", str(target))
        if name.startswith("wrap_with_set_grad_enabled"):
            enabled, body, *args = node.args
            return self._inline(body, args, no_grad or not enabled)
        if name.startswith("wrap_with_autocast"):
            _, _, enabled, _, body, *args = node.args
            if enabled:
                raise TraceError(
                    "the model switches autocast on inside forward",
                    values=_module_path(node),
                    alternatives='remove it and pass precision="bf16" or "fp16" to autopar.compile',
                )
            return self._inline(body, args, no_grad)
        if name.startswith("_has_compatible_shallow_copy_type"):
            raise TraceError(
                "forward assigns to the .data of a tensor, which the program would not keep",
                values=user_line(node.meta.get("stack_trace")) or _module_path(node) or "in forward",
                alternatives="change parameters and buffers in the training loop",
            )
        if not isinstance(target, torch._ops.OpOverload) and isinstance(node.meta.get("val"), _NUMBERS):
            raise takes_number(user_line(node.meta.get("stack_trace")) or f"{name} at {_module_path(node)}")
        if not isinstance(target, torch._ops.OpOverload):
            line = user_line(node.meta.get("stack_trace")) or _module_path(node) or "in forward"
            of_vmap = "write what torch.vmap computes for all elements at once (torch.einsum, torch.bmm)"
            raise TraceError(
                "forward calls an operator that autopar does not support",
                values=f"{name} at {line}",
                alternatives=of_vmap if name in BRACKETS else "use an aten operator, or a torch.library.custom_op",
            )
        parts = definition(target, node)
        if parts is not None:
            return self._inline(parts, node.all_input_nodes, no_grad)
        return self._append(node, target, no_grad)

    def _inline(self, body: Any, args: list[Any], no_grad: bool) -> Any:
        body_module = self.values[body] if isinstance(body, torch.fx.Node) else body
        placeholders = [n for n in body_module.graph.nodes if n.op == "placeholder"]
        for placeholder, arg in zip(placeholders, args, strict=True):
            self.values[placeholder] = self._argument(arg)
        return self._import_nodes(body_module, no_grad)

    def _append(self, node: torch.fx.Node, target: torch._ops.OpOverload, no_grad: bool) -> Any:
        args = tuple(self._argument(a) for a in node.args)
        op = str(target)
        kwargs = tuple((k, self._argument(v)) for k, v in kept_kwargs(op, node.kwargs).items())
        is_differentiable = not no_grad and base_name(op) not in CONSTANT
        if not (operands := {*refs_in((args, kwargs))}) <= self.metas.keys():  # some are not tensors
            raise takes_number(user_line(node.meta.get("stack_trace")) or f"{op} at {_module_path(node)}")
        grads = is_differentiable and any(self.metas[ref].requires_grad for ref in operands)
        value = node.meta.get("val")
        values = value if isinstance(value, (tuple, list)) else (value,)
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        outputs = tuple(_static(v, grads and has_gradients(v.dtype), node) for v in tensors)
        name = unused_name(node.name, self.names)
        self.names.add(name)
        self.flat.lines[name] = node.meta.get("stack_trace") or ""
        module = _module_path(node)
        call = Node(name=name, op=op, args=args, kwargs=kwargs, outputs=outputs, module=module)
        self.flat.nodes.append(call)
        self.metas |= {Ref(name, i): meta for i, meta in enumerate(outputs)}
        self._follow_memory(call)
        refs = tuple(Ref(name, i) for i in range(len(outputs)))
        return refs if isinstance(value, (tuple, list)) else Ref(name)

    def _follow_memory(self, node: Node) -> None:
        """Mark memory that a differentiable write reaches as differentiated from then on, views and bases included."""
        is_write = node.op.split(".")[1].endswith("_")
        shares = is_view(node, self.metas) and base_name(node.op) not in CONSTANT
        if not (is_write or shares) or not node.args or not isinstance(node.args[0], Ref):
            return
        root = self.roots.get(node.args[0], node.args[0])
        self.roots |= {Ref(node.name, i): root for i in range(len(node.outputs))}
        if is_write and any(meta.requires_grad for meta in node.outputs):
            for ref in (root, *(ref for ref, base in self.roots.items() if base == root)):
                self.metas[ref] = replace(self.metas[ref], requires_grad=True)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return self.values[value]
        if isinstance(value, (tuple, list)):
            return tuple(self._argument(item) for item in value)
        return value


def _leave_out_unneeded(graph: torch.fx.Graph) -> None:
    """Drop logits that the loss is not computed from, and calls that only they need."""
    output = graph.output_node()
    results = output.args[0]
    if not isinstance(results, (tuple, list)) or len(results) < 2:
        return
    loss, logits = results
    needed, waiting = {loss}, [loss]
    while waiting:
        node = waiting.pop()
        operands = node.all_input_nodes if isinstance(node, torch.fx.Node) else []
        waiting += [operand for operand in operands if operand not in needed]
        needed |= set(operands)
    if logits not in needed:
        output.args = ((loss,),)
        graph.eliminate_dead_code()


def _meta(value: torch.Tensor, requires_grad: bool | None = None) -> TensorMeta:
    needs = value.requires_grad if requires_grad is None else requires_grad
    return TensorMeta(tuple(int(s) for s in value.shape), value.dtype, needs)


def _static(value: torch.Tensor, requires_grad: bool, node: torch.fx.Node) -> TensorMeta:
    """Raise TraceError, naming the user's line, for a shape that depends on values."""
    if any(not isinstance(size, int) and not size.node.is_constant() for size in value.shape):
        line = user_line(node.meta.get("stack_trace"))
        raise TraceError(
            "the shape of a result depends on values",
            values=f"{node.target}" + (f" at {line}" if line else ""),
            alternatives="use torch.where, or a product with the mask, not an index by it (nonzero, unique, "
            "masked_select)",
        )
    return _meta(value, requires_grad)


def _root(name: str) -> str:
    """Return a name in the user's model, without the wrapper's prefix."""
    return name.removeprefix(_ROOT)


def _module_path(node: torch.fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return _root(path) if path != "model" else ""


def _first_names(module: nn.Module) -> dict[str, str]:
    """Map every parameter and buffer name of the wrapper to the first name of that tensor in the user's model."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, tensor in named_tensors(module, remove_duplicate=False):
        names[name] = first.setdefault(id(tensor), _root(name))
    return names


def _name_of_memory(value: torch.Tensor, model: nn.Module) -> str:
    """Return the parameter or buffer of the user's model that a tensor shares its memory with, or ""."""
    address = value.untyped_storage().data_ptr()
    for name, tensor in named_tensors(model):
        has_memory = not tensor.is_meta and not isinstance(tensor, FakeTensor)
        if address and has_memory and tensor.untyped_storage().data_ptr() == address:
            return name
    return ""


def _parameters(module: nn.Module) -> dict[str, Parameter]:
    """Return the user's parameters and buffers by first name, tied names as aliases; a loss's tensors are constants."""
    names = _first_names(module)
    aliases: dict[str, list[str]] = {}
    for name, first in names.items():
        aliases.setdefault(first, [])
        if _root(name) != first:
            aliases[first].append(_root(name))
    persistent = {_root(name) for name in persistent_names(module) if name.startswith(_ROOT)}
    parameters = {}
    for name, tensor in dict(named_tensors(module)).items():
        root = _root(name)
        is_buffer = not isinstance(tensor, nn.Parameter) or not name.startswith(_ROOT)
        parameters[root] = Parameter(
            name=root,
            meta=_meta(tensor),
            aliases=tuple(aliases[root]),
            is_buffer=is_buffer,
            persistent=root in persistent,
        )
    return parameters


def _class_names(module: nn.Module) -> dict[str, str]:
    return {_root(path): type(child).__name__ for path, child in named_modules(module) if path not in ("", "model")} | {
        "": type(module.model).__name__
    }
