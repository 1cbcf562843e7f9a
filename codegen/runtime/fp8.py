"""Linear layers that multiply in e4m3 with a scale per row (`kernels/fp8.py` has the formulas and error bounds).

y and the gradient of x are products of rounded operands, the gradient of the weight is not; stored weights and all else
stay as they are. GPUs have such products from compute capability 8.9 on; a CPU computes the same numbers in fp32, to
verify programs, and takes longer than without.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.fp8 import fp8_linear

LEAST_CAPABILITY = (8, 9)


def why_unavailable(device: torch.device) -> str:
    """Why a device cannot run such layers, or "" if it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY:
        return ""
    found = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f"{torch.cuda.get_device_name(device)} has compute capability {found}, fp8 products need 8.9"


def require(device: torch.device) -> None:
    """Raises RuntimeError for a device without such products."""
    reason = why_unavailable(device)
    if reason:
        raise RuntimeError(reason)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear: x [..., in], weight [out, in], bias [out] -> [..., out]."""
    return fp8_linear(x, weight, bias)


def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """torch.addmm: bias [out], x [rows, in], weight [in, out] -> [rows, out]."""
    return fp8_linear(x, weight.t(), bias)
