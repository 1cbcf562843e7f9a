"""Numbers of 8 bits: rows and products in e4m3, blocks for messages."""

from __future__ import annotations

import torch

from benchmarks.gpu.cases.case import BOTH, FORWARD, Case, Kernel, random

# An e4m3 number is off by 2.6 % in the mean square, a product of two by 1.4 times that.
_TOLERANCE_E4M3 = 0.05
_QUANTIZE_BLOCK = 256
_NUM_PARTS = 8


def _fp8_quantize(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.fp8 import dequantize_rows, quantize_rows, quantize_rows_reference

    x = torch.randn(shape, dtype=dtype, device=device)

    def error() -> float:
        exact = x.double()
        return ((dequantize_rows(*quantize_rows(x), torch.float32).double() - exact).norm() / exact.norm()).item()

    return Case(
        "fp8_quantize",
        shape,
        dtype,
        (x,),
        lambda x: quantize_rows(x)[0],
        lambda x: quantize_rows_reference(x)[0],
        {FORWARD: x.numel() * (dtype.itemsize + 1)},
        exact_error=error,
        tolerance=_TOLERANCE_E4M3,
    )


def _fp8_linear(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    """shape: (rows, inputs, outputs); the weight's gradient in fp8 too."""
    from codegen.kernels.fp8 import fp8_linear

    num_rows, num_inputs, num_outputs = shape
    inputs = (random((num_rows, num_inputs), dtype, device), random((num_outputs, num_inputs), dtype, device))
    size = (sum(t.numel() for t in inputs) + num_rows * num_outputs) * dtype.itemsize
    product = 2 * num_rows * num_inputs * num_outputs
    return Case(
        "fp8_linear",
        shape,
        dtype,
        inputs,
        lambda x, weight: fp8_linear(x, weight, fp8_grad_weight=True),
        torch.nn.functional.linear,
        {FORWARD: size, BOTH: 3 * size},
        {FORWARD: product, BOTH: 3 * product},
        tolerance=_TOLERANCE_E4M3,
        others={"fast-accumulation": lambda x, weight: fp8_linear(x, weight, None, True, True)},
    )


def _quantize(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.quantize import dequantize_blocks, quantize_blocks, quantize_blocks_reference

    x = torch.randn(shape, dtype=dtype, device=device)

    def error() -> float:
        back = dequantize_blocks(*quantize_blocks(x, _QUANTIZE_BLOCK), x.shape, torch.float32)
        return ((back.double() - x.double()).norm() / x.double().norm()).item()

    return Case(
        "quantize_int8",
        shape,
        dtype,
        (x,),
        lambda x: quantize_blocks(x, _QUANTIZE_BLOCK)[0],
        lambda x: quantize_blocks_reference(x, _QUANTIZE_BLOCK)[0],
        {FORWARD: x.numel() * (dtype.itemsize + 1)},
        exact_error=error,
        # Normal numbers: a step of 1 / 127 of the largest of 256, some 2.8, and 0.29 steps in the mean square.
        tolerance=0.012,
        others={"stochastic": lambda x: quantize_blocks(x, _QUANTIZE_BLOCK, seed=1)[0]},
    )


def _dequantize_sum(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.quantize import dequantize_sum, dequantize_sum_reference, quantize_blocks

    parts = [quantize_blocks(torch.randn(shape, device=device), _QUANTIZE_BLOCK) for _ in range(_NUM_PARTS)]
    codes, scales = (torch.stack(tensors) for tensors in zip(*parts, strict=True))

    def error() -> float:
        exact = (codes.double() * scales.double()[..., None]).sum(0).flatten()[: torch.Size(shape).numel()].view(shape)
        return ((dequantize_sum(codes, scales, shape, dtype).double() - exact).norm() / exact.norm()).item()

    return Case(
        "dequantize_sum",
        shape,
        dtype,
        (codes, scales),
        lambda codes, scales: dequantize_sum(codes, scales, shape, dtype),
        lambda codes, scales: dequantize_sum_reference(codes, scales, shape, dtype),
        {FORWARD: torch.Size(shape).numel() * (_NUM_PARTS + dtype.itemsize)},
        exact_error=error,
    )


# Timed: Llama 3 8B's (tokens, hidden) and its second MLP layer; 128 M elements of a message.
# Interpreted without conversions to e4m3: Triton's interpreter drops a carry in them.
KERNELS = {
    "fp8_quantize": Kernel(
        _fp8_quantize,
        checked=((70, 1000), (33, 20001)),
        interpreted=(),
        timed=((8192, 4096),),
    ),
    "fp8_linear": Kernel(
        _fp8_linear,
        checked=((64, 128, 48), (70, 100, 50)),
        interpreted=(),
        timed=((8192, 4096, 14336),),
    ),
    "quantize_int8": Kernel(
        _quantize,
        checked=((70, 1000), (100003,)),
        interpreted=((3, 301),),
        timed=((134217728,),),
    ),
    "dequantize_sum": Kernel(
        _dequantize_sum,
        checked=((70, 1000), (100003,)),
        interpreted=((3, 301),),
        timed=((134217728,),),
    ),
}
