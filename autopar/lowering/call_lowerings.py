"""Statements of calls that need a lowering: the rules' lowering names become calls of the run time.

Each function takes the local call and returns the program's statement. The run-time functions are in codegen/runtime;
their names here are `runtime.<function>`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from autopar.ir.draws import IN_TRAINING
from autopar.ir.graph import (
    SINK_ATTENTION,
    UPDATE_BUFFER,
    WINDOW_ATTENTION,
    Graph,
    LayerRun,
    Node,
    Ref,
    ancestors,
    base_name,
)
from autopar.ir.mesh import Mesh
from autopar.ir.operators import arguments_of
from autopar.ir.placement import Placement, R, S
from autopar.operators.traits import DEFERRABLE
from autopar.rules.call import Call as RuleCall
from autopar.rules.families.attention import EXCHANGES
from autopar.rules.families.convolution import HALO, halo_dim
from autopar.rules.families.experts import EXPERT_LINEAR
from autopar.rules.families.lookup import BAGS
from autopar.rules.families.loss import MEAN, is_plain_cross_entropy
from autopar.rules.localize import LocalCall, LoweringCall, local_call
from autopar.rules.rule import AxisOption
from autopar.sharding.call_options import Operator, Option
from codegen.evaluation import UPDATE
from codegen.program import Call, Raw, Statement, TensorType, Var
from codegen.schemas import schema_of
from codegen.source.expressions import call_arguments, literal

if TYPE_CHECKING:
    from autopar.lowering.scope_lowering import Lowering


def lower_call(
    scope: Lowering, node: Node, operator: Operator, option: Option, local: LocalCall, call: Call
) -> Statement:
    """Return the statement for one call."""
    lowering = local.lowering if option.axes else _on_one_rank(node, operator)
    statement = _by_operator(scope, node, operator, lowering, call)
    if statement is not None:
        return statement
    if lowering is None:
        return _own_operator(call) if node.op in (WINDOW_ATTENTION, SINK_ATTENTION, BAGS) else call
    if lowering.name == "mean":
        return replace(call, divisor=lowering.divisor)
    if lowering.name == "group_norm":
        return _group_norm(scope.shared.mesh, operator, lowering, call)
    if lowering.name == HALO:
        return _halo(operator, Raw(scope.shared.mesh.axes[lowering.axes[0]]), call)
    if lowering.name in EXCHANGES:
        return _context_attention(call, lowering, scope.shared.mesh.axes[lowering.axes[0]])
    return _at_positions(scope, node, operator, lowering, call)


def _by_operator(
    scope: Lowering, node: Node, operator: Operator, lowering: LoweringCall | None, call: Call
) -> Statement | None:
    """Return the statement for an operator that has one statement of its own, whatever its option; else None."""
    name, mesh = base_name(node.op), scope.shared.mesh
    if is_plain_cross_entropy(node, operator.inputs, any_dims=True):
        axes = lowering.axes if lowering and lowering.name == "cross_entropy" else ()
        return _cross_entropy(scope, node, axes, _with_rows(scope, call))
    if scope.shared.defers_weights and name in DEFERRABLE and _is_trained(operator, call, DEFERRABLE[name]):
        return replace(call, target=f"deferred.{name}")
    if node.op == UPDATE_BUFFER:
        return replace(call, target=UPDATE)
    if node.op == EXPERT_LINEAR:
        return _expert_linear(scope, operator, lowering, call)
    if node.op == IN_TRAINING:
        return replace(call, target="self.in_training")
    if name == "batch_norm":
        return _batch_norm(mesh, lowering, call)
    user_rows = scope.shared.graph.vocabularies.get(node.name) if not operator.scope else None
    if lowering is not None and lowering.name == "vocab_embedding":
        return _vocab_embedding(call, Raw(mesh.axes[lowering.axes[0]]), user_rows)
    if lowering is None and name == "embedding" and user_rows is not None:
        return _vocab_embedding(call, None, user_rows)
    return None


def _at_positions(scope: Lowering, node: Node, operator: Operator, lowering: LoweringCall, call: Call) -> Statement:
    """Return the statement for a call whose numbers follow from the global positions of its elements."""
    layout = scope.layout(lowering.layout_shape, lowering.layout)
    if lowering.name == "arange":
        return _arange(call, layout, node.meta.dtype)
    number = scope.shared.numbers.calls[operator.scope, node.name]
    where: tuple[tuple[str, Any], ...] = (("call", number), ("layout", Raw(layout)))
    accumulation = scope.shared.graph.accumulation
    if accumulation is not None and (operator.scope, node.name) in accumulation.repeated:
        where = (*where, ("batched", False))
    if lowering.name == "dropout":
        arguments = call_arguments(call)
        return replace(call, target="self.same_dropout", args=(arguments["input"], arguments["p"]), kwargs=where)
    if lowering.name == "draw":
        return _draw(node, call, where)
    assert lowering.name == "attention", f"no statement for lowering {lowering.name}"
    return replace(call, target="self.dropout_attention", kwargs=(*call.kwargs, *where))


def _expert_linear(scope: Lowering, operator: Operator, lowering: LoweringCall | None, call: Call) -> Call:
    """Return an expert layer, with the exchange of its rows before and after it where that belongs to this call."""
    rows, weight, experts, *bias = call.args
    axes = _routing_axis(scope.shared.mesh, lowering)
    num_experts, route = operator.inputs[1].shape[0], operator.route
    routes = scope.once("Routes", (experts, num_experts, *axes), "routes", experts, call.section)
    if not route.arrives:
        rows = scope.once("dispatch", (rows, routes), "rows", rows, call.section)
    product = replace(call, target="runtime.expert_linear", args=(rows, weight, routes, *bias))
    if not route.returns:
        return product
    (result,) = call.results
    product_variable = Var(scope.fresh_name("product"), replace(result.type, tensor=("", 0)))
    scope.pending.append(replace(product, results=(product_variable,)))
    return replace(call, target="runtime.combine", args=(product_variable, routes))


def _batch_norm(mesh: Mesh, lowering: LoweringCall | None, call: Call) -> Call:
    """Return a norm whose statistics cover the rows of all ranks of the axes appended to its arguments."""
    arguments = (value for name, value in call_arguments(call).items() if name != "cudnn_enabled")
    axes = () if lowering is None else tuple(Raw(mesh.axes[number]) for number in lowering.axes)
    return replace(call, target="runtime.batch_norm", args=(*arguments, *axes), kwargs=())


def _group_norm(mesh: Mesh, operator: Operator, lowering: LoweringCall, call: Call) -> Call:
    """Return a norm whose statistics cover groups of rows with space sharded over the axes."""
    arguments = _whole_arguments(operator, call)
    first = (arguments[name] for name in ("input", "num_groups", "weight", "bias", "eps"))
    axes = (Raw(mesh.axes[number]) for number in lowering.axes)
    return replace(call, target="runtime.group_norm", args=(*first, *axes), kwargs=())


def _whole_arguments(operator: Operator, call: Call) -> dict[str, Any]:
    """Return the arguments of a rank's call by name, including defaults."""
    names = [argument.name for argument in schema_of(call.target) or ()]
    return arguments_of(operator.node) | dict(zip(names, call.args, strict=False)) | dict(call.kwargs)


def _halo(operator: Operator, axis: Raw, call: Call) -> Call:
    """Return a convolution of a rank's rows of space and some of its neighbors' rows."""
    reach = halo_dim(RuleCall.of(operator.node, operator.inputs))
    assert reach is not None
    arguments = _whole_arguments(operator, call)
    tensors = (arguments[name] for name in ("input", "weight", "bias"))
    sizes = {name: arguments[name] for name in ("stride", "padding", "dilation", "groups")}
    usual = {name: 1 if name == "groups" else (int(name != "padding"),) * len(sizes["stride"]) for name in sizes}
    kwargs = (("dim", reach[0]), *((name, size) for name, size in sizes.items() if size != usual[name]))
    return replace(call, target="runtime.halo_convolution", args=(*tensors, axis), kwargs=kwargs)


def _routing_axis(mesh: Mesh, lowering: LoweringCall | None) -> tuple[Raw, ...]:
    """Return the argument that names the axis over which rows travel, if they do."""
    names = () if lowering is None else tuple(mesh.axes[number] for number in lowering.axes)
    if len(names) < 2:
        return tuple(map(Raw, names))
    return (Raw(f"self.mesh.joint({literal(names)})", joint=names),)


def _own_operator(call: Call) -> Call:
    """Return attention of a whole sequence on one rank, or a look-up of bags, as a call of the run time."""
    arguments = call_arguments(call)
    names = [name for name in ("query", "key", "value", "sinks", "indices", "weight") if name in arguments]
    tensors = tuple(arguments.pop(name) for name in names)
    return replace(call, target=f"runtime.{base_name(call.target)}", args=tensors, kwargs=tuple(arguments.items()))


def _context_attention(call: Call, lowering: LoweringCall, axis: str) -> Call:
    """Return attention over the keys of all ranks of `axis`."""
    arguments = call_arguments(call)
    query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
    stripes = (("is_striped", True),) if lowering.is_striped else ()
    kwargs = (*arguments.items(), ("exchange", lowering.name), *stripes)
    return replace(call, target="runtime.context_attention", args=(query, key, value, Raw(axis)), kwargs=kwargs)


def _is_trained(operator: Operator, call: Call, position: int) -> bool:
    """Whether the weight is a trained parameter, used as it is stored, and the call has only tensor arguments."""
    is_plain = all(isinstance(argument, Var) for argument in call.args if argument is not None) and not call.kwargs
    return is_plain and operator.inputs[position].requires_grad and call.args[position].is_stored


def _on_one_rank(node: Node, operator: Operator) -> Any:
    """Return the lowering that a call needs even where nothing is sharded: a single rank is an axis of one."""
    option = AxisOption("R", (R,) * len(operator.inputs), (R,) * len(node.outputs))
    lowering = local_call(node, operator.rule, (option,), operator.inputs, (1,)).lowering
    return None if lowering is None else replace(lowering, layout=())


def _vocab_embedding(call: Call, axis: Raw | None, user_rows: int | None) -> Call:
    """Return a look-up in rows on `axis` (None: all rows are local). The first `user_rows` are the user's."""
    arguments = call_arguments(call)
    named = (("padding_idx", arguments.get("padding_idx")), ("own_rows", user_rows))
    kwargs = tuple((key, value) for key, value in named if value is not None)
    return replace(
        call, target="runtime.vocab_embedding", args=(arguments["indices"], arguments["weight"], axis), kwargs=kwargs
    )


def _cross_entropy(scope: Lowering, node: Node, axes: tuple[int, ...], call: Call) -> Call:
    arguments = arguments_of(node)
    is_mean = arguments["reduction"] == MEAN
    divisor = _count(scope, node, arguments["ignore_index"], call) if is_mean else Raw("1.0")
    kwargs: list[tuple[str, Any]] = []
    if arguments["ignore_index"] != -100:
        kwargs.append(("ignore_index", arguments["ignore_index"]))
    if axes:
        kwargs.append(("vocab_axis", Raw(scope.shared.mesh.axes[axes[0]])))
    if arguments["label_smoothing"]:
        kwargs.append(("label_smoothing", arguments["label_smoothing"]))
    if node.name in scope.shared.graph.vocabularies:
        kwargs.append(("own_classes", scope.shared.graph.vocabularies[node.name]))
    return replace(call, target="runtime.cross_entropy", args=(*call.args[:2], divisor), kwargs=tuple(kwargs))


def _count(scope: Lowering, node: Node, ignore_index: int, call: Call) -> Raw:
    """Return the number of valid targets on all ranks.

    Targets that depend only on the batch are counted before the step, over all its micro-batches, which makes the mean
    exact under accumulation. Others are counted here, so that each micro-batch has the same weight.
    """
    target = node.inputs[1]
    if scope.scope.layer is None and depends_on_batch_only(scope.shared.graph, target, scope.shared.received):
        return Raw(f"num_targets[{scope.loss_index(node, target, ignore_index)}]")
    count = scope.count_valid(call.args[1], ignore_index, scope.fresh_name("num_valid"), call.section)
    return Raw(count.name, (count,))


def depends_on_batch_only(graph: Graph, ref: Ref, received: frozenset[str] = frozenset()) -> bool:
    """Whether `ref` is computed only from batch inputs and constants. received: inputs from other stages."""
    parameters = {p.name for p in graph.parameters if not p.is_buffer}
    runs = {piece.name for piece in graph.body if isinstance(piece, LayerRun)}
    return not ancestors(graph, ref) & (parameters | runs | received)


def _draw(node: Node, call: Call, where: tuple[tuple[str, Any], ...]) -> Call:
    """Return a draw of the layout's shape, with its dtype if that is not fp32."""
    arguments = call_arguments(call)
    parameters = tuple((name, arguments[name]) for name in ("p", "low", "high") if name in arguments)
    dtype = () if node.meta.dtype == torch.float32 else (("dtype", node.meta.dtype),)
    return replace(call, target="self.draw", args=(arguments["distribution"],), kwargs=(*parameters, *dtype, *where))


def _arange(call: Call, layout: str, dtype: torch.dtype) -> Call:
    """Return start + step * (global position), with a dtype argument unless positions and numbers are int64 already."""
    numbers = call_arguments(call)
    start, step = numbers.get("start", 0), numbers.get("step", 1)
    is_whole = dtype == torch.int64 and isinstance(start, int) and isinstance(step, int)
    args = (start, step, Raw(layout), Raw("self.mesh"))
    return replace(call, target="runtime.arange", args=args, kwargs=() if is_whole else (("dtype", dtype),))


def _with_rows(scope: Lowering, call: Call) -> Call:
    """Turn cross-entropy of [N, C, ...] or [C] logits into that of [rows, C], the form of the run time's function."""
    logits, target = call.args[:2]
    rank = len(logits.type.shape)
    if rank == 2:
        return call
    rows, name = Var(scope.fresh_name("targets"), _flat(target.type)), scope.fresh_name("logits")
    if rank == 1:
        classes = Var(name, _flat(logits.type, 1))
        scope.pending.append(Call("aten.unsqueeze.default", (logits, 0), (), (classes,), section=call.section))
    else:
        moved = Var(name, _moved(logits.type))
        classes = Var(name, _flat(moved.type, 1))
        scope.pending.append(Call("aten.movedim.int", (logits, 1, -1), (), (moved,), section=call.section))
        scope.pending.append(Call("aten.flatten.using_ints", (moved, 0, -2), (), (classes,), section=call.section))
    scope.pending.append(Call("aten.flatten.using_ints", (target,), (), (rows,), section=call.section))
    return replace(call, args=(classes, rows, *call.args[2:]))


def _moved(tensor_type: TensorType) -> TensorType:
    """Return the type with dim 1 moved to the end."""
    num_dims = len(tensor_type.shape)
    order = (0, *range(2, num_dims), 1)
    return _redimmed(tensor_type, tuple(tensor_type.shape[dim] for dim in order), lambda dim: (order.index(dim), 1))


def _flat(tensor_type: TensorType, num_last: int = 0) -> TensorType:
    """Return the type with all dims but the last `num_last` flattened into one."""
    num_rows = len(tensor_type.shape) - num_last
    shape = (math.prod(tensor_type.shape[:num_rows]), *tensor_type.shape[num_rows:])
    # A shard of an inner dim is a shard of the rows in as many sections as there are indices before that dim.
    home = {dim: (0, math.prod(tensor_type.shape[:dim])) for dim in range(num_rows)}
    return _redimmed(tensor_type, shape, lambda dim: home.get(dim, (dim - num_rows + 1, 1)))


def _redimmed(tensor_type: TensorType, shape: tuple[int, ...], home: Callable[[int], tuple[int, int]]) -> TensorType:
    """Return the type in another shape. home: maps a dim to (the dim that contains it, sections there)."""
    pairs = []
    for axis, text in tensor_type.placements:
        placement = Placement.parse(text)
        if placement.is_shard:
            dim, sections = home(placement.dim)
            placement = S(dim, sections * placement.sections)
        pairs.append((axis, str(placement)))
    return replace(tensor_type, shape=shape, placements=tuple(pairs), tensor=("", 0))
