"""Many tensors in one launch: where each of them lies, and how it is cut into chunks, as tables on the device.

A table has rows of tensors that belong together (a parameter, its gradient, its state), of one number of elements, in
columns of one dtype. A kernel gets the first tensor of each column as a pointer, and the others as 64-bit distances
from it, in elements: a GPU has one address space, so that any tensor is at some distance from any other. Program i
works on chunk i: CHUNK elements (fewer at a tensor's end) of each tensor of a row, tile by tile.

Shapes: T rows, K columns, P chunks. int64 throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from .dispatch import jit, tl, use_triton

# A chunk is long enough for the look-ups before it not to count: 128 KiB of fp32 in each column.
CHUNK: Final = 32768
_ALIGNMENT: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """Tensors of fixed addresses, which it keeps alive; made by `chunk_table`.

    Attributes:
        columns: K columns of T tensors each, without those that have no elements.
        offsets_TK: distance of each tensor from its column's first, in elements.
        numels_T: elements of the tensors of a row.
        chunks_P2: (row, first element) of each chunk.
        is_aligned: every tensor starts at 16 bytes.
        on_kernels: the Triton kernels can take these tensors; otherwise there are no tables, and the torch reference
            runs.
    """

    columns: tuple[tuple[torch.Tensor, ...], ...]
    offsets_TK: torch.Tensor
    numels_T: torch.Tensor
    chunks_P2: torch.Tensor
    is_aligned: bool
    on_kernels: bool

    @property
    def bases(self) -> tuple[torch.Tensor, ...]:
        """The first tensor of each column."""
        return tuple(column[0] for column in self.columns)

    @property
    def num_chunks(self) -> int:
        return len(self.chunks_P2)


def chunk_table(*columns: Sequence[torch.Tensor]) -> ChunkTable:
    """The table of `columns`: rows are the tensors of one position. Uploads it, so made once and not in every step.

    Raises:
        ValueError: columns differ in length, tensors of a row in number of elements, those of a column in dtype, any in
            device, or one is not contiguous.
    """
    lengths = [len(column) for column in columns]
    if len(set(lengths)) != 1:
        raise ValueError(f"columns must have one length each, got {lengths}")
    for row in zip(*columns, strict=True):
        if len({tensor.numel() for tensor in row}) != 1 or not all(tensor.is_contiguous() for tensor in row):
            shapes = [(tuple(tensor.shape), tensor.stride()) for tensor in row]
            raise ValueError(f"tensors of a row must be contiguous and have equally many elements, got {shapes}")
    filled = tuple(tuple(tensor for tensor in column if tensor.numel()) for column in columns)
    dtypes = [sorted({str(tensor.dtype) for tensor in column}) for column in filled]
    devices = {tensor.device for column in filled for tensor in column}
    if any(len(names) > 1 for names in dtypes) or len(devices) > 1:
        raise ValueError(f"a column must have one dtype and all tensors one device, got {dtypes} on {devices}")
    nothing = torch.empty(0, dtype=torch.int64)
    if not devices or not use_triton(*(tensor for column in filled for tensor in column)):
        return ChunkTable(
            columns=filled, offsets_TK=nothing, numels_T=nothing, chunks_P2=nothing, is_aligned=False, on_kernels=False
        )
    device = devices.pop()
    addresses = [[tensor.data_ptr() for tensor in row] for row in zip(*filled, strict=True)]
    itemsizes = [column[0].element_size() for column in filled]
    offsets = [
        [(address - first) // size for address, first, size in zip(row, addresses[0], itemsizes, strict=True)]
        for row in addresses
    ]
    numels = [tensor.numel() for tensor in filled[0]]
    chunks = [(row, start) for row, numel in enumerate(numels) for start in range(0, numel, CHUNK)]
    offsets_TK, numels_T, chunks_P2 = (
        torch.tensor(values, dtype=torch.int64, device=device) for values in (offsets, numels, chunks)
    )
    is_aligned = all(address % _ALIGNMENT == 0 for row in addresses for address in row)
    return ChunkTable(
        columns=filled,
        offsets_TK=offsets_TK,
        numels_T=numels_T,
        chunks_P2=chunks_P2,
        is_aligned=is_aligned,
        on_kernels=True,
    )


@jit
def chunk_of(chunks_ptr: tl.tensor, numels_ptr: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(row, first element, elements left from there in the row's tensors) of this program's chunk."""
    program = tl.program_id(0).to(tl.int64)
    row = tl.load(chunks_ptr + 2 * program)
    start = tl.load(chunks_ptr + 2 * program + 1)
    return row, start, tl.load(numels_ptr + row) - start


@jit
def column_pointer(
    base_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    row: tl.tensor,
    start: tl.tensor,
    COLUMN: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
) -> tl.tensor:
    """Return the place in a column at which a chunk begins."""
    offset = tl.load(offsets_ptr + row * NUM_COLUMNS + COLUMN) + start
    if ALIGNED:
        # Elements in 16 bytes: the compiler then reads and writes that many at once.
        offset = tl.multiple_of(offset, 128 // base_ptr.dtype.element_ty.primitive_bitwidth)
    return base_ptr + offset


@jit
def load_tile(pointers: tl.tensor, left: tl.tensor, MASKED: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """BLOCK elements in fp32, zeros beyond `left`. A whole tile is read without a mask, whose edge may be anywhere."""
    mask = tl.arange(0, BLOCK) < left if MASKED else None
    value = tl.load(pointers, mask=mask)
    # What a masked load gives outside the mask is not defined.
    value = tl.where(mask, value, 0.0) if MASKED else value
    return value.to(tl.float32)


@jit
def store_tile(
    pointers: tl.tensor, value: tl.tensor, left: tl.tensor, MASKED: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """The reverse of `load_tile`, rounded to the pointers' dtype."""
    mask = tl.arange(0, BLOCK) < left if MASKED else None
    tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)
