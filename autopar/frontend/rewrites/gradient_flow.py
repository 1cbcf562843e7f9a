"""The flow of gradients: `no_grad` regions end in a detach, and parameters that get no gradient are not trained.

An exported graph says of a call in a `no_grad` region that its result needs no gradient. A generated program has no
such regions: tensors that leave such a region are detached there. A parameter that the loss does not depend on has
`grad is None` in one process, and optimizers skip it, weight decay included; so it counts as frozen.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.frontend.fx_import import FlatGraph, unused_name
from autopar.ir.graph import Node, Ref, TensorMeta, base_name, has_gradients, with_refs
from autopar.operators.traits import CONSTANT

_DETACH = "aten.detach.default"


def settle_gradients(flat: FlatGraph) -> None:
    """Settle detached regions and frozen parameters, and set every tensor's `requires_grad` anew."""
    detach_regions(flat)
    frozen = set(flat.parameters) - reached(flat)
    for name in frozen:
        parameter = flat.parameters[name]
        flat.parameters[name] = replace(parameter, meta=replace(parameter.meta, requires_grad=False))
    metas = flat.metas()
    for position, node in enumerate(flat.nodes):
        needs = any(metas[ref].requires_grad for ref in node.inputs)
        outputs = tuple(replace(meta, requires_grad=meta.requires_grad and needs) for meta in node.outputs)
        if outputs != node.outputs:
            flat.nodes[position] = replace(node, outputs=outputs)
            metas |= {Ref(node.name, index): meta for index, meta in enumerate(outputs)}


def detach_regions(flat: FlatGraph) -> None:
    """Detach, for later uses, the result of every call whose results need no gradient although its operands do."""
    metas = flat.metas()
    taken = {ref.node for ref in metas}
    detached: dict[Ref, Ref] = {}
    nodes: list[Node] = []
    for node in flat.nodes:
        node = with_refs(node, lambda ref: detached.get(ref, ref))
        crosses = base_name(node.op) not in CONSTANT and any(metas[ref].requires_grad for ref in node.inputs)
        cut = [i for i, meta in enumerate(node.outputs) if crosses and has_gradients(meta.dtype)]
        cut = [i for i in cut if not node.outputs[i].requires_grad]
        if not cut:
            nodes.append(node)
            continue
        opened = tuple(replace(m, requires_grad=True) if i in cut else m for i, m in enumerate(node.outputs))
        nodes.append(replace(node, outputs=opened))
        for index in cut:
            name = unused_name(f"{node.name}_detached", taken)
            taken.add(name)
            nodes.append(
                Node(
                    name=name,
                    op=_DETACH,
                    args=(Ref(node.name, index),),
                    kwargs=(),
                    outputs=(node.outputs[index],),
                    module=node.module,
                )
            )
            detached[Ref(node.name, index)] = Ref(name)
            metas[Ref(name)] = node.outputs[index]
    flat.nodes = nodes
    flat.loss = detached.get(flat.loss, flat.loss)


def reached(flat: FlatGraph) -> set[str]:
    """Return nodes, parameters and inputs that the loss is differentiated through."""
    metas: dict[Ref, TensorMeta] = flat.metas()
    names = {flat.loss.node} if metas[flat.loss].requires_grad else set()
    for node in reversed(flat.nodes):
        if node.name in names and base_name(node.op) not in CONSTANT:
            names |= {ref.node for ref in node.inputs if metas[ref].requires_grad}
    return names
