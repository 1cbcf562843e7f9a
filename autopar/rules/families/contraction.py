"""Rules of matrix products and einsum: a sharded contracted factor gives partial sums.

Table rows: equation, then the sets of arguments in which the op is jointly linear (separated by commas).
"""

from __future__ import annotations

from dataclasses import replace

from autopar.rules.call import Call, Groups, broadcast_groups, linear_sets, make_rule
from autopar.rules.equation import Equation
from autopar.rules.rule import Rule

EQUATIONS: dict[str, tuple[str, str]] = {
    "aten.linear": ("b* k, n k, [n] -> b* n", "input bias, weight bias"),
    "aten.mm": ("m k, k n -> m n", "self, mat2"),
    "aten.bmm": ("b m k, b k n -> b m n", "self, mat2"),
    "aten.mv": ("m k, k -> m", "self, vec"),
    "aten.dot": ("k, k ->", "self, tensor"),
    "aten.outer": ("m, n -> m n", "self, vec2"),
}


def equation_rule(call: Call, text: str, linear: str) -> Rule:
    """Return the rule of a one-line equation."""
    return Equation.parse(text).bind(call.inputs, call.outputs, linear_sets(call, linear.split(",")))


def addmm(call: Call) -> Rule:
    """Return the rule of self + mat1 @ mat2, for matrices and batches; self is broadcast and enters the sum once."""
    batched = call.packet == "baddbmm"
    first, second = ("batch1", "batch2") if batched else ("mat1", "mat2")
    left, right = call.tensor(first), call.tensor(second)
    batch = ["b"] if batched else []
    sizes = {"m": left.shape[-2], "k": left.shape[-1], "n": right.shape[-1]}
    if batched:
        sizes["b"] = left.shape[0]
    out = [*batch, "m", "n"]
    groups: dict[int, Groups] = {
        call.tensor("self").index: broadcast_groups(call.tensor("self").shape, out, sizes),
        left.index: [[f] for f in (*batch, "m", "k")],
        right.index: [[f] for f in (*batch, "k", "n")],
    }
    return make_rule(
        call,
        [groups[i] for i in range(3)],
        [[[f] for f in out]],
        sizes,
        additive={call.tensor("self").index},
        linear=(f"self {first}", f"self {second}"),
    )


def matmul(call: Call) -> Rule:
    """Return the rule of numpy's matmul: broadcast leading dims, vectors on either side."""
    left, right = call.tensor("self"), call.tensor("other")
    out = call.outputs[0].shape
    rows, columns = len(left.shape) > 1, len(right.shape) > 1
    num_batch = len(out) - rows - columns
    batch = [f"b{i}" for i in range(num_batch)]
    sizes = dict(zip(batch, out, strict=False)) | {"k": left.shape[-1]}
    if rows:
        sizes["m"] = left.shape[-2]
    if columns:
        sizes["n"] = right.shape[-1]

    def leading(shape: tuple[int, ...]) -> list[list[str]]:
        return broadcast_groups(shape, batch, sizes) if shape else []

    left_groups = [*leading(left.shape[:-2]), *([["m"]] if rows else []), ["k"]]
    right_groups = [*leading(right.shape[:-2]), ["k"], *([["n"]] if columns else [])]
    out_groups = [*([b] for b in batch), *([["m"]] if rows else []), *([["n"]] if columns else [])]
    return make_rule(call, [left_groups, right_groups], [out_groups], sizes, linear=("self", "other"))


def einsum(call: Call) -> Rule | None:
    """Return the rule that the equation states; None for an equation that torch cannot read.

    A letter that occurs twice in one operand takes its diagonal, which is not sharded.
    """
    shapes = [tensor.shape for tensor in call["tensors"]]
    operands, result = _loops(call["equation"], [len(shape) for shape in shapes])
    if [len(names) for names in operands] != [len(shape) for shape in shapes]:
        return None
    sizes: dict[str, int] = {}
    for names, shape in zip(operands, shapes, strict=True):
        for name, size in zip(names, shape, strict=True):
            sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]  # dims of size 1 are broadcast
    groups = [
        [[name] if size == sizes[name] else [] for name, size in zip(names, shape, strict=True)]
        for names, shape in zip(operands, shapes, strict=True)
    ]
    diagonals = {name for names in operands for name in names if names.count(name) > 1}
    rule = make_rule(call, groups, [[[name] for name in result]], sizes, blocked=diagonals)
    floating = all(meta.dtype.is_floating_point for meta in call.inputs)
    return replace(rule, linear=tuple(frozenset({index}) for index in range(len(groups))) if floating else ())


def _loops(equation: str, ranks: list[int]) -> tuple[list[list[str]], list[str]]:
    """Return the loops of the dims of each operand and of the result.

    "..." stands for the dims of an operand that have no letter, aligned to the right. An omitted result has those dims,
    then the letters that occur once, in alphabetical order.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    texts = left.split(",")
    letters = [text.replace("...", "") for text in texts]
    covered = [
        rank - len(names) if "..." in text else 0 for text, names, rank in zip(texts, letters, ranks, strict=True)
    ]
    dots = [f"b.{index}" for index in range(max(covered, default=0))]
    if not arrow:
        every = "".join(letters)
        right = "..." + "".join(sorted(name for name in every if every.count(name) == 1))

    def loops(text: str, count: int) -> list[str]:
        before, ellipsis, after = text.partition("...")
        return [*before, *(dots[len(dots) - count :] if ellipsis else ()), *after]

    return [loops(text, count) for text, count in zip(texts, covered, strict=True)], loops(right, len(dots))


TABLE = {
    **EQUATIONS,
    "aten.addmm": addmm,
    "aten.baddbmm": addmm,
    "aten.matmul": matmul,
    "aten.einsum": einsum,
}
