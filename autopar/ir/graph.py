"""The traced model: frozen nodes, with repeated layers found and stored once.

`trace.py` makes a flat list of nodes from a torch.fx graph; `layers.py` folds repeated layers into `LayerRun`s.
Everything after that (rules, strategies, prices, plan, lowering) reads this form only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from autopar.operators.schemas import find_op, is_seeded
from autopar.operators.traits import ATTENTION, VIEWS


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Global shape and dtype of one tensor, and whether the loss is differentiated through it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


def has_gradients(dtype: torch.dtype) -> bool:
    """Whether torch differentiates through values of the dtype: floating and complex ones."""
    return dtype.is_floating_point or dtype.is_complex


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """A use of output `index` of the node (or parameter, buffer, input, layer run) called `node`."""

    node: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """One operator call.

    op: the overload's name, such as "aten.linear.default". args/kwargs: as the overload takes them, with a `Ref`
    wherever a tensor goes (also inside tuples; lists become tuples). outputs: one meta per output tensor.
    module: path of the module that made the call, such as "model.layers.0.mlp". inputs: every tensor argument, in order
    of appearance in args, then kwargs.
    """

    name: str
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[TensorMeta, ...]
    module: str = ""
    inputs: tuple[Ref, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = tuple(refs_in((self.args, tuple(value for _, value in self.kwargs))))
        object.__setattr__(self, "inputs", found)

    @property
    def meta(self) -> TensorMeta:
        """The only output's meta."""
        (meta,) = self.outputs
        return meta


def refs_in(value: Any) -> Iterator[Ref]:
    """The Refs inside a nested argument structure, in order."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from refs_in(item)


def map_refs(value: Any, function: Callable[[Ref], Any]) -> Any:
    """The same nested structure with every Ref replaced by `function(ref)`."""
    if isinstance(value, Ref):
        return function(value)
    if isinstance(value, tuple):
        return tuple(map_refs(item, function) for item in value)
    return value


def with_refs(node: Node, function: Callable[[Ref], Any]) -> Node:
    """The call with every Ref among its arguments replaced by `function(ref)`."""
    return replace(node, args=map_refs(node.args, function), kwargs=map_refs(node.kwargs, function))


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer of the user's model under its first name; `aliases` are tied names.

    A parameter's meta requires a gradient if the loss has one for it. increment: what every forward in training adds to
    a buffer that counts. padding: entries at the end of each of padded_sections equal sections of the meta's dim
    padded_dim that the user's own tensor lacks (frontend/padding.py, frontend/head_padding.py). value: of a tensor that
    forward uses and no module has registered, which a program keeps as a buffer.
    """

    name: str
    meta: TensorMeta
    aliases: tuple[str, ...] = ()
    is_buffer: bool = False
    persistent: bool = True
    increment: int | float = 0
    padding: int = 0
    padded_dim: int = 0
    padded_sections: int = 1
    value: torch.Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor of the user's batch. `batch_dim` is 0 for tensors that are split into micro-batches, else None.

    name: as `batch_names.py` makes it of the batch's.
    """

    name: str
    meta: TensorMeta
    batch_dim: int | None = 0


@dataclass(frozen=True, slots=True)
class LayerClass:
    """The body shared by equal layers. Names are local to it.

    inputs: formal (name, meta) of the tensors that enter. parameters: metas under names relative to the layer's
    module path. outputs: what leaves.
    """

    name: str
    inputs: tuple[tuple[str, TensorMeta], ...]
    parameters: tuple[Parameter, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Consecutive layers of one class, each fed by the one before it.

    instances: module paths, in order. args: what enters the first layer, one Ref per formal input.
    carried: pairs (input index, output index): output of one layer that is that input of the next; every other
    input is shared by all layers. The run's own outputs are those of its last layer.
    """

    name: str
    layer: LayerClass
    instances: tuple[str, ...]
    args: tuple[Ref, ...]
    carried: tuple[tuple[int, int], ...]

    @property
    def inputs(self) -> tuple[Ref, ...]:
        return self.args

    @property
    def outputs(self) -> tuple[TensorMeta, ...]:
        metas = {node.name: node.outputs for node in self.layer.nodes}
        return tuple(metas[ref.node][ref.index] for ref in self.layer.outputs)


@dataclass(frozen=True, slots=True)
class Accumulation:
    """How several micro-batches make the whole batch's loss, as `options/micro_batches.py` has proven it.

    whole: tensors whose value, wherever it is read, is the sum of those of all micro-batches, computed ahead of the
    step. scales: what an input of a call is multiplied by before the call, by (scope, call, number of the input). loss:
    what the loss is multiplied by; the step takes the mean over the micro-batches after that. repeated: calls (scope,
    name) of dropout whose mask is the same in all micro-batches; the others' goes on from one to the next. summed:
    further tensors like `whole`, by (scope, tensor), whose sum a first pass of the step finds; their gradient is the
    micro-batch's own, times the number of micro-batches.
    """

    whole: tuple[Ref, ...] = ()
    scales: Mapping[tuple[str, str, int], Fraction] = field(default_factory=dict)
    loss: Fraction = Fraction(1)
    repeated: frozenset[tuple[str, str]] = frozenset()
    summed: tuple[tuple[str, Ref], ...] = ()


class Known(dict[tuple[Any, ...], Any]):
    """What was found out of a graph. It stays in its process: others find it again."""

    def __reduce__(self) -> tuple[type[Known], tuple[()]]:
        return Known, ()


@dataclass(frozen=True, slots=True)
class Graph:
    """The whole model up to its scalar loss. `body` is in execution order; parameters of layers are global names.

    accumulation: of a graph of micro-batches, several of which make the batch. no_evaluation: why it is not
    what evaluation computes with its draws put aside. unchecked: the user's lines that check
    values and raise or warn, which are left out. padded_to, experts_padded_to, heads_padded_to: what numbers of rows of
    vocabularies, of experts and of heads were brought to a multiple of (frontend/padding.py, expert_padding.py,
    head_padding.py). vocabularies: of calls that read longer tables, the rows or classes that are the user's, by the
    call's name. logits: of what the loss is computed from (top level), what the model returns as its logits, if it
    does; logits_size: the dim of them that is longer by padding, and how much of it is the user's. known: what
    functions marked `derived` have found out of it.
    """

    name: str
    inputs: tuple[Input, ...]
    parameters: tuple[Parameter, ...]
    body: tuple[Node | LayerRun, ...]
    loss: Ref
    batch_size: int
    accumulation: Accumulation | None = None
    unchecked: tuple[str, ...] = field(default=(), compare=False)
    no_evaluation: str = field(default="", compare=False)
    padded_to: int = 1
    experts_padded_to: int = 1
    heads_padded_to: int = 1
    vocabularies: Mapping[str, int] = field(default_factory=dict)
    logits: Ref | None = None
    logits_size: tuple[int, int] | None = None
    known: Known = field(default_factory=Known, init=False, compare=False, repr=False)

    @property
    def has_first_pass(self) -> bool:
        """Whether a step runs the forwards of all its micro-batches twice, first for sums over them."""
        return self.accumulation is not None and bool(self.accumulation.summed)


Result = TypeVar("Result")
Further = ParamSpec("Further")


def derived(function: Callable[Concatenate[Graph, Further], Result]) -> Callable[Concatenate[Graph, Further], Result]:
    """`function(graph, ...)`, computed once for each graph and further arguments. Nobody may change the result."""
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def once(graph: Graph, /, *args: Further.args, **kwargs: Further.kwargs) -> Result:
        key = name, args, *kwargs.items()
        if key not in graph.known:
            graph.known[key] = function(graph, *args, **kwargs)
        found: Result = graph.known[key]
        return found

    return once


@derived
def layer_names(graph: Graph) -> frozenset[str]:
    """The classes of layers; what else stands in the chain of blocks are calls between layers."""
    return frozenset(piece.layer.name for piece in graph.body if isinstance(piece, LayerRun))


WINDOW_ATTENTION = "autopar.window_attention.default"
"""`window_attention(query, key, value, before, after, chunk, scale, enable_gqa)`, of codegen/runtime/windows.py: what
calls of attention are written as whose mask is proven to be a window."""

SINK_ATTENTION = "autopar.sink_attention.default"
"""`sink_attention(query, key, value, sinks, is_causal, before, after, chunk, scale, enable_gqa)`, of
codegen/runtime/sink_attention.py: what attention is written as that is proven to have a sink (frontend/sinks.py)."""

UPDATE_BUFFER = "autopar.update_buffer.default"
"""`update_buffer(buffer, value)`: the step writes the value to the buffer when its backward is over. Nothing reads the
result, which is the value. All micro-batches compute the same one."""

_OWN_ATTENTION = (WINDOW_ATTENTION, SINK_ATTENTION)


def is_causal(node: Node) -> bool:
    """Whether a call of attention skips what a causal mask hides."""
    if node.op in _OWN_ATTENTION:
        return bool(dict(node.kwargs).get("is_causal"))
    return len(node.args) > 5 and bool(node.args[5])


def has_dropout(node: Node) -> bool:
    """Whether a call of attention drops probabilities."""
    given = node.args[4] if len(node.args) > 4 else dict(node.kwargs).get("dropout_p")
    return node.op not in _OWN_ATTENTION and bool(given)


def view_root(ref: Ref, nodes: Mapping[str, Node]) -> Ref:
    """What a view is a view of, `ref` itself where it is none. nodes: by name."""
    while ref.node in nodes and base_name(nodes[ref.node].op) in VIEWS and nodes[ref.node].inputs:
        ref = nodes[ref.node].inputs[0]
    return ref


def base_name(op: str) -> str:
    """`aten.linear.default` -> `linear`; private and in-place forms without their underscores."""
    return op.split(".")[1].removeprefix("_").removesuffix("_")


def repeated_calls(graph: Graph) -> frozenset[str]:
    """Names of top-level calls that depend on the batch and on buffers alone and need no gradient.

    They may be made wherever they are needed: by every stage of a pipeline for itself, or before the step.
    """
    sources = {i.name for i in graph.inputs} | {p.name for p in graph.parameters if p.is_buffer}
    found: set[str] = set()
    for piece in graph.body:
        if isinstance(piece, LayerRun) or any(meta.requires_grad for meta in piece.outputs):
            continue
        is_costly = base_name(piece.op) in ATTENTION or is_seeded(find_op(piece.op))
        is_plain = piece.op != UPDATE_BUFFER and not is_costly
        if is_plain and all(ref.node in sources or ref.node in found for ref in piece.inputs):
            found.add(piece.name)
    return frozenset(found)


@derived
def unread(graph: Graph) -> tuple[Parameter, ...]:
    """Parameters and buffers that no call reads, as a program holds them: whole, and never trained.

    Trained half-precision parameters are held in fp32, and nobody knows that these are not to be trained.
    """
    used = {graph.loss.node} | {ref.node for piece in graph.body for ref in piece.inputs}
    for run in (piece for piece in graph.body if isinstance(piece, LayerRun)):
        used |= {f"{path}.{parameter.name}" for path in run.instances for parameter in run.layer.parameters}
    found = []
    for each in (p for p in graph.parameters if p.name not in used and (p.persistent or p.increment)):
        is_half = not each.is_buffer and each.meta.dtype.is_floating_point and each.meta.dtype.itemsize < 4
        found.append(replace(each, meta=replace(each.meta, dtype=torch.float32)) if is_half else each)
    return tuple(found)


def layer_borders(graph: Graph) -> Iterator[tuple[tuple[str, Ref], tuple[str, Ref]]]:
    """The two names, each with its scope, of every tensor at a layer's border: inside, and outside or in the next."""
    for run in (piece for piece in graph.body if isinstance(piece, LayerRun)):
        layer, scope = run.layer, run.layer.name
        formals = [(scope, Ref(name)) for name, _ in layer.inputs]
        yield from ((formal, ("", arg)) for formal, arg in zip(formals, run.args, strict=True))
        yield from (((scope, ref), ("", Ref(run.name, index))) for index, ref in enumerate(layer.outputs))
        yield from ((formals[position], (scope, layer.outputs[output])) for position, output in run.carried)


def ancestors(graph: Graph, ref: Ref) -> set[str]:
    """Names of everything at the top level that `ref` is computed from, itself included."""
    inputs = {piece.name: piece.inputs for piece in graph.body}
    found: set[str] = set()
    open_names = [ref.node]
    while open_names:
        name = open_names.pop()
        if name not in found:
            found.add(name)
            open_names += [r.node for r in inputs.get(name, ())]
    return found
