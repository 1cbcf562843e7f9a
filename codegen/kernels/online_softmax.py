"""The maximum of a row of logits and the sum of exponentials over it, in one pass over the row.

Formula (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3), block by block of
columns, with m the maximum and z the sum of exp(x - m) so far:

    m' = max(m, max(x_block))
    z  = z * exp(m - m') + sum(exp(x_block - m'))
"""

from __future__ import annotations

from .dispatch import jit, tl


@jit
def row_statistics(row_ptr: tl.tensor, num_cols: tl.tensor, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(maximum, sum of exp(x - maximum)) of the row at `row_ptr`, whose elements are finite or -inf, in fp32."""
    running_max = float("-inf")
    running_sum = 0.0
    for start in range(0, num_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + cols, mask=cols < num_cols, other=float("-inf")).to(tl.float32)
        new_max = tl.maximum(running_max, tl.max(x, axis=0))
        # While every logit so far is -inf, -inf - -inf would give nan; subtracting 0 leaves exp(-inf) = 0.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        running_sum = running_sum * tl.exp(running_max - shift) + tl.sum(tl.exp(x - shift), axis=0)
        running_max = new_max
    return running_max, running_sum
