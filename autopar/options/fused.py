"""Runs of calls of a graph that one kernel can do, found by the patterns that fuse generated programs.

Lowered calls are the graph's calls with reshards between them, and a reshard parts a run. So what is found here may be
fused; it is where every tensor of the run lies for its reader as it was made (autopar/costs/kernels.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autopar.ir.graph import Node, Ref, TensorMeta, base_name, map_refs
from autopar.ir.operators import arguments_of
from autopar.rules.loss import MEAN, is_plain_cross_entropy
from codegen.fusion import PATTERNS, Match, matches
from codegen.program import Call, Raw, TensorType, Var

OTHER_RESULT = "fused."
"""Instead of "kernels." in the operator of a result beside a kernel's last one."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """A run of calls, and the one that it becomes.

    nodes: of that one call, a node for each of its results, named as the call that made it in the run; the last is the
    call itself. members: in order; entering: what is read from outside; readers: that -> the first member that reads
    it; leaves: what the pattern calls it. match: pattern and bindings. rivals: runs that programs would rather have,
    which share calls with this one.
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
        """The name of the pattern."""
        return self.match.pattern.name

    @property
    def node(self) -> Node:
        """The call that gives the last result."""
        return self.nodes[-1]

    @property
    def tensors(self) -> dict[Ref, TensorMeta]:
        """All tensors that enter or leave the run."""
        return {**self.entering, **{Ref(node.name): node.meta for node in self.nodes}}

    @property
    def charged(self) -> dict[Ref, str]:
        """Tensor that enters or leaves -> the member charged for it: the first that reads it, or that makes it."""
        return {**self.readers, **{Ref(node.name): node.name for node in self.nodes}}

    def pays(self, num_token_ranks: int) -> bool:
        """Whether programs for so many data-parallel ranks have it."""
        return self.match.pattern.pays(self.match.bound, num_token_ranks)


class Fusions:
    """The fusions of one scope, found when they are asked for (plans without kernels never do), and which calls read
    what there.

    nodes, metas: the scope's. leaving: what is read outside of it.
    """

    def __init__(self, nodes: tuple[Node, ...], metas: Mapping[Ref, TensorMeta], leaving: Collection[Ref]) -> None:
        self._scope = nodes, metas, leaving

    @cached_property
    def all(self) -> tuple[Fusion, ...]:
        """All fusions of the scope, in the order in which programs prefer them."""
        nodes, metas, leaving = self._scope
        body = tuple(unsharded_call(node, metas) for node in nodes)
        found: list[Fusion] = []
        for match in matches(PATTERNS, body, tuple(unsharded(ref, metas[ref]) for ref in leaving)):
            rivals = tuple(other for other in found if other.match.statements & match.statements)
            found.append(_fusion(match, nodes, metas, rivals))
        return tuple(found)

    @cached_property
    def readers(self) -> Mapping[Ref, tuple[Node, ...]]:
        """What the scope's calls read -> those calls, in order."""
        found: dict[Ref, tuple[Node, ...]] = {}
        for node in self._scope[0]:
            for ref in dict.fromkeys(node.inputs):
                found[ref] = (*found.get(ref, ()), node)
        return found

    @cached_property
    def _by_call(self) -> Mapping[str, tuple[Fusion, ...]]:
        found: dict[str, tuple[Fusion, ...]] = {}
        for fusion in self.all:
            for member in fusion.members:
                found[member.name] = (*found.get(member.name, ()), fusion)
        return found

    def of(self, name: str) -> tuple[Fusion, ...]:
        """The fusions that the call `name` may be part of, in the order in which programs prefer them."""
        return self._by_call.get(name, ())


def _fusion(
    match: Match, nodes: tuple[Node, ...], metas: Mapping[Ref, TensorMeta], rivals: tuple[Fusion, ...]
) -> Fusion:
    members = tuple(nodes[i] for i in sorted(match.statements))
    made = {Ref(member.name) for member in members}
    readers: dict[Ref, str] = {}
    for member in members:
        for ref in member.inputs:
            if ref not in made:
                readers.setdefault(ref, member.name)
    bound = match.bound.items()
    leaves = {name: Ref(*each.type.tensor) for name, each in bound if isinstance(each.value, Var)}
    pattern, results = match.pattern, []
    makers = {result.name: nodes[match.bound[result.name].origin] for result in pattern.results}
    named = leaves | {name: Ref(maker.name) for name, maker in makers.items()}

    def args(names: tuple[str, ...]) -> tuple[Ref, ...]:
        return tuple(named[name] for name in names if name in named)

    for result in pattern.results:
        own = makers[result.name]
        operator = OTHER_RESULT + pattern.target.partition(".")[2]
        node = Node(
            name=own.name, op=operator, args=args(result.leaves), kwargs=(), outputs=own.outputs, module=own.module
        )
        results.append(own if result.is_call else node)
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
    """A call as it is lowered where nothing is sharded. stored: parameters, which are attributes of the module."""
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
    """The variable of a tensor where nothing is sharded."""
    if ref.node in stored:
        return replace(unsharded(ref, meta), name=f"self.{ref.node}")
    held = TensorType(meta.shape, str(meta.dtype).removeprefix("torch."), tensor=(ref.node, ref.index))
    return Var(ref.node if ref.index == 0 else f"{ref.node}:{ref.index}", held)
