"""Bytes of a parameter in the precisions that models are trained in, and what an allocator wastes.

Mixed precision with Adam is that of S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion
parameter models" (SC 2020), section 3: an fp32 master beside 16-bit weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

FRAGMENTATION = 0.15
"""Extra memory that a caching allocator holds, as a fraction of what comes and goes (activations, transients).

C. Guo et al., "GMLake: efficient and transparent GPU memory defragmentation" (ASPLOS 2024), abstract: 15 % on average
(up to 33 %) of what PyTorch's caching allocator holds is fragmentation that GMLake removes, over eight language models
on A100-80GB. Weights, gradients and optimizer state are allocated once, so it is not applied to them.
"""


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per parameter of the weight computed with, the stored gradient, and a separate fp32 master (0: none)."""

    name: str
    compute_bytes: int
    gradient_bytes: int
    master_bytes: int


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "fp32": Precision("fp32", compute_bytes=4, gradient_bytes=4, master_bytes=0),
        # Gradients of micro-batches are accumulated and reduced in fp32: a bf16 sum (8 bits of mantissa) drops every
        # addend below 1/256 of it. ZeRO's table counts 2 bytes here, for gradients that are never accumulated.
        "bf16": Precision("bf16", compute_bytes=2, gradient_bytes=4, master_bytes=4),
        "fp16": Precision("fp16", compute_bytes=2, gradient_bytes=4, master_bytes=4),
    }
)


def precision(name: str) -> Precision:
    """The precision called `name`. Raises ValueError that lists the known ones."""
    if name not in PRECISIONS:
        raise ValueError(f"unknown precision {name!r}; known: {', '.join(PRECISIONS)}")
    return PRECISIONS[name]
