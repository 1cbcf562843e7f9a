"""Runs of graph calls that one kernel can compute, found by the patterns that fuse generated programs.

Lowered calls are the graph's calls with reshards between them, and a reshard breaks a run. So these runs may be fused.
They are fused where every tensor reaches its reader in the placements in which it was produced
(autopar/costs/kernels.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autopar.ir.graph import Node, Ref, TensorMeta, base_name, map_refs
from autopar.ir.operators import arguments_of
from autopar.rules.families.loss import MEAN, is_plain_cross_entropy
from codegen.fusion import PATTERNS, Match, matches
from codegen.program import Call, Raw, TensorType, Var

OTHER_RESULT = "fused."
"""Replaces "kernels." in the operator of a kernel's results other than the last."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """A run of calls, and the single call that replaces it.

    nodes: of the single call, one node per result, named as the call that returned it in the run; the last one is the
    call itself. members: in order. entering: tensors read from outside. readers: the first member that reads each of
    these. leaves: their names in the pattern. match: pattern and bindings. rivals: preferred runs that share calls with
    this one.
    """

    nodes: tuple[Node, ...]
    members: tuple[Node, ...]
    entering: Mapping[Ref, TensorMeta]
    readers: Mapping[Ref, str]
    leaves: Mapping[str, Ref]
    match: Match
    rivals: tuple[Fusion, ...]

    @property
    def name(self) -> str:
        """Return the name of the pattern."""
        return self.match.pattern.name

    @property
    def node(self) -> Node:
        """Return the call of the last result."""
        return self.nodes[-1]

    @property
    def tensors(self) -> dict[Ref, TensorMeta]:
        """Return all tensors that enter or leave the run."""
        return {**self.entering, **{Ref(node.name): node.meta for node in self.nodes}}

    @property
    def charged(self) -> dict[Ref, str]:
        """Map each tensor that enters or leaves to the member charged for it: its first reader, or its producer."""
        return {**self.readers, **{Ref(node.name): node.name for node in self.nodes}}

    def pays(self, num_token_ranks: int) -> bool:
        """Whether programs for this number of data-parallel ranks use it."""
        return self.match.pattern.pays(self.match.bound, num_token_ranks)


class Fusions:
    """The fusions of one scope, found on request (plans without kernels need none), and the readers of its tensors.

    nodes, metas: of the scope. leaving: tensors read outside of it.
    """

    def __init__(self, nodes: tuple[Node, ...], metas: Mapping[Ref, TensorMeta], leaving: Collection[Ref]) -> None:
        self._scope = nodes, metas, leaving

    @cached_property
    def all(self) -> tuple[Fusion, ...]:
        """Return all fusions of the scope, in the order in which programs prefer them."""
        nodes, metas, leaving = self._scope
        body = tuple(unsharded_call(node, metas) for node in nodes)
        fusions: list[Fusion] = []
        for match in matches(PATTERNS, body, tuple(unsharded(ref, metas[ref]) for ref in leaving)):
            rivals = tuple(other for other in fusions if other.match.statements & match.statements)
            fusions.append(_fusion(match, nodes, metas, rivals))
        return tuple(fusions)

    @cached_property
    def readers(self) -> Mapping[Ref, tuple[Node, ...]]:
        """Map each tensor to the scope's calls that read it, in order."""
        readers: dict[Ref, tuple[Node, ...]] = {}
        for node in self._scope[0]:
            for ref in dict.fromkeys(node.inputs):
                readers[ref] = (*readers.get(ref, ()), node)
        return readers

    @cached_property
    def _by_call(self) -> Mapping[str, tuple[Fusion, ...]]:
        fusions_of: dict[str, tuple[Fusion, ...]] = {}
        for fusion in self.all:
            for member in fusion.members:
                fusions_of[member.name] = (*fusions_of.get(member.name, ()), fusion)
        return fusions_of

    def of(self, name: str) -> tuple[Fusion, ...]:
        """Return the fusions that may contain the call `name`, in the order in which programs prefer them."""
        return self._by_call.get(name, ())


def _fusion(
    match: Match, nodes: tuple[Node, ...], metas: Mapping[Ref, TensorMeta], rivals: tuple[Fusion, ...]
) -> Fusion:
    members = tuple(nodes[i] for i in sorted(match.statements))
    results_inside = {Ref(member.name) for member in members}
    readers: dict[Ref, str] = {}
    for member in members:
        for ref in member.inputs:
            if ref not in results_inside:
                readers.setdefault(ref, member.name)
    bound = match.bound.items()
    leaves = {name: Ref(*binding.type.tensor) for name, binding in bound if isinstance(binding.value, Var)}
    pattern, results = match.pattern, []
    makers = {result.name: nodes[match.bound[result.name].origin] for result in pattern.results}
    named = leaves | {name: Ref(maker.name) for name, maker in makers.items()}

    def args(names: tuple[str, ...]) -> tuple[Ref, ...]:
        return tuple(named[name] for name in names if name in named)

    for result in pattern.results:
        producer = makers[result.name]
        operator = OTHER_RESULT + pattern.target.partition(".")[2]
        node = Node(
            name=producer.name,
            op=operator,
            args=args(result.leaves),
            kwargs=(),
            outputs=producer.outputs,
            module=producer.module,
        )
        results.append(producer if result.is_call else node)
    last = members[-1]
    results.append(
        Node(
            name=last.name,
            op=pattern.target,
            args=args(pattern.leaves),
            kwargs=(),
            outputs=last.outputs,
            module=last.module,
        )
    )
    entering = {ref: metas[ref] for ref in readers}
    return Fusion(
        nodes=tuple(results),
        members=members,
        entering=entering,
        readers=readers,
        leaves=leaves,
        match=match,
        rivals=rivals,
    )


def unsharded_call(node: Node, metas: Mapping[Ref, TensorMeta], stored: Collection[str] = ()) -> Call:
    """Return a call as it is lowered without sharding. stored: parameters, which are attributes of the module."""
    inputs = [metas[ref] for ref in node.inputs]
    results = tuple(unsharded(Ref(node.name, index), meta) for index, meta in enumerate(node.outputs))

    def variable(ref: Ref) -> Var:
        return unsharded(ref, metas[ref], stored)

    args: tuple[Any, ...] = map_refs(node.args, variable)
    if is_plain_cross_entropy(node, inputs):
        arguments = arguments_of(node)
        divisor = Raw("num_targets[0]" if arguments["reduction"] == MEAN else "1.0")
        options = tuple((key, arguments[key]) for key in ("ignore_index", "label_smoothing") if arguments[key])
        return Call("runtime.cross_entropy", (*args[:2], divisor), options, results)
    if base_name(node.op) == "dropout":
        return Call("self.same_dropout", args[:2], (), results)
    kwargs = tuple((key, map_refs(value, variable)) for key, value in node.kwargs)
    return Call(node.op, args, kwargs, results)


def unsharded(ref: Ref, meta: TensorMeta, stored: Collection[str] = ()) -> Var:
    """Return the variable of an unsharded tensor."""
    if ref.node in stored:
        return replace(unsharded(ref, meta), name=f"self.{ref.node}")
    tensor_type = TensorType(meta.shape, str(meta.dtype).removeprefix("torch."), tensor=(ref.node, ref.index))
    return Var(ref.node if ref.index == 0 else f"{ref.node}:{ref.index}", tensor_type)
