"""Stand-ins for functions that a generated program calls besides torch: results of correct shape, dtype and strides.

Collectives send nothing. Run-time functions that read values on the host, or that work in chunks where one chunk says
enough, have a stand-in here; all others run unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from codegen.kernels.dropout_add import dropout_add
from codegen.kernels.linear_cross_entropy import linear_cross_entropy
from codegen.runtime import context_attention, cross_entropy, experts, experts_by_node, grouped, sink_attention, windows
from codegen.runtime.dropout_module import DropoutModule
from codegen.runtime.layout import Layout
from codegen.runtime.mesh import Arrival, Axis, Mesh

DEVICE = torch.device("meta")
"""The device of a fake rank's tensors; it is not the CPU, so that a tensor created on a wrong device shows."""


class StandInAxis(Axis):
    """An axis of absent ranks; this rank is the last of them."""

    def _reduced(self, x: Tensor, largest: bool, wait: bool = True) -> Tensor:
        return x.detach() if self.size == 1 else x.detach().clone(memory_format=torch.contiguous_format)

    def gather_parts(self, part: Tensor) -> Tensor:
        return part.new_empty((self.size, *part.shape))

    def scatter_sum(self, parts: Tensor) -> Tensor:
        return parts.new_empty(parts.shape[1:])

    def exchange_parts(self, parts: Tensor) -> Tensor:
        return parts.new_empty(parts.shape)

    def exchange_rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return rows.new_empty((sum(received), *rows.shape[1:]))

    def start_sum(self, x: Tensor) -> Arrival:
        return _arrived(x.new_empty(x.shape))

    def start_scatter_sum(self, parts: Tensor) -> Arrival:
        return _arrived(parts.new_empty(parts.shape[1:]))

    def pass_on(self, part: Tensor, hops: int = 1) -> Arrival:
        return _arrived(part.new_empty(part.shape))


def _arrived(result: Tensor) -> Arrival:
    return Arrival(result, result, [])


class StandInMesh(Mesh):
    """The mesh of a rank without others."""

    @classmethod
    def of(cls, axes: Sequence[str], sizes: Sequence[int]) -> StandInMesh:
        """Return the mesh of these axes."""
        stand_in_axes = tuple(StandInAxis(name, size, size - 1) for name, size in zip(axes, sizes, strict=True))
        count = math.prod(sizes)
        return cls(stand_in_axes, StandInAxis("world", count, count - 1), DEVICE)

    def _join(self, joined: list[Axis]) -> Axis:
        size = math.prod(axis.size for axis in joined)
        return StandInAxis("+".join(axis.name for axis in joined), size, size - 1)


# Functions ------------------------------------------------------------------------------------------------------------


class _Depending(torch.autograd.Function):
    """A new contiguous tensor that depends on others, which get new gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, shape: tuple[int, ...], dtype: torch.dtype, *sources: Tensor | None) -> Tensor:
        ctx.save_for_backward(*sources)  # type: ignore[arg-type]
        first = next(source for source in sources if source is not None)
        return first.new_empty(shape, dtype=dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        pairs = zip(ctx.saved_tensors, needs, strict=True)
        return None, None, *(torch.empty_like(x) if needed and x is not None else None for x, needed in pairs)


def depending(shape: Sequence[int], dtype: torch.dtype, *sources: Tensor | None) -> Tensor:
    """Return a tensor of this shape and dtype that depends on the sources."""
    function: Any = _Depending
    devices = {source.device for source in sources if source is not None}
    _require(len(devices) == 1, f"all tensors must be on one device, got {', '.join(sorted(map(str, devices)))}")
    result: Tensor = function.apply(tuple(shape), dtype, *sources)
    return result


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def _cross_entropy(logits: Tensor, target: Tensor, num_targets: Any, *_: Any, **options: Any) -> Tensor:
    shapes = f"{tuple(logits.shape)} and {tuple(target.shape)}"
    _require(logits.dim() == 2 and target.shape == logits.shape[:1], f"logits [N, V] and target [N], got {shapes}")
    _require(logits.is_floating_point() and target.dtype == torch.int64, f"got {logits.dtype} and {target.dtype}")
    dtype = torch.promote_types(logits.dtype, torch.float32)
    torch.as_tensor(num_targets, dtype=dtype, device=logits.device)
    return depending((), dtype, logits, target)


def _linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    _require(x.dim() == 2 and target.shape == x.shape[:1], f"x [N, H], target [N], got {tuple(x.shape)}")
    F.linear(x.detach(), weight.detach(), None if bias is None else bias.detach())
    return depending((), torch.promote_types(x.dtype, torch.float32), x, weight, bias, target)


def _dropout_add(x: Tensor, residual: Tensor, p: float, **options: Any) -> Tensor:
    same = (x.shape, x.dtype) == (residual.shape, residual.dtype)
    _require(same, f"x {tuple(x.shape)} {x.dtype} and residual {tuple(residual.shape)} {residual.dtype} must agree")
    return depending(x.shape, x.dtype, x, residual)


def _attention(q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, enable_gqa: bool = False) -> Tensor:
    """Stand in for attention of queries [..., H, L, E], keys [..., G, T, E] and values [..., G, T, F]."""
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (q, k, v))
    fits = k.shape[:-1] == v.shape[:-1] and q.shape[-1] == k.shape[-1] and q.shape[:-3] == k.shape[:-3]
    heads = q.shape[-3:-2], k.shape[-3:-2]
    is_shared = heads[0] == heads[1] or (enable_gqa and heads[0].numel() % heads[1].numel() == 0)
    _require(fits and is_shared, f"attention takes [B, H, L, E], [B, G, T, E] and [B, G, T, F], got {shapes}")
    _require(q.dtype == k.dtype == v.dtype, f"attention of {q.dtype}, {k.dtype} and {v.dtype}")
    _require(sinks is None or sinks.shape == heads[0], "attention takes a sink for each head")
    return depending((*q.shape[:-1], v.shape[-1]), q.dtype, q, k, v, sinks)


def _context_attention(
    q: Tensor, k: Tensor, v: Tensor, axis: Axis, *_: Any, sinks: Any = None, enable_gqa: bool = False, **options: Any
) -> Tensor:
    return _attention(q, k, v, sinks=sinks, enable_gqa=enable_gqa)


def _window_attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
    return _attention(q, k, v, enable_gqa=enable_gqa)


def _sink_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *_: Any, enable_gqa: bool = False, **options: Any
) -> Tensor:
    return _attention(q, k, v, sinks=sinks, enable_gqa=enable_gqa)


# Experts: as many rows arrive as leave --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Routes:
    """`experts.Routes`, and `NodeRoutes` with its further arguments."""

    experts: Tensor
    num_experts: int
    axis: Any = field(default=None)
    choices: int = 1
    neighbors: int = 1

    def __post_init__(self) -> None:
        _require(not self.experts.is_floating_point(), f"numbers of experts, got {self.experts.dtype}")

    @property
    def num_rows(self) -> int:
        return self.experts.numel()


def _dispatch(rows: Tensor, routes: _Routes, choices: int = 1) -> Tensor:
    _require(len(rows) * choices == routes.num_rows, f"{len(rows)} rows for {routes.num_rows} choices of experts")
    return depending((routes.num_rows, *rows.shape[1:]), rows.dtype, rows)


def _combine(rows: Tensor, routes: _Routes, weights: Tensor | None = None, choices: int = 1) -> Tensor:
    _require(len(rows) == routes.num_rows, f"{len(rows)} rows for {routes.num_rows} choices of experts")
    _require(weights is None or weights.shape == (len(rows), 1), "combine takes a weight for each row")
    dtype = rows.dtype if weights is None else torch.promote_types(rows.dtype, weights.dtype)
    return depending((routes.num_rows // choices, *rows.shape[1:]), dtype, rows, weights)


def _dispatch_by_node(tokens: Tensor, routes: _Routes) -> Tensor:
    _require(len(tokens) * routes.choices == routes.num_rows, f"{len(tokens)} tokens, {routes.num_rows} choices")
    return depending((routes.num_rows, *tokens.shape[1:]), tokens.dtype, tokens)


def _combine_by_node(rows: Tensor, weights: Tensor, routes: _Routes) -> Tensor:
    _require(weights.numel() == routes.num_rows, f"{weights.numel()} weights, {routes.num_rows} choices")
    shape = (routes.num_rows // routes.choices, *rows.shape[1:])
    return depending(shape, torch.promote_types(rows.dtype, weights.dtype), rows, weights)


def _expert_linear(rows: Tensor, weight: Tensor, routes: _Routes, bias: Tensor | None = None) -> Tensor:
    size = 1 if routes.axis is None else routes.axis.size
    _require(len(weight) * size == routes.num_experts, f"{len(weight)} of {routes.num_experts} experts on {size} ranks")
    product = rows.detach() @ weight.detach()[0]
    shape = product.shape if bias is None else (product + bias.detach()[0]).shape
    return depending(shape, product.dtype, rows, weight, bias)


# Dropout: the mask is some mask ---------------------------------------------------------------------------------------


def _same_dropout(module: DropoutModule, x: Tensor, p: float, *, call: int, layout: Layout, **_: Any) -> Tensor:
    wanted = layout.local_shape(module.mesh)
    _require(tuple(x.shape) == tuple(wanted), f"x has shape {tuple(x.shape)}, its layout has {tuple(wanted)}")
    return torch.where(x.new_empty(x.shape, dtype=torch.bool), x, 0.0)


def _dropout_mask(module: DropoutModule, **_: Any) -> dict[str, Any]:
    return {}


def _draw(
    module: DropoutModule, _: str, *, layout: Layout, dtype: torch.dtype = torch.float32, **options: Any
) -> Tensor:
    return torch.empty(layout.local_shape(module.mesh), dtype=dtype, device=module.mesh.device)


def _dropout_attention(module: DropoutModule, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    names = ("attn_mask", "is_causal", "scale", "enable_gqa")
    kept = {name: value for name, value in options.items() if name in names}
    return F.scaled_dot_product_attention(q, k, v, **kept)


_FUNCTIONS: dict[Any, Any] = {
    cross_entropy.cross_entropy: _cross_entropy,
    linear_cross_entropy: _linear_cross_entropy,
    dropout_add: _dropout_add,
    context_attention.context_attention: _context_attention,
    windows.window_attention: _window_attention,
    sink_attention.sink_attention: _sink_attention,
    experts.Routes: _Routes,
    experts.dispatch: _dispatch,
    experts.combine: _combine,
    experts.expert_linear: _expert_linear,
    experts_by_node.NodeRoutes: _Routes,
    experts_by_node.dispatch_by_node: _dispatch_by_node,
    experts_by_node.combine_by_node: _combine_by_node,
    grouped: SimpleNamespace(Routes=_Routes, dispatch=_dispatch, expert_linear=_expert_linear, combine=_combine),
}
_METHODS: dict[str, Callable[..., Any]] = {
    "draw": _draw,
    "same_dropout": _same_dropout,
    "dropout_mask": _dropout_mask,
    "dropout_attention": _dropout_attention,
}


def stand_in(module: dict[str, Any]) -> None:
    """Replace the imports of a generated module by their stand-ins."""
    for name, value in list(module.items()):
        if isinstance(value, type) and issubclass(value, DropoutModule) and value.__module__ == module["__name__"]:
            for method, replacement in _METHODS.items():
                setattr(value, method, replacement)
        try:
            stand_in_function = _FUNCTIONS.get(value)
        except TypeError:  # unhashable values are not functions
            continue
        if stand_in_function is not None:
            module[name] = stand_in_function
