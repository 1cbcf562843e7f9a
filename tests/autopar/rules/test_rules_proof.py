"""Every family of built-in rules, proven on hand-made calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.rules import prove_rule, rule_for
from tests.autopar.rules.handmade_calls import T, bools, f, ints, make_node

STATS = T((6,), grad=False)
C = tuple[str, tuple[Any, ...], dict[str, Any]]


def c(op: str, *args: Any, **kwargs: Any) -> C:
    return op, args, kwargs


CONTRACTION = [
    c("aten.linear.default", f(4, 6, 12), f(6, 12), f(6)),
    c("aten.linear.default", f(4, 12), f(6, 12)),
    c("aten.mm.default", f(4, 6), f(6, 12)),
    c("aten.bmm.default", f(6, 4, 6), f(6, 6, 12)),
    c("aten.mv.default", f(4, 6), f(6)),
    c("aten.dot.default", f(6), f(6)),
    c("aten.outer.default", f(6), f(4)),
    c("autopar.window_attention.default", *(f(2, 4, 6, 4),) * 3, before=2, after=0),
    c("autopar.sink_attention.default", f(2, 4, 6, 4), *(f(2, 2, 6, 4),) * 2, f(4), True, enable_gqa=True),
    c("autopar.sink_attention.default", *(f(2, 4, 6, 4),) * 3, f(4), before=2, after=0, scale=0.3),
    c("autopar.sink_attention.default", f(2, 4, 6, 4), f(2, 4, 4, 4), f(2, 4, 4, 6), f(4)),
    c("autopar.expert_linear.default", f(12, 6), f(4, 6, 12), ints(12)),
    c("autopar.expert_linear.default", f(12, 6), f(4, 6, 12), ints(12), f(4, 12)),
    c("aten.addmm.default", f(6), f(4, 12), f(12, 6)),
    c("aten.addmm.default", f(4, 6), f(4, 12), f(12, 6), alpha=0.5, beta=2.0),
    c("aten.baddbmm.default", f(4, 1, 6), f(4, 6, 12), f(4, 12, 6)),
    c("aten.matmul.default", f(4, 6, 12), f(12, 6)),
    c("aten.matmul.default", f(4, 1, 6, 12), f(6, 12, 4)),
    c("aten.matmul.default", f(4, 6), f(6)),
    c("aten.matmul.default", f(6), f(4, 6, 12)),
    c("aten.einsum.default", "bhqd,bhkd->bhqk", [f(2, 4, 6, 6), f(2, 4, 6, 6)]),
    c("aten.conv2d.default", f(4, 6, 5, 5), f(12, 6, 3, 3), f(12), [1, 1], [1, 1]),
    c("aten.conv2d.default", f(4, 12, 5, 5), f(24, 2, 3, 3), f(24), [1, 1], [0, 0], [1, 1], 6),
    c("aten.conv1d.default", f(4, 6, 8), f(6, 6, 3)),
    c("aten.conv1d.default", f(2, 4, 24), f(4, 4, 3), None, [1], [2], [2]),
    c("aten.conv2d.default", f(2, 4, 12, 5), f(4, 2, 7, 3), f(4), [2, 1], [3, 1], [1, 1], 2),
    c("aten.conv1d.default", f(2, 2, 18), f(2, 2, 3), None, [3], [1]),  # leaves a row that the next rank reads
    c("aten.conv3d.default", f(2, 4, 12, 4, 4), f(4, 4, 2, 3, 3), None, [2, 1, 1], [0, 1, 1]),
    c("aten.conv3d.default", f(2, 4, 3, 12, 4), f(4, 4, 2, 3, 3), None, [1, 1, 1], [1, 1, 1]),
    c("aten.conv2d.default", f(2, 3, 12, 24), f(4, 3, 2, 4), f(4), [2, 4]),
    c("aten.conv2d.default", f(2, 4, 12, 6), f(4, 4, 1, 1), None, [2, 1]),
    c("aten.conv2d.default", f(2, 4, 12, 12), f(4, 4, 2, 2), None, [1, 1]),
    c("aten.max_pool2d.default", f(4, 6, 12, 6), [2, 2]),
    c("aten.max_pool2d.default", f(4, 6, 12, 6), [3, 3], [2, 2], [1, 1]),
    c("aten.max_pool2d_with_indices.default", f(4, 6, 6, 6), [2, 2]),
    c("aten.adaptive_avg_pool2d.default", f(4, 6, 6, 6), [1, 1]),
    c("aten.avg_pool2d.default", f(4, 6, 6, 6), [2, 2]),
]
ATTENTION = [
    c("aten.scaled_dot_product_attention.default", f(4, 6, 4, 6), f(4, 6, 6, 6), f(4, 6, 6, 4)),
    c("aten.scaled_dot_product_attention.default", f(4, 6, 6, 4), f(4, 6, 6, 4), f(4, 6, 6, 4), None, 0.0, True),
    c("aten.scaled_dot_product_attention.default", f(2, 6, 4, 4), f(2, 6, 4, 4), f(2, 6, 4, 4), bools(2, 1, 4, 4)),
    c("aten.scaled_dot_product_attention.default", f(2, 4, 6, 4), f(2, 4, 6, 4), f(2, 4, 6, 4), f(1, 4, 6, 6)),
    c("aten.scaled_dot_product_attention.default", f(2, 12, 4, 4), f(2, 6, 4, 4), f(2, 6, 4, 4), enable_gqa=True),
    c(
        "aten.scaled_dot_product_attention.default",
        f(2, 12, 4, 4),
        f(2, 2, 4, 4),
        f(2, 2, 4, 4),
        f(2, 12, 4, 4),
        enable_gqa=True,
    ),
    c("aten.scaled_dot_product_attention.default", f(2, 6, 4, 4), f(2, 1, 4, 4), f(2, 1, 4, 4), enable_gqa=True),
    c("aten.scaled_dot_product_attention.default", f(6, 4, 6), f(6, 4, 6), f(6, 4, 6)),
    c(
        "aten.scaled_dot_product_attention.default",
        f(2, 4, 6, 4),
        f(2, 2, 6, 4),
        f(2, 2, 6, 4),
        None,
        0.0,
        True,
        scale=0.3,
        enable_gqa=True,
    ),
    c("aten.scaled_dot_product_attention.default", f(2, 4, 6, 4), f(2, 4, 12, 4), f(2, 4, 12, 6), bools(2, 1, 1, 12)),
    c(
        "aten.scaled_dot_product_attention.default",
        f(2, 2, 6, 4),
        f(2, 2, 6, 4),
        f(2, 2, 6, 4),
        T((1, 2, 6, 6), grad=False),
    ),
]
NORM = [
    c("aten.layer_norm.default", f(4, 6, 12), [12], f(12), f(12)),
    c("aten.layer_norm.default", f(4, 6, 12), [6, 12]),
    c("aten.rms_norm.default", f(4, 6, 12), [12], f(12)),
    c("aten.batch_norm.default", f(4, 6, 3, 3), f(6), f(6), None, None, True, 0.1, 1e-5, False),
    c("aten.batch_norm.default", f(4, 6, 4, 3), f(6), f(6), STATS, STATS, False, 0.1, 1e-5, False),
    c("aten.batch_norm.default", f(4, 6, 4, 3), f(6), f(6), STATS, STATS, True, 0.1, 1e-5, False),
    c("aten.group_norm.default", f(4, 12, 3), 6, f(12), f(12)),
    c("aten.group_norm.default", f(2, 4, 12, 4), 2, f(4), f(4)),
    c("aten.group_norm.default", f(2, 6, 12), 2, f(6), f(6)),
    c("aten.softmax.int", f(4, 6, 12), -1),
    c("aten.log_softmax.int", f(4, 6, 12), 1),
    c("aten.cumsum.default", f(4, 6), 1),
    c("aten.sort.default", f(4, 6), -1),
    c("aten.topk.default", f(4, 6, 12), 3, -1),
    c("aten.histc.default", T((4, 6), grad=False), 4, -2, 2),
]
LOOKUP = [
    c("autopar.embedding_bag.default", ints(4, 6), f(12, 6), mode="sum", per_sample_weights=f(4, 6)),
    c("autopar.embedding_bag.default", ints(4, 6), f(12, 6), mode="mean", padding_idx=2),
    c("autopar.embedding_bag.default", ints(4, 6), f(12, 6), mode="max"),
    c("aten.embedding.default", f(12, 6), ints(4, 6)),
    c("aten.embedding.default", f(12, 6), ints(4), 3),
    c("aten.gather.default", f(4, 6, 12), 2, ints(4, 6, 4)),
    c("aten.gather.default", f(4, 6), 0, ints(6, 4)),
    c("aten.index_select.default", f(4, 6), 1, ints(12)),
    c("aten.index.Tensor", f(6, 4, 12), [None, ints(6, 4)]),
    c("aten.index.Tensor", f(4, 6, 12), [ints(4, 1), ints(6)]),
    c("aten.index.Tensor", f(4, 6, 12), [ints(4), None, ints(4)]),
    c("aten.one_hot.default", ints(4, 6), 12),
]
LOSS = [
    c("aten.cross_entropy_loss.default", f(12, 6), ints(12)),
    c("aten.cross_entropy_loss.default", f(12, 6), ints(12), None, 1, 2, 0.1),
    c("aten.cross_entropy_loss.default", f(12, 6), ints(12), None, 2, -100, 0.1),
    c("aten.cross_entropy_loss.default", f(12, 6), ints(12), None, 0),
    c("aten.cross_entropy_loss.default", f(4, 6, 12), ints(4, 12)),
    c("aten.cross_entropy_loss.default", f(6), ints()),
    c("aten.cross_entropy_loss.default", f(12, 6), f(12, 6)),
    c("aten.cross_entropy_loss.default", f(12, 6), ints(12), STATS),
    c("aten.nll_loss_nd.default", f(12, 6), ints(12)),
    c("aten.nll_loss_nd.default", f(12, 6), ints(12), None, 2),
    c("aten.mse_loss.default", f(4, 6), f(4, 6)),
    c("aten.mse_loss.default", f(4, 6), f(4, 6), 2),
    c("aten.l1_loss.default", f(4, 6), f(4, 6), 0),
    c("aten.smooth_l1_loss.default", f(4, 6), f(4, 6)),
    c("aten.binary_cross_entropy_with_logits.default", f(4, 6), f(4, 6), None, STATS),
    c("aten.binary_cross_entropy.default", f(4, 6), f(4, 6)),
    c("aten.kl_div.default", f(4, 6), f(4, 6), 1),
]
SHAPE = [
    c("aten.view.default", f(4, 6, 12), [24, 12]),
    c("aten.view.default", f(4, 6, 12), [4, 6, 3, 4]),
    c("aten.view.default", f(4, 6, 12), [-1, 12]),
    c("aten.reshape.default", f(6, 4), [4, 6]),
    c("aten.reshape.default", f(6, 12, 4), [4, 3, 24]),
    c("aten.reshape.default", f(1, 6, 4), [6, 1, 2, 2]),
    c("aten.flatten.using_ints", f(4, 6, 12), 1),
    c("aten.unflatten.int", f(4, 12), -1, [3, -1]),
    c("aten.permute.default", f(4, 6, 12), [2, 0, 1]),
    c("aten.transpose.int", f(4, 6, 12), 1, -1),
    c("aten.t.default", f(4, 6)),
    c("aten.unsqueeze.default", f(4, 6), 1),
    c("aten.unsqueeze.default", f(4, 6), -1),
    c("aten.squeeze.default", f(2, 1, 6)),
    c("aten.squeeze.dim", f(2, 1, 6), 1),
    c("aten.squeeze.dim", f(2, 1, 6), 0),
    c("aten.squeeze.dims", f(2, 1, 6, 1), [1, -1]),
    c("aten.expand.default", f(4, 1, 6), [4, 12, 6]),
    c("aten.expand.default", f(1, 6), [4, -1, 6]),
    c("aten.expand_as.default", f(1, 6), f(4, 6)),
    c("aten.broadcast_tensors.default", [f(4, 1, 6), f(12, 6)]),
    c("aten.repeat.default", f(4, 6), [2, 4, 3]),
    c("aten.repeat_interleave.self_int", f(4, 6), 4, 1),
    c("aten.repeat_interleave.self_int", f(4, 6), 4, 1, output_size=24),
    c("aten.select.int", f(4, 6), 1, -1),
    c("aten.unbind.int", f(3, 4, 6), 0),
    c("aten.slice.Tensor", f(4, 12), 1, 6, 12),
    c("aten.slice.Tensor", f(4, 12), 1, -6),
    c("aten.slice.Tensor", f(4, 12), 1, 4, 8),
    c("aten.slice.Tensor", f(4, 12), 1, 0, 9223372036854775807),
    c("aten.slice.Tensor", f(4, 12), 1, None, -1),
    c("aten.slice.Tensor", f(4, 12), 1, 0, None, 2),
    c("aten.narrow.default", f(4, 12), 1, 6, 6),
    c("aten.split.Tensor", f(4, 36), 12, -1),
    c("aten.split.Tensor", f(4, 10), 4, -1),
    c("aten.split_with_sizes.default", f(4, 24), [12, 6, 6], 1),
    c("aten.chunk.default", f(4, 24), 2, -1),
    c("aten.cat.default", [f(4, 6), f(4, 6)], -1),
    c("aten.cat.default", [f(4, 12), f(4, 6)], 1),
    c("aten.stack.default", [f(4, 6), f(4, 6)], 1),
    c("aten.pad.default", f(4, 6), [1, 0]),
    c("aten.constant_pad_nd.default", f(4, 6), [0, 2], 1.5),
    c("aten.tril.default", f(4, 6, 6)),
    c("aten.roll.default", f(4, 6), [1], [1]),
    c("aten.flip.default", f(4, 6), [0]),
]
POINTWISE = [
    c("aten.add.Tensor", f(4, 6), f(4, 6)),
    c("aten.add.Tensor", f(4, 6, 12), f(12)),
    c("aten.add.Tensor", f(4, 1, 12), f(6, 12), alpha=2),
    c("aten.add.Tensor", f(4, 6), 1.0),
    c("aten.add_.Tensor", f(4, 6), f(4, 6)),
    c("aten.sub.Tensor", f(4, 6), f(6)),
    c("aten.rsub.Scalar", f(4, 6), 1.0),
    c("aten.mul.Tensor", f(4, 6), f(6)),
    c("aten.mul.Tensor", f(4, 6), 2.0),
    c("aten.div.Tensor", f(4, 6), f(4, 1)),
    c("aten.div.Tensor_mode", f(4, 6), 2.0, rounding_mode="floor"),
    c("aten.neg.default", f(4, 6)),
    c("aten.relu.default", f(4, 6)),
    c("aten.relu_.default", f(4, 6)),
    c("aten.gelu.default", f(4, 6), approximate="tanh"),
    c("aten.silu.default", f(4, 6)),
    c("aten.tanh.default", f(4, 6)),
    c("aten.rsqrt.default", f(4, 6)),
    c("aten.pow.Tensor_Scalar", f(4, 6), 2),
    c("aten.clamp.default", f(4, 6), -1.0, 1.0),
    c("aten.maximum.default", f(4, 6), f(6)),
    c("aten.max.other", f(4, 6), f(6)),
    c("aten.where.self", bools(4, 6), f(4, 6), f(6)),
    c("aten.where.ScalarOther", bools(4, 6), f(4, 6), 0.0),
    c("aten.where.ScalarOther", bools(4, 6), f(4, 6), -1.0),
    c("aten.masked_fill.Scalar", f(4, 6), bools(6), 0),
    c("aten.masked_fill.Scalar", f(4, 6), bools(4, 6), -1e4),
    c("aten.masked_fill.Tensor", f(4, 6), bools(4, 6), f()),
    c("aten.eq.Tensor", ints(4, 6), ints(6)),
    c("aten.logical_and.default", bools(4, 6), bools(4, 6)),
    c("aten.__and__.Tensor", bools(4, 6), bools(1, 6)),
    c("aten.floor_divide.default", ints(4, 6), 2),
    c("aten.clone.default", f(4, 6)),
    c("aten.contiguous.default", f(4, 6)),
    c("aten.detach.default", f(4, 6)),
    c("aten.lift_fresh_copy.default", f(4, 6)),
    c("aten.to.dtype", f(4, 6), torch.float64),
    c("aten.to.dtype", f(4, 6), torch.bfloat16),
    c("aten.to.dtype", ints(4, 6), torch.float32),
    c("aten._to_copy.default", bools(4, 6), dtype=torch.float32),
    c("aten.glu.default", f(4, 12), -1),
    c("aten.dropout.default", f(4, 6), 0.5, False),
    c("aten.copy.default", T((4, 6), grad=False), STATS),
]
REDUCTION = [
    c("aten.sum.default", f(4, 6)),
    c("aten.sum.dim_IntList", f(4, 6, 12), [1, 2]),
    c("aten.sum.dim_IntList", f(4, 6, 12), [-1], True),
    c("aten.sum.default", bools(4, 6)),
    c("aten.mean.default", f(4, 6)),
    c("aten.mean.dim", f(4, 6, 12), [-1], True),
    c("aten.mean.dim", f(4, 6, 12), [0, 1]),
    c("aten.amax.default", f(4, 6), [1]),
    c("aten.max.dim", f(4, 6), 1, True),
    c("aten.var.dim", f(4, 6), [1]),
    c("aten.logsumexp.default", f(4, 6), [1]),
    c("aten.argmax.default", f(4, 6), 1),
    c("aten.any.dim", bools(4, 6), 1),
]
CREATION = [
    c("aten.full.default", [4, 6], 2.0),
    c("aten.zeros.default", [4, 6]),
    c("aten.ones.default", [4, 6]),
    c("aten.new_zeros.default", f(4, 6), [4, 6]),
    c("aten.new_ones.default", f(4, 6), [12]),
    c("aten.zeros_like.default", f(4, 6)),
    c("aten.full_like.default", f(4, 6), 3.0),
    c("aten.arange.default", 12),
    c("aten.arange.start_step", 2, 26, 2),
]
RANDOM = [
    c("aten.dropout.default", f(4, 6, 12), 0.5, True),
    c("aten.scaled_dot_product_attention.default", f(4, 6, 4, 4), f(4, 6, 4, 4), f(4, 6, 4, 4), None, 0.5),
    c(
        "aten.scaled_dot_product_attention.default",
        f(2, 4, 6, 4),
        f(2, 2, 6, 4),
        f(2, 2, 6, 4),
        None,
        0.5,
        True,
        enable_gqa=True,
    ),
]
SPATIAL = [
    c("aten.upsample_nearest2d.vec", f(4, 6, 4, 4), None, [2.0, 2.0]),
    c("aten.upsample_nearest2d.vec", f(4, 6, 4, 4), [12, 6], None),
    c("aten.upsample_nearest2d.vec", f(4, 6, 4, 4), None, [3.2, 1.0]),  # 12 of 4 elements, but not each 3 times
    c("aten.upsample_nearest1d.default", f(4, 6, 4), [12], 3.2),
    c("aten._upsample_nearest_exact1d.vec", f(4, 6, 4), [8], None),
    c("aten.upsample_bilinear2d.vec", f(4, 6, 4, 4), [6, 6], False, None),
    c("aten.upsample_bicubic2d.vec", f(4, 6, 4, 4), [6, 6], True, None),
    c("aten.upsample_linear1d.vec", f(4, 6, 4), [6], False, None),
    c("aten.upsample_trilinear3d.vec", f(4, 6, 2, 2, 2), [4, 4, 4], False, None),
    c("aten.reflection_pad2d.default", f(4, 6, 4, 4), [1, 1, 2, 2]),
    c("aten.replication_pad1d.default", f(4, 6, 4), [1, 2]),
    c("aten.pixel_shuffle.default", f(2, 24, 6, 6), 2),
    c("aten.pixel_unshuffle.default", f(2, 6, 12, 12), 2),
    c("aten.im2col.default", f(4, 6, 4, 4), [3, 3], [1, 1], [1, 1], [1, 1]),
    c("aten.col2im.default", f(4, 54, 16), [4, 4], [3, 3], [1, 1], [1, 1], [1, 1]),
    c("aten.grid_sampler.default", f(4, 6, 4, 4), f(4, 6, 6, 2), 0, 0, False),
    c("aten.conv_transpose1d.default", f(4, 6, 4), f(6, 12, 3), f(12), [2], [1]),
    c("aten.conv_transpose2d.input", f(4, 6, 3, 3), f(6, 12, 2, 2), f(12), [2, 2]),
    c("aten.conv_transpose2d.input", f(2, 12, 3, 3), f(12, 2, 2, 2), None, [2, 2], [0, 0], [0, 0], 6),
    c("aten.conv_transpose3d.input", f(4, 6, 2, 2, 2), f(6, 6, 2, 2, 2)),
]
SCATTER = [
    c("aten.scatter.value", f(4, 6), 1, ints(4, 2), 0),
    c("aten.scatter.value", f(4, 6), 1, ints(4, 2), 1.5),
    c("aten.scatter.src", f(4, 6), -1, ints(4, 2), f(4, 2)),
    c(
        "aten.lstm.input",
        f(6, 4, 3),
        [f(1, 4, 2), f(1, 4, 2)],
        [f(8, 3), f(8, 2), f(8), f(8)],
        True,
        1,
        0.0,
        True,
        False,
        False,
    ),
    c("aten.gru.input", f(4, 6, 3), f(2, 4, 2), [f(6, 3), f(6, 2), f(6, 3), f(6, 2)], False, 1, 0.0, True, True, True),
    c("aten.fft_rfft.default", f(4, 6), None, 1),
    c("aten.fft_fftn.default", f(4, 6, 6), None, [1, 2]),
    c("aten.view_as_complex.default", f(4, 6, 2)),
    c("aten.polar.default", f(4, 6), f(4, 6)),
    c("aten.scatter_add.default", f(4, 6), 0, ints(12, 6), f(12, 6)),
    c("aten.scatter_add.default", f(4, 6, 4), 1, ints(4, 12, 4), f(4, 12, 4)),
    c("aten.index_add.default", f(4, 6), 0, ints(12), f(12, 6)),
    c("aten.index_add.default", f(4, 6), -1, ints(12), f(4, 12)),
]
MORE = [
    c("aten.softshrink.default", f(4, 6)),
    c("aten.lgamma.default", f(4, 6)),
    c("aten.erfinv.default", f(4, 6)),
    c("aten.logit.default", f(4, 6)),
    c("aten.hypot.default", f(4, 6), f(6)),
    c("aten.special_entr.default", f(4, 6)),
    c("aten._prelu_kernel.default", f(4, 6), f(6)),
    c("aten.complex.default", f(4, 6), f(4, 6)),
    c("aten.deg2rad.default", f(4, 6)),
    c("aten.cummax.default", f(4, 6), 1),
    c("aten.aminmax.default", f(4, 6), dim=1),
    c("aten.kthvalue.default", f(4, 6), 2),
    c("aten.mode.default", f(4, 6), 1, True),
    c("aten.nanmedian.dim", f(4, 6), 0),
    c("aten.diagonal.default", f(4, 6, 6), 0, 1, 2),
    c("aten.diagonal.default", f(4, 6, 12), 2, 0, -1),
    c("aten.diag_embed.default", f(4, 6)),
    c("aten.diag_embed.default", f(4, 6), 1, 0, 2),
    c("aten.unfold.default", f(4, 12, 6), 1, 4, 2),
    c("aten.unsafe_split.Tensor", f(4, 12), 6, 1),
    c("aten.channel_shuffle.default", f(4, 6, 6, 4), 2),
    c("aten.linalg_cross.default", f(4, 6, 3), f(1, 6, 3)),
    c("aten._linalg_det.default", f(4, 6, 6)),
    c("aten.linalg_inv_ex.default", f(4, 6, 6)),
    c("aten._linalg_solve_ex.default", f(4, 6, 6), f(4, 6, 2)),
    c("aten.linalg_qr.default", f(4, 6, 6)),
    c("aten.linalg_matrix_exp.default", f(4, 2, 4, 4)),
    c("aten._cdist_forward.default", f(4, 6, 12), f(4, 4, 12), 2.0, None),
    c("aten.instance_norm.default", f(4, 6, 4, 6), f(6), f(6), None, None, True, 0.1, 1e-5, False),
    c("aten.scatter_reduce.two", f(4, 6), 1, ints(4, 4), f(4, 4), "prod"),
    c("aten.bucketize.Tensor", T((4, 6), grad=False), STATS),
    c("aten.searchsorted.Tensor", STATS, T((4, 6), grad=False)),
    c("aten.eye.default", 6),
    c("aten.linspace.default", 0, 1, 6),
]
ALL = [
    *CONTRACTION,
    *ATTENTION,
    *NORM,
    *LOOKUP,
    *LOSS,
    *SHAPE,
    *POINTWISE,
    *REDUCTION,
    *CREATION,
    *RANDOM,
    *SPATIAL,
    *SCATTER,
    *MORE,
]


DECLINED = {
    # Parameters of a norm are never partial sums.
    "layer_norm": {"Rp, P, P -> P"},
    "rms_norm": {"Rp, P -> P"},
    "group_norm": {"Rp, P, P -> P"},
    "instance_norm": {"Rp, P, P -> P"},
    # Targets given as probabilities are not partial sums either.
    "cross_entropy_loss": {"Rp, P -> P"},
    # Nor is what products scale.
    "scatter_reduce": {"P, R, Rp -> P"},
    # Copies of whole pixels could stay in place; space is not cut.
    "upsample_nearest2d": {"S(2) -> S(2)", "S(3) -> S(3)"},
}
UNUSED_TENSOR = {"batch_norm", "copy", "expand_as", "new_zeros", "new_ones", "zeros", "zeros_like"}
"""A tensor argument whose values the result does not depend on may lie anywhere, and zeros are a sum of zeros."""


@pytest.mark.parametrize("case", ALL, ids=lambda case: case[0])
def test_every_option_equals_the_whole_op(case: C) -> None:
    """Forward and backward, one axis and pairs of axes; and nothing that would be right is left out."""
    op, args, kwargs = case
    node, inputs = make_node(op, *args, **kwargs)
    rule = rule_for(node, inputs)
    assert rule is not None
    report = prove_rule(node, inputs, rule)
    assert report.wrong == ()
    assert report.skipped == ()
    assert report.options_checked > 0
    packet = op.split(".")[1]
    if packet not in UNUSED_TENSOR:
        assert set(report.missed) <= DECLINED.get(packet, set())
