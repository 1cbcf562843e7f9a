"""Sharding rules: the factors of an operator, the sharding they allow for its tensors, and proof of it.

`rule_for(node, inputs)` returns a `Rule`. `rule.axis_options` expands it to the options of one mesh axis, and
`local_call` is the call that a rank then runs. `register_rule` adds rules, `prove_rule` checks one on real tensors.
"""

from autopar.rules.call import Call, Operand
from autopar.rules.localize import LocalCall, LoweringCall, combines, local_call
from autopar.rules.proofs.prove_rule import ProofReport, prove_rule
from autopar.rules.registry import Registry, known_ops, register_rule, rule_for
from autopar.rules.rule import AxisOption, Lowering, Rule, axis_options

__all__ = [
    "AxisOption",
    "Call",
    "LocalCall",
    "Lowering",
    "LoweringCall",
    "Operand",
    "ProofReport",
    "Registry",
    "Rule",
    "axis_options",
    "combines",
    "known_ops",
    "local_call",
    "prove_rule",
    "register_rule",
    "rule_for",
]
