"""Bytes per parameter in the precisions used for training, and the fragmentation of the allocator.

Mixed precision with Adam is that of S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion
parameter models" (SC 2020), section 3: an fp32 master beside 16-bit weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

FRAGMENTATION = 0.15
"""Extra memory of a caching allocator, as a fraction of transient memory (activations, temporaries).

C. Guo et al., "GMLake: efficient and transparent GPU memory defragmentation" (ASPLOS 2024), abstract: on average 15 %
(up to 33 %) of the memory in PyTorch's caching allocator is fragmentation that GMLake removes, over eight language
models on A100-80GB. Weights, gradients and optimizer state are allocated once, so the factor does not apply to them.
"""


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per parameter: the weight used in compute, the stored gradient, and a separate fp32 master (0: none)."""

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
    """Return the precision called `name`. Raises ValueError that lists the known precisions."""
    if name not in PRECISIONS:
        raise ValueError(f"unknown precision {name!r}; known: {', '.join(PRECISIONS)}")
    return PRECISIONS[name]
