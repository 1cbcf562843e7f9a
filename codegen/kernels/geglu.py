"""GEGLU's elementwise half: `gelu(gate) * up`, forward and backward in one pass each.

Formula (Shazeer 2020, "GLU Variants Improve Transformer", eq. 6, with the two projections already applied; gelu and
its derivative exact or with tanh, see gelu.py):

    y     = round(gelu(gate)) * up                      round: to the inputs' dtype, as unfused modules do
    dgate = dy * up * gelu'(gate)
    dup   = dy * round(gelu(gate))

Shapes: all tensors have one shape; the kernels see `[N, C]`. Arithmetic is fp32. Backward recomputes gelu, so only the
two inputs are saved.
"""

from __future__ import annotations

import torch

from .dispatch import use_triton
from .gated import Gated, gate_and_up
from .gelu import check_approximate


def geglu_reference(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """The formula in torch operations, any shape."""
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def geglu(gate: torch.Tensor, up: torch.Tensor | None = None, approximate: str = "none") -> torch.Tensor:
    """`gelu(gate) * up`, elementwise; differentiable once in both.

    Args:
        gate, up: one shape, one dtype, any strides. Without up, gate has both as halves of its last dim, and its
            gradient is written in one piece.
        approximate: "none" for the exact gelu, "tanh" for its approximation, as of `torch.nn.functional.gelu`.

    Returns:
        The product, in the inputs' shape and dtype, contiguous on the Triton path.

    Raises:
        ValueError: shapes or dtypes differ, there are no halves, or approximate is neither of these.
    """
    check_approximate(approximate)
    operands = gate_and_up(gate, up)
    if not use_triton(gate, up):
        return geglu_reference(*operands, approximate)
    y: torch.Tensor = _GeGlu.apply(gate, up, False, approximate == "tanh")  # type: ignore[no-untyped-call]
    return y


class _GeGlu(Gated):
    """gelu(gate) * up."""
