"""Fused Triton kernels, one file per operation, each with its formula and its torch reference.

The folder is copied beside generated programs and imported there as `kernels`, here as `codegen.kernels`:
its files import one another relatively and nothing else but torch, and Triton where it is installed.
"""

from .adamw import adamw_, adamw_table
from .add_layer_norm import add_layer_norm
from .add_rms_norm import add_rms_norm
from .bias_gelu import bias_gelu
from .cross_entropy import cross_entropy
from .dropout_add import dropout_add
from .fp8 import fp8_linear
from .geglu import geglu
from .grad_norm import clip_factor, squared_norm
from .layer_norm import layer_norm
from .linear_cross_entropy import linear_cross_entropy
from .quantize import dequantize_blocks, dequantize_sum, quantize_blocks
from .rms_norm import rms_norm
from .rotary import rotary
from .swiglu import swiglu

__all__ = [
    "adamw_",
    "adamw_table",
    "add_layer_norm",
    "add_rms_norm",
    "bias_gelu",
    "clip_factor",
    "cross_entropy",
    "dequantize_blocks",
    "dequantize_sum",
    "dropout_add",
    "fp8_linear",
    "geglu",
    "layer_norm",
    "linear_cross_entropy",
    "quantize_blocks",
    "rms_norm",
    "rotary",
    "squared_norm",
    "swiglu",
]
