"""Context parallelism: attention whose queries, keys and values are all cut along the sequence over one mesh axis.

Shapes: B batch, H heads, G key/value heads (G divides H), L positions of this rank, n ranks, E and F head sizes.
Rank r holds the positions rL to (r + 1)L - 1 of q, k and v, or, in stripes, the positions r, n + r, 2n + r, ..., and
computes those of the result. Keys and values of the others reach it by one of two exchanges:

    all_gather   one all_gather of k and v; backward gathers them again and ends with a reduce_scatter of their
                 gradients (A. Dubey et al., "The Llama 3 Herd of Models" (2024), section 3.3.2)
    ring         n - 1 times every rank hands the part at hand to the next one while it computes with it; backward the
                 gradients of k and v travel behind, one hop further, to where they belong (H. Liu et al., "Ring
                 Attention with Blockwise Transformers" (2023), section 3)

Neither keeps more for backward than attention on one rank does: q, k, v, the result and lse [B, H, L]. Causal attention
is cut in stripes, so that every rank sees half of every part and all work alike: query i of rank r sees the keys 0 to i
of rank s if s <= r, and 0 to i - 1 else (W. Brandon et al., "Striped Attention" (2023), section 3). In consecutive
parts the last rank would do 2n - 1 times the work of the first. `attention_blocks.py` has the mathematics of the parts.

Where queries see a window of the keys (windows.py), ranks with consecutive parts need of the others what lies within
the window's reach of their own: the ring then is a message from each of so many neighbors, and backward one to each,
with the gradients of what it sent. In stripes a window reaches all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .attention_blocks import Block, WindowedKeys, block_attention, block_gradients, merge
from .sink_attention import sink_attention, sink_gradient, with_sinks
from .windows import Positions, Window, window_attention

Exchange = Literal["all_gather", "ring"]


class Arrival(Protocol):
    """A tensor on its way from another rank."""

    def wait(self) -> Tensor: ...


class ContextAxis(Protocol):
    """The parts of a mesh axis (`mesh.Axis`) that are needed here."""

    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def gather_parts(self, part: Tensor) -> Tensor: ...
    def scatter_sum(self, parts: Tensor) -> Tensor: ...
    def pass_on(self, part: Tensor, hops: int = 1) -> Arrival: ...


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: ContextAxis,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    exchange: Exchange = "all_gather",
    is_striped: bool = False,
    before: int | None = None,
    after: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """This rank's rows of `F.scaled_dot_product_attention` over the keys of all ranks of `axis`; no dropout.

    Args: q: [B, H, L, E]; k: [B, G, L', E]; v: [B, G, L', F]: the rank's positions, L' = L if is_causal. G may differ
        from
            H only with enable_gqa.
        attn_mask: boolean (True takes part) or floating (added), broadcastable to [B, H, L, n L']: this rank's rows for
            the keys of all ranks, in their order. It gets no gradient. Not with is_causal.
        exchange: how keys and values travel.
        is_striped: whether a rank's positions are every n-th one. Needed with is_causal.
        before, after, chunk: of the window that queries see of as many keys (windows.py); without, they see all.
        sinks: [H], as in `sink_attention`; their gradient is of this rank's rows.

    Returns [B, H, L, F] in q's dtype. Parts are joined in float32 at least, and gradients travel so in the ring; the
    reduce_scatter is in k's dtype. Not differentiable twice. Raises ValueError for an unknown exchange, for a mask
    beside is_causal or a window, for a mask that needs a gradient, and for is_causal without stripes.
    """
    if exchange not in get_args(Exchange):
        raise ValueError(f"exchange must be one of {', '.join(get_args(Exchange))}, got {exchange!r}")
    if attn_mask is not None and (is_causal or attn_mask.requires_grad):
        raise ValueError("context_attention takes a mask or is_causal, not both, and gives a mask no gradient")
    window = None if (before, after, chunk) == (None,) * 3 else Window(before, after, chunk)
    if window is not None and (is_causal or attn_mask is not None or q.shape[-2] != k.shape[-2]):
        raise ValueError("context_attention takes a window of as many keys as queries, without mask and is_causal")
    if is_causal and not is_striped:
        raise ValueError("context_attention with is_causal takes positions in stripes: is_striped=True")
    if axis.size == 1 and sinks is not None and attn_mask is None:
        return sink_attention(q, k, v, sinks, is_causal, before, after, chunk, scale, enable_gqa)
    if axis.size == 1 and window is not None:
        return window_attention(q, k, v, before, after, chunk, scale, enable_gqa)
    if axis.size == 1 and sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    near = window is not None and not is_striped
    function: Any = _AllGathered if exchange == "all_gather" else _Neighbors if near else _Ring
    result: Tensor = function.apply(q, k, v, sinks, attn_mask, is_causal, scale, axis, is_striped, window)
    return result


@dataclass(frozen=True, slots=True)
class _Attention:
    """One call on this rank; its methods take the keys and values of the ranks from `first` on."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    mask: Tensor | None
    is_causal: bool
    scale: float | None
    axis: ContextAxis
    is_striped: bool
    window: Window | None

    def visible(self) -> list[tuple[int, int]]:
        """(first rank, last rank + 1) of the runs of ranks whose keys are taken at once, the own ones first."""
        if not self.is_causal and (self.window is None or not self.is_striped):
            return [(0, self.axis.size)]
        this_rank, size = self.axis.rank, self.axis.size
        return [(rank % size, rank % size + 1) for rank in range(this_rank, this_rank + size)]

    def packed(self) -> Tensor:
        """Own keys and values as one line, so that they travel as one message."""
        return _packed(self.k, self.v)

    def unpacked(self, line: Tensor) -> tuple[Tensor, Tensor]:
        """Views of a packed line in the shapes of k and v."""
        return _unpacked(line, tuple(self.k.shape), tuple(self.v.shape))

    def joined(self, lines: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of several ranks, joined along the sequence. lines: one packed line per rank."""
        keys = lines[:, : self.k.numel()].view(-1, *self.k.shape)
        values = lines[:, self.k.numel() :].view(-1, *self.v.shape)
        return keys.movedim(0, -3).flatten(-3, -2), values.movedim(0, -3).flatten(-3, -2)

    def windowed(self, window: Window, keys: Tensor, first: int) -> WindowedKeys:
        """keys: at the positions from `first` on, or every n-th one from there."""
        length, size, this_rank = self.q.shape[-2], self.axis.size, self.axis.rank
        at, stride = (this_rank, size) if self.is_striped else (this_rank * length, 1)
        key_positions = Positions(first, keys.shape[-2], stride)
        return WindowedKeys(window, Positions(at, length, stride), key_positions, size * length)

    def _first(self, rank: int) -> int:
        """The first position of a rank."""
        return rank if self.is_striped else rank * self.k.shape[-2]

    def forward(self, keys: Tensor, values: Tensor, first: int) -> Block:
        if self.window is not None:
            at = self.windowed(self.window, keys, self._first(first))
            return at.attention(self.q, keys, values, self.scale)
        if not self._is_later(first):
            return block_attention(self.q, keys, values, self._columns(keys, first), self.is_causal, self.scale)
        out, lse = block_attention(_later(self.q), _earlier(keys), _earlier(values), None, True, self.scale)
        return F.pad(out, (0, 0, 1, 0)), F.pad(lse, (1, 0), value=-math.inf)

    def backward(
        self, grad: Tensor, whole: Block, keys: Tensor, values: Tensor, first: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.window is not None:
            at = self.windowed(self.window, keys, self._first(first))
            return at.gradients(grad, self.q, keys, values, whole, self.scale)
        if not self._is_later(first):
            mask = self._columns(keys, first)
            return block_gradients(grad, self.q, keys, values, whole, mask, self.is_causal, self.scale)
        rows = _later(whole[0]), whole[1][..., 1:].contiguous()
        q, k, v = _later(self.q), _earlier(keys), _earlier(values)
        dq, dk, dv = block_gradients(_later(grad), q, k, v, rows, None, True, self.scale)
        return F.pad(dq, (0, 0, 1, 0)), F.pad(dk, (0, 0, 0, 1)), F.pad(dv, (0, 0, 0, 1))

    def _is_later(self, rank: int) -> bool:
        """Whether a key of `rank` comes after the query of the same number."""
        return self.is_causal and rank > self.axis.rank

    def _columns(self, keys: Tensor, first: int) -> Tensor | None:
        """The mask for these keys."""
        if self.mask is None or self.mask.shape[-1] == 1:
            return self.mask
        length = self.k.shape[-2]
        if not self.is_striped:
            return self.mask.narrow(-1, first * length, keys.shape[-2])
        by_rank = self.mask.view(*self.mask.shape[:-1], length, self.axis.size).transpose(-2, -1)
        return by_rank.narrow(-2, first, keys.shape[-2] // length).flatten(-2)

    def keep(self, ctx: FunctionCtx, block: Block | None) -> Tensor:
        """The result in q's dtype; what backward needs is saved."""
        assert block is not None  # a rank sees its own keys at least
        if self.sinks is not None:
            block = with_sinks(block, self.sinks, self.q.dtype)
        out, lse = block[0].to(self.q.dtype), block[1]
        ctx.save_for_backward(self.q, self.k, self.v, self.sinks, self.mask, out, lse)  # type: ignore[arg-type]
        ctx.options = (self.is_causal, self.scale, self.axis, self.is_striped, self.window)  # type: ignore[attr-defined]
        return out

    @classmethod
    def kept(cls, ctx: FunctionCtx) -> tuple[_Attention, Block]:
        q, k, v, sinks, mask, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        return cls(q, k, v, sinks, mask, *ctx.options), (out, lse)  # type: ignore[attr-defined]

    def sink_gradient(self, grad: Tensor, whole: Block) -> Tensor | None:
        """Made first, while there are no other gradients."""
        return None if self.sinks is None else sink_gradient(grad, whole, self.sinks)

    def gradients(self, dq: Tensor, dk: Tensor, dv: Tensor, ds: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the results of a backward: one for every argument of a forward, in the dtypes of q, k and v."""
        return dq.to(self.q.dtype), dk.to(self.k.dtype), dv.to(self.v.dtype), ds, *(None,) * 6


class _AllGathered(torch.autograd.Function):
    """Keys and values of all ranks at once."""

    @staticmethod
    def forward(ctx: FunctionCtx, *args: Any) -> Tensor:
        call, merged = _Attention(*args), None
        lines = call.axis.gather_parts(call.packed())
        for first, last in call.visible():
            block = call.forward(*call.joined(lines[first:last]), first)
            merged = block if merged is None else merge(merged, block)
        return call.keep(ctx, merged)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        call, whole = _Attention.kept(ctx)
        ds = call.sink_gradient(grad, whole)
        lines = call.axis.gather_parts(call.packed())
        grads = torch.zeros_like(lines)
        dq = torch.zeros_like(call.q, dtype=whole[1].dtype)
        for first, last in call.visible():
            dq_part, dk, dv = call.backward(grad, whole, *call.joined(lines[first:last]), first)
            dq += dq_part
            parts = zip(dk.chunk(last - first, -2), dv.chunk(last - first, -2), strict=True)
            for rank, (dk_part, dv_part) in enumerate(parts, first):
                grads[rank] = _packed(dk_part, dv_part)
        dk, dv = call.unpacked(call.axis.scatter_sum(grads))
        return call.gradients(dq, dk, dv, ds)


class _Ring(torch.autograd.Function):
    """Keys and values of one rank after the other: at step i this rank has those of rank - i."""

    @staticmethod
    def forward(ctx: FunctionCtx, *args: Any) -> Tensor:
        call, merged = _Attention(*args), None
        line, axis = call.packed(), call.axis
        for step in range(axis.size):
            arrival = axis.pass_on(line) if step < axis.size - 1 else None
            block = call.forward(*call.unpacked(line), (axis.rank - step) % axis.size)
            merged = block if merged is None else merge(merged, block)
            line = arrival.wait() if arrival else line
        return call.keep(ctx, merged)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        call, whole = _Attention.kept(ctx)
        ds = call.sink_gradient(grad, whole)
        line, axis, wide = call.packed(), call.axis, whole[1].dtype
        dq = torch.zeros_like(call.q, dtype=wide)
        behind: Arrival | None = None
        for step in range(axis.size):
            arrival = axis.pass_on(line) if step < axis.size - 1 else None
            dq_part, dk, dv = call.backward(grad, whole, *call.unpacked(line), (axis.rank - step) % axis.size)
            dq += dq_part
            grads = _packed(dk, dv).to(wide)
            behind = axis.pass_on(grads if behind is None else grads.add_(behind.wait()))
            line = arrival.wait() if arrival else line
        assert behind is not None
        dk, dv = call.unpacked(behind.wait().to(line.dtype))
        return call.gradients(dq, dk, dv, ds)


class _Neighbors(torch.autograd.Function):
    """Keys and values of those ranks whose consecutive parts the window reaches, as far as it does."""

    @staticmethod
    def forward(ctx: FunctionCtx, *args: Any) -> Tensor:
        call = _Attention(*args)
        near = _Near.of(call)
        keys, values, first, _ = near.collect()
        return call.keep(ctx, near.windowed(keys, first).attention(call.q, keys, values, call.scale))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        call, whole = _Attention.kept(ctx)
        ds = call.sink_gradient(grad, whole)
        near = _Near.of(call)
        keys, values, first, counts = near.collect()
        dq, dk, dv = near.windowed(keys, first).gradients(grad, call.q, keys, values, whole, call.scale)
        parts = (torch.split(x, counts, -2) for x in (dk, dv))
        dk, dv = near.give_back(*parts)
        return call.gradients(dq, dk, dv, ds)


@dataclass(frozen=True, slots=True)
class _Near:
    """The keys from neighbors. parts: (hops, first row, rows) of what each rank hands to the one so many
    ranks on, or back, in the order of the positions of what it gets, its own rows between them."""

    call: _Attention
    window: Window
    parts: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, call: _Attention) -> _Near:
        assert call.window is not None
        length, size = call.k.shape[-2], call.axis.size
        before, after = call.window.reach(size * length, size)
        behind = [min(length, before - at) for at in range(0, before, length)]
        ahead = [min(length, after - at) for at in range(0, after, length)]
        tails = [(hops, length - rows, rows) for hops, rows in enumerate(behind, 1)]
        heads = [(-hops, 0, rows) for hops, rows in enumerate(ahead, 1)]
        return cls(call, call.window, (*reversed(tails), (0, 0, length), *heads))

    def windowed(self, keys: Tensor, first: int) -> WindowedKeys:
        return self.call.windowed(self.window, keys, first)

    def collect(self) -> tuple[Tensor, Tensor, int, list[int]]:
        """(keys, values, the first's position, how many rows are of which part): those that there are, joined."""
        call, axis = self.call, self.call.axis
        shapes = [tuple((*x.shape[:-2], rows, x.shape[-1]) for x in (call.k, call.v)) for _, _, rows in self.parts]
        lines = [
            axis.pass_on(_packed(*(x.narrow(-2, start, rows) for x in (call.k, call.v))), hops) if hops else None
            for hops, start, rows in self.parts
        ]
        pairs: list[tuple[Tensor, Tensor]] = []
        counts, first = [], 0
        for (hops, start, rows), shape, line in zip(self.parts, shapes, lines, strict=True):
            pair = (call.k, call.v) if line is None else _unpacked(line.wait(), *shape)
            is_there = 0 <= axis.rank - hops < axis.size
            counts.append(rows if is_there else 0)
            if is_there:
                first = first if pairs else (axis.rank - hops) * call.k.shape[-2] + start
                pairs.append(pair)
        keys, values = (torch.cat(parts, -2) for parts in zip(*pairs, strict=True))
        return keys, values, first, counts

    def give_back(self, dk: tuple[Tensor, ...], dv: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Gradients of own keys and values, those of the neighbors added; dk, dv: of each part, [..., 0, E] of one
        that there is not."""
        call, axis = self.call, self.call.axis
        lines = []
        for (hops, _, rows), *pair in zip(self.parts, dk, dv, strict=True):
            if hops:
                equal_rows = (F.pad(x, (0, 0, 0, rows - x.shape[-2])) for x in pair)
                lines.append(axis.pass_on(_packed(*equal_rows), -hops))
        own_part = next(number for number, (hops, _, _) in enumerate(self.parts) if not hops)
        sums, arrivals = (dk[own_part].clone(), dv[own_part].clone()), iter(lines)
        for hops, start, rows in self.parts:
            if not hops:
                continue
            shapes = tuple((*x.shape[:-2], rows, x.shape[-1]) for x in (call.k, call.v))
            arrived = _unpacked(next(arrivals).wait(), *shapes)
            if 0 <= axis.rank + hops < axis.size:
                for total, part in zip(sums, arrived, strict=True):
                    total.narrow(-2, start, rows).add_(part)
        return sums


def _unpacked(line: Tensor, k: tuple[int, ...], v: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Views of a packed line in the shapes of keys and values."""
    return line[: math.prod(k)].view(k), line[math.prod(k) :].view(v)


def _packed(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat((k.flatten(), v.flatten()))


def _later(x: Tensor) -> Tensor:
    """All positions but the first."""
    return x.narrow(-2, 1, x.shape[-2] - 1)


def _earlier(x: Tensor) -> Tensor:
    """All positions but the last."""
    return x.narrow(-2, 0, x.shape[-2] - 1)
