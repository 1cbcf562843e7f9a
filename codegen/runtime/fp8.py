"""Linear layers that multiply in e4m3 with a scale per row (`kernels/fp8.py` has the formulas and error bounds).

y and the gradient of x are products of rounded operands, the gradient of the weight is not; stored weights and all else
stay as they are. Layers that read the same x are one call of `linears`, which casts it once, and otherwise is the same
as `linear` for each of them. A CPU computes the same numbers in fp32, to verify programs, and takes longer than
without.

GPUs have fp8 units from compute capability 8.9 on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.fp8 import fp8_linear, fp8_linears

LEAST_CAPABILITY = (8, 9)


def why_unavailable(device: torch.device) -> str:
    """Return the reason why a device cannot run such layers, or "" if it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY:
        return ""
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f"{torch.cuda.get_device_name(device)} has compute capability {capability}, fp8 products need 8.9"


def require(device: torch.device) -> None:
    """Raises RuntimeError for a device without such products."""
    reason = why_unavailable(device)
    if reason:
        raise RuntimeError(reason)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear: x [..., in], weight [out, in], bias [out] -> [..., out]."""
    return fp8_linear(x, weight, bias)


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> tuple[Tensor, ...]:
    """F.linear of x [..., in] with each weight [out, in] and its bias [out], if any."""
    return fp8_linears(x, weights, biases)


def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """torch.addmm: bias [out], x [rows, in], weight [in, out] -> [rows, out]."""
    return fp8_linear(x, weight.t(), bias)
