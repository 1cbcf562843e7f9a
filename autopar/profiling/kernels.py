"""Calls of kernels: from a case's parameters and a device to a call that launches it, as eager code under autograd
does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from autopar.profiling import blocks
from autopar.profiling.cases import Case
from autopar.profiling.load import Call

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def kernel(case: Case, device: torch.device) -> Call:
    """Return the call of a kernel's case. Its tensors live as long as the call."""
    return _MAKERS[case.family](case.name, case.parameters, device)


def _linear(_: str, sizes: Mapping[str, Any], device: torch.device) -> Call:
    dtype = DTYPES[sizes["dtype"]]
    x = torch.randn(sizes["rows"], sizes["depth"], dtype=dtype, device=device)
    weight = torch.randn(sizes["columns"], sizes["depth"], dtype=dtype, device=device, requires_grad=True)
    return lambda: F.linear(x, weight)


def _memory(_: str, sizes: Mapping[str, Any], device: torch.device) -> Call:
    """Return a memory-bound operation, forward or backward, on fp32 tensors [rows, width]."""
    x = torch.randn(sizes["rows"], sizes["width"], device=device, requires_grad=True)
    y = torch.randn(sizes["rows"], sizes["width"], device=device)
    name, _, direction = str(sizes["operation"]).partition(" ")
    forward: Callable[[], torch.Tensor] = {
        "add": lambda: x + y,
        "gelu": lambda: F.gelu(x),
        "layer_norm": lambda: F.layer_norm(x, x.shape[-1:]),
    }[name]
    return _backward(forward, [x]) if direction else forward


def _attention(_: str, sizes: Mapping[str, Any], device: torch.device) -> Call:
    dtype = DTYPES[sizes["dtype"]]
    q, k, v = (torch.randn(sizes["shape"], dtype=dtype, device=device, requires_grad=True) for _ in range(3))

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=sizes["causal"])

    return _backward(forward, [q, k, v]) if sizes["backward"] else forward


def _backward(forward: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor]) -> Call:
    out = forward()
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def _optimizer(_: str, sizes: Mapping[str, Any], device: torch.device) -> Call:
    return adamw(sizes["elements"], device)


def adamw(elements: int, device: torch.device) -> Call:
    """Return one update of eight parameters with `elements` elements together."""
    parameters = [torch.nn.Parameter(torch.randn(elements // 8, device=device)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True).step


def _block(name: str, sizes: Mapping[str, Any], device: torch.device) -> Call:
    """Return a transformer block, with backward unless its name says otherwise; a tiny block shows only overhead."""
    return blocks.call(sizes, name != "block forward", device)


_MAKERS: Mapping[str, Callable[[str, Mapping[str, Any], torch.device], Call]] = {
    "matmul": _linear,
    "memory": _memory,
    "attention": _attention,
    "optimizer": _optimizer,
    "overhead": _block,
    "block": _block,
}
