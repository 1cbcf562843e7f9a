"""The cut of a kernel's work into programs: a few bounds, from which a problem's shape makes the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .dispatch import power_of_2_at_least


class Candidate(Protocol):
    """Launch parameters of a kernel, of which tuning.py chooses."""

    def launched(self, shape: tuple[int, ...]) -> object:
        """Return the launch of a problem of this shape: equal for candidates that make the same launch."""
        ...


class Fit(NamedTuple):
    """A tile of rows x cols elements. whole_row: a row fits. num_warps: of the program that holds the tile."""

    rows: int
    cols: int
    whole_row: bool
    num_warps: int


@dataclass(frozen=True, slots=True)
class Tile:
    """One candidate of the launch parameters of a kernel.

    most: elements of the largest tile; longer rows are read in blocks. A power of two, as all tiles of Triton's.
    least: elements of the smallest tile: short rows share it (heads of 64 or 128 in query-key norms); 1: never.
    per_warp: elements that one warp holds of one tile. 512 are 16 per thread: ptxas for sm_90 then reports 17 to 128
        registers a thread and no spills for every kernel here at every first candidate, in bf16 and fp32; but for one
        word where the gradient of a layer norm's sum has rows beyond a tile, in fp32. Below 256 a thread would have
        less than 16 bytes of bf16 to load at once.
    programs: per multiprocessor, of kernels that keep partial sums of each: enough to hide latency, few enough that
        the partial sums stay small. Candidates go down from the first, so that none takes more memory.
    """

    most: int
    least: int = 1
    per_warp: int = 512
    programs: int = 4

    def fit(self, num_cols: int) -> Fit:
        """The tile's shape and warps for rows of `num_cols` elements."""
        cols = min(power_of_2_at_least(num_cols), self.most)
        rows = max(self.least // cols, 1)
        return Fit(rows, cols, cols >= num_cols, self.num_warps(rows * cols))

    def launched(self, shape: tuple[int, ...]) -> object:
        return self.fit(shape[-1]), self.programs

    def num_warps(self, num_elements: int) -> int:
        """The number of warps, between 4 and 32, for a program whose largest tile has `num_elements` elements."""
        return min(max(power_of_2_at_least(num_elements // self.per_warp), 4), 32)


SMALLEST_PRODUCT = 16
"""Rows, columns and inner elements that tensor cores multiply at once, at least."""


@dataclass(frozen=True, slots=True)
class ProductTile:
    """One candidate of the launch parameters of a kernel that multiplies matrices.

    rows, cols: of the part of the result that one program makes. depth_bytes: of the rows of both factors that are
    multiplied at once. num_stages: how many of those are on their way at a time, all in shared memory:
    num_stages * depth_bytes * (rows + cols) bytes. All are powers of two but num_stages.
    """

    rows: int
    cols: int
    depth_bytes: int
    num_warps: int
    num_stages: int

    def fit(self, num_rows: int, num_cols: int) -> tuple[int, int]:
        """Rows and columns of a program's part of a result of `num_rows` x `num_cols`."""
        rows, cols = (max(power_of_2_at_least(size), SMALLEST_PRODUCT) for size in (num_rows, num_cols))
        return min(rows, self.rows), min(cols, self.cols)

    def depth(self, itemsize: int) -> int:
        """Elements of `itemsize` bytes that are multiplied at once."""
        return max(self.depth_bytes // itemsize, SMALLEST_PRODUCT)

    def launched(self, shape: tuple[int, ...]) -> object:
        return self.fit(*shape[-2:]), self.depth_bytes, self.num_warps, self.num_stages
