"""Products of rows with the matrices of their experts."""

from __future__ import annotations

import torch

from benchmarks.gpu.cases.case import BOTH, FORWARD, Case, Kernel, Operation, random


def _grouped_linear(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    """shape: experts, rows, features in and out. The first expert has a third of the rows, the second none."""
    from codegen.kernels.grouped_linear import grouped_linear, grouped_linear_reference

    num_experts, num_rows, num_in, num_out = shape
    weights = torch.full((num_experts,), 1.0, device=device)
    weights[0], weights[1] = num_experts / 2, 0.0
    ends = (weights.cumsum(0) / weights.sum() * num_rows).round().to(torch.int32)
    rows, weight = random((num_rows, num_in), dtype, device), random((num_experts, num_in, num_out), dtype, device)
    with torch.no_grad():
        weight.mul_(num_in**-0.5)
    size = (rows.numel() + weight.numel() + num_rows * num_out) * dtype.itemsize
    product = 2 * num_rows * num_in * num_out
    return Case(
        "grouped_linear",
        shape,
        dtype,
        (rows, weight),
        lambda rows, weight: grouped_linear(rows, weight, ends),
        lambda rows, weight: grouped_linear_reference(rows, weight, ends),
        {FORWARD: size, BOTH: 3 * size},
        {FORWARD: product, BOTH: 3 * product},
        others=_torchs(ends, dtype, device),
    )


def _torchs(ends: torch.Tensor, dtype: torch.dtype, device: str) -> dict[str, Operation]:
    """torch's own, one kernel or a loop by the GPU, where there is one."""
    if device == "cpu" or dtype != torch.bfloat16:
        return {}
    return {"torch-grouped_mm": lambda rows, weight: torch.nn.functional.grouped_mm(rows, weight, offs=ends)}


# Timed: Mixtral 8x7B's (experts, tokens times choices, hidden, twice intermediate), and one of many small experts.
KERNELS = {
    "grouped_linear": Kernel(
        _grouped_linear,
        checked=((2, 1, 16, 16), (3, 50, 33, 70), (8, 3000, 256, 512), (64, 1000, 128, 200)),
        interpreted=((3, 20, 17, 33),),
        timed=((8, 16384, 4096, 28672), (64, 32768, 2048, 2816)),
    ),
}
