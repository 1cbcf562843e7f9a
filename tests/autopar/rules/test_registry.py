"""Finding rules, and adding them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autopar.ir.graph import Node, Ref, TensorMeta
from autopar.operators.schemas import find_op
from autopar.proofs import prove_rule
from autopar.rules import Call, Registry, Rule, known_ops, register_rule, rule_for
from autopar.rules.call import make_rule
from autopar.rules.registry import builtin_table
from tests.autopar.rules.handmade_calls import f, make_node


@pytest.fixture
def scaled_matmul() -> Iterator[str]:
    """A user's operator: alpha * a @ b, contracted over the last dim of both."""
    with torch.library._scoped_library("rulestest", "DEF") as library:
        library.define("scaled_matmul(Tensor a, Tensor b, float alpha) -> Tensor")
        library.impl("scaled_matmul", lambda a, b, alpha: alpha * (a @ b.T), "CompositeImplicitAutograd")
        yield "rulestest.scaled_matmul.default"


def test_a_users_equation_is_found_and_proven(scaled_matmul: str) -> None:
    registry = Registry()
    registry.register(scaled_matmul, "m k, n k -> m n", linear=("a", "b"))
    node, inputs = make_node(scaled_matmul, f(4, 6), f(12, 6), 0.5)
    rule = registry.rule_for(node, inputs)
    assert rule is not None
    report = prove_rule(node, inputs, rule)
    assert (report.wrong, report.missed) == ((), ())
    assert report.options_checked > 20
    assert scaled_matmul in registry.known_ops()
    assert scaled_matmul not in known_ops()


def test_a_users_wrong_equation_is_caught(scaled_matmul: str) -> None:
    registry = Registry()
    registry.register(scaled_matmul, "m k, n k -> n m")
    node, inputs = make_node(scaled_matmul, f(6, 6), f(6, 6), 0.5)
    rule = registry.rule_for(node, inputs)
    assert rule is not None
    assert prove_rule(node, inputs, rule).wrong


def test_a_users_function_sees_arguments_by_name(scaled_matmul: str) -> None:
    def by_hand(call: Call) -> Rule:
        assert call["alpha"] == 0.5
        a, b = call.tensor("a"), call.tensor("b")
        sizes = {"m": a.shape[0], "n": b.shape[0], "k": a.shape[1]}
        return make_rule(call, [[["m"], ["k"]], [["n"], ["k"]]], [[["m"], ["n"]]], sizes, linear=("a", "b"))

    registry = Registry()
    registry.register(scaled_matmul, by_hand)
    node, inputs = make_node(scaled_matmul, f(4, 6), f(12, 6), 0.5)
    rule = registry.rule_for(node, inputs)
    assert rule is not None
    assert prove_rule(node, inputs, rule).missed == ()


def test_a_user_may_override_a_builtin_rule() -> None:
    registry = Registry()
    registry.register("aten.relu", "!a !b -> !a !b")
    node, inputs = make_node("aten.relu.default", f(4, 6))
    mine, builtin = registry.rule_for(node, inputs), rule_for(node, inputs)
    assert mine is not None and builtin is not None
    assert mine.shardable == ()
    assert builtin.shardable == ("d0", "d1")


def test_an_unknown_op_has_no_rule() -> None:
    node = Node("x", "nobody.knows.default", (Ref("a"),), (), (TensorMeta((4,), torch.float32),))
    assert rule_for(node, (TensorMeta((4,), torch.float32),)) is None


def test_in_place_forms_share_the_rule() -> None:
    node, inputs = make_node("aten.add_.Tensor", f(4, 6), f(6))
    plain, inputs_plain = make_node("aten.add.Tensor", f(4, 6), f(6))
    assert rule_for(node, inputs) == rule_for(plain, inputs_plain)


def test_registering_an_op_that_torch_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="no operator"):
        register_rule("nobody.knows.default", "a -> a")


def test_a_function_takes_no_linear_sets() -> None:
    with pytest.raises(ValueError, match="whole Rule"):
        Registry().register("aten.relu", lambda call: None, linear=("self",))


def test_every_builtin_name_is_an_operator_of_torch() -> None:
    """A misspelt row would never be found."""
    names = [name.split(".") for name in builtin_table()]
    missing = [f"{space}.{name}" for space, name in names if not hasattr(getattr(torch.ops, space), name)]
    assert missing == []
    assert find_op("aten.linear.default") is not None


def test_wrong_number_of_metas_is_refused() -> None:
    node, inputs = make_node("aten.relu.default", f(4, 6))
    with pytest.raises(ValueError, match="1 tensor arguments, 2 metas"):
        rule_for(node, inputs * 2)
