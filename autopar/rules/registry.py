"""Find the rule of a node in the built-in tables and among user-defined rules.

The built-in tables are immutable. A `Registry` has a user's additions. `register_rule` writes to `default_registry()`,
which everything reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType

from autopar.ir.graph import Node, TensorMeta
from autopar.operators.schemas import find_op
from autopar.rules.call import Call, linear_sets, packet_name
from autopar.rules.equation import Equation
from autopar.rules.families import (
    attention,
    autograd_functions,
    buffers,
    contraction,
    convolution,
    creation,
    experts,
    lookup,
    loss,
    norm,
    pointwise,
    recurrent,
    reduction,
    shape,
    spatial,
    transform,
)
from autopar.rules.rule import Lowering, Rule
from codegen.functions import NAMESPACE

RuleFunction = Callable[[Call], Rule | None]
Row = tuple[str, str] | RuleFunction
"""An equation with its linear sets, or a function."""


@cache
def builtin_table() -> Mapping[str, Row]:
    """Return every built-in row by packet ("aten.linear"), for all its overloads and its in-place form."""
    families = (
        *(attention, buffers, contraction, convolution, creation, experts, lookup),
        *(loss, norm, pointwise, recurrent, reduction, shape, spatial, transform),
    )
    table: dict[str, Row] = {}
    for family in families:
        for name, row in family.TABLE.items():
            if name in table:
                raise ValueError(f"two rules for {name}")
            table[name] = row
    return MappingProxyType(table)


@dataclass(slots=True)
class Registry:
    """The built-in rules, extended or overridden by `register`."""

    additions: dict[str, RuleFunction] = field(default_factory=dict)

    def register(
        self,
        op_name: str,
        rule: str | RuleFunction,
        *,
        linear: tuple[str, ...] = (),
        lowerings: Mapping[str, Lowering] | None = None,
    ) -> None:
        """Add or replace the rule of `op_name`: an overload ("lib.op.default") or a packet ("lib.op").

        rule: an equation such as "b* k, n k -> b* n", or a function from `Call` to `Rule`.
        linear: argument names in which the op is jointly linear, space-separated, one string per set; lowerings: by
        factor. Both apply to an equation; a function states them in its Rule. Raises ValueError for an invalid
        equation.
        """
        if callable(rule):
            if linear or lowerings:
                raise ValueError(f"{op_name}: a function returns a whole Rule; put linear and lowerings there")
            self.additions[op_name] = rule
            return
        equation = Equation.parse(rule)

        def bind(call: Call) -> Rule:
            return equation.bind(call.inputs, call.outputs, linear_sets(call, linear), dict(lowerings or {}))

        self.additions[op_name] = bind

    def rule_for(self, node: Node, inputs: tuple[TensorMeta, ...]) -> Rule | None:
        """Return the call's rule, or None for an op (or form of it) without one, which is replicated and reported."""
        row = self._find(node.op)
        if row is None:
            return None
        call = Call.of(node, inputs)
        return contraction.equation_rule(call, *row) if isinstance(row, tuple) else row(call)

    def _find(self, op: str) -> Row | None:
        packet = packet_name(op)
        plain = packet.rstrip("_") if not packet.endswith("__") else packet
        for name in (op, packet):
            if name in self.additions:
                return self.additions[name]
        if packet.startswith(f"{NAMESPACE}."):
            return partial(autograd_functions.function_rule, rule_of=self.rule_for)
        table = builtin_table()
        return table.get(packet) or table.get(plain)

    def has_rule(self, op: str) -> bool:
        """Whether calls of this overload can have a rule, though perhaps not all of them."""
        return self._find(op) is not None

    def known_ops(self) -> tuple[str, ...]:
        """Return the names of all packets and overloads with a rule, sorted."""
        return tuple(sorted({*builtin_table(), *self.additions}))


@cache
def default_registry() -> Registry:
    """Return the registry of this process, created on first use."""
    return Registry()


def rule_for(node: Node, inputs: tuple[TensorMeta, ...]) -> Rule | None:
    """Call `Registry.rule_for` of the default registry."""
    return default_registry().rule_for(node, inputs)


def register_rule(
    op_name: str,
    rule: str | RuleFunction,
    *,
    linear: tuple[str, ...] = (),
    lowerings: Mapping[str, Lowering] | None = None,
) -> None:
    """Call `Registry.register` of the default registry. Prove the rule first, with `autopar.prove_rule`."""
    if find_op(op_name) is None and len(op_name.split(".")) == 3:
        raise ValueError(f"torch has no operator {op_name!r}; import the library that defines it first")
    default_registry().register(op_name, rule, linear=linear, lowerings=lowerings)


def has_rule(op: str) -> bool:
    """Call `Registry.has_rule` of the default registry."""
    return default_registry().has_rule(op)


def known_ops() -> tuple[str, ...]:
    """Return every op that has a rule."""
    return default_registry().known_ops()
