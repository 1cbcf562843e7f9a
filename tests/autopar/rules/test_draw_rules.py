"""Draws and `in_training` under every option, forward and backward."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.draws import DRAW, IN_TRAINING
from autopar.ir.graph import Node, Ref, TensorMeta
from autopar.proofs import prove_rule
from autopar.rules import rule_for

PARAMETERS = {"bernoulli": (("p", 0.3),), "integers": (("low", -2), ("high", 5))}


def drawn(distribution: str) -> Node:
    dtype = torch.int64 if distribution == "integers" else torch.float32
    kwargs = (("dtype", dtype), *PARAMETERS.get(distribution, ()))
    meta = TensorMeta((4, 6, 12), dtype)
    return Node(name="drawn", op=DRAW, args=(distribution, meta.shape), kwargs=kwargs, outputs=(meta,))


@pytest.mark.parametrize("distribution", ["uniform", "bernoulli", "exponential", "normal", "integers"])
def test_every_rank_draws_its_part(distribution: str) -> None:
    node = drawn(distribution)
    rule = rule_for(node, ())
    assert rule is not None
    report = prove_rule(node, (), rule)
    assert not report.wrong and not report.missed and report.options_checked > 6


def test_what_evaluation_reads_has_the_placement_of_what_it_replaces() -> None:
    metas = (TensorMeta((4, 6), torch.float64, True), TensorMeta((4, 6), torch.float64, True))
    refs = (Ref("a"), Ref("b"))
    node = Node(name="both", op=IN_TRAINING, args=refs, kwargs=(), outputs=(metas[0],))
    rule = rule_for(node, metas)
    assert rule is not None
    report = prove_rule(node, metas, rule)
    assert not report.wrong and not report.skipped
