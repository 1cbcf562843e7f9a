"""The placements of parameters and of the tensors that modules compute, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from autopar.ir.graph import Node, Ref
from autopar.ir.mesh import ZERO_AXES, Mesh
from autopar.ir.placement import Placements, Stored
from autopar.report.dims import DimNames
from autopar.sharding.assignment import Assignment
from autopar.sharding.scopes import Scope

SHOWN_MODULES = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One line: which parameters or modules, and their placement, as one text and axis by axis."""

    what: str
    how: str
    parts: tuple[str, ...] = ()


def parameter_rows(scope: Scope, assignment: Assignment, mesh: Mesh, names: DimNames) -> list[Row]:
    """Return the scope's trained parameters in the model's order. Equal placements in one module share a row."""
    words: dict[str, tuple[str, ...]] = {}
    for (owner, name), stored in assignment.parameters.items():
        if owner == scope.name and scope.metas[Ref(name)].requires_grad:
            words[name] = _stored_parts(scope, name, stored, mesh, names)
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, parts in words.items():
        parent = name.rpartition(".")[0].rpartition(".")[0]
        groups.setdefault((parent, parts), []).append(name)
    return [Row(_joined(members, words), _stored_text(parts), parts) for (_, parts), members in groups.items()]


def _joined(members: list[str], words: Mapping[str, object]) -> str:
    """Return `self_attn.q_proj, k_proj`; with parameter names only where a module's parameters have several
    placements."""
    items: list[str] = []
    for name in members:
        module, _, leaf = name.rpartition(".")
        siblings = [n for n in words if n.rpartition(".")[0] == module]
        is_whole = bool(module) and all(n in members for n in siblings)
        item = module if is_whole else name
        if item not in items:
            items.append(item)
    parent = items[0].rpartition(".")[0]
    tails = [item.removeprefix(f"{parent}.") if i and parent else item for i, item in enumerate(items)]
    return ", ".join(tails)


def stored_words(scope: Scope, name: str, stored: Stored, mesh: Mesh, names: DimNames) -> str:
    """Return the storage of one parameter on every axis of the mesh."""
    return _stored_text(_stored_parts(scope, name, stored, mesh, names))


def _stored_text(parts: tuple[str, ...]) -> str:
    return "; ".join(parts) or "on one rank"


def _stored_parts(scope: Scope, name: str, stored: Stored, mesh: Mesh, names: DimNames) -> tuple[str, ...]:
    meta = scope.metas[Ref(name)]
    parts = []
    for axis, placement in sorted(
        zip(mesh.axes, stored.placements, strict=True), key=lambda pair: not pair[1].is_shard
    ):
        if placement.is_shard:
            word = names.of(scope.name, Ref(name), placement, len(meta.shape))
            fused = f", {placement.sections} fused parts alike" if placement.sections > 1 else ""
            parts.append(f"sharded by {word} over {axis}{fused}")
        elif stored.zero and axis in ZERO_AXES and placement.kind == "Rp":
            parts.append(zero_words(stored.zero, axis, bool(scope.layer)))
        else:
            parts.append(f"replicated over {axis}" + (", gradients summed" if placement.kind == "Rp" else ""))
    return tuple(parts)


def zero_words(stage: int, axis: str, is_layer: bool) -> str:
    """Return the storage of a parameter under a ZeRO stage."""
    if stage == 3:
        return f"sharded over {axis}, gathered {'per layer' if is_layer else 'when used'} (ZeRO-3)"
    sharded = "gradients and optimizer state" if stage == 2 else "optimizer state"
    return f"replicated over {axis}, {sharded} sharded (ZeRO-{stage})"


def activation_rows(scope: Scope, assignment: Assignment, mesh: Mesh, names: DimNames) -> list[Row]:
    """Return the scope's inputs, then its modules in the order of execution, each with the placement of its results."""
    rows = []
    for name, _ in scope.layer.inputs if scope.layer else ():
        if scope.metas[Ref(name)].requires_grad:
            parts = _activation_parts(scope, Ref(name), assignment.tensors[scope.name, Ref(name)], mesh, names)
            rows.append(Row("(input)", _activation_text(parts), parts))
    phases = [(_words(scope, node, assignment, mesh, names), node) for node in _activations(scope)]
    for parts, group in groupby(phases, key=lambda pair: pair[0]):
        modules = list(dict.fromkeys(relative(scope, node.module) for _, node in group))
        rows.append(Row(_modules_text(modules), _activation_text(parts), parts))
    return rows


def _activations(scope: Scope) -> Iterator[Node]:
    """Yield the calls with a result that needs a gradient and has at least one dim."""
    return (n for n in scope.nodes if n.outputs and n.outputs[0].requires_grad and n.outputs[0].shape)


def _words(scope: Scope, node: Node, assignment: Assignment, mesh: Mesh, names: DimNames) -> tuple[str, ...]:
    placements = assignment.operators[scope.name, node.name].outputs[0]
    return _activation_parts(scope, Ref(node.name), placements, mesh, names)


def _activation_text(parts: tuple[str, ...]) -> str:
    return ", ".join(parts) or "on one rank"


def _activation_parts(scope: Scope, ref: Ref, placements: Placements, mesh: Mesh, names: DimNames) -> tuple[str, ...]:
    """Return an activation's placement, axis by axis: `batch over dp`, `sequence over tp`."""
    num_dims = len(scope.metas[ref].shape)
    parts = []
    for axis, placement in zip(mesh.axes, placements, strict=True):
        if placement.is_shard:
            parts.append(f"{names.of(scope.name, ref, placement, num_dims)} over {axis}")
        else:
            parts.append(f"partial sums over {axis}" if placement.kind == "P" else f"replicated over {axis}")
    return tuple(parts)


def relative(scope: Scope, path: str) -> str:
    """Return a module's path relative to its layer; "(itself)" for the layer or the model."""
    for instance in scope.instances:
        if scope.layer and (path == instance or path.startswith(f"{instance}.")):
            return path[len(instance) :].lstrip(".") or "(itself)"
    return path or "(itself)"


def _modules_text(modules: list[str]) -> str:
    """Return the modules' names without parents of others; a long list as its first and last name."""
    leaves = [m for m in modules if not any(other.startswith(f"{m}.") for other in modules)]
    leaves = [m for m in leaves if m != "(itself)"] or leaves
    if len(leaves) > SHOWN_MODULES:
        return f"{leaves[0]} ... {leaves[-1]}"
    return ", ".join(leaves)
