"""Extra bytes of attention with sinks over attention without (codegen/runtime/sink_attention.py): moved, and temporary,
of one rank's call.

R: bytes of the result. W: the same in at least fp32. Q, K: bytes of the gradients of queries, and of keys and values,
in at least fp32. Forward the result is read and written, and allocated twice. Backward it and its gradient are read,
and their product is computed and summed in fp32, before there are gradients.

On GPUs, in half precision without chunks, windows go to a flash kernel unchanged. Otherwise pieces
(attention_blocks.py) fill a result and gradients in fp32 one after the other, which are cast at the end. Where no flash
kernel applies, formulas compute the result, with the scores of a piece in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.costs.context import SCORES_HELD, SCORES_MOVED, WIDE_BYTES, seen_keys, window_tiles
from autopar.ir.mesh import Mesh
from autopar.rules.families.attention import window_of
from autopar.sharding.call_options import Operator, Option, num_local


@dataclass(frozen=True, slots=True)
class Sinks:
    """Bytes that one call moves, and bytes that it allocates in addition to arguments and result (and in backward their
    gradients)."""

    moved_forward: float
    moved_backward: float
    held_forward: float
    held_backward: float


def sinks(operator: Operator, option: Option, mesh: Mesh, on_cpu: bool, is_exchanged: bool) -> Sinks:
    """Price the sinks of one call. on_cpu: a CPU's flash kernel takes all dtypes, but no windows. is_exchanged:
    whether keys of other ranks are visible. Their exchange has a higher temporary peak than sinks (context.py)."""
    (query, key, value), output = operator.inputs[:3], operator.node.outputs[0]
    sizes = [num_local(x, placements, mesh) for x, placements in zip(operator.inputs[:3], option.inputs, strict=False)]
    itemsize, wide = output.dtype.itemsize, max(WIDE_BYTES, output.dtype.itemsize)
    result = num_local(output, option.outputs[0], mesh)
    moved = 2.0 * result * itemsize, result * (2.0 * itemsize + 4.0 * wide)
    if is_exchanged:
        return Sinks(*moved, 0.0, 0.0)
    window, length = window_of(operator.node), query.shape[-2]
    num_tiles, is_half = window_tiles(operator)[0], itemsize < WIDE_BYTES
    is_flash = on_cpu or (is_half and key.shape[-1] == value.shape[-1] and (window is None or window.chunk is None))
    has_pieces = window is not None and (on_cpu or not is_flash)
    forward, backward = float(result * itemsize), max(float(result * wide - sum(sizes) * itemsize), 0.0)
    if has_pieces:
        keys = seen_keys(operator) / length
        parts = sizes[0] / num_tiles + (sizes[1] + sizes[2]) * keys
        forward = float(result * wide)
        backward = max(backward, (sum(sizes) * is_half + 2.0 * parts) * wide)
    if not is_flash:
        scores = float(sizes[0] // query.shape[-1] * seen_keys(operator) * wide)
        moved = moved[0] + SCORES_MOVED[0] * scores, moved[1] + SCORES_MOVED[1] * scores
        forward += SCORES_HELD[0] * scores / num_tiles
        backward += SCORES_HELD[1] * scores / num_tiles
    return Sinks(*moved, forward, backward)
