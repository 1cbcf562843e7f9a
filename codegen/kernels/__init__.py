"""Fused Triton kernels, one file per operation, each with its formula and its torch reference.

The folder is copied beside generated programs and imported there as `kernels`, here as `codegen.kernels`:
its files import one another relatively and nothing else but torch, and Triton where it is installed.
"""

from .cross_entropy import cross_entropy
from .rms_norm import rms_norm
from .swiglu import swiglu

__all__ = ["cross_entropy", "rms_norm", "swiglu"]
