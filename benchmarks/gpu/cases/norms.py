"""Norms of rows, alone and with the addition before or after them."""

from __future__ import annotations

import torch

from benchmarks.gpu.cases.case import BOTH, FORWARD, Case, Kernel, liger, random


def _rms_norm(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.rms_norm import rms_norm, rms_norm_reference

    # Forward reads x, writes y; backward reads x and dy, writes dx.
    size = torch.Size(shape).numel() * dtype.itemsize
    return Case(
        "rms_norm",
        shape,
        dtype,
        (random(shape, dtype, device), random(shape[-1:], dtype, device)),
        lambda x, weight: rms_norm(x, weight, 1e-6),
        lambda x, weight: rms_norm_reference(x, weight, 1e-6),
        {FORWARD: 2 * size, BOTH: 5 * size},
        others=liger("liger_rms_norm", lambda f: lambda x, weight: f(x, weight, 1e-6, 0.0, "llama", False)),
    )


def _add_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.add_rms_norm import add_rms_norm, add_rms_norm_reference

    # Forward reads two, writes two; backward reads the sum and two gradients, writes one.
    size = torch.Size(shape).numel() * dtype.itemsize
    return Case(
        "add_rms_norm",
        shape,
        dtype,
        (random(shape, dtype, device), random(shape, dtype, device), random(shape[-1:], dtype, device)),
        lambda x, residual, weight: add_rms_norm(x, residual, weight, 1e-6),
        lambda x, residual, weight: add_rms_norm_reference(x, residual, weight, 1e-6),
        {FORWARD: 4 * size, BOTH: 8 * size},
        others=liger("liger_fused_add_rms_norm", lambda f: lambda x, r, w: f(x, r, w, 1e-6, 0.0, "llama", False)),
    )


def _rms_norm_add(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    """As Gemma has it: 1 + weight, rounded once."""
    from codegen.kernels.rms_norm_add import rms_norm_add, rms_norm_add_reference

    # Forward reads two, writes one; backward reads x and dy, writes dx.
    size = torch.Size(shape).numel() * dtype.itemsize
    return Case(
        "rms_norm_add",
        shape,
        dtype,
        (random(shape, dtype, device), random(shape, dtype, device), random(shape[-1:], dtype, device)),
        lambda x, residual, weight: rms_norm_add(x, residual, weight, 1e-6, 1.0, True),
        lambda x, residual, weight: rms_norm_add_reference(x, residual, weight, 1e-6, 1.0, True),
        {FORWARD: 3 * size, BOTH: 6 * size},
    )


def _layer_norm_add(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.layer_norm_add import layer_norm_add

    size = torch.Size(shape).numel() * dtype.itemsize
    parameters = (random(shape[-1:], dtype, device), random(shape[-1:], dtype, device))

    def eager(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5) + residual

    return Case(
        "layer_norm_add",
        shape,
        dtype,
        (random(shape, dtype, device), random(shape, dtype, device), *parameters),
        lambda x, residual, weight, bias: layer_norm_add(x, residual, weight, bias, 1e-5),
        eager,
        {FORWARD: 3 * size, BOTH: 6 * size},
    )


def _layer_norm(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.layer_norm import layer_norm

    size = torch.Size(shape).numel() * dtype.itemsize
    parameters = (random(shape[-1:], dtype, device), random(shape[-1:], dtype, device))

    def eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)

    return Case(
        "layer_norm",
        shape,
        dtype,
        (random(shape, dtype, device), *parameters),
        lambda x, weight, bias: layer_norm(x, weight, bias, 1e-5),
        eager,
        {FORWARD: 2 * size, BOTH: 5 * size},
        others=liger("liger_layer_norm", lambda f: lambda x, weight, bias: f(x, weight, bias, 1e-5)),
    )


def _add_layer_norm(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.add_layer_norm import add_layer_norm

    size = torch.Size(shape).numel() * dtype.itemsize
    parameters = (random(shape[-1:], dtype, device), random(shape[-1:], dtype, device))

    def eager(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return torch.nn.functional.layer_norm(total, x.shape[-1:], weight, bias, 1e-5), total

    return Case(
        "add_layer_norm",
        shape,
        dtype,
        (random(shape, dtype, device), random(shape, dtype, device), *parameters),
        lambda x, residual, weight, bias: add_layer_norm(x, residual, weight, bias, 1e-5),
        eager,
        {FORWARD: 4 * size, BOTH: 8 * size},
    )


# Timed: Llama 3 8B's (tokens, hidden); a query-key norm; 405B's hidden; GPT-2's and GPT-3's in layer norms; Gemma 3's.
KERNELS = {
    "rms_norm": Kernel(
        _rms_norm,
        checked=((1, 33), (3, 7), (2, 3, 65), (1000, 128), (130, 5000), (70, 20001)),
        interpreted=((3, 7), (2, 3, 65)),
        timed=((8192, 4096), (262144, 128), (8192, 16384)),
    ),
    "add_rms_norm": Kernel(
        _add_rms_norm,
        checked=((1, 33), (3, 7), (2, 3, 65), (1000, 128), (130, 5000), (70, 20001)),
        interpreted=((3, 7),),
        timed=((8192, 4096), (8192, 16384)),
    ),
    "layer_norm": Kernel(
        _layer_norm,
        checked=((1, 33), (3, 7), (2, 3, 65), (1000, 128), (130, 5000), (70, 20001)),
        interpreted=((3, 7),),
        timed=((8192, 4096), (8192, 768), (8192, 12288)),
    ),
    "add_layer_norm": Kernel(
        _add_layer_norm,
        checked=((1, 33), (3, 7), (2, 3, 65), (1000, 128), (130, 5000), (70, 20001)),
        interpreted=((3, 7),),
        timed=((8192, 4096), (8192, 768), (8192, 12288)),
    ),
    "rms_norm_add": Kernel(
        _rms_norm_add,
        checked=((1, 33), (3, 7), (2, 3, 65), (1000, 128), (130, 5000), (70, 20001)),
        interpreted=((3, 7),),
        timed=((8192, 4096), (8192, 1152)),
    ),
    "layer_norm_add": Kernel(
        _layer_norm_add,
        checked=((1, 33), (3, 7), (2, 3, 65), (1000, 128), (130, 5000), (70, 20001)),
        interpreted=((3, 7),),
        timed=((8192, 4096), (8192, 768)),
    ),
}
