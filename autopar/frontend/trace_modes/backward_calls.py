"""Rewrite backward operators of aten as operators that have rules and gradients, for calls traced below autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.errors import TraceError

_aten = torch.ops.aten
_WRITTEN_OUT = (
    *("native_layer_norm", "native_layer_norm_backward", "native_group_norm_backward"),
    *("_fused_rms_norm", "_fused_rms_norm_backward", "native_batch_norm", "native_batch_norm_backward"),
    *("_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional"),
    "slice_backward",
    "select_backward",
    "mse_loss_backward",
    "smooth_l1_loss_backward",
    "huber_loss_backward",
    "binary_cross_entropy_backward",
    "nll_loss_backward",
)
"""Operators whose torch decompositions are differentiable. Norms are among them: their backward reads means and
deviations, which have no gradient.
"""

_WITHOUT_SECOND = ("scaled_dot_product", "native_", "_fused_", "cudnn", "mkldnn", "miopen", "_backward_overrideable")
"""Parts of names of operators whose extra results backward reads, without a gradient for these results."""

Traced = Callable[..., Any]


def traced_below(function: Traced, *tensors: Tensor) -> torch.fx.GraphModule:
    """Return the calls of `function(*tensors)`, traced below autograd and its transforms, without dead ones."""
    graph: torch.fx.GraphModule = make_fx(function, decomposition_table=_decompositions())(*tensors)
    for node in graph.graph.nodes:
        if node.target is _aten.convolution.default:
            _name_convolution(node)
    graph.graph.eliminate_dead_code()
    for node in graph.graph.nodes:
        if any(word in str(node.target) for word in _WITHOUT_SECOND):
            raise TraceError(
                "forward differentiates an operator that torch cannot differentiate twice",
                values=str(node.target),
                alternatives="use operators that torch differentiates twice, such as matmul and softmax for attention",
            )
    return graph


@cache
def _decompositions() -> dict[Any, Traced]:
    decompositions: dict[Any, Traced] = {
        _aten.convolution_backward.default: _convolution_backward,
        _aten.native_group_norm.default: _group_norm,
    }
    for name in _WRITTEN_OUT:
        packet = getattr(_aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            call = getattr(packet, overload)
            if call in decomposition_table:
                decompositions[call] = decomposition_table[call]
    return decompositions


def _convolution_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    is_transposed: bool,
    output_padding: list[int],
    groups: int,
    mask: list[bool],
) -> Any:
    """Write the gradient by the input and the bias as calls; the one by the weight, too, where there are no groups."""
    if is_transposed or (mask[1] and groups > 1):
        return NotImplemented
    by_x = by_weight = by_bias = None
    if mask[0]:
        sizes = _sizes(gradient, weight, stride, padding, dilation)
        spans = [(n - 1) * s - 2 * p + d * (k - 1) + 1 for n, s, p, d, k in sizes]
        rest = [size - span for size, span in zip(x.shape[2:], spans, strict=True)]
        by_x = _aten.convolution(gradient, weight, None, stride, padding, dilation, True, rest, groups)
    if mask[1]:
        sources, targets = x.transpose(0, 1), gradient.transpose(0, 1)
        none = [0] * len(stride)
        by_weight_gradient = _aten.convolution(
            sources, targets, None, dilation, padding, stride, False, none, 1
        ).transpose(0, 1)
        for dim, size in enumerate(weight.shape[2:], 2):
            by_weight_gradient = by_weight_gradient.narrow(dim, 0, size)
        by_weight = by_weight_gradient
    if mask[2]:
        by_bias = gradient.sum([0, *range(2, gradient.dim())])
    return by_x, by_weight, by_bias


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, size: int, groups: int, eps: float
) -> Any:
    """Write group norm as calls without as_strided, which torch's decomposition contains."""
    rows = x.reshape(n, groups, -1)
    variance, mean = torch.var_mean(rows, dim=-1, correction=0, keepdim=True)
    deviation = torch.rsqrt(variance + eps)
    result = ((rows - mean) * deviation).reshape(x.shape)
    shape = (1, c, *[1] * (x.dim() - 2))
    result = result * weight.reshape(shape) if weight is not None else result
    result = result + bias.reshape(shape) if bias is not None else result
    return result, mean.squeeze(-1), deviation.squeeze(-1)


def _sizes(gradient: Tensor, weight: Tensor, *options: list[int]) -> list[tuple[int, ...]]:
    dims = len(options[0])
    spread = [option * dims if len(option) == 1 else option for option in options]
    return list(zip(gradient.shape[2:], *spread, weight.shape[2:], strict=True))


def _name_convolution(node: torch.fx.Node) -> None:
    """Rewrite a convolution of any kind as the named operator that forward calls, which has a rule."""
    x, weight, bias, stride, padding, dilation, is_transposed, output_padding, groups = node.args
    assert isinstance(stride, (list, tuple))
    if is_transposed:
        node.target = getattr(_aten, f"conv_transpose{len(stride)}d").input
        node.args = (x, weight, bias, stride, padding, output_padding, groups, dilation)
    else:
        node.target = getattr(_aten, f"conv{len(stride)}d").default
        node.args = (x, weight, bias, stride, padding, dilation, groups)
