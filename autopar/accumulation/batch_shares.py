"""The parts of a call's inputs in the micro-batches of a step, and how the call differs there from the whole
batch.

`micro_batches.py` has the algebra.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from autopar.ir.graph import Node, base_name
from autopar.ir.placement import P, Placement, R
from autopar.operators.traits import CREATED_LIKE, SIZES
from autopar.rules.call import Call, Operand
from autopar.rules.families.pointwise import CASTS
from autopar.rules.rule import Rule
from autopar.sharding.scopes import Scope

ONE = Fraction(1)


@dataclass(frozen=True, slots=True)
class Share:
    """The relation of the whole batch's value to the micro-batches' values, see `micro_batches.py`.

    is_late: it depends on a sum that the first pass of a step computes, and is correct only in the second pass.
    has_own_gradient: its value is equal in all micro-batches, but its gradient is not; the mean of the gradients is
    that of the whole batch.
    """

    placement: Placement
    scale: Fraction = ONE
    is_late: bool = False
    has_own_gradient: bool = False

    @property
    def is_sum(self) -> bool:
        return self.placement == P


SAME = Share(R)


class WholeBatchError(ValueError):
    """The model needs its whole batch at once; the message names the call, its place and the reason."""


@dataclass(frozen=True, slots=True)
class Site:
    """One call in both graphs, with the shares of its inputs."""

    scope: Scope
    node: Node
    twin: Node
    call: Call
    rule: Rule | None
    inputs: tuple[Share, ...]
    numbers: Mapping[str, Fraction]

    @property
    def packet(self) -> str:
        return self.call.packet

    @property
    def grows(self) -> bool:
        return any(a.shape != b.shape for a, b in zip(self.node.outputs, self.twin.outputs, strict=True))

    @property
    def has_rows(self) -> bool:
        """Whether an input or a result has rows of the batch."""
        return self.grows or any(share.placement.is_shard for share in self.inputs)

    @property
    def sums(self) -> tuple[int, ...]:
        """Return the inputs that are sums over the batch, complete after the last micro-batch."""
        return tuple(i for i, share in enumerate(self.inputs) if share.is_sum)

    @property
    def with_own_gradients(self) -> tuple[int, ...]:
        """Return the inputs with a separate gradient in every micro-batch, which the call's results pass on."""
        has_gradient = any(meta.requires_grad for meta in self.node.outputs)
        return tuple(i for i, share in enumerate(self.inputs) if share.has_own_gradient and has_gradient)

    @property
    def adds_number(self) -> bool:
        """Whether the call adds a number to its only input, or subtracts one."""
        return self.packet in ("add", "sub", "rsub") and len(self.inputs) == 1

    def error(self, reason: str) -> WholeBatchError:
        paths = [name for name in self.scope.full_names(self.node.module) if name]
        where = (paths[0] if len(paths) == 1 else f"{paths[0]} ... {paths[-1]}") if paths else "outside of submodules"
        return WholeBatchError(f"{base_name(self.node.op)} ({self.node.name}, {where}) {reason}")

    def index_of(self, name: str) -> int | None:
        """Return the index of a tensor argument among the inputs."""
        value = self.call.get(name)
        return value.index if isinstance(value, Operand) else None


def lent(call: Call, index: int, share: Share) -> Share:
    """Return SAME for an input that only provides dtype or shape, else its share."""
    is_made = call.packet.startswith("new_") and call.inputs[index].shape != call.outputs[0].shape
    is_lent = is_made or (call.packet in CASTS and index > 0)
    return SAME if is_lent or (share.is_sum and call.packet in CREATED_LIKE) else share


def linear_sets(site: Site) -> list[tuple[frozenset[int], bool]]:
    """Return sets of inputs in which the call is linear, and whether it adds a number to them.

    These are the rules' sets, casts between floating dtypes (rounding does not matter here), and `x + 1`, `1 - x`.
    """
    sets = [(members, False) for members in (site.rule.linear if site.rule is not None else ())]
    floating = all(meta.dtype.is_floating_point for meta in (*site.call.inputs, *site.node.outputs))
    if floating and site.packet in CASTS:
        sets.append((frozenset({0}), False))
    if floating and site.packet in ("add", "sub", "rsub"):
        sets.append((frozenset(range(len(site.inputs))), site.adds_number))
    return sets


def numbers_of(site: Site, whole: Call, micro: Call) -> dict[str, Fraction]:
    """Return, by argument, the ratio of its numbers in whole batch and micro-batch. Raises for other differences."""
    numbers = {}
    for name, value in whole.arguments.items():
        other = micro.arguments.get(name)
        if _equal(value, other) or name == SIZES.get(whole.packet.removeprefix("_")):
            continue
        numeric = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (value, other))
        if not numeric or not other or not value or not math.isfinite(value) or not math.isfinite(other):
            raise site.error(f"has an argument that depends on the number of rows: {name}")
        numbers[name] = Fraction(value) / Fraction(other)
    return numbers


def _equal(first: Any, second: Any) -> bool:
    """Compare argument values; operands are equal if they are the same input."""
    if isinstance(first, Operand):
        return isinstance(second, Operand) and first.index == second.index
    if isinstance(first, tuple):
        alike = isinstance(second, tuple) and len(first) == len(second)
        return alike and all(_equal(a, b) for a, b in zip(first, second, strict=True))
    return type(first) is type(second) and (first is second or bool(first == second))
