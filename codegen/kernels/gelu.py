"""GELU and its derivative on a tile in fp32, for the kernels that fuse it with something.

Formula (Hendrycks and Gimpel 2016, "Gaussian Error Linear Units", section 2), exact and with tanh:

    gelu(x)  = x * cdf                  cdf = (1 + erf(x / sqrt(2))) / 2
    gelu'(x) = cdf + x * exp(-x ** 2 / 2) / sqrt(2 pi)

    gelu(x)  = x * sig                  sig = 1 / (1 + exp(-2 u)) = (1 + tanh(u)) / 2
    gelu'(x) = sig + x * sig * (1 - sig) * 2 u'
               u = sqrt(2 / pi) * (x + 0.044715 x ** 3), u' = sqrt(2 / pi) * (1 + 3 * 0.044715 x ** 2)
"""

from __future__ import annotations

from typing import Final

from .dispatch import jit, tl

APPROXIMATIONS: Final = ("none", "tanh")


def check_approximate(approximate: str) -> None:
    """Raises ValueError for what `torch.nn.functional.gelu` does not know."""
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"approximate must be one of {', '.join(APPROXIMATIONS)}; got {approximate!r}")


@jit
def gelu_share(x: tl.tensor, TANH: tl.constexpr) -> tl.tensor:
    """cdf or sig: gelu(x) / x."""
    if TANH:
        # 2 sqrt(2 / pi) = 1.59577...
        share = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    return share


@jit
def gelu_derivative(x: tl.tensor, share: tl.tensor, TANH: tl.constexpr) -> tl.tensor:
    """gelu'(x), from `gelu_share` of x."""
    if TANH:
        slope = share * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        # 1 / sqrt(2 pi) = 0.39894...
        slope = 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return share + x * slope
