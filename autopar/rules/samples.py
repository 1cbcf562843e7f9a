"""Random inputs for one call: values that the operator accepts and that differ between ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.ir.graph import Node, TensorMeta
from autopar.rules.call import Call, Operand

POSITIVE = frozenset(
    {"log", "log2", "log10", "log1p", "lgamma", "sqrt", "rsqrt", "pow", "reciprocal", "div", "xlogy", "kl_div"}
)
UNIT_INTERVAL = frozenset({"binary_cross_entropy", "acos", "asin", "erfinv", "logit", "special_entr"})
POSITIVE_ARGUMENTS = frozenset({"running_var"})


def sample_inputs(node: Node, inputs: tuple[TensorMeta, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return one tensor per input: floating ones as float64, integers in the range that they index."""
    call = Call.of(node, inputs)
    names = _argument_names(call)
    return tuple(_sample(call, names.get(i, ""), meta, generator) for i, meta in enumerate(inputs))


def _argument_names(call: Call) -> dict[int, str]:
    names = {}
    for name, value in call.arguments.items():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Operand):
                names[item.index] = name
    return names


def _sample(call: Call, name: str, meta: TensorMeta, generator: torch.Generator) -> Tensor:
    if meta.dtype == torch.bool:
        value = torch.rand(meta.shape, generator=generator) < 0.6
        if name == "attn_mask" and meta.shape[-1]:
            value[..., 0] = True  # a row without any key has no softmax
        return value
    if not meta.dtype.is_floating_point:
        return _integers(call, name, meta, generator)
    value = torch.randn(meta.shape, generator=generator, dtype=torch.float64)
    if name in POSITIVE_ARGUMENTS or call.packet in POSITIVE:
        return value.abs() + 0.5
    if call.packet in UNIT_INTERVAL:
        return value.sigmoid()
    if call.packet == "cross_entropy_loss" and name == "target":
        return value.softmax(1 if len(meta.shape) > 1 else 0)
    return value


def _integers(call: Call, name: str, meta: TensorMeta, generator: torch.Generator) -> Tensor:
    low, high = 1, 5
    if name in ("indices", "index") or name == "target":
        low, high = 0, _index_limit(call)
    elif name == "experts":
        low, high = 0, call.tensor("weight").shape[0]
    elif call.packet == "one_hot":
        low, high = 0, call.outputs[0].shape[-1]
    value = torch.randint(low, max(high, low + 1), meta.shape, generator=generator, dtype=torch.int64)
    ignored = call.get("ignore_index")
    if name == "target" and isinstance(ignored, int) and len(meta.shape):
        # Unevenly distributed over ranks: mostly in the first rows.
        ignore = torch.rand(meta.shape, generator=generator) < 0.2
        ignore[0] = torch.rand(meta.shape[1:], generator=generator) < 0.7
        value[ignore] = ignored
    if name == "target" and isinstance(ignored, int):
        value.view(-1)[-1] = 1 if ignored == 0 else 0  # a mean over no target is not a number
    padding = call.get("padding_idx")
    if name == "indices" and isinstance(padding, int) and padding >= 0:
        value.view(-1)[0] = padding
    return value.to(meta.dtype)


def _index_limit(call: Call) -> int:
    """Return the exclusive upper bound of indices into the call's table."""
    if call.packet in ("embedding", "embedding_bag"):
        return call.tensor("weight").shape[0]
    if call.packet in ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"):
        shape = call.tensor("self").shape
        return shape[1] if len(shape) > 1 else shape[0]
    if call.packet in ("gather", "index_select", "take_along_dim", "scatter", "scatter_add", "index_add"):
        dim: int = call["dim"]
        return call.tensor("self").shape[dim]
    if call.packet == "index":
        used = [i for i, v in enumerate(call["indices"]) if isinstance(v, Operand)]
        return min(call.tensor("self").shape[i] for i in used)
    return 5
