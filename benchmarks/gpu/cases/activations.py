"""What an MLP computes between its matrices, and dropout after them."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.cases.case import BOTH, FORWARD, Case, Kernel, liger, random


def _swiglu(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.swiglu import swiglu, swiglu_reference

    # Forward reads two, writes one; backward reads three, writes two.
    size = torch.Size(shape).numel() * dtype.itemsize
    inputs = (random(shape, dtype, device), random(shape, dtype, device))
    moved = {FORWARD: 3 * size, BOTH: 8 * size}
    others = liger("liger_swiglu", lambda f: f)
    return Case("swiglu", shape, dtype, inputs, swiglu, swiglu_reference, moved, others=others)


def _geglu(shape: tuple[int, ...], dtype: torch.dtype, device: str, approximate: str = "none") -> Case:
    from codegen.kernels.geglu import geglu, geglu_reference

    size = torch.Size(shape).numel() * dtype.itemsize
    return Case(
        "geglu" if approximate == "none" else "geglu_tanh",
        shape,
        dtype,
        (random(shape, dtype, device), random(shape, dtype, device)),
        lambda gate, up: geglu(gate, up, approximate),
        lambda gate, up: geglu_reference(gate, up, approximate),
        {FORWARD: 3 * size, BOTH: 8 * size},
        # Only with tanh.
        others={} if approximate == "none" else liger("liger_geglu", lambda f: f),
    )


def _geglu_tanh(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    return _geglu(shape, dtype, device, "tanh")


def _bias_gelu(shape: tuple[int, ...], dtype: torch.dtype, device: str, approximate: str = "none") -> Case:
    from codegen.kernels.bias_gelu import bias_gelu, bias_gelu_reference

    # Forward reads one, writes one; backward reads two, writes one.
    size = torch.Size(shape).numel() * dtype.itemsize
    return Case(
        "bias_gelu" if approximate == "none" else "bias_gelu_tanh",
        shape,
        dtype,
        (random(shape, dtype, device), random(shape[-1:], dtype, device)),
        lambda x, bias: bias_gelu(x, bias, approximate),
        lambda x, bias: bias_gelu_reference(x, bias, approximate),
        {FORWARD: 2 * size, BOTH: 5 * size},
    )


def _bias_gelu_tanh(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    return _bias_gelu(shape, dtype, device, "tanh")


def _dropout_add(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    from codegen.kernels.dropout_add import dropout_add, dropout_add_reference
    from codegen.runtime.dropout import dropout, dropout_key
    from codegen.runtime.layout import whole

    # Forward reads two, writes one; backward reads one, writes one. The mask comes from the element's index.
    size = torch.Size(shape).numel() * dtype.itemsize
    key, layout, p = dropout_key(1, 2, 3), whole(shape), 0.1
    options: dict[str, Any] = {"key": key, "grid": layout.grid(None, device)}
    return Case(
        "dropout_add",
        shape,
        dtype,
        (random(shape, dtype, device), random(shape, dtype, device)),
        lambda x, residual: dropout_add(x, residual, p, **options),
        lambda x, residual: dropout_add_reference(x, residual, p, **options),
        {FORWARD: 3 * size, BOTH: 5 * size},
        others={
            "runtime-dropout": lambda x, residual: dropout(x, p, key=key, layout=layout, mesh=None) + residual,
            "torch-dropout": lambda x, residual: torch.nn.functional.dropout(x, p) + residual,
        },
    )


# Timed: Llama 3 8B's (tokens, intermediate) and (tokens, hidden); a GELU after four times its hidden.
KERNELS = {
    "swiglu": Kernel(
        _swiglu,
        checked=((1, 1), (3, 7), (2, 3, 65), (130, 5001)),
        interpreted=((3, 7), (2, 3, 65)),
        timed=((8192, 14336),),
    ),
    "geglu": Kernel(
        _geglu,
        checked=((1, 1), (3, 7), (2, 3, 65), (130, 5001)),
        interpreted=((3, 7),),
        timed=((8192, 14336),),
    ),
    "geglu_tanh": Kernel(
        _geglu_tanh,
        checked=((1, 1), (3, 7), (2, 3, 65), (130, 5001)),
        interpreted=((3, 7),),
        timed=((8192, 14336),),
    ),
    "bias_gelu": Kernel(
        _bias_gelu,
        checked=((3, 7), (2, 3, 65), (1000, 128), (1300, 5001)),
        interpreted=((3, 7),),
        timed=((8192, 16384),),
    ),
    "bias_gelu_tanh": Kernel(
        _bias_gelu_tanh,
        checked=((3, 7), (2, 3, 65), (1000, 128), (1300, 5001)),
        interpreted=((3, 7),),
        timed=((8192, 16384),),
    ),
    "dropout_add": Kernel(
        _dropout_add,
        checked=((3, 7), (2, 3, 65), (1000, 128), (130, 5001), (130, 20002)),
        interpreted=((3, 7), (5, 6)),
        timed=((8192, 4096),),
    ),
}
