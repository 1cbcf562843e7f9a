"""What SwiGLU and GeGLU share: a check, and launches of kernels over the elements of a gate and its product."""

from __future__ import annotations

from typing import Any, Final

import torch

from .dispatch import elementwise_rows, launch_device, num_warps, power_of_2_at_least

_MAX_BLOCK: Final = 4096


def check_agree(gate: torch.Tensor, up: torch.Tensor) -> None:
    """Raises ValueError where the product would broadcast or promote."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            "gate and up must agree in shape and dtype; "
            f"got {tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}"
        )


def launch(kernel: Any, inputs: tuple[torch.Tensor, ...], num_outputs: int, **options: Any) -> list[torch.Tensor]:
    """Contiguous outputs like the inputs, which are of one shape and any strides.

    kernel: (inputs, outputs, columns, blocks per row, the inputs' row strides, BLOCK, options) on `[N, C]`.
    """
    outputs = [torch.empty(inputs[0].shape, dtype=inputs[0].dtype, device=inputs[0].device) for _ in range(num_outputs)]
    rows = elementwise_rows(*inputs)
    num_rows, num_cols = rows[0].shape
    block = min(power_of_2_at_least(num_cols), _MAX_BLOCK)
    blocks_per_row = -(-num_cols // block)
    strides = [tensor.stride(0) for tensor in rows]
    with launch_device(inputs[0]):
        kernel[(num_rows * blocks_per_row,)](
            *rows, *outputs, num_cols, blocks_per_row, *strides, BLOCK=block, num_warps=num_warps(block), **options
        )
    return outputs
