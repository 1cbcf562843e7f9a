"""The call of one rank, written out by hand for the cases that matter in models."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.ir.placement import P, R, S
from autopar.rules import AxisOption, LocalCall, LoweringCall, combines, local_call, rule_for
from autopar.rules.rule import axis_options, shard_option
from tests.autopar.rules.handmade_calls import T, f, ints, make_node


def localize(op: str, *args: Any, shard: dict[str, int], **kwargs: Any) -> tuple[LocalCall, tuple[AxisOption, ...]]:
    """The local call with one axis per entry of `shard`: factor (or factor/sections) -> axis size; "R" replicates."""
    node, inputs = make_node(op, *args, **kwargs)
    rule = rule_for(node, inputs)
    assert rule is not None
    options = []
    for label, size in shard.items():
        factor, _, sections = label.partition("/")
        if label == "R":
            options.append(axis_options(rule, size, inputs, node.outputs)[0])
        else:
            options.append(shard_option(rule, factor, int(sections or 1)))
    return local_call(node, rule, tuple(options), inputs, tuple(shard.values())), tuple(options)


def test_splitting_heads_over_batch_and_heads() -> None:
    local, options = localize("aten.view.default", f(8, 16, 32), [8, 16, 4, 8], shard={"v0to0": 2, "v2to2": 4})
    assert local.args[1] == (4, 16, 1, 8)
    assert [o.inputs[0] for o in options] == [S(0), S(2)]
    assert [o.outputs[0] for o in options] == [S(0), S(2)]


def test_an_inferred_size_stays_inferred() -> None:
    local, _ = localize("aten.view.default", f(8, 16, 32), [-1, 32], shard={"v0to0": 2})
    assert local.args[1] == (-1, 32)


def test_merging_batch_and_sequence_with_the_sequence_sharded() -> None:
    local, (option,) = localize("aten.reshape.default", f(8, 16, 32), [128, 32], shard={"v1to0": 2})
    assert local.args[1] == (64, 32)
    assert option.inputs[0] == S(1)
    assert option.outputs[0] == S(0, 8)


def test_fused_qkv_is_split_in_three_sections() -> None:
    local, (option,) = localize("aten.split.Tensor", f(8, 16, 96), 32, 2, shard={"m": 4})
    assert local.args[1] == 8
    assert option.inputs[0] == S(2, 3)
    assert option.outputs == (S(2),) * 3


def test_half_of_a_rotary_embedding() -> None:
    local, (option,) = localize("aten.slice.Tensor", f(4, 2, 16), 2, 8, 9223372036854775807, shard={"m": 2})
    assert local.args[1:] == (2, 4, 8)
    assert option.inputs[0] == S(2, 2)


def test_a_size_of_one_that_comes_from_sharding_survives_a_squeeze() -> None:
    local, _ = localize("aten.squeeze.default", f(2, 1, 6), shard={"d0": 2})
    assert local.op == "aten.squeeze.dims"
    assert dict(local.kwargs) == {"dim": (1,)}


def test_expand_unflatten_repeat_and_constructor() -> None:
    assert localize("aten.expand.default", f(4, 1, 6), [-1, 12, 6], shard={"d1": 3})[0].args[1] == (-1, 4, 6)
    assert localize("aten.unflatten.int", f(4, 12), 1, [6, -1], shard={"v1to1": 2})[0].args[2] == (3, -1)
    assert localize("aten.repeat.default", f(4, 6), [2, 1], shard={"d0": 2})[0].args[1] == (2, 1)
    assert localize("aten.repeat.default", f(4, 6), [2, 1], shard={"r0": 2})[0].args[1] == (1, 1)
    assert localize("aten.full.default", [4, 6], 1.0, shard={"d0": 2, "d1": 3})[0].args[0] == (2, 2)


def test_groups_of_a_convolution() -> None:
    local, _ = localize("aten.conv1d.default", f(2, 12, 8), f(12, 1, 3), f(12), [1], [0], [1], 12, shard={"g": 4})
    assert local.args[6] == 3


def test_nothing_changes_when_nothing_is_sharded() -> None:
    node, _ = make_node("aten.view.default", f(4, 6), [24])
    local, _ = localize("aten.view.default", f(4, 6), [24], shard={"R": 2})
    assert (local.args, local.kwargs, local.lowering) == (node.args, node.kwargs, None)


def test_a_mean_over_two_axes_divides_by_both() -> None:
    local, _ = localize("aten.mean.dim", f(4, 6, 8), [0, 1], shard={"d0": 2, "d2": 4, "d1": 3})
    assert local.lowering == LoweringCall("mean", axes=(0, 2), divisor=6)


def test_cross_entropy_names_the_axis_of_the_classes() -> None:
    args = (f(12, 8), ints(12))
    local, options = localize("aten.cross_entropy_loss.default", *args, shard={"n0": 2, "c": 4})
    assert local.lowering == LoweringCall("cross_entropy", axes=(1,))
    assert [o.outputs for o in options] == [(P,), (R,)]
    local, _ = localize("aten.cross_entropy_loss.default", *args, shard={"n0": 2})
    assert local.lowering == LoweringCall("cross_entropy")
    local, _ = localize("aten.cross_entropy_loss.default", *args, shard={"R": 2})
    assert local.lowering is None


def test_dropout_is_lowered_even_when_replicated() -> None:
    local, _ = localize("aten.dropout.default", f(4, 6), 0.1, True, shard={"R": 2, "d1": 3})
    assert local.lowering == LoweringCall("dropout", layout_shape=(4, 6), layout=(R, S(1)))


def test_attention_dropout_lies_like_the_probabilities() -> None:
    q, kv = f(2, 8, 4, 6), f(2, 2, 4, 6)
    local, _ = localize(
        "aten.scaled_dot_product_attention.default",
        q,
        kv,
        kv,
        None,
        0.1,
        enable_gqa=True,
        shard={"b0": 2, "r": 2, "f": 3},
    )
    assert local.lowering == LoweringCall("attention", layout_shape=(2, 8, 4, 4), layout=(S(0), S(1, 2), R))


def test_two_axes_on_one_factor_divide_the_factor_not_only_the_dim() -> None:
    """6 groups of 2 channels: 12 channels divide by four, 6 groups do not."""
    node, inputs = make_node("aten.group_norm.default", f(4, 12, 3), 6, T((12,)), T((12,)))
    rule = rule_for(node, inputs)
    assert rule is not None
    pair = (shard_option(rule, "g"), shard_option(rule, "g"))
    assert not combines(rule, pair, (2, 2))
    assert combines(rule, pair, (2, 3))
    with pytest.raises(ValueError, match="do not combine"):
        local_call(node, rule, pair, inputs, (2, 2))


def test_two_axes_do_not_share_a_vocabulary() -> None:
    node, inputs = make_node("aten.embedding.default", f(12, 4), ints(6))
    rule = rule_for(node, inputs)
    assert rule is not None
    assert not combines(rule, (shard_option(rule, "v"), shard_option(rule, "v")), (2, 2))
    labels = [o.label for o in axis_options(rule, 2, inputs, node.outputs, {"v": (2,), "h": (2,)})]
    assert "v" in labels and "h/2" in labels and "v/2" not in labels
