"""Sliding windows and chunks: which keys a query sees by its position alone, and the tiles of scores that this needs.

A query at position p sees the key at position s if

    p - before <= s <= p + after        and        floor(s / chunk) = floor(p / chunk)

Queries and keys may be every n-th position of a sequence. Rows of queries are taken some at a time, each time with the
keys that any of them sees: a tile. Of a window of w keys a tile has at most 2w keys, however long the sequence. Of
windows that are not small a tile is cut into what needs no mask: triangles above and below a diagonal, and rectangles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

SAVED: Final = ((0, 1, 2), True, 4)
"""What autograd keeps: (positions of arguments, whether the result, bytes per row of the first argument): q, k, v,
out, the logsumexp of the flash kernels. autopar/costs/price.py counts what tiles and masks add (`window_bytes`)."""

MIN_ROWS = 128
"""Rows of a tile at least: smaller kernels take as long."""


@dataclass(frozen=True, slots=True)
class Positions:
    """Index i of a dim is the position first + i * stride of the sequence, for i below count."""

    first: int
    count: int
    stride: int = 1

    def __getitem__(self, index: int) -> int:
        return self.first + index * self.stride

    def between(self, low: int, high: int) -> tuple[int, int]:
        """(first index, last index + 1) of the positions low to high; the two are equal where there are none."""
        start = max(-((self.first - low) // self.stride), 0) if low > self.first else 0
        end = min((high - self.first) // self.stride + 1, self.count)
        return start, max(start, end)

    def tensor(self, start: int, end: int, device: torch.device) -> Tensor:
        """int64 [end - start]"""
        return self.first + self.stride * torch.arange(start, end, device=device)


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of queries and the keys that some of them see, by their indices. is_full: each sees all."""

    row: int
    end_row: int
    key: int
    end_key: int
    is_full: bool


Kind = Literal["full", "lower", "upper", "masked"]
"""Which pairs of a piece count: all; in a square those with key <= row, or key >= row, counted from its corner; or what
the window says."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of queries and of keys, each (first, how many), and which of their pairs are meant."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    kind: Kind


@dataclass(frozen=True, slots=True)
class Window:
    """The bounds in the formula above; None where there is none. Raises ValueError for a chunk of no positions."""

    before: int | None = None
    after: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"a chunk has a position at least, not {self.chunk}")

    def low(self, position: int) -> int:
        """The first position that a query sees, 0 or later."""
        start = 0 if self.chunk is None else position // self.chunk * self.chunk
        return max(start, 0 if self.before is None else position - self.before)

    def high(self, position: int, length: int) -> int:
        """The last position that a query of a sequence of this length sees."""
        end = length if self.chunk is None else min((position // self.chunk + 1) * self.chunk, length)
        return min(end - 1, length if self.after is None else position + self.after)

    def width(self, length: int) -> int:
        """Keys that a query sees, at most."""
        sides = (length if side is None else side for side in (self.before, self.after))
        return min(sum(sides) + 1, length if self.chunk is None else self.chunk, length)

    def reach(self, length: int, ranks: int) -> tuple[int, int]:
        """Return the keys that some rank needs before its own, and after. The sequence is cut into equal parts."""
        part = length // ranks
        starts = [rank * part for rank in range(ranks)]
        before = max(max(start - self.low(start), 0) for start in starts)
        after = max(max(self.high(start + part - 1, length) - (start + part - 1), 0) for start in starts)
        return before, after

    def tiles(self, queries: Positions, keys: Positions, length: int) -> Iterator[Tile]:
        """The tiles of these queries and keys of a sequence of this length, by rows."""
        stride = queries.stride
        rows, row = max(self.width(length) // stride, MIN_ROWS), 0
        while row < queries.count:
            end_row = min(row + rows, queries.count)
            if self.chunk is not None and self.chunk >= MIN_ROWS * stride:  # no tile has keys of two large chunks
                ends = (queries[row] // self.chunk + 1) * self.chunk
                end_row = min(end_row, -((queries.first - ends) // stride))
            first, last = queries[row], queries[end_row - 1]
            key, end_key = keys.between(self.low(first), self.high(last, length))
            sees_all = key == end_key or (self.low(last) <= keys[key] and keys[end_key - 1] <= self.high(first, length))
            yield Tile(row, end_row, key, end_key, is_full=sees_all)
            row = end_row

    def pieces(self, queries: Positions, keys: Positions, length: int) -> Iterator[Piece]:
        """All pairs that count, each in one piece."""
        if self.chunk is None and self.before is not None and self.after is not None:
            apart, stride = queries.first - keys.first, queries.stride
            low, high = -((self.before - apart) // stride), (self.after + apart) // stride
            if high - low >= MIN_ROWS:
                yield from _band(low, high, queries.count, keys.count)
                return
        for tile in self.tiles(queries, keys, length):
            if tile.end_key > tile.key:
                rows, seen = (tile.row, tile.end_row - tile.row), (tile.key, tile.end_key - tile.key)
                yield Piece(rows, seen, "full" if tile.is_full else "masked")

    def mask(self, queries: Tensor, keys: Tensor) -> Tensor:
        """bool [L, T]: what queries at positions int64 [L] see of keys at positions int64 [T]."""
        p, s = queries[:, None], keys[None]
        seen = torch.ones(p.shape[0], s.shape[1], dtype=torch.bool, device=queries.device)
        if self.before is not None:
            seen &= s >= p - self.before
        if self.after is not None:
            seen &= s <= p + self.after
        if self.chunk is not None:
            seen &= s // self.chunk == p // self.chunk
        return seen

    def alike(
        self, queries: Positions, keys: Positions, rows: tuple[int, int], seen: tuple[int, int]
    ) -> tuple[int, ...]:
        """Return a key that is equal for equal masks. rows, seen: the first index and the one after the last."""
        shift = queries[rows[0]] % self.chunk if self.chunk is not None else 0
        return rows[1] - rows[0], seen[1] - seen[0], queries[rows[0]] - keys[seen[0]], shift

    def tile_pairs(self, length: int) -> int:
        """Pairs of a query and a key in the tiles of a whole sequence."""
        whole = Positions(0, length)
        return sum((t.end_row - t.row) * (t.end_key - t.key) for t in self.tiles(whole, whole, length))

    def mask_sizes(self, length: int) -> tuple[int, int]:
        """(tiles of a whole sequence, elements of the masks that they need)"""
        whole, sizes, num_tiles = Positions(0, length), {}, 0
        for tile in self.tiles(whole, whole, length):
            rows, keys = (tile.row, tile.end_row), (tile.key, tile.end_key)
            if not tile.is_full:
                sizes[self.alike(whole, whole, rows, keys)] = (rows[1] - rows[0]) * (keys[1] - keys[0])
            num_tiles += 1
        return num_tiles, sum(sizes.values())

    def pairs(self, queries: Positions, keys: Positions, length: int) -> int:
        """Pairs of a query and a key that pieces have, half of them in triangles."""
        pieces = self.pieces(queries, keys, length)
        return sum(p.rows[1] * p.keys[1] // (2 if p.kind in ("lower", "upper") else 1) for p in pieces)


class Masks:
    """Masks [rows, keys] of tiles and pieces; those that lie alike share one.

    dtype: bool, or a floating one for masks that are added.
    """

    def __init__(
        self, window: Window, queries: Positions, keys: Positions, device: torch.device, dtype: torch.dtype = torch.bool
    ) -> None:
        self.window, self.queries, self.keys, self.device, self.dtype = window, queries, keys, device, dtype
        self.masks: dict[tuple[int, ...], Tensor] = {}

    def of(self, rows: tuple[int, int], seen: tuple[int, int]) -> Tensor:
        """rows, seen: the first index and the one after the last, of queries and of keys."""
        alike = self.window.alike(self.queries, self.keys, rows, seen)
        if alike not in self.masks:
            positions = self.queries.tensor(*rows, self.device)
            mask = self.window.mask(positions, self.keys.tensor(*seen, self.device))
            is_added = self.dtype != torch.bool
            added = torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, -torch.inf) if is_added else mask
            self.masks[alike] = added
        return self.masks[alike]


def _band(low: int, high: int, num_rows: int, num_keys: int) -> Iterator[Piece]:
    """The pairs whose key is from row + low to row + high, high - low rows at a time: first a triangle whose rows lose
    one key after the other, at last one whose rows gain one."""
    for row in range(0, num_rows, high - low):
        rows = min(high - low, num_rows - row)
        ends = (row + low, row + low + rows), (row + low + rows, row + high), (row + high, row + high + rows)
        for (key, end), kind in zip(ends, ("upper", "full", "lower"), strict=True):
            first, last = max(key, 0), min(end, num_keys)
            if first >= last:
                continue
            before, seen = first - key, last - first  # keys that there are not, and that there are
            if kind == "full":
                yield Piece((row, rows), (first, seen), "full")
                continue
            yield Piece((row + before, seen), (first, seen), "upper" if kind == "upper" else "lower")
            whole = (row, before) if kind == "upper" else (row + before + seen, rows - before - seen)
            if whole[1]:
                yield Piece(whole, (first, seen), "full")


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    before: int | None = None,
    after: int | None = None,
    chunk: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention` of a sequence whose queries see a window of its keys, by tiles.

    Args: query: [..., H, L, E]; key: [..., G, L, E]; value: [..., G, L, F]; G may differ from H with enable_gqa only.
        before, after, chunk: the window.

    Returns [..., H, L, F]; a query that sees no key has zeros.
    """
    length, window = query.shape[-2], Window(before, after, chunk)
    whole, parts = Positions(0, length), []
    masks, tiles = Masks(window, whole, whole, query.device, query.dtype), [*window.tiles(whole, whole, length)]
    if enable_gqa and query.is_cuda and not all(tile.is_full for tile in tiles):
        # torch's kernels for a GPU that take masks do not take grouped heads.
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    for tile in tiles:
        mask = None if tile.is_full else masks.of((tile.row, tile.end_row), (tile.key, tile.end_key))
        rows = query.narrow(-2, tile.row, tile.end_row - tile.row)
        count = tile.end_key - tile.key
        if not count:
            parts.append(rows.new_zeros(*rows.shape[:-1], value.shape[-1]))
            continue
        keys, values = (x.narrow(-2, tile.key, count) for x in (key, value))
        parts.append(
            F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)
