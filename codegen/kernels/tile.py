"""How a kernel cuts its work into programs: a few bounds, from which the number of columns makes the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .dispatch import power_of_2_at_least


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

    def num_warps(self, num_elements: int) -> int:
        """The number of warps, between 4 and 32, for a program whose largest tile has `num_elements` elements."""
        return min(max(power_of_2_at_least(num_elements // self.per_warp), 4), 32)
