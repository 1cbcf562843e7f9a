"""The traced model: frozen nodes, with each repeated layer stored once.

`trace.py` makes a flat list of nodes from a torch.fx graph; `layers.py` folds repeated layers into `LayerRun`s.
All later passes (rules, strategies, prices, plan, lowering) read only this form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping
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
        refs = tuple(refs_in((self.args, tuple(value for _, value in self.kwargs))))
        object.__setattr__(self, "inputs", refs)

    @property
    def meta(self) -> TensorMeta:
        """Return the meta of the only output."""
        (meta,) = self.outputs
        return meta


def refs_in(value: Any) -> Iterator[Ref]:
    """Yield the Refs inside a nested argument structure, in order."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from refs_in(item)


def map_refs(value: Any, function: Callable[[Ref], Any]) -> Any:
    """Return the same nested structure with every Ref replaced by `function(ref)`."""
    if isinstance(value, Ref):
        return function(value)
    if isinstance(value, tuple):
        return tuple(map_refs(item, function) for item in value)
    return value


def with_refs(node: Node, function: Callable[[Ref], Any]) -> Node:
    """Return the call with every Ref among its arguments replaced by `function(ref)`."""
    return replace(node, args=map_refs(node.args, function), kwargs=map_refs(node.kwargs, function))


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer of the user's model under its first name; `aliases` are tied names.

    A parameter's meta requires a gradient if the loss has one for it. increment: added by every training forward to a
    buffer that counts. padding: entries at the end of each of padded_sections equal sections of the meta's dim
    padded_dim that the user's own tensor lacks (frontend/padding/vocabulary.py, heads.py). value: of a tensor that
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

    name: made by `input_name` from the batch's name.
    """

    name: str
    meta: TensorMeta
    batch_dim: int | None = 0


@dataclass(frozen=True, slots=True)
class LayerClass:
    """The body shared by equal layers. Names are local to it.

    inputs: formal (name, meta) of the tensors that enter. parameters: metas under names relative to the layer's
    module path. outputs: the tensors that leave.
    """

    name: str
    inputs: tuple[tuple[str, TensorMeta], ...]
    parameters: tuple[Parameter, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Consecutive layers of one class, each fed by the one before it.

    instances: module paths, in order. args: inputs of the first layer, one Ref per formal input.
    carried: pairs (input index, output index): this output of one layer is that input of the next. All layers share the
    other inputs. The run's own outputs are those of its last layer.
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
    """The proof that micro-batches add up to the whole batch's loss, by `accumulation/micro_batches.py`.

    whole: tensors that are read as the sum over all micro-batches, computed before the step. scales: factors of call
    inputs, by (scope, call, number of the input). loss: factor of the loss; the step then takes the mean over the
    micro-batches. repeated: dropout calls (scope, name) whose mask is the same in all micro-batches; other masks
    continue from one micro-batch to the next. summed: further tensors like `whole`, by (scope, tensor), whose sum a
    first pass of the step computes; their gradient is the micro-batch's own, times the number of micro-batches.
    """

    whole: tuple[Ref, ...] = ()
    scales: Mapping[tuple[str, str, int], Fraction] = field(default_factory=dict)
    loss: Fraction = Fraction(1)
    repeated: frozenset[tuple[str, str]] = frozenset()
    summed: tuple[tuple[str, Ref], ...] = ()


class Facts(dict[tuple[Any, ...], Any]):
    """Results of functions marked `derived`, by function and arguments. They are not pickled but computed again."""

    def __reduce__(self) -> tuple[type[Facts], tuple[()]]:
        return Facts, ()


@dataclass(frozen=True, slots=True)
class Graph:
    """The whole model up to its scalar loss. `body` is in execution order; parameters of layers are global names.

    accumulation: of a graph of micro-batches that add up to the batch. no_evaluation: why evaluation computes something
    other than this graph without its draws. unchecked: the user's lines that check values and raise or warn, which are
    left out. padded_to, experts_padded_to, heads_padded_to: the multiples to which vocabulary rows, experts and heads
    were padded (frontend/padding/). vocabularies: for calls that read padded tables, the user's number of rows or
    classes, by the call's name. logits: the tensor (top level) from which the loss is computed and which the model
    returns as its logits, if it does; logits_size: its padded dim, and the user's size of it. facts: results of
    functions marked `derived`.
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
    facts: Facts = field(default_factory=Facts, init=False, compare=False, repr=False)

    @property
    def has_first_pass(self) -> bool:
        """Whether a step runs the forwards of all its micro-batches twice, first to compute sums over them."""
        return self.accumulation is not None and bool(self.accumulation.summed)


Result = TypeVar("Result")
Further = ParamSpec("Further")


def derived(function: Callable[Concatenate[Graph, Further], Result]) -> Callable[Concatenate[Graph, Further], Result]:
    """Compute `function(graph, ...)` once per graph and further arguments. Results must not be modified."""
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def once(graph: Graph, /, *args: Further.args, **kwargs: Further.kwargs) -> Result:
        key = name, args, *kwargs.items()
        if key not in graph.facts:
            graph.facts[key] = function(graph, *args, **kwargs)
        result: Result = graph.facts[key]
        return result

    return once


@derived
def layer_names(graph: Graph) -> frozenset[str]:
    """Return the names of the layer classes; other units of the chain are calls between layers."""
    return frozenset(piece.layer.name for piece in graph.body if isinstance(piece, LayerRun))


WINDOW_ATTENTION = "autopar.window_attention.default"
"""`window_attention(query, key, value, before, after, chunk, scale, enable_gqa)`, of codegen/runtime/windows.py: what
calls of attention are written as whose mask is proven to be a window."""

SINK_ATTENTION = "autopar.sink_attention.default"
"""`sink_attention(query, key, value, sinks, is_causal, before, after, chunk, scale, enable_gqa)`, of
codegen/runtime/sink_attention.py: what attention is written as that is proven to have a sink
(frontend/rewrites/attention_sinks.py)."""

UPDATE_BUFFER = "autopar.update_buffer.default"
"""`update_buffer(buffer, value)`: the step writes the value to the buffer when its backward is over. Nothing reads the
result, which is the value. All micro-batches compute the same one."""

_OWN_ATTENTION = (WINDOW_ATTENTION, SINK_ATTENTION)


def is_causal(node: Node) -> bool:
    """Whether an attention call skips the keys that a causal mask hides."""
    if node.op in _OWN_ATTENTION:
        return bool(dict(node.kwargs).get("is_causal"))
    return len(node.args) > 5 and bool(node.args[5])


def has_dropout(node: Node) -> bool:
    """Whether an attention call drops probabilities."""
    dropout = node.args[4] if len(node.args) > 4 else dict(node.kwargs).get("dropout_p")
    return node.op not in _OWN_ATTENTION and bool(dropout)


def view_root(ref: Ref, nodes: Mapping[str, Node]) -> Ref:
    """Return the tensor that a view is taken of, or `ref` itself if it is no view. nodes: by name."""
    while ref.node in nodes and base_name(nodes[ref.node].op) in VIEWS and nodes[ref.node].inputs:
        ref = nodes[ref.node].inputs[0]
    return ref


def base_name(op: str) -> str:
    """Shorten `aten.linear.default` to `linear`; private and in-place forms lose their underscores."""
    return op.split(".")[1].removeprefix("_").removesuffix("_")


def repeated_calls(graph: Graph) -> frozenset[str]:
    """Return names of top-level calls that depend only on the batch and on buffers and need no gradient.

    They may be computed wherever they are needed: by every stage of a pipeline, or before the step.
    """
    sources = {i.name for i in graph.inputs} | {p.name for p in graph.parameters if p.is_buffer}
    repeated: set[str] = set()
    for piece in graph.body:
        if isinstance(piece, LayerRun) or any(meta.requires_grad for meta in piece.outputs):
            continue
        is_costly = base_name(piece.op) in ATTENTION or is_seeded(find_op(piece.op))
        is_plain = piece.op != UPDATE_BUFFER and not is_costly
        if is_plain and all(ref.node in sources or ref.node in repeated for ref in piece.inputs):
            repeated.add(piece.name)
    return frozenset(repeated)


@derived
def unread(graph: Graph) -> tuple[Parameter, ...]:
    """Return parameters and buffers that no call reads, as a program stores them: whole, and never trained.

    Trained half-precision parameters are stored in fp32, and nothing marks these as not trained.
    """
    used = {graph.loss.node} | {ref.node for piece in graph.body for ref in piece.inputs}
    for run in (piece for piece in graph.body if isinstance(piece, LayerRun)):
        used |= {f"{path}.{parameter.name}" for path in run.instances for parameter in run.layer.parameters}
    unread_parameters = []
    for kept in (p for p in graph.parameters if p.name not in used and (p.persistent or p.increment)):
        is_half = not kept.is_buffer and kept.meta.dtype.is_floating_point and kept.meta.dtype.itemsize < 4
        unread_parameters.append(replace(kept, meta=replace(kept.meta, dtype=torch.float32)) if is_half else kept)
    return tuple(unread_parameters)


def layer_borders(graph: Graph) -> Iterator[tuple[tuple[str, Ref], tuple[str, Ref]]]:
    """Yield both (scope, ref) names of every tensor at a layer's border: inside, and outside or in the next layer."""
    for run in (piece for piece in graph.body if isinstance(piece, LayerRun)):
        layer, scope = run.layer, run.layer.name
        formals = [(scope, Ref(name)) for name, _ in layer.inputs]
        yield from ((formal, ("", arg)) for formal, arg in zip(formals, run.args, strict=True))
        yield from (((scope, ref), ("", Ref(run.name, index))) for index, ref in enumerate(layer.outputs))
        yield from ((formals[position], (scope, layer.outputs[output])) for position, output in run.carried)


def ancestors(graph: Graph, ref: Ref) -> set[str]:
    """Return the names of everything at the top level from which `ref` is computed, itself included."""
    inputs = {piece.name: piece.inputs for piece in graph.body}
    names: set[str] = set()
    open_names = [ref.node]
    while open_names:
        name = open_names.pop()
        if name not in names:
            names.add(name)
            open_names += [r.node for r in inputs.get(name, ())]
    return names


_OF_BATCH = "@batch"


def input_name(key: str, parameters: Container[str]) -> str:
    """Return the graph's name for an input of the batch, distinct from the model's parameters and buffers."""
    return key + _OF_BATCH if key in parameters else key


def batch_key(name: str) -> str:
    """Return the batch's name for an input of a graph."""
    return name.removesuffix(_OF_BATCH)
