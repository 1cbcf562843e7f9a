"""Parameters gathered, and gradients summed, as blocks of 8-bit codes with a scale each: a quarter of fp32's bytes.

After G. Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training" (2023), sections
3.1 (qwZ) and 3.3 (qgZ within a group). BLOCK_SIZE consecutive elements of a bucket's line share one fp32 scale s; the
codes and their error are those of `kernels/quantize.py`. A message is 1 + 4 / BLOCK_SIZE bytes per element. A rank's
range is a whole number of blocks, so the codes of a line do not depend on how many ranks share it.

gather, over n ranks. Rank r quantizes its range x_r (what an exact gather would send: the master in the compute dtype);
the messages are gathered; every rank, the owner too, computes xhat = code * s. So parameters are equal bit for bit.

    int8    |xhat - x| <= s / 2                       s = amax / 127 over the block
    fp8     |xhat - x| <= max(|x| / 16, s / 1024)     s = amax / 448, e4m3

Masters are not touched: whatever a step computes with is that near to them, and no error is carried to the next step.

reduce, over n ranks (int8). Rank r quantizes its line in n parts and sends the i-th to rank i (all_to_all); rank i adds
what it received, code * s in fp32 and in order of rank: one hop, every gradient quantized once, equal bits on each run.

    |sum_r xhat_r - sum_r x_r| <= sum_r s_r / 2       s_r: the scale of rank r's block

Sums over further axes (`ddp`) stay in fp32. Rounding in fp32 adds at most 2 ** -16 s to each bound, and rounding to the
compute dtype at most half a unit of its last place. s is at least 2 ** -100 / 127 (or 448), so that blocks of smaller
numbers than that become zeros; zero stays zero.

Not finite: a block with an infinity or a NaN gets the scale NaN and arrives as NaN, all BLOCK_SIZE elements of it: on
every rank of a gather, and in the sum of a reduction. None is lost; its neighbors become NaN with it. A block whose
amax is fp32's largest number may arrive as infinity.

Buckets whose master is not fp32 (fp64, integers) move exactly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..kernels.quantize import dequantize_sum, message_num_bytes, message_views, quantize_blocks
from . import collectives
from .codes import BLOCK_SIZE, CODES, LEGAL
from .collectives import Work
from .mesh import Axis

_CPU_ELEMENTS = 2**18
"""Elements of one call on a CPU, whose reference makes several fp32 copies: they then stay in its cache. (Of 2**15 to
2**22 it took the least time per element.)"""
_MAX_PUBLISHING = 2
"""Number of buckets whose messages are held while parameters are published."""


class Compression:
    """The compression of a program's collectives of parameters.

    names: collective -> code, such as {"gather": "int8", "reduce": "int8"}; what is absent moves exactly. Raises
    ValueError with what is legal.
    """

    block_size = BLOCK_SIZE

    def __init__(self, names: Mapping[str, str]) -> None:
        for collective, code in names.items():
            if code not in CODES.get(collective, {}):
                raise ValueError(f"compression of {collective!r} to {code!r} is not supported; there is {LEGAL}")
        codes = {collective: CODES[collective][code] for collective, code in names.items()}
        self.gather, self.reduce = codes.get("gather"), codes.get("reduce")
        self._publishing: deque[Gathering] = deque()

    def start_gather(self, output: Tensor, part: Tensor, axis: Axis) -> Gathering:
        """Begin to gather every rank's `part` into `output` [n * part], which must have memory when it is waited for.

        part: whole blocks.
        """
        assert self.gather is not None
        return Gathering(output, part, axis, self.gather)

    def start_publish(self, output: Tensor, part: Tensor, axis: Axis) -> Gathering:
        """`start_gather` of one of many buckets: the messages of a few are held at a time."""
        while len(self._publishing) >= _MAX_PUBLISHING:
            self._publishing.popleft().wait()
        self._publishing.append(self.start_gather(output, part, axis))
        return self._publishing[-1]

    def start_reduce(self, target: Tensor, line: Tensor, axis: Axis) -> Reducing:
        """Begin to sum over the ranks their `line` [n * target], of which this rank's range goes to `target` (fp32).

        line: n ranges of whole blocks; it is free when this returns.
        """
        assert self.reduce is not None
        return Reducing(target, line, axis, self.reduce)


class Gathering:
    """A compressed gather under way."""

    def __init__(self, output: Tensor, part: Tensor, axis: Axis, code: torch.dtype) -> None:
        self._output, self._code = output, code
        num_bytes = message_num_bytes(part.numel(), BLOCK_SIZE)
        self._sent: Tensor | None = torch.empty(num_bytes, dtype=torch.uint8, device=part.device)
        _quantize(part, self._sent, code)
        self._messages: Tensor | None = self._sent.new_empty((axis.size, num_bytes))
        self._work = collectives.all_gather(self._messages, self._sent, axis.group, async_op=True)

    def wait(self) -> None:
        """Fill the output; the first time only."""
        if self._messages is None:
            return
        messages = _arrived(self._work, self._messages)
        self._work = self._sent = self._messages = None
        output_NE = self._output.view(len(messages), -1)
        codes_NFB, scales_NF = message_views(messages, output_NE.shape[1], BLOCK_SIZE, self._code)
        for lo, hi in _chunks(output_NE):
            blocks = slice(lo // BLOCK_SIZE, hi // BLOCK_SIZE)
            codes = codes_NFB[:, blocks]
            if codes.dtype != torch.int8:
                # Exact, and the only thing that torch computes with e4m3.
                codes = codes.to(torch.bfloat16)
            torch.mul(codes, scales_NF[:, blocks, None], out=output_NE[:, lo:hi].view(len(messages), -1, BLOCK_SIZE))


class Reducing:
    """A compressed sum under way."""

    def __init__(self, target: Tensor, line: Tensor, axis: Axis, code: torch.dtype) -> None:
        self._target, self._code = target, code
        parts_NE = line.view(axis.size, -1)
        num_bytes = message_num_bytes(parts_NE.shape[1], BLOCK_SIZE)
        self._sent: Tensor | None = torch.empty((axis.size, num_bytes), dtype=torch.uint8, device=line.device)
        for part, message in zip(parts_NE, self._sent, strict=True):
            _quantize(part, message, code)
        self._messages: Tensor | None = torch.empty_like(self._sent)
        self._work = collectives.all_to_all(self._messages, self._sent, axis.group, async_op=True)

    def wait(self) -> None:
        """Write the sum to the target; the first time only."""
        if self._messages is None:
            return
        messages = _arrived(self._work, self._messages)
        self._work = self._sent = self._messages = None
        codes_NFB, scales_NF = message_views(messages, self._target.numel(), BLOCK_SIZE, self._code)
        for lo, hi in _chunks(self._target.view(1, -1)):
            blocks = slice(lo // BLOCK_SIZE, hi // BLOCK_SIZE)
            total = dequantize_sum(codes_NFB[:, blocks], scales_NF[:, blocks], (hi - lo,), self._target.dtype)
            self._target[lo:hi] = total


def _quantize(part: Tensor, message: Tensor, code: torch.dtype) -> None:
    """Write the codes and scales of a rank's range into its message."""
    codes_FB, scales_F = message_views(message, part.numel(), BLOCK_SIZE, code)
    for lo, hi in _chunks(part.view(1, -1)):
        blocks = slice(lo // BLOCK_SIZE, hi // BLOCK_SIZE)
        quantize_blocks(part[lo:hi], BLOCK_SIZE, code, out=(codes_FB[blocks], scales_F[blocks]))


def _arrived(work: Work | None, messages: Tensor) -> Tensor:
    """The messages, when they are there."""
    if work is not None:
        work.wait()
    if messages.is_cuda:
        # They may have been allocated on the stream that brought an offloaded shard.
        messages.record_stream(torch.cuda.current_stream(messages.device))
    return messages


def _chunks(rows_NE: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of dim 1 that one call takes: whole blocks; on a GPU everything."""
    count, width = rows_NE.shape
    step = width if rows_NE.is_cuda else max(_CPU_ELEMENTS // count // BLOCK_SIZE, 1) * BLOCK_SIZE
    yield from ((lo, min(lo + step, width)) for lo in range(0, width, max(step, 1)))
