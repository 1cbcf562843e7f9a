"""Rules of table look-ups and indexing."""

from __future__ import annotations

from typing import Any, cast

import torch

from autopar.rules.call import Call, Groups, Operand, make_rule, normal_dim
from autopar.rules.rule import Lowering, Rule
from codegen.runtime.embedding import embedding_bag as bags_of_one_size


def embedding(call: Call) -> Rule:
    """weight [v, h], ids [...] -> [..., h]. With v sharded, each rank looks up only its own rows: a partial result."""
    weight, ids = call.tensor("weight"), call.tensor("indices")
    names = [f"i{i}" for i in range(len(ids.shape))]
    sizes = dict(zip(names, ids.shape, strict=True)) | {"v": weight.shape[0], "h": weight.shape[1]}
    dims = [[f] for f in names]
    tensors: dict[int, Groups] = {weight.index: [["v"], ["h"]], ids.index: dims}
    return make_rule(
        call,
        [tensors[0], tensors[1]],
        [[*dims, ["h"]]],
        sizes,
        linear=("weight",),
        lowerings={"v": Lowering("vocab_embedding", contiguous=True)},
    )


BAGS = "autopar.embedding_bag.default"
"""`embedding_bag(indices [N, k], weight [V, h], mode, per_sample_weights [N, k], padding_idx) -> [N, h]`: torch's
operator for bags of one size (frontend/rewrites/embedding_bags.py)."""

_LIBRARY: Any = cast(Any, torch.library).Library("autopar", "FRAGMENT")
_LIBRARY.define(
    "embedding_bag(Tensor indices, Tensor weight, *, str mode, Tensor? per_sample_weights=None, int? padding_idx=None) "
    "-> Tensor"
)

_LIBRARY.impl("embedding_bag", bags_of_one_size, "CompositeImplicitAutograd")


def embedding_bag(call: Call) -> Rule:
    """ids [n, k], weight [v, h], optional weights [n, k] -> [n, h]. Parts of bags give partial sums of a sum."""
    ids, weight, weighed = call.tensor("indices"), call.tensor("weight"), call.get("per_sample_weights")
    sizes = dict(zip("nkvh", (*ids.shape, *weight.shape), strict=True))
    tensors: dict[int, Groups] = {ids.index: [["n"], ["k"]], weight.index: [["v"], ["h"]]}
    tensors |= {weighed.index: [["n"], ["k"]]} if weighed is not None else {}
    return make_rule(
        call,
        [tensors[i] for i in range(len(tensors))],
        [[["n"], ["h"]]],
        sizes,
        blocked={"v"} if call["mode"] == "sum" else {"v", "k"},
        linear=() if call["mode"] == "max" else ("weight",) if weighed is None else ("weight", "per_sample_weights"),
    )


def gather(call: Call) -> Rule | None:
    """out[..., j, ...] = self[..., index[..., j, ...], ...]: the searched dim of self is blocked, j is free.

    Dims that index covers only partly are blocked. None for take_along_dim of flattened or broadcast tensors.
    """
    x, index = call.tensor("self"), call.tensor("indices" if call.packet == "take_along_dim" else "index")
    if call.get("dim") is None or index.shape != call.outputs[0].shape or len(x.shape) != len(index.shape):
        return None
    if call.packet == "take_along_dim" and any(
        a != b for d, (a, b) in enumerate(zip(x.shape, index.shape, strict=True)) if d != call["dim"] % len(x.shape)
    ):
        return None
    dim = normal_dim(call["dim"], max(len(x.shape), 1))
    names = [f"d{i}" for i in range(len(x.shape))]
    sizes = dict(zip(names, index.shape, strict=True))
    source: list[list[str]] = []
    blocked = set()
    for i, (f, size) in enumerate(zip(names, x.shape, strict=True)):
        if i == dim or size != sizes[f]:
            sizes[f"x{i}"] = size
            blocked |= {f"x{i}"} if i == dim else {f"x{i}", f}
            source.append([f"x{i}"])
        else:
            source.append([f])
    dims = [[f] for f in names]
    tensors: dict[int, Groups] = {x.index: source, index.index: dims}
    return make_rule(call, [tensors[0], tensors[1]], [dims], sizes, blocked=blocked, linear=("self",))


def index_select(call: Call) -> Rule:
    """index_select: the chosen positions are free, the searched dim is blocked."""
    x, index = call.tensor("self"), call.tensor("index")
    dim = normal_dim(call["dim"], len(x.shape))
    names = [f"d{i}" for i in range(len(x.shape))]
    sizes = dict(zip(names, x.shape, strict=True)) | {"j": index.meta.numel}
    out = [["j"] if i == dim else [f] for i, f in enumerate(names)]
    tensors: dict[int, Groups] = {x.index: [[f] for f in names], index.index: [["j"]] if index.shape else []}
    return make_rule(call, [tensors[0], tensors[1]], [out], sizes, blocked={names[dim]}, linear=("self",))


def index_tensor(call: Call) -> Rule | None:
    """Advanced indexing with integer tensors (numpy's rules): indexed dims are blocked, the indices' dims are free.

    None for boolean masks, whose result size depends on data.
    """
    x = call.tensor("self")
    indices: tuple[Operand | None, ...] = tuple(call["indices"])
    used = {i: v for i, v in enumerate(indices) if isinstance(v, Operand)}
    if not used or any(v.meta.dtype.itemsize == 1 for v in used.values()):
        return None
    out = call.outputs[0].shape
    rank = max(len(v.shape) for v in used.values())
    names = [f"d{i}" for i in range(len(x.shape))]
    rest = [f for i, f in enumerate(names) if i not in used]
    first, last = min(used), max(used)
    adjacent = last - first + 1 == len(used)
    # Separated index tensors put their dims first; adjacent ones put them in their own position.
    position = first if adjacent else 0
    picked = [f"j{i}" for i in range(rank)]
    sizes = dict(zip(names, x.shape, strict=True)) | dict(zip(picked, out[position : position + rank], strict=True))
    groups: dict[int, Groups] = {x.index: [[f] for f in names]}
    for v in used.values():
        aligned = picked[rank - len(v.shape) :]
        groups[v.index] = [[f] if size == sizes[f] else [] for f, size in zip(aligned, v.shape, strict=True)]
    order = [*rest[:position], *picked, *rest[position:]]
    return make_rule(
        call,
        [groups[i] for i in range(len(groups))],
        [[[f] for f in order]],
        sizes,
        blocked=[f for i, f in enumerate(names) if i in used],
        linear=("self",),
    )


def one_hot(call: Call) -> Rule:
    """one_hot: a new last dim of classes, blocked."""
    x = call.tensor("self")
    names = [f"d{i}" for i in range(len(x.shape))]
    sizes = dict(zip(names, x.shape, strict=True)) | {"c": call.outputs[0].shape[-1]}
    dims = [[f] for f in names]
    return make_rule(call, [dims], [[*dims, ["c"]]], sizes, blocked={"c"})


def scatter(call: Call) -> Rule | None:
    """self [..., x, ...] with entries at index [..., j, ...] replaced by src or a number: dims x and j are blocked.

    None where index covers other dims only partly, or src is larger than index.
    """
    x, index, src = call.tensor("self"), call.tensor("index"), call.get("src")
    rank = len(x.shape)
    dim = normal_dim(call["dim"], max(rank, 1))
    is_covered = all(a == b for d, (a, b) in enumerate(zip(x.shape, index.shape, strict=True)) if d != dim)
    is_summed = call.get("reduce") is not None
    if rank == 0 or not is_covered or is_summed or (src is not None and src.shape != index.shape):
        return None
    names = [f"d{i}" for i in range(rank)]
    sizes = dict(zip(names, x.shape, strict=True)) | {"j": index.shape[dim]}
    dims = [[f] for f in names]
    parts = [["j"] if i == dim else [f] for i, f in enumerate(names)]
    groups: dict[int, Groups] = {x.index: dims, index.index: parts}
    groups |= {src.index: parts} if src is not None else {}
    tensors = [groups[i] for i in range(len(groups))]
    linear = "self value" if src is None else "self src"
    return make_rule(call, tensors, [dims], sizes, blocked={names[dim], "j"}, linear=(linear,))


def slice_scatter(call: Call) -> Rule:
    """self [..., x, ...] with a slice of dim x replaced by src [..., j, ...]: x and j are blocked."""
    x, src = call.tensor("self"), call.tensor("src")
    dim = normal_dim(call["dim"], len(x.shape))
    names = [f"d{i}" for i in range(len(x.shape))]
    sizes = dict(zip(names, x.shape, strict=True)) | {"j": src.shape[dim]}
    dims = [[f] for f in names]
    tensors: dict[int, Groups] = {x.index: dims, src.index: [["j"] if i == dim else [f] for i, f in enumerate(names)]}
    blocked = {names[dim], "j"}
    return make_rule(call, [tensors[0], tensors[1]], [dims], sizes, blocked=blocked, linear=("self src",))


def scatter_sum(call: Call) -> Rule | None:
    """self [..., x, ...] + sum over j of src [..., j, ...] at index: shards of j give partial sums, to which self
    counts.

    The dim x that is written to is blocked. None where index, or src, covers the other dims only partly.
    """
    along = call.packet == "index_add"
    x, index, src = call.tensor("self"), call.tensor("index"), call.tensor("source" if along else "src")
    rank = len(x.shape)
    if rank == 0 or rank != len(src.shape) or (along and call["alpha"] != 1):
        return None
    dim = normal_dim(call["dim"], rank)
    names = [f"d{i}" for i in range(rank)]
    if (not along and index.shape != src.shape) or any(x.shape[i] != src.shape[i] for i in range(rank) if i != dim):
        return None
    sizes = dict(zip(names, x.shape, strict=True)) | {"j": src.shape[dim]}
    dims = [[f] for f in names]
    parts = [["j"] if i == dim else [f] for i, f in enumerate(names)]
    groups: dict[int, Groups] = {x.index: dims, src.index: parts, index.index: [["j"]] if along else parts}
    return make_rule(
        call,
        [groups[i] for i in range(len(groups))],
        [dims],
        sizes,
        blocked={names[dim]},
        additive={x.index},
        linear=(f"self {'source' if along else 'src'}",),
    )


def scatter_reduce(call: Call) -> Rule | None:
    """Return the rule of scatter, for entries that are multiplied, averaged or compared where they meet."""
    x, index, src = call.tensor("self"), call.tensor("index"), call.tensor("src")
    rank = len(x.shape)
    dim = normal_dim(call["dim"], max(rank, 1))
    is_covered = all(a == b for d, (a, b) in enumerate(zip(x.shape, index.shape, strict=True)) if d != dim)
    if rank == 0 or not is_covered or src.shape != index.shape:
        return None
    names = [f"d{i}" for i in range(rank)]
    sizes = dict(zip(names, x.shape, strict=True)) | {"j": index.shape[dim]}
    parts = [["j"] if i == dim else [f] for i, f in enumerate(names)]
    groups = {x.index: [[f] for f in names], index.index: parts, src.index: parts}
    return make_rule(call, [groups[i] for i in range(3)], [groups[x.index]], sizes, blocked={names[dim], "j"})


def buckets(call: Call) -> Rule | None:
    """The index of each value's interval; every rank has all limits. None for limits per row."""
    x, limits = call["self"], call.tensor("boundaries" if call.packet == "bucketize" else "sorted_sequence")
    if not isinstance(x, Operand) or len(limits.shape) != 1 or len(call.inputs) != 2:
        return None
    names = [f"d{i}" for i in range(len(x.shape))]
    sizes = dict(zip(names, x.shape, strict=True)) | {"limits": limits.shape[0]}
    dims = [[f] for f in names]
    groups = {x.index: dims, limits.index: [["limits"]]}
    return make_rule(call, [groups[0], groups[1]], [dims], sizes, blocked={"limits"})


TABLE = {
    "aten.embedding": embedding,
    "autopar.embedding_bag": embedding_bag,
    "aten.gather": gather,
    "aten.take_along_dim": gather,
    "aten.index_select": index_select,
    "aten.index": index_tensor,
    "aten.one_hot": one_hot,
    "aten.scatter": scatter,
    "aten.slice_scatter": slice_scatter,
    "aten.scatter_add": scatter_sum,
    "aten.scatter_reduce": scatter_reduce,
    "aten.bucketize": buckets,
    "aten.searchsorted": buckets,
    "aten.index_add": scatter_sum,
}
