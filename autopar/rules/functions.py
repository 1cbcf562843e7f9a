"""A user's `torch.autograd.Function`, of which nothing is known but what it does: its dims are cut where that shows.

A dim is cut where, on random numbers, the parts' results and gradients are those of the whole: of operands that have
the dim the parts', of those that have not the sum; also where one part's numbers are small beside the
other's, so that what the largest of all decides shows. A Function whose backward is not linear in its gradients keeps
none.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from autopar.ir.graph import TensorMeta, has_gradients
from autopar.rules.call import Call, Operand, make_rule
from autopar.rules.rule import Rule
from codegen.functions import applied, function_of

_LARGEST = 2**23
"""Elements of all operands and results together up to which a Function is tried at its whole size."""

_RANGES = ((0.01, 0.1), (-2.0, 2.0))
"""Of the random numbers: in the first, results must be finite (roots, arc cosines)."""

_SCALES = (1e-2, 1e2)
"""Of the two halves of operands along a dim, in the last of the trials."""

_PRECISIONS = ((torch.float64, 1e-9), (None, 1e-5))
"""Dtype of the trial (None: the call's own) and the relative error up to which results are equal."""


def function_rule(call: Call) -> Rule | None:
    """A factor for each dim of the first result that may be cut; None where there is none."""
    arguments = tuple(call.arguments.values())
    placed = tuple(("tensor", value.index) if isinstance(value, Operand) else value for value in arguments)
    dims = _cut_dims(call.node.op, placed, call.inputs, call.outputs)
    if not dims:
        return None
    sizes: dict[str, int] = {}

    def groups(meta: TensorMeta) -> list[list[str]]:
        found: list[list[str]] = []
        for dim, size in enumerate(meta.shape):
            factor = next((f"d{d}" for d in dims if _dim_of(meta, call.outputs[0], d) == dim), f"k{len(sizes)}")
            sizes[factor] = size
            found.append([factor])
        return found

    inputs, outputs = [groups(meta) for meta in call.inputs], [groups(meta) for meta in call.outputs]
    return make_rule(call, inputs, outputs, sizes, blocked=[factor for factor in sizes if factor.startswith("k")])


def _dim_of(meta: TensorMeta, whole: TensorMeta, dim: int) -> int | None:
    """The dim of `meta` that goes with one of `whole`: its first or its last dims are those of `whole`."""
    rank, more = len(meta.shape), len(whole.shape) - len(meta.shape)
    if more < 0:
        return None
    starts = all(a == b for a, b in zip(meta.shape, whole.shape, strict=False))
    found = dim if starts else dim - more
    return found if 0 <= found < rank and meta.shape[found] == whole.shape[dim] else None


@lru_cache(maxsize=256)
def _cut_dims(
    op: str, placed: tuple[Any, ...], inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta, ...]
) -> tuple[int, ...]:
    """The dims of the first result that may be cut."""
    if not any(meta.numel for meta in inputs) or sum(meta.numel for meta in (*inputs, *outputs)) > _LARGEST:
        return ()
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for dtype, error in _PRECISIONS:
            try:
                trials = [_Trial(op, placed, inputs, outputs, dtype, span) for span in _RANGES]
                if all(trial.is_linear(error) for trial in trials) and trials[0].is_finite():
                    dims = range(len(outputs[0].shape))
                    found = tuple(
                        d for d in dims if all(each.can_cut(d, error) for each in (*trials, trials[-1].scaled(d)))
                    )
                    if found:
                        return found
            except Exception:  # whatever the user's code raises on random numbers: it is not cut
                continue
    return ()


class _Trial:
    """A Function on random operands, whole and in parts."""

    def __init__(
        self,
        op: str,
        placed: tuple[Any, ...],
        inputs: Sequence[TensorMeta],
        outputs: Sequence[TensorMeta],
        dtype: torch.dtype | None,
        span: tuple[float, float],
    ) -> None:
        found = function_of(op)
        assert found is not None
        self.function, self.placed, self.inputs, self.outputs = found.function, placed, inputs, outputs
        self.operands = [_random(meta, dtype, span) for meta in inputs]
        self.gradients = [_random(meta, dtype, (-1.0, 1.0)) for meta in outputs]
        self.results, self.found = self.run(self.operands, self.gradients)

    def run(self, operands: list[Tensor], gradients: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The results and the operands' gradients (zeros where there are none)."""
        leaves = [x.detach().clone().requires_grad_(has_gradients(x.dtype)) for x in operands]
        args = [leaves[value[1]] if isinstance(value, tuple) else value for value in self.placed]
        results = applied(self.function, *args)
        results = list(results) if isinstance(results, tuple) else [results]
        pairs = [(y, g.to(y.dtype)) for y, g in zip(results, gradients, strict=True) if y.requires_grad]
        wanted = [x for x in leaves if x.requires_grad]
        found: list[Any] = []
        if pairs and wanted:
            ends, given = zip(*pairs, strict=True)
            found = list(torch.autograd.grad(ends, wanted, given, allow_unused=True))
        by_leaf = iter(found or [None] * len(wanted))
        own = [next(by_leaf) if x.requires_grad else None for x in leaves]
        whole = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, own, strict=True)]
        return [y.detach() for y in results], whole

    def scaled(self, dim: int) -> _Trial:
        """The same with operands of unlike scale in the two halves along `dim` of the first result."""
        made, half = copy.copy(self), self.outputs[0].shape[dim] // 2
        made.operands = [x.clone() for x in self.operands]
        for meta, operand in zip(self.inputs, made.operands, strict=True):
            own = _dim_of(meta, self.outputs[0], dim)
            if own is not None and has_gradients(meta.dtype):
                operand.narrow(own, 0, half).mul_(_SCALES[0])
                operand.narrow(own, half, meta.shape[own] - half).mul_(_SCALES[1])
        made.results, made.found = made.run(made.operands, made.gradients)
        return made

    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(value).all()) for value in (*self.results, *self.found))

    def is_linear(self, error: float) -> bool:
        """Whether gradients of a scaled sum are the scaled sum of the gradients."""
        others = [torch.rand_like(g) if has_gradients(g.dtype) else g for g in self.gradients]
        sums = [0.25 * (a + b) if has_gradients(a.dtype) else a for a, b in zip(self.gradients, others, strict=True)]
        other, total = self.run(self.operands, others)[1], self.run(self.operands, sums)[1]
        return all(_equal(0.25 * (a + b), c, error) for a, b, c in zip(self.found, other, total, strict=True))

    def can_cut(self, dim: int, error: float) -> bool:
        """Whether the parts of several cuts along `dim` of the first result give the whole."""
        whole = self.outputs[0]
        ins = [_dim_of(meta, whole, dim) for meta in self.inputs]
        outs = [_dim_of(meta, whole, dim) for meta in self.outputs]
        size = whole.shape[dim]
        if size < 2 or None in outs or all(d is None for d in ins):
            return False
        for cut in sorted({1, size // 2, size - 1}):
            parts = []
            for start, stop in ((0, cut), (cut, size)):
                operands = list(_parts(self.operands, ins, start, stop))
                parts.append(self.run(operands, list(_parts(self.gradients, outs, start, stop))))
            (left, to_left), (right, to_right) = parts
            joined = [torch.cat([a, b], d or 0) for a, b, d in zip(left, right, outs, strict=True)]
            sums = [
                a + b if d is None else torch.cat([a, b], d) for a, b, d in zip(to_left, to_right, ins, strict=True)
            ]
            pairs = zip((*self.results, *self.found), (*joined, *sums), strict=True)
            if not all(_equal(a, b, error) for a, b in pairs):
                return False
        return True


def _parts(values: Sequence[Tensor], dims: Sequence[int | None], start: int, stop: int) -> Iterator[Tensor]:
    for value, dim in zip(values, dims, strict=True):
        yield value if dim is None else value.narrow(dim, start, stop - start)


def _random(meta: TensorMeta, dtype: torch.dtype | None, span: tuple[float, float]) -> Tensor:
    if not has_gradients(meta.dtype):
        return torch.randint(0, 2, meta.shape).to(meta.dtype)
    own = meta.dtype if dtype is None or meta.dtype.is_complex else dtype
    return torch.empty(meta.shape, dtype=own).uniform_(*span)


def _equal(one: Tensor, two: Tensor, error: float) -> bool:
    """Whether two tensors are equal up to `error` of the first one's largest number."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if not has_gradients(one.dtype):
        return torch.equal(one, two)
    largest = float(one.nan_to_num(0.0, 0.0, 0.0).abs().max()) if one.numel() else 0.0
    return bool(torch.allclose(one, two, rtol=error, atol=error * largest, equal_nan=True))
