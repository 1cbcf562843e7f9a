"""The proof itself: wrong rules fail, rules that leave something out are told so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.ir.placement import P, R, Rp, S
from autopar.lowering import call_lowerings
from autopar.proofs import prove_rule
from autopar.proofs.simulated_ranks import assembled, conjugate, coordinates, cut, distribute
from autopar.rules import Lowering, Rule, rule_for
from tests.autopar.rules.handmade_calls import f, ints, make_node


def rule_of(op: str, *args: Any, **kwargs: Any) -> tuple[Any, Any, Rule]:
    node, inputs = make_node(op, *args, **kwargs)
    rule = rule_for(node, inputs)
    assert rule is not None
    return node, inputs, rule


def test_softmax_over_a_sharded_dim_is_wrong() -> None:
    node, inputs, rule = rule_of("aten.softmax.int", f(4, 6), -1)
    report = prove_rule(node, inputs, replace(rule, blocked=frozenset()))
    assert any(text.startswith("d1: S(1) -> S(1) on 2: output 0 differs") for text in report.wrong)
    assert not any(text.startswith("d0:") and " and " not in text for text in report.wrong)


def test_a_mean_without_its_lowering_is_wrong() -> None:
    node, inputs, rule = rule_of("aten.mean.default", f(4, 6))
    report = prove_rule(node, inputs, replace(rule, lowerings={}))
    assert any(text.startswith("d0: S(0) -> P on 2: output 0 differs") for text in report.wrong)


def test_a_bias_that_enters_the_sum_on_every_rank_is_wrong() -> None:
    node, inputs, rule = rule_of("aten.linear.default", f(4, 6), f(12, 6), f(12))
    report = prove_rule(node, inputs, replace(rule, additive=frozenset()))
    assert any(text.startswith("k: S(1), S(1), Rp -> P on 2: output 0 differs") for text in report.wrong)


def test_a_nonlinear_op_on_partial_sums_is_wrong() -> None:
    node, inputs, rule = rule_of("aten.gelu.default", f(4, 6))
    report = prove_rule(node, inputs, replace(rule, linear=(frozenset({0}),)))
    assert any(text.startswith("P: P -> P on 2: output 0 differs") for text in report.wrong)


def test_right_value_with_wrong_gradient_is_wrong() -> None:
    """Cross-entropy over sharded classes is R: every rank needs the whole gradient, as Rp it would get a share."""
    node, inputs, rule = rule_of("aten.cross_entropy_loss.default", f(12, 6), ints(12))
    as_partial = {**rule.lowerings, "c": replace(rule.lowerings["c"], outputs=(Rp,))}
    report = prove_rule(node, inputs, replace(rule, lowerings=as_partial), search_missed=False)
    assert any(text.startswith("c: S(1), R -> Rp by cross_entropy on 2: gradient 0 differs") for text in report.wrong)


def test_vocabulary_rows_without_masking_are_wrong() -> None:
    node, inputs, rule = rule_of("aten.embedding.default", f(12, 4), ints(6))
    report = prove_rule(node, inputs, replace(rule, lowerings={}), search_missed=False)
    assert any(text.startswith("v:") for text in report.wrong)


def test_ignored_targets_make_a_mean_of_means_wrong() -> None:
    """Valid targets are spread unevenly, so averaging each rank's mean is not the mean."""
    node, inputs, rule = rule_of("aten.nll_loss_nd.default", f(12, 6), ints(12))
    report = prove_rule(
        node, inputs, replace(rule, lowerings={"n0": Lowering("mean")}, blocked=frozenset({"c"})), search_missed=False
    )
    assert any(text.startswith("n0:") for text in report.wrong)


@pytest.mark.parametrize(
    ("broken", "op", "args"),
    [
        ("_batch_norm", "aten.batch_norm.default", (f(4, 6), f(6), f(6), None, None, True, 0.1, 1e-5, True)),
        ("_vocab_embedding", "aten.embedding.default", (f(12, 4), ints(6), 1)),
        ("_arange", "aten.arange.start_step", (1, 13, 2)),
    ],
)
def test_a_wrong_lowering_is_caught(broken: str, op: str, args: tuple[Any, ...], monkeypatch: Any) -> None:
    """Norms over the rows of one rank, look-ups without padding, positions that count by one."""
    node, inputs, rule = rule_of(op, *args)
    assert prove_rule(node, inputs, rule, search_missed=False).wrong == ()
    lower = {
        "_batch_norm": lambda mesh, lowering, call: original(mesh, None, call),
        "_vocab_embedding": lambda *args: replace(original(*args), kwargs=()),
        "_arange": lambda call, *args: original(replace(call, args=(call.args[0], call.args[1], 1)), *args),
    }[broken]
    original = getattr(call_lowerings, broken)
    monkeypatch.setattr(call_lowerings, broken, lower)
    assert prove_rule(node, inputs, rule, search_missed=False).wrong


@pytest.mark.parametrize(
    ("op", "args", "factor", "expected"),
    [
        ("aten.linear.default", (f(4, 6), f(12, 6)), "k", "S(1), S(1) -> P"),
        ("aten.linear.default", (f(4, 6), f(12, 6)), "n", "Rp, S(0) -> S(1)"),
        ("aten.relu.default", (f(4, 6),), "d0", "S(0) -> S(0)"),
        ("aten.view.default", (f(4, 6), [4, 2, 3]), "v0to0", "S(0) -> S(0)"),
    ],
)
def test_a_blocked_factor_is_reported_as_missed(op: str, args: tuple[Any, ...], factor: str, expected: str) -> None:
    node, inputs, rule = rule_of(op, *args)
    assert prove_rule(node, inputs, rule).missed == ()
    assert prove_rule(node, inputs, replace(rule, blocked=rule.blocked | {factor})).missed == (expected,)


def test_factors_that_nothing_divides_are_skipped() -> None:
    node, inputs, rule = rule_of("aten.relu.default", f(11, 4))
    assert prove_rule(node, inputs, rule).skipped == ("d0 of size 11",)


def test_cut_by_hand() -> None:
    x = torch.arange(12)
    assert cut(x, (S(0),), (2,), (1,)).tolist() == [6, 7, 8, 9, 10, 11]
    assert cut(x, (S(0, 3),), (2,), (1,)).tolist() == [2, 3, 6, 7, 10, 11]
    # grid (4, 3): the first axis halves the four runs, the second takes a third of each
    assert cut(x, (S(0), S(0, 4)), (2, 3), (1, 2)).tolist() == [8, 11]
    assert cut(x, (S(0), S(0)), (2, 3), (1, 2)).tolist() == [10, 11]


@pytest.mark.parametrize("first", [R, Rp, P, S(0), S(1), S(0, 3)])
@pytest.mark.parametrize("second", [R, Rp, P, S(0), S(1), S(0, 6)])
def test_distributing_and_assembling_are_inverse(first: Any, second: Any) -> None:
    if {first, second} == {S(0), S(0, 3)}:
        pytest.skip("three sections do not split in two")
    x = torch.randn(24, 4, dtype=torch.float64)
    parts = distribute(x, (first, second), (2, 2), torch.Generator().manual_seed(0))
    assert len(parts) == len(coordinates((2, 2)))
    for whole in assembled(parts, (first, second), (2, 2), (24, 4)):
        torch.testing.assert_close(whole, x)


def test_assembling_keeps_ranks_that_should_agree_apart() -> None:
    parts = {(0,): torch.ones(2), (1,): torch.zeros(2)}
    assert [t.tolist() for t in assembled(parts, (R,), (2,), (2,))] == [[1.0, 1.0], [0.0, 0.0]]


def test_conjugates_are_those_of_the_table() -> None:
    assert [conjugate(p) for p in (R, Rp, P, S(1, 2))] == [R, P, R, S(1, 2)]
