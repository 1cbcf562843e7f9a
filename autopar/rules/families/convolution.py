"""Rules of convolutions and pooling: batch and channels may be sharded, and space where windows do not overlap. Where
windows of a convolution overlap, one dim of space may be sharded with rows of the neighbors
(codegen/runtime/halo.py)."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.rules.call import Call, Groups, Operand, make_rule
from autopar.rules.rule import Joint, Rule
from codegen.runtime.halo import halo

HALO = "halo"
"""The lowering of convolutions whose ranks have rows of space and read some of their neighbors' rows."""


def window_factors(
    call: Call, space: Sequence[int], out: Sequence[int], window: Sequence[int]
) -> tuple[list[tuple[str, ...]], dict[str, int], list[str]]:
    """Return spatial dims as (factors of each input dim, sizes, blocked factors); output dim i is the factor `r{i}`.

    Windows that do not overlap (a patch embedding, a 1 x 1 kernel, pooling by its own stride) tile the input: dim i is
    the composite (r{i}, stride), so that r may be sharded. Otherwise neighbors' elements are needed and the factors are
    blocked.
    """
    dims: list[tuple[str, ...]] = []
    sizes: dict[str, int] = {}
    blocked: list[str] = []
    for i, (size, count, width) in enumerate(zip(space, out, window, strict=True)):
        stride = _of_dim(call.get("stride"), i, width)
        tiles = (
            stride is not None
            and size == count * stride
            and width <= stride
            and _of_dim(call.get("padding"), i, 0) == 0
            and _of_dim(call.get("dilation"), i, 1) == 1
        )
        sizes[f"r{i}"] = count
        if tiles and stride is not None:
            sizes[f"t{i}"] = stride
            dims.append((f"r{i}", f"t{i}"))
            blocked.append(f"t{i}")
        else:
            sizes[f"s{i}"] = size
            dims.append((f"s{i}",))
            blocked += [f"s{i}", f"r{i}"]
    return dims, sizes, blocked


def _of_dim(value: int | tuple[int, ...] | str | None, dim: int, default: int) -> int | None:
    """Return the stride, padding or dilation of one dim; None for padding given as a word."""
    if value is None or value == ():
        return default
    if isinstance(value, str):
        return 0 if value == "valid" else None
    return value if isinstance(value, int) else value[dim if len(value) > 1 else 0]


def convolution(call: Call) -> Rule:
    """Return the rule of conv1d/2d/3d (not transposed): batch, groups, channels, and space where windows do not
    overlap.

    With g groups both channel dims are composites with g as the major factor.
    """
    x, weight = call.tensor("input"), call.tensor("weight")
    groups: int = call["groups"]
    num_space = len(weight.shape) - 2
    out = call.outputs[0].shape
    kernel = weight.shape[2:]
    window = [f"k{i}" for i in range(num_space)]
    space, sizes, blocked = window_factors(call, x.shape[-num_space:], out[-num_space:], kernel)
    sizes |= {"g": groups, "o": weight.shape[0] // groups, "i": weight.shape[1]}
    sizes |= dict(zip(window, kernel, strict=True))
    batch: list[list[str]] = []
    if len(x.shape) == num_space + 2:
        sizes["b"] = x.shape[0]
        batch = [["b"]]
    tensors: dict[int, Groups] = {
        x.index: [*batch, ["g", "i"], *space],
        weight.index: [["g", "o"], ["i"], *([w] for w in window)],
    }
    bias = call.get("bias")
    if isinstance(bias, Operand):
        tensors[bias.index] = [["g", "o"]]
    return make_rule(
        call,
        [tensors[i] for i in range(len(tensors))],
        [[*batch, ["g", "o"], *([f"r{i}"] for i in range(num_space))]],
        sizes,
        blocked=(*blocked, *window),
        additive={bias.index} if isinstance(bias, Operand) else (),
        linear=("input bias", "weight bias"),
        joints=_halos(call, blocked),
    )


def halo_dim(call: Call) -> tuple[int, int] | None:
    """Return (dim of space that can be sharded with neighbors' rows, most rows read of one neighbor), or None.

    Rows of input and result must correspond, `stride` to one.
    """
    (x, weight), out = (call.tensor(name) for name in ("input", "weight")), call.outputs[0].shape
    for dim, kernel in enumerate(weight.shape[2:]):
        stride, dilation = (_of_dim(call.get(name), dim, 1) for name in ("stride", "dilation"))
        padding = _of_dim(call.get("padding"), dim, 0)
        at = dim + 2 - len(weight.shape)
        if stride and dilation and padding is not None and x.shape[at] == out[at] * stride:
            reads = max(halo(kernel, stride, padding, dilation))
            if reads > 0:
                return dim, reads
    return None


def _halos(call: Call, blocked: Sequence[str]) -> dict[str, Joint]:
    """Return the option that shards a dim of space with the neighbors' rows, for convolutions of batches."""
    halo, x = halo_dim(call), call.tensor("input")
    if halo is None or len(x.shape) != len(call.tensor("weight").shape) or f"s{halo[0]}" not in blocked:
        return {}
    rows, results = f"s{halo[0]}", f"r{halo[0]}"
    inputs = tuple(rows if index == x.index else None for index in range(len(call.inputs)))
    return {f"{rows}+{results}": Joint(inputs, results, HALO, least=halo[1])}


def pool(call: Call) -> Rule:
    """Return the rule of pooling over space: leading dims (batch, channels) may be sharded. Averages are linear.

    Maximum pooling with indices blocks all space, because the indices count positions in the whole plane.
    """
    num_space = int(call.packet[call.packet.index("pool") + len("pool")])
    x = call.inputs[0].shape
    lead = [f"b{i}" for i in range(len(x) - num_space)]
    sizes = dict(zip(lead, x, strict=False))
    if len(call.outputs) == 1 and not call.packet.startswith("adaptive"):
        kernel = [_of_dim(call["kernel_size"], i, 1) or 1 for i in range(num_space)]
        result = call.outputs[0].shape[-num_space:]
        space, more, blocked = window_factors(call, x[-num_space:], result, kernel)
    else:
        space = [(f"s{i}",) for i in range(num_space)]
        more = {f"s{i}": size for i, size in enumerate(x[-num_space:])}
        more |= {f"r{i}": size for i, size in enumerate(call.outputs[0].shape[-num_space:])}
        blocked = list(more)
    out = [*([f] for f in lead), *([f"r{i}"] for i in range(num_space))]
    linear = ("self",) if "avg" in call.packet else ()
    return make_rule(
        call,
        [[*([f] for f in lead), *space]],
        [out for _ in call.outputs],
        sizes | more,
        blocked=blocked,
        linear=linear,
    )


POOLS = [
    f"{adaptive}{kind}_pool{n}d{suffix}"
    for n in (1, 2, 3)
    for adaptive, kind, suffix in (
        ("", "max", ""),
        ("", "max", "_with_indices"),
        ("", "avg", ""),
        ("adaptive_", "max", ""),
        ("adaptive_", "avg", ""),
    )
]

TABLE = {
    "aten.conv1d": convolution,
    "aten.conv2d": convolution,
    "aten.conv3d": convolution,
    **{f"aten.{name}": pool for name in POOLS},
}
