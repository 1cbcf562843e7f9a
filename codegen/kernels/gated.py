"""What SwiGLU and GeGLU share: a check, and the launches and blocks of kernels over a gate and what it multiplies."""

from __future__ import annotations

from typing import Any, Final

import torch

from . import tuning
from .dispatch import elementwise_rows, jit, tl
from .tile import Tile

TILES: Final = (Tile(4096), Tile(4096, per_warp=256), Tile(4096, per_warp=1024), Tile(2048), Tile(8192), Tile(1024))


def check_agree(gate: torch.Tensor, up: torch.Tensor) -> None:
    """Raises ValueError where the product would broadcast or promote."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            "gate and up must agree in shape and dtype; "
            f"got {tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}"
        )


@jit
def block_of(
    num_cols: tl.tensor, blocks_per_row: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(row, columns `[BLOCK]`, which of them there are) of this program."""
    program = tl.program_id(0)
    row = (program // blocks_per_row).to(tl.int64)
    # 64-bit columns too: contiguous tensors are handed over as one long row.
    cols = (program % blocks_per_row).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row, cols, cols < num_cols


def launch(
    name: str, kernel: Any, inputs: tuple[torch.Tensor, ...], num_outputs: int, **options: bool
) -> list[torch.Tensor]:
    """Contiguous outputs like the inputs, which are of one shape and any strides.

    kernel: (inputs, outputs, columns, blocks per row, the inputs' row strides, BLOCK, options) on `[N, C]`.
    """
    rows = elementwise_rows(*inputs)
    num_rows, num_cols = rows[0].shape
    strides = [tensor.stride(0) for tensor in rows]

    def run(tile: Tile) -> list[torch.Tensor]:
        _, block, _, warps = tile.fit(num_cols)
        blocks_per_row = -(-num_cols // block)
        outputs = [torch.empty(inputs[0].shape, dtype=inputs[0].dtype, device=inputs[0].device)]
        outputs += [torch.empty_like(outputs[0]) for _ in range(num_outputs - 1)]
        kernel[(num_rows * blocks_per_row,)](
            *rows, *outputs, num_cols, blocks_per_row, *strides, BLOCK=block, num_warps=warps, **options
        )
        return outputs

    return tuning.launch(name, TILES, run, (num_rows, num_cols), inputs[0], **options)
