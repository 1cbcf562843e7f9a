"""Fused Triton kernels, one file per operation, each with its formula and its torch reference.

The folder is copied beside generated programs and imported there as `kernels`, here as `codegen.kernels`:
its files import one another relatively and nothing else but torch, and Triton where it is installed.
"""

from .adamw import adamw_, adamw_table
from .cross_entropy import cross_entropy
from .fp8 import fp8_linear
from .grad_norm import clip_factor, squared_norm
from .linear_cross_entropy import linear_cross_entropy
from .quantize import dequantize_blocks, dequantize_sum, quantize_blocks
from .rms_norm import rms_norm
from .swiglu import swiglu

__all__ = [
    "adamw_",
    "adamw_table",
    "clip_factor",
    "cross_entropy",
    "dequantize_blocks",
    "dequantize_sum",
    "fp8_linear",
    "linear_cross_entropy",
    "quantize_blocks",
    "rms_norm",
    "squared_norm",
    "swiglu",
]
