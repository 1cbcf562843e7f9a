"""All kernels that are measured, by name."""

from __future__ import annotations

import torch

from benchmarks.gpu.cases import activations, experts, losses, norms, positions, quantization, updates
from benchmarks.gpu.cases.case import Case, Kernel, Shape

KERNELS: dict[str, Kernel] = {
    **norms.KERNELS,
    **positions.KERNELS,
    **activations.KERNELS,
    **losses.KERNELS,
    **experts.KERNELS,
    **updates.KERNELS,
    **quantization.KERNELS,
}


def make_case(kernel: str, shape: Shape, dtype: torch.dtype, device: str) -> Case:
    """Fresh random inputs of `kernel` at `shape`."""
    if kernel not in KERNELS:
        raise ValueError(f"no kernel {kernel!r}; there are {', '.join(KERNELS)}")
    return KERNELS[kernel].make(shape, dtype, device)
