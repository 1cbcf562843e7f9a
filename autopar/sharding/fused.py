"""Runs of calls of a graph that one kernel can do, found by the patterns that fuse generated programs.

Lowered calls are the graph's calls with reshards between them, and a reshard parts a run. So what is found here may be
fused; it is where every tensor of the run lies for its reader as it was made (autopar/costs/kernels.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.graph import Node, Ref, TensorMeta, map_refs
from autopar.rules.loss import MEAN, cross_entropy_arguments, is_plain_cross_entropy
from codegen.fusion import PATTERNS, Match, matches
from codegen.program import Call, Operand, Raw, Var


@dataclass(frozen=True, slots=True)
class Fusion:
    """A run of calls, and the one that it becomes: named as the last of them, with the same results.

    members: in order; metas: of what the kernel reads; readers: what is read from outside -> the first of them that
    reads it. match: pattern and bindings.
    """

    node: Node
    metas: tuple[TensorMeta, ...]
    members: tuple[Node, ...]
    readers: Mapping[Ref, str]
    match: Match

    @property
    def name(self) -> str:
        """The pattern's."""
        return self.match.pattern.name

    def pays(self, num_data_ranks: int) -> bool:
        """Whether programs for so many data-parallel ranks have it."""
        return self.match.pattern.pays(self.match.bound, num_data_ranks)


def fusions_in(
    nodes: tuple[Node, ...], metas: Mapping[Ref, TensorMeta], leaving: Collection[Ref]
) -> dict[str, tuple[Fusion, ...]]:
    """Call -> the runs that it may be part of, in the order in which programs prefer them.

    nodes: of one scope. leaving: what is read outside of them.
    """
    body = tuple(_call(node, metas) for node in nodes)
    found: dict[str, tuple[Fusion, ...]] = {}
    for match in matches(PATTERNS, body, tuple(map(_name, leaving))):
        fusion = _fusion(match, tuple(nodes[i] for i in sorted(match.statements)), metas)
        for member in fusion.members:
            found[member.name] = (*found.get(member.name, ()), fusion)
    return found


def _fusion(match: Match, members: tuple[Node, ...], metas: Mapping[Ref, TensorMeta]) -> Fusion:
    made = {Ref(member.name) for member in members}
    readers: dict[Ref, str] = {}
    for member in members:
        for ref in member.inputs:
            if ref not in made:
                readers.setdefault(ref, member.name)
    outside = {_name(ref): ref for ref in readers}
    last = members[-1]
    args = tuple(outside[match.bound[leaf].value.name] for leaf in match.pattern.leaves if leaf in match.bound)
    node = Node(last.name, match.pattern.target, args, (), last.outputs, last.module)
    return Fusion(node, tuple(metas[ref] for ref in args), members, readers, match)


def _call(node: Node, metas: Mapping[Ref, TensorMeta]) -> Call:
    """A call as it is lowered where nothing is sharded."""
    inputs = [metas[ref] for ref in node.inputs]
    held = tuple(
        (_name(ref), Operand(meta.shape, str(meta.dtype).removeprefix("torch.")))
        for ref, meta in zip(node.inputs, inputs, strict=True)
    )
    results = tuple(_name(Ref(node.name, index)) for index in range(len(node.outputs)))

    def variable(ref: Ref) -> Var:
        return Var(_name(ref))

    args: tuple[Any, ...] = map_refs(node.args, variable)
    if is_plain_cross_entropy(node, inputs):
        arguments = cross_entropy_arguments(node)
        divisor = Raw("num_targets[0]" if arguments["reduction"] == MEAN else "1.0")
        options = tuple((key, arguments[key]) for key in ("ignore_index", "label_smoothing") if arguments[key])
        return Call("runtime.cross_entropy", (*args[:2], divisor), options, results, operands=held)
    kwargs = tuple((key, map_refs(value, variable)) for key, value in node.kwargs)
    return Call(node.op, args, kwargs, results, operands=held)


def _name(ref: Ref) -> str:
    return ref.node if ref.index == 0 else f"{ref.node}:{ref.index}"
