"""SwiGLU's elementwise half: `silu(gate) * up`, forward and backward in one pass each.

Formula (Shazeer 2020, "GLU Variants Improve Transformer", eq. 6, with the two projections already applied):

    sig   = 1 / (1 + exp(-gate))
    y     = round(gate * sig) * up                      round: to the inputs' dtype, as unfused modules do
    dgate = dy * up * sig * (1 + gate * (1 - sig))
    dup   = dy * round(gate * sig)

Shapes: all tensors have one shape; the kernels see `[N, C]`. Arithmetic is fp32. Backward recomputes sig, so only the
two inputs are saved.
"""

from __future__ import annotations

import torch

from .dispatch import use_triton
from .gated import Gated, gate_and_up


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The formula in torch operations, any shape."""
    return torch.nn.functional.silu(gate) * up


def swiglu(gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """`silu(gate) * up`, elementwise; differentiable once in both.

    Args:
        gate, up: one shape, one dtype, any strides. Without up, gate has both as halves of its last dim, and its
            gradient is written in one piece.

    Returns:
        The product, in the inputs' shape and dtype, contiguous on the Triton path.

    Raises:
        ValueError: shapes or dtypes differ, or there are no halves.
    """
    operands = gate_and_up(gate, up)
    if not use_triton(gate, up):
        return swiglu_reference(*operands)
    y: torch.Tensor = _SwiGlu.apply(gate, up, True, False)  # type: ignore[no-untyped-call]
    return y


class _SwiGlu(Gated):
    """silu(gate) * up."""
