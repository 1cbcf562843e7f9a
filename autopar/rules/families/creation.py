"""Rules of constructors: every dim may be created sharded. Zeros may also be a partial sum. Random draws are
included."""

from __future__ import annotations

from typing import Any, cast

import torch

from autopar.ir.draws import DRAW
from autopar.operators.traits import CREATED
from autopar.rules.call import Call, make_rule
from autopar.rules.rule import Lowering, Rule


def creation(call: Call) -> Rule:
    """Return the rule of a constructor from sizes. A tensor argument provides only its dtype: its dims are blocked
    unless it has the result's shape; then it is sharded alike."""
    shape = call.outputs[0].shape
    names = [f"d{i}" for i in range(len(shape))]
    sizes = dict(zip(names, shape, strict=True))
    result_dims = [[f] for f in names]
    inputs: list[list[list[str]]] = []
    blocked: list[str] = []
    for number, meta in enumerate(call.inputs):
        if meta.shape == shape:
            inputs.append(result_dims)
            continue
        blocked_dims = [f"o{number}.{i}" for i in range(len(meta.shape))]
        sizes |= dict(zip(blocked_dims, meta.shape, strict=True))
        blocked += blocked_dims
        inputs.append([[f] for f in blocked_dims])
    return make_rule(call, inputs, [result_dims], sizes, blocked=blocked)


_LIBRARY: Any = cast(Any, torch.library).Library("autopar", "FRAGMENT")
_LIBRARY.define(
    "draw(str distribution, int[] size, *, ScalarType dtype, Device? device=None, float p=0.5, int low=0, int high=2) "
    "-> Tensor"
)


def _drawn(distribution: str, size: list[int], *, dtype: torch.dtype, **others: Any) -> torch.Tensor:
    """Return an empty tensor of the draw's shape and dtype; the lowering draws the numbers."""
    return torch.empty(size, dtype=dtype, device="meta")


_LIBRARY.impl("draw", _drawn, "CompositeExplicitAutograd")


def draw(call: Call) -> Rule:
    """Return the rule of `draw`: each rank draws its own shard of the whole; lowering "draw"."""
    shape = call.outputs[0].shape
    sizes = {f"d{i}": size for i, size in enumerate(shape)}
    return make_rule(call, [], [[[f] for f in sizes]], sizes, lowerings={"*": Lowering("draw")})


def arange(call: Call) -> Rule:
    """Return the rule of `arange`: each rank has its own start; lowering "arange"."""
    sizes = {"n": call.outputs[0].shape[0]}
    return make_rule(call, [], [[["n"]]], sizes, lowerings={"n": Lowering("arange")})


def whole(call: Call) -> Rule:
    """Return the rule of entries that depend on their positions: every rank has all of them."""
    shape = call.outputs[0].shape
    sizes = {f"d{i}": size for i, size in enumerate(shape)}
    return make_rule(call, [], [[[f] for f in sizes]], sizes, blocked=sizes)


TABLE = {
    **{f"aten.{name}": creation for name in CREATED},
    "aten.arange": arange,
    DRAW.removesuffix(".default"): draw,
    **{f"aten.{name}": whole for name in ("eye", "linspace", "logspace", "tril_indices", "triu_indices")},
}
