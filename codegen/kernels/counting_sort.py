"""A stable sort of small integers, by counting: rows by their experts, in two launches whatever their number.

Formula, for ids_N from 0 to E - 1:

    ends_E[e]       = the number of rows n with ids[n] <= e
    inverse_N[n]    = ends[ids[n] - 1] + the number of rows m < n with ids[m] = ids[n]          ends[-1] = 0
    order_N         = the rows in the order of their places: order[inverse[n]] = n

Shapes: N rows, E ids; P programs have N / P rows in a row each. The first kernel counts the ids of each program's rows,
[P, E]. In the second every program adds up the counts of the ids and programs before it: E P numbers, which are few
beside N. Then it counts the equal ids before each of its rows, tile by tile. A radix sort of 64-bit keys reads and
writes all rows eight times. All are integers, so results are equal to the bit to those of `torch.sort(stable=True)`.

An id out of range has no place: -1 in `inverse`, and as many -1 at the end of `order`, which index_select refuses.
"""

from __future__ import annotations

from typing import Final

import torch

from .dispatch import jit, launch_device, power_of_2_at_least, tl, use_triton

ID_DTYPES: Final = frozenset({torch.int64, torch.int32})
MOST_IDS: Final = 512
"""More ids are sorted by torch: a tile has a column for each."""
TILE_ELEMENTS: Final = 8192
"""Elements of a tile [rows, ids]: 64 for a thread of 4 warps. For sm_90 that is 54 to 167 registers and no spills, as
cuobjdump reports; twice as many elements spill."""
LEAST_ROWS: Final = 16
MOST_PROGRAMS: Final = 128
PROGRAMS_AT_ONCE: Final = 32
"""Programs whose counts are added up at once."""


def counting_sort_reference(ids: torch.Tensor, num_ids: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The formula in torch operations."""
    ascending, order = ids.sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(ids), device=ids.device))
    of_ids = torch.arange(num_ids, dtype=ids.dtype, device=ids.device)
    return order, inverse, torch.searchsorted(ascending, of_ids, right=True, out_int32=True)


def counting_sort(ids: torch.Tensor, num_ids: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The stable order of rows by their ids; nothing waits for the device.

    Args:
        ids: `[N]` int64 or int32, from 0 to num_ids - 1.
        num_ids: E.

    Returns:
        (order `[N]` int64, inverse `[N]` int64, ends `[E]` int32).
    """
    if num_ids > MOST_IDS or ids.dim() != 1 or not use_triton(ids, dtypes=ID_DTYPES):
        return counting_sort_reference(ids, num_ids)
    ids = ids.detach().contiguous()
    num_rows, columns = len(ids), power_of_2_at_least(num_ids)
    tile_rows = min(max(TILE_ELEMENTS // columns, LEAST_ROWS), max(power_of_2_at_least(num_rows), LEAST_ROWS))
    num_tiles = -(-num_rows // tile_rows)
    tiles_per_program = -(-num_tiles // MOST_PROGRAMS)
    num_programs = -(-num_tiles // tiles_per_program)
    order, inverse = (torch.empty(num_rows, dtype=torch.int64, device=ids.device) for _ in range(2))
    ends = torch.empty(num_ids, dtype=torch.int32, device=ids.device)
    counts = torch.empty((num_programs, num_ids), dtype=torch.int32, device=ids.device)
    sizes = num_rows, num_ids, tiles_per_program
    with launch_device(ids):
        _count_kernel[(num_programs,)](ids, counts, *sizes, ROWS=tile_rows, IDS=columns, num_warps=4)
        _place_kernel[(num_programs,)](
            *(ids, counts, order, inverse, ends, *sizes, num_programs),
            ROWS=tile_rows,
            IDS=columns,
            PROGRAMS=PROGRAMS_AT_ONCE,
            num_warps=4,
        )
    return order, inverse, ends


@jit
def _load_ids(ids_ptr: tl.tensor, rows: tl.tensor, num_rows: tl.tensor, num_ids: tl.tensor) -> tl.tensor:
    """The ids of rows as int32; -1 where there is no row, and for ids out of range."""
    ids = tl.load(ids_ptr + rows, mask=rows < num_rows, other=-1)
    return tl.where((ids >= 0) & (ids < num_ids), ids, -1).to(tl.int32)


@jit
def _count_kernel(
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_ids: tl.tensor,
    tiles_per_program: tl.tensor,
    ROWS: tl.constexpr,
    IDS: tl.constexpr,
) -> None:
    program, columns = tl.program_id(0), tl.arange(0, IDS)
    counts = tl.zeros([IDS], dtype=tl.int32)
    for tile in range(tiles_per_program):
        rows = (program * tiles_per_program + tile) * ROWS + tl.arange(0, ROWS)
        ids = _load_ids(ids_ptr, rows, num_rows, num_ids)
        counts += tl.sum((ids[:, None] == columns[None, :]).to(tl.int32), axis=0)
    tl.store(counts_ptr + program * num_ids + columns, counts, mask=columns < num_ids)


@jit
def _place_kernel(
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    order_ptr: tl.tensor,
    inverse_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_ids: tl.tensor,
    tiles_per_program: tl.tensor,
    num_programs: tl.tensor,
    ROWS: tl.constexpr,
    IDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
) -> None:
    program, columns = tl.program_id(0), tl.arange(0, IDS)
    total, before = tl.zeros([IDS], dtype=tl.int32), tl.zeros([IDS], dtype=tl.int32)
    for start in range(0, num_programs, PROGRAMS):
        programs = start + tl.arange(0, PROGRAMS)
        ok = (programs < num_programs)[:, None] & (columns < num_ids)[None, :]
        counts = tl.load(counts_ptr + programs[:, None] * num_ids + columns[None, :], mask=ok, other=0)
        total += tl.sum(counts, axis=0)
        before += tl.sum(tl.where((programs < program)[:, None], counts, 0), axis=0)
    ends = tl.cumsum(total, axis=0)
    places = ends - total + before  # of the next row of each id
    for tile in range(tiles_per_program):
        rows = (program * tiles_per_program + tile) * ROWS + tl.arange(0, ROWS)
        ids = _load_ids(ids_ptr, rows, num_rows, num_ids)
        marks = (ids[:, None] == columns[None, :]).to(tl.int32)
        place = tl.sum(marks * (places[None, :] + tl.cumsum(marks, axis=0) - 1), axis=1)
        tl.store(order_ptr + place, rows.to(tl.int64), mask=ids >= 0)
        tl.store(inverse_ptr + rows, tl.where(ids >= 0, place, -1).to(tl.int64), mask=rows < num_rows)
        places += tl.sum(marks, axis=0)
    if program == 0:
        tl.store(ends_ptr + columns, ends, mask=columns < num_ids)
        for start in range(tl.sum(total, axis=0), num_rows, ROWS):
            rows = start + tl.arange(0, ROWS)
            tl.store(order_ptr + rows, tl.full([ROWS], -1, dtype=tl.int64), mask=rows < num_rows)
