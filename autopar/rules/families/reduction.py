"""Rules of reductions over dims. Sums give partial results; a mean is a sum over a count; others block reduced dims."""

from __future__ import annotations

from autopar.rules.call import Call, Operand, broadcast_groups, make_rule, normal_dim, normal_dims
from autopar.rules.families.pointwise import pointwise
from autopar.rules.rule import Lowering, Rule

SUMS = ("sum", "mean", "nansum")
BLOCKED = (
    "amax",
    "amin",
    "max",
    "min",
    "logsumexp",
    "prod",
    "var",
    "std",
    "norm",
    "any",
    "all",
    "argmax",
    "argmin",
    "linalg_vector_norm",
    "median",
    "var_mean",
    "std_mean",
    "aminmax",
    "count_nonzero",
    "kthvalue",
    "mode",
    "nanmedian",
)


def reduction(call: Call) -> Rule:
    """`dim` may be absent, one, several or empty; with `keepdim`, reduced dims stay without factors.

    The two-tensor forms of max and min are pointwise.
    """
    if len(call.inputs) == 2:
        return pointwise(call)
    (x,) = call.inputs
    rank = len(x.shape)
    dims = normal_dims(call.get("dim"), rank) if rank else ()
    names = [f"d{i}" for i in range(rank)]
    sizes = dict(zip(names, x.shape, strict=True))
    reduced = [names[d] for d in dims]
    keep = any(len(meta.shape) == rank for meta in call.outputs) and rank > 0 and bool(call.get("keepdim"))
    out: list[list[str]] = [[] if f in reduced else [f] for f in names if keep or f not in reduced]
    is_sum = call.packet in SUMS
    lowerings = {f: Lowering("mean") for f in reduced} if call.packet == "mean" else {}
    return make_rule(
        call,
        [[[f] for f in names]],
        [out for _ in call.outputs],
        sizes,
        blocked=() if is_sum else reduced,
        linear=("self",) if is_sum else (),
        lowerings=lowerings,
    )


def topk(call: Call) -> Rule:
    """Values and indices of the k largest: the searched dim is blocked on both sides."""
    x = call.tensor("self")
    names = [f"d{i}" for i in range(len(x.shape))]
    sizes = dict(zip(names, x.shape, strict=True)) | {"k": call["k"]}
    dim = normal_dim(call["dim"], len(names))
    out = [["k"] if i == dim else [f] for i, f in enumerate(names)]
    return make_rule(call, [[[f] for f in names]], [out for _ in call.outputs], sizes, blocked={"k", names[dim]})


def histogram(call: Call) -> Rule | None:
    """Counts of shards add up. None where the bins span the range of the data, which a shard does not know."""
    if call["min"] == call["max"]:
        return None
    (x,) = call.inputs
    names = [f"d{i}" for i in range(len(x.shape))]
    sizes = dict(zip(names, x.shape, strict=True)) | {"bins": call["bins"]}
    return make_rule(call, [[[f] for f in names]], [[["bins"]]], sizes, blocked={"bins"})


def pointwise_loss(call: Call) -> Rule:
    """mse, l1, BCE ...: operands broadcast against each other, then none, mean (1) or sum (2) over every element."""
    tensors = [v for v in call.arguments.values() if isinstance(v, Operand)]
    rank = max(len(t.shape) for t in tensors)
    names = [f"d{i}" for i in range(rank)]
    padded = [(1,) * (rank - len(t.shape)) + t.shape for t in tensors]
    sizes = {f: max(shape[i] for shape in padded) for i, f in enumerate(names)}
    inputs = [broadcast_groups(meta.shape, names, sizes) for meta in call.inputs]
    out = [[f] for f in names] if call["reduction"] == 0 else []
    lowerings = {f: Lowering("mean") for f in names} if call["reduction"] == 1 else {}
    return make_rule(call, inputs, [out], sizes, lowerings=lowerings)


LOSSES = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "soft_margin_loss",
    "poisson_nll_loss",
)

TABLE = {
    **{f"aten.{name}": reduction for name in (*SUMS, *BLOCKED)},
    "aten.topk": topk,
    "aten.histc": histogram,
    **{f"aten.{name}": pointwise_loss for name in LOSSES},
}
