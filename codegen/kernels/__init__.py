"""Fused Triton kernels, one file per operation, each with its formula and its torch reference.

The folder is copied beside generated programs and imported there as `kernels`, here as `codegen.kernels`:
its files import one another relatively and nothing else but torch, and Triton where it is installed.

Where lines belong, from what all kernels share to what one has:

    dispatch.py                          is Triton there, may it take these tensors, do they fit, tensors as rows
    tile.py, tuning.py, tuning_file.py   a kernel's candidates of launch parameters, and which of them is launched
    chunk_table.py                       many tensors in one launch: adamw.py, grad_norm.py
    norm_kernels.py, norm_launches.py    layer and RMS norms, of x or of a sum with the residual stream
    gated.py, gelu.py                    the kernels of SwiGLU and GeGLU, and GELU's two forms
    online_softmax.py                    maximum and sum of exponentials of a row: both losses
    <operation>.py                       its formula and reference, what callers see, what autograd saves
    <operation>_kernels.py               kernels and launches that several operations have, or that make a file long

So a new operation is a file with its formula, its candidate tiles, `<operation>_reference`, the function, kernels named
`_<what>_kernel`, and an autograd function that saves as little as it can. A tile's arithmetic that two kernels have to
the bit is a `@jit` function in a file of its own or of the family; where roundings differ, each has its own lines.
"""

from .adamw import adamw_, adamw_table
from .add_layer_norm import add_layer_norm
from .add_rms_norm import add_rms_norm
from .bias_gelu import bias_gelu
from .cross_entropy import cross_entropy
from .dropout_add import dropout_add
from .fp8 import fp8_linear, fp8_linears
from .geglu import geglu
from .grad_norm import clip_factor, squared_norm
from .grouped_linear import grouped_linear
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
    "fp8_linears",
    "geglu",
    "grouped_linear",
    "layer_norm",
    "linear_cross_entropy",
    "quantize_blocks",
    "rms_norm",
    "rotary",
    "squared_norm",
    "swiglu",
]
