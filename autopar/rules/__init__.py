"""Sharding rules: the factors of an operator, and the sharding they allow for its tensors.

`rule_for(node, inputs)` returns a `Rule`. `rule.axis_options` expands it to the options of one mesh axis, and
`local_call` is the call that a rank then runs. `register_rule` adds rules; `autopar.proofs` proves them.
"""

from autopar.rules.call import Call, Operand
from autopar.rules.localize import LocalCall, LoweringCall, combines, local_call
from autopar.rules.registry import Registry, known_ops, register_rule, rule_for
from autopar.rules.rule import AxisOption, Lowering, Rule, axis_options

__all__ = [
    "AxisOption",
    "Call",
    "LocalCall",
    "Lowering",
    "LoweringCall",
    "Operand",
    "Registry",
    "Rule",
    "axis_options",
    "combines",
    "known_ops",
    "local_call",
    "register_rule",
    "rule_for",
]
