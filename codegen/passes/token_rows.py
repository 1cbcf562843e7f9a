"""Experts' layers that take tokens and give sums by token, without a copy of each token for each of its choices.

    index = x.repeat_interleave(8, 0)
    rows = dispatch(index, routes)              rows = dispatch(x, routes, choices=8)
    ...                                         ...
    y = combine(product, routes)
    y = y * weights
    total = y.view(4096, 8, 2048).sum(1)        total = combine(product, routes, weights, choices=8)

Both do the same to the bit where torch's calls do it (codegen/runtime/experts.py). Programs with kernels weigh and sum
in one (codegen/runtime/grouped.py). Where something else reads what is between, or it is resharded, calls stay.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from codegen.fusion.match import matches
from codegen.fusion.rewrite import chosen, replaced
from codegen.fusion.template import Bindings, Either, Is, Leaf, Op, Pattern, Value, fused
from codegen.program import Call, ModuleClass, Program


def with_token_rows(program: Program) -> Program:
    """The program with such calls replaced, in all classes."""
    return replace(program, layers=tuple(map(_rewritten, program.layers)), root=_rewritten(program.root))


def _rewritten(cls: ModuleClass) -> ModuleClass:
    return replace(cls, body=replaced(cls.body, chosen(matches(_PATTERNS, cls.body, cls.outputs), num_token_ranks=1)))


def _copies_fit(bound: Bindings) -> bool:
    """Whether each token of a matrix is copied, and copies are sharded like their tokens."""
    (copies,), tokens = bound["copies"].value.results, bound["tokens"].type
    num_copies = bound["choices"].value
    is_count = isinstance(num_copies, int) and copies.type.shape == (tokens.shape[0] * num_copies, *tokens.shape[1:])
    return is_count and len(tokens.shape) == 2 and copies.type.placements == tokens.placements


def _with_copies(pattern: Pattern, bound: Bindings, last: Call) -> tuple[Call, ...]:
    choices = (("choices", bound["choices"].value),)
    return (fused(pattern.target, bound, ("tokens", "routes"), last, choices),)


def _sums_fit(bound: Bindings) -> bool:
    """Whether adjacent rows of a matrix are summed, each times a number, and sums are sharded like rows."""
    (viewed,), (total,), rows = bound["viewed"].value.results, bound["total"].value.results, bound["rows"].type
    if len(rows.shape) != 2 or len(viewed.type.shape) != 3:
        return False
    num_tokens, choices, width = viewed.type.shape
    is_by_token = (num_tokens * choices, width) == rows.shape
    is_weighted = "weights" not in bound or bound["weights"].type.shape == (rows.shape[0], 1)
    return is_by_token and is_weighted and total.type.placements == rows.placements


def _with_sums(pattern: Pattern, bound: Bindings, last: Call) -> tuple[Call, ...]:
    (viewed,) = bound["viewed"].value.results
    names = ("rows", "routes", *(["weights"] if "weights" in bound else []))
    return (fused(pattern.target, bound, names, last, (("choices", viewed.type.shape[1]),)),)


_COMBINED: Final = Op("runtime.combine", (Leaf("rows"), Leaf("routes")))
_WEIGHTED: Final = Op("aten.mul.Tensor", (_COMBINED, Leaf("weights")), commutes=True)
_PATTERNS: Final = (
    Pattern(
        name="rows of tokens",
        target="runtime.dispatch",
        leaves=("tokens", "routes"),
        template=Op(
            "runtime.dispatch",
            (
                Op("aten.repeat_interleave.self_int", (Leaf("tokens"), Value("choices"), Is(0)), name="copies"),
                Leaf("routes"),
            ),
        ),
        fits=_copies_fit,
        build=_with_copies,
    ),
    Pattern(
        name="sums by token",
        target="runtime.combine",
        leaves=("rows", "routes", "weights"),
        template=Op(
            "aten.sum.dim_IntList",
            (
                Op("aten.view.default", (Either((_WEIGHTED, _COMBINED)), Value("shape")), name="viewed"),
                Either((Is((1,)), Is([1]))),
            ),
            name="total",
        ),
        fits=_sums_fit,
        build=_with_sums,
    ),
)
