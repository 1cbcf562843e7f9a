"""Rules of operators that move, split, merge, repeat or select dims. All are linear."""

from __future__ import annotations

import math

from autopar.rules.call import Call, Operand, make_rule, normal_dim, normal_dims
from autopar.rules.factorize import view_factors
from autopar.rules.rule import Rule


def view(call: Call) -> Rule | None:
    """view, reshape, flatten, unflatten: common factors of the two shapes. None for a view as another dtype."""
    (x,) = call.inputs
    (out,) = call.outputs
    if out.dtype != x.dtype:
        return None
    factors = view_factors(x.shape, out.shape)
    return make_rule(call, [factors.source], [factors.target], factors.sizes, blocked=factors.blocked, linear=("self",))


def _names(call: Call) -> tuple[list[str], dict[str, int]]:
    """Return one factor per dim of the first input, and their sizes."""
    shape = call.inputs[0].shape
    names = [f"d{i}" for i in range(len(shape))]
    return names, dict(zip(names, shape, strict=True))


def _rearranged(call: Call, order: list[int | None]) -> Rule:
    """Build a rule that keeps the input dims in `order` and adds dims of size 1 (None); the others have size 1."""
    names, sizes = _names(call)
    out = [[] if i is None else [names[i]] for i in order]
    return make_rule(call, [[[f] for f in names]], [out], sizes, linear=("self",))


def permute(call: Call) -> Rule:
    rank = len(call.inputs[0].shape)
    return _rearranged(call, [normal_dim(d, rank) for d in call["dims"]])


def transpose(call: Call) -> Rule:
    """transpose(dim0, dim1), and t() of a matrix or vector."""
    order: list[int | None] = list(range(len(call.inputs[0].shape)))
    if call.packet in ("t", "numpy_T"):
        order.reverse()
    else:
        first, second = call.get("dim0", call.get("axis0")), call.get("dim1", call.get("axis1"))
        a, b = normal_dim(first, len(order)), normal_dim(second, len(order))
        order[a], order[b] = order[b], order[a]
    return _rearranged(call, order)


def unsqueeze(call: Call) -> Rule:
    rank = len(call.outputs[0].shape)
    order: list[int | None] = list(range(rank - 1))
    order.insert(normal_dim(call["dim"], rank), None)
    return _rearranged(call, order)


def squeezed_dims(call: Call) -> tuple[int, ...]:
    """Return the dims that a squeeze removes, by the global shape."""
    shape = call.inputs[0].shape
    if not shape:
        return ()
    dim = call.get("dim")
    dims = range(len(shape)) if dim is None else normal_dims(dim, len(shape)) if dim != () else ()
    return tuple(d for d in dims if shape[d] == 1)


def squeeze(call: Call) -> Rule:
    gone = squeezed_dims(call)
    return _rearranged(call, [i for i in range(len(call.inputs[0].shape)) if i not in gone])


def repeat(call: Call) -> Rule:
    """repeat: copies are the major factor of each dim."""
    (x,) = call.inputs
    out = call.outputs[0].shape
    source = (1,) * (len(out) - len(x.shape)) + x.shape
    sizes = {f"d{i}": n for i, n in enumerate(source)} | {
        f"r{i}": m // n for i, (n, m) in enumerate(zip(source, out, strict=True))
    }
    source_dims = [[f"d{i}"] for i in range(len(out) - len(x.shape), len(out))]
    return make_rule(call, [source_dims], [[[f"r{i}", f"d{i}"] for i in range(len(out))]], sizes, linear=("self",))


def repeat_interleave(call: Call) -> Rule | None:
    """Copies are the minor factor of one dim. None unless the number of copies is one integer and dim is given."""
    if len(call.inputs) != 1 or not isinstance(call.get("repeats"), int) or call.get("dim") is None:
        return None
    names, sizes = _names(call)
    dim = normal_dim(call["dim"], len(names))
    sizes["r"] = call["repeats"]
    out = [[f, "r"] if i == dim else [f] for i, f in enumerate(names)]
    return make_rule(call, [[[f] for f in names]], [out], sizes, linear=("self",))


def select(call: Call) -> Rule:
    """select and unbind: one index of a dim, or each in turn; the dim is blocked."""
    names, sizes = _names(call)
    dim = normal_dim(call["dim"], len(names))
    out = [[f] for i, f in enumerate(names) if i != dim]
    outputs = [out for _ in call.outputs]
    return make_rule(call, [[[f] for f in names]], outputs, sizes, blocked={names[dim]}, linear=("self",))


def slice_bounds(call: Call) -> tuple[int, int, int]:
    """Return (dim, start, step) of a slice, counted from the front and clamped."""
    shape = call.inputs[0].shape
    dim = normal_dim(call["dim"], len(shape))
    size = shape[dim]
    start = call.get("start") or 0
    start = min(max(start + size if start < 0 else start, 0), size)
    return dim, start, call.get("step") or 1


def slice_(call: Call) -> Rule:
    """A slice that is one of equal sections of its dim keeps the section's loop; otherwise the dim is blocked.

    Size c * m with the piece [j * m, (j + 1) * m): input (c, m), output m, so that sharding m means S(d/c) before it.
    """
    names, sizes = _names(call)
    dim, start, step = slice_bounds(call)
    size, length = call.inputs[0].shape[dim], call.outputs[0].shape[dim]
    sizes |= {"m": length, "c": size}
    source, target = [[f] for f in names], [[f] for f in names]
    if length and step == 1 and start % length == 0 and size % length == 0:
        sizes["c"] = size // length
        source[dim], target[dim] = ["c", "m"], ["m"]
        blocked = {"c"}
    else:
        source[dim], target[dim] = ["c"], ["m"]
        blocked = {"c", "m"}
    return make_rule(call, [source], [target], sizes, blocked=blocked, linear=("self",))


def split(call: Call) -> Rule:
    """split, split_with_sizes, chunk: pieces are multiples of m = gcd of their sizes, the loop that may be sharded."""
    names, sizes = _names(call)
    dim = normal_dim(call["dim"], len(names))
    lengths = [meta.shape[dim] for meta in call.outputs]
    m = math.gcd(*lengths) or 1
    sizes |= {"m": m, "c": call.inputs[0].shape[dim] // m} | {f"c{i}": n // m for i, n in enumerate(lengths)}
    source = [[f] for f in names]
    source[dim] = ["c", "m"]
    outputs = []
    for i in range(len(lengths)):
        out = [[f] for f in names]
        out[dim] = [f"c{i}", "m"]
        outputs.append(out)
    blocked = {"c", *(f"c{i}" for i in range(len(lengths)))}
    return make_rule(call, [source], outputs, sizes, blocked=blocked, linear=("self",))


def cat(call: Call) -> Rule | None:
    """The reverse of split. None for the legacy form with empty vectors."""
    tensors: tuple[Operand, ...] = call["tensors"]
    out = call.outputs[0].shape
    if any(len(t.shape) != len(out) for t in tensors):
        return None
    dim = normal_dim(call["dim"], len(out))
    lengths = [t.shape[dim] for t in tensors]
    names = [f"d{i}" for i in range(len(out))]
    m = math.gcd(*lengths) or 1
    sizes = dict(zip(names, out, strict=True)) | {"m": m, "c": out[dim] // m}
    sizes |= {f"c{i}": n // m for i, n in enumerate(lengths)}
    groups = [[["c", "m"] if i == dim else [f] for i, f in enumerate(names)]]
    inputs = [[[f"c{t}", "m"] if i == dim else [f] for i, f in enumerate(names)] for t in range(len(tensors))]
    blocked = {"c", *(f"c{i}" for i in range(len(lengths)))}
    return make_rule(call, inputs, groups, sizes, blocked=blocked, linear=("tensors",))


def stack(call: Call) -> Rule:
    """stack: the new dim is blocked."""
    out = call.outputs[0].shape
    dim = normal_dim(call["dim"], len(out))
    names = [f"d{i}" for i in range(len(out))]
    operand = [[f] for i, f in enumerate(names) if i != dim]
    sizes = dict(zip(names, out, strict=True))
    return make_rule(
        call,
        [operand for _ in call.inputs],
        [[[f] for f in names]],
        sizes,
        blocked={names[dim]},
        linear=("tensors",),
    )


def pad(call: Call) -> Rule:
    """Padded dims are blocked. Linear unless padded with a constant other than 0."""
    names, sizes = _names(call)
    amounts: tuple[int, ...] = call["pad"]
    padded = {len(names) - 1 - i // 2 for i, amount in enumerate(amounts) if amount}
    out = call.outputs[0].shape
    sizes |= {f"p{i}": out[i] for i in padded}
    target = [[f"p{i}"] if i in padded else [f] for i, f in enumerate(names)]
    blocked = {names[i] for i in padded} | {f"p{i}" for i in padded}
    return make_rule(call, [[[f] for f in names]], [target], sizes, blocked=blocked, linear=("self value",))


def keeps_shape(call: Call) -> Rule:
    """tril, triu, roll, flip, channel_shuffle: the dims along which they work are blocked."""
    names, sizes = _names(call)
    rank = len(names)
    if call.packet in ("tril", "triu"):
        along: tuple[int, ...] = (rank - 2, rank - 1)
    elif call.packet == "channel_shuffle":
        along = (1,)
    else:
        along = normal_dims(call["dims"], rank)
    dims = [[f] for f in names]
    return make_rule(call, [dims], [dims], sizes, blocked={names[d] for d in along}, linear=("self",))


def diagonal(call: Call) -> Rule:
    """Two dims become one at the end; with diag_embed, one dim at the end becomes two. All of these are blocked."""
    x, out = call.inputs[0].shape, call.outputs[0].shape
    long, short = (out, x) if call.packet == "diag_embed" else (x, out)
    pair = normal_dims((call["dim1"], call["dim2"]), len(long))
    names = [f"d{i}" for i in range(len(long))]
    sizes = dict(zip(names, long, strict=True)) | {"n": short[-1]}
    wide, narrow = [[f] for f in names], [[f] for i, f in enumerate(names) if i not in pair] + [["n"]]
    source, target = (narrow, wide) if call.packet == "diag_embed" else (wide, narrow)
    return make_rule(call, [source], [target], sizes, blocked={"n", *(names[d] for d in pair)}, linear=("self",))


def diagonal_scatter(call: Call) -> Rule:
    """A diagonal of the first tensor is replaced by the second: the two dims of the diagonal are blocked."""
    x, source = call.tensor("self"), call.tensor("src")
    pair = normal_dims((call["dim1"], call["dim2"]), len(x.shape))
    names = [f"d{i}" for i in range(len(x.shape))]
    sizes = dict(zip(names, x.shape, strict=True)) | {"n": source.shape[-1]}
    whole, narrow = [[f] for f in names], [[f] for i, f in enumerate(names) if i not in pair] + [["n"]]
    blocked = {"n", *(names[d] for d in pair)}
    return make_rule(call, [whole, narrow], [whole], sizes, blocked=blocked, linear=("self src",))


def unfold(call: Call) -> Rule:
    """Windows along one dim, with their elements in a new last dim: both are blocked."""
    names, sizes = _names(call)
    dim, out = normal_dim(call["dimension"], max(len(names), 1)), call.outputs[0].shape
    sizes |= {"windows": out[dim] if len(out) > 1 else 1, "window": out[-1]}
    kept = [["windows"] if i == dim else [f] for i, f in enumerate(names)]
    blocked = {"windows", "window", *names[dim : dim + 1]}
    return make_rule(call, [[[f] for f in names]], [[*kept, ["window"]]], sizes, blocked=blocked, linear=("self",))


TABLE = {
    **{f"aten.{name}": view for name in ("view", "_unsafe_view", "reshape", "flatten", "unflatten")},
    "aten.permute": permute,
    **{f"aten.{name}": transpose for name in ("transpose", "t", "numpy_T", "swapaxes", "swapdims")},
    "aten.unsqueeze": unsqueeze,
    "aten.squeeze": squeeze,
    "aten.repeat": repeat,
    "aten.repeat_interleave": repeat_interleave,
    "aten.select": select,
    "aten.unbind": select,
    "aten.slice": slice_,
    "aten.narrow": slice_,
    **{f"aten.{name}": split for name in ("split", "unsafe_split", "split_with_sizes", "chunk")},
    "aten.cat": cat,
    "aten.stack": stack,
    "aten.pad": pad,
    "aten.constant_pad_nd": pad,
    **{f"aten.{name}": keeps_shape for name in ("tril", "triu", "roll", "flip", "channel_shuffle")},
    **{f"aten.{name}": diagonal for name in ("diagonal", "diag_embed")},
    "aten.diagonal_scatter": diagonal_scatter,
    "aten.unfold": unfold,
}
