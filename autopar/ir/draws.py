"""Calls that draw random numbers, and calls of which an evaluation reads something else."""

from __future__ import annotations

from autopar.ir.graph import Node, base_name, has_dropout
from autopar.operators.traits import ATTENTION, DRAWN

DRAW = "autopar.draw.default"
"""`draw(distribution, size, dtype, p, low, high)`, of codegen/runtime/draws.py: what random operators are written as
(frontend/draws.py)."""

IN_TRAINING = "autopar.in_training.default"
"""`in_training(training, evaluation)`: the first in training, the second in evaluation (frontend/training_only.py)."""


def is_keyed(node: Node) -> bool:
    """Whether a call draws random numbers by a key of its own: dropout, attention with dropout, and draws."""
    name = base_name(node.op)
    return name in DRAWN and (name not in ATTENTION or has_dropout(node))


def is_single_draw(node: Node) -> bool:
    """Whether a call draws one number, which is kept in a graph even where nothing reads it."""
    return node.op == DRAW and node.args[1] == ()
