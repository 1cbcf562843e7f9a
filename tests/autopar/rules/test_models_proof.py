"""The distinct calls of every example model, proven. Run with -s for the totals.

The fast tests trace each model once, with dropout if it is used with it, and prove one of the calls that are alike
(`alike`): the slow ones prove every call, with dropout and without.
"""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.graph import Node, TensorMeta, map_refs
from autopar.rules import ProofReport, prove_rule, rule_for
from autopar.sharding.strategies import scopes_of
from autopar.tracing.trace import trace
from examples.models import EXAMPLES

DECLINED = {"Rp, P, P -> P"}
"""A LayerNorm is linear in its weight and bias together, but parameters are never partial sums."""

WITHOUT_DROPOUT = ("llama", "llama_gqa", "qwen2", "qwen3", "vit", "mlp")
"""Trained so. Between them and the others, attention of each form is traced with dropout or without."""

Metas = tuple[TensorMeta, ...]
Key = tuple[str, str, Metas]
Calls = dict[Key, tuple[Node, Metas]]


def calls_of(name: str, dropout: float) -> Calls:
    """The model's calls by op, constants and input metas."""
    example = EXAMPLES[name](dropout=dropout)
    graph = trace(example.model, example.inputs, example.loss_fn)
    found: Calls = {}
    for scope in scopes_of(graph):
        for node in scope.nodes:
            metas = tuple(scope.metas[ref] for ref in node.inputs)
            constants = map_refs((node.args, tuple(value for _, value in node.kwargs)), lambda _: "tensor")
            found.setdefault((node.op, repr(constants), metas), (node, metas))
    return found


def alike(key: Key) -> object:
    """Equal for calls whose inputs have equal sizes in the same places, which the tried axes divide alike."""
    op, constants, metas = key
    numbers: dict[int, int] = {}

    def kind(size: int) -> object:
        return size if size == 1 else (numbers.setdefault(size, len(numbers)), size % 2 == 0, size % 3 == 0)

    return op, constants, tuple((tuple(map(kind, meta.shape)), meta.dtype, meta.requires_grad) for meta in metas)


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["alike", "all"])
def calls(request: pytest.FixtureRequest) -> Calls:
    found: Calls = {}
    for name in EXAMPLES:
        for dropout in (0.0, 0.1):
            if request.param or (dropout == 0.0) == (name in WITHOUT_DROPOUT):
                found = calls_of(name, dropout) | found
    if request.param:
        return found
    one_of_each = {alike(key): key for key in reversed(found)}
    return {key: found[key] for key in one_of_each.values()}


def test_every_op_has_a_rule(calls: Calls) -> None:
    without = {node.op for node, metas in calls.values() if rule_for(node, metas) is None}
    assert without == set()


def test_every_option_of_every_call_is_right(calls: Calls) -> None:
    reports: list[ProofReport] = []
    for node, metas in calls.values():
        rule = rule_for(node, metas)
        assert rule is not None
        reports.append(prove_rule(node, metas, rule))
    wrong = [(report.op, text) for report in reports for text in report.wrong]
    missed = Counter((report.op, text) for report in reports for text in report.missed)
    checked = sum(report.options_checked for report in reports)
    print(
        f"\n{len(reports)} calls of {len({r.op for r in reports})} ops, {checked} options checked, "
        f"{len(wrong)} wrong, {len(missed)} missed: {dict(missed)}"
    )
    assert wrong == []
    assert {text for op, text in missed if op == "aten.layer_norm.default"} <= DECLINED
    # Zeros are also a partial sum of zeros, which no reader of a fresh tensor gains from.
    assert {op for op, _ in missed} <= {"aten.layer_norm.default", "aten.zeros.default", "aten.new_zeros.default"}
    assert checked > 20 * len(reports)
