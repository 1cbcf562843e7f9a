"""Calls that draw random numbers and their numbers, and calls that an evaluation replaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph, LayerRun, Node, base_name, derived, has_dropout
from autopar.operators.traits import ATTENTION, DRAWN

DRAW = "autopar.draw.default"
"""`draw(distribution, size, dtype, p, low, high)`, of codegen/runtime/draws.py: what random operators are written as
(frontend/rewrites/draws.py)."""

IN_TRAINING = "autopar.in_training.default"
"""`in_training(training, evaluation)`: the first in training, the second in evaluation (frontend/training_only.py)."""


def is_keyed(node: Node) -> bool:
    """Whether a call draws random numbers with its own key: dropout, attention with dropout, and draws."""
    name = base_name(node.op)
    return name in DRAWN and (name not in ATTENTION or has_dropout(node))


def is_single_draw(node: Node) -> bool:
    """Whether a call draws one number, which is kept in a graph even where nothing reads it."""
    return node.op == DRAW and node.args[1] == ()


@dataclass(frozen=True, slots=True)
class DrawNumbers:
    """Draw numbers of a model.

    calls: number by (scope, node), in a layer counted from the layer's first call. per_layer: calls per layer of a
    class. bases: numbers of the first calls of all layers of a class.
    """

    calls: Mapping[tuple[str, str], int]
    per_layer: Mapping[str, int]
    bases: Mapping[str, tuple[int, ...]]

    def base(self, layer: str) -> int | tuple[int, ...]:
        """Return the first layer's base if the layers of the class are evenly spaced, else one base per layer."""
        bases, step = self.bases[layer], self.per_layer[layer]
        is_even = all(base == bases[0] + i * step for i, base in enumerate(bases))
        return bases[0] if is_even else bases


@derived
def draw_numbers(graph: Graph) -> DrawNumbers:
    """Number a whole model's calls; stages look their numbers up by name."""
    calls: dict[tuple[str, str], int] = {}
    per_layer: dict[str, int] = {}
    bases: dict[str, list[int]] = {}
    count = 0
    for piece in graph.body:
        if isinstance(piece, LayerRun):
            layer = piece.layer
            drawing = [node.name for node in layer.nodes if is_keyed(node)]
            calls |= {(layer.name, name): number for number, name in enumerate(drawing)}
            per_layer[layer.name] = len(drawing)
            for _ in piece.instances:
                bases.setdefault(layer.name, []).append(count)
                count += len(drawing)
        elif is_keyed(piece):
            calls["", piece.name] = count
            count += 1
    return DrawNumbers(calls, per_layer, {name: tuple(numbers) for name, numbers in bases.items()})
