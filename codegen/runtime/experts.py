"""Layers of a mixture of experts: each row is multiplied by the matrix of the expert that it was sent to.

Shapes: N rows (tokens times choices), E experts, A features in, B features out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT_BYTES = 16
"""What rows and matrices are aligned to for torch's grouped product."""


def expert_linear(input: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    """`input[n] @ weight[experts[n]]` for every row n.

    input [N, A], weight [E, A, B], experts [N] (whole numbers from 0 to E - 1) -> [N, B]. Rows are sorted by expert, so
    that each expert multiplies once. An expert without a row gets a gradient of zeros.
    """
    order = experts.argsort()
    rows = input.index_select(0, order)
    counts = experts.new_zeros(len(weight)).index_add_(0, experts, torch.ones_like(experts))
    if _has_kernel(rows, weight):
        products = F.grouped_mm(rows, weight, offs=counts.cumsum(0, dtype=torch.int32))
    else:
        parts = zip(torch.split(rows, counts.tolist()), weight.unbind(), strict=True)
        products = torch.cat([part @ matrix for part, matrix in parts])
    return products.index_select(0, order.argsort())


def _has_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch multiplies all groups in one kernel: of bf16 on GPUs of compute capability 8.0 or more."""
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or torch.cuda.get_device_capability(rows.device) < (8, 0):
        return False
    return all(size * rows.element_size() % ALIGNMENT_BYTES == 0 for size in (rows.shape[1], weight.shape[2]))
