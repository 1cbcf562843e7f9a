"""Rows times their experts' matrices with the kernels in Triton's interpreter, against one product per row in fp64.

Run by test_kernels_isolated.py with TRITON_INTERPRET=1 in a process of its own.
"""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from codegen.kernels.tile import ProductTile
from codegen.runtime import grouped
from codegen.runtime.experts import Routes
from codegen.runtime.recompute import _contexts

module = importlib.import_module("codegen.kernels.grouped_linear")
pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.usefixtures("exact_bf16")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# How many rows each expert has; tiles have 16.
COUNTS = {
    "balanced": [16, 16, 16],
    "skewed": [1, 40, 0, 7, 0],
    "one has all": [0, 0, 35, 0],
    "the last has all": [0, 0, 0, 0, 0, 33],
    "single expert": [19],
    "one row": [0, 1, 0],
}


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Several small tiles in every direction; the torch reference may not stand in for a kernel."""

    def refuse(*_):
        raise AssertionError("the reference ran, not the kernel")

    monkeypatch.setattr(module, "grouped_linear_reference", refuse)
    monkeypatch.setattr(module, "TILES", (ProductTile(16, 32, depth_bytes=64, num_warps=4, num_stages=2),))
    original, seen = module.launch, []

    def launch(name, *args, **flags):
        seen.append(name)
        return original(name, *args, **flags)

    monkeypatch.setattr(module, "launch", launch)
    return seen


def inputs(counts, num_in, num_out, dtype=torch.float32, with_bias=False):
    """[rows, weight, ends], perhaps bias."""
    torch.manual_seed(0)
    num_experts = len(counts)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    rows, weight = torch.randn(sum(counts), num_in).to(dtype), torch.randn(num_experts, num_in, num_out).to(dtype)
    return [rows, weight, ends, *([torch.randn(num_experts, num_out).to(dtype)] if with_bias else [])]


def check(tensors, assert_near):
    """Values and all gradients."""
    rows, weight, ends, *bias = (t.detach().requires_grad_(t.is_floating_point()) for t in tensors)
    leaves = rows, weight, *bias
    y = module.grouped_linear(rows, weight, ends, *bias)
    dy = torch.randn(y.shape).to(y.dtype)
    gradients = torch.autograd.grad(y, leaves, dy)
    assert y.dtype == rows.dtype and [(g.dtype, g.shape) for g in gradients] == [(t.dtype, t.shape) for t in leaves]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    experts = torch.bucketize(torch.arange(len(rows)), ends, right=True)
    expected = torch.einsum("ma,mab->mb", exact[0], exact[1][experts])
    expected = expected + exact[2][experts] if bias else expected
    wanted = torch.autograd.grad(expected, exact, dy.double())
    for found, right in zip((y, *gradients), (expected.detach(), *wanted), strict=True):
        assert_near(found, right, y.dtype)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_fp64(counts, dtype, assert_near):
    check(inputs(counts, 19, 37, dtype, with_bias=len(counts) % 2 == 1), assert_near)


@pytest.mark.parametrize(("num_in", "num_out"), [(1, 1), (16, 32), (33, 65), (70, 5)])
def test_sizes_that_tiles_do_not_divide(num_in, num_out, assert_near):
    check(inputs([3, 0, 17], num_in, num_out, with_bias=True), assert_near)


def test_more_tiles_than_go_through_the_columns_together(assert_near):
    check(inputs([100, 2, 60, 0, 5, 16, 1, 1], 5, 70), assert_near)


def test_matrices_and_rows_in_any_strides_surrounded_by_nan(assert_near):
    rows, weight, ends, bias = inputs([4, 0, 14], 6, 40, with_bias=True)
    parted = torch.full((36, 11), float("nan"))[::2, 2:8].copy_(rows)
    check([parted, weight.transpose(1, 2).contiguous().transpose(1, 2), ends, bias.t().contiguous().t()], assert_near)


def test_a_gradient_of_one_number(assert_near):
    """What sum gives is expanded, without strides."""
    rows, weight, ends = inputs([5, 12], 6, 8)
    leaves = rows.requires_grad_(), weight.requires_grad_()
    found = torch.autograd.grad(module.grouped_linear(*leaves, ends).sum(), leaves)
    assert_near(found[0], torch.cat([w.double().sum(1).expand(n, -1) for w, n in zip(weight, (5, 12), strict=True)]))
    of_rows = [part.double().sum(0)[:, None].expand(-1, 8) for part in rows.split((5, 12))]
    assert_near(found[1], torch.stack(of_rows))


def test_nan_stays_with_its_expert():
    rows, weight, ends = inputs([5, 20, 3], 8, 8)
    rows[7] = float("nan")
    leaves = rows.requires_grad_(), weight.requires_grad_()
    y = module.grouped_linear(*leaves, ends)
    drows, dweight = torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert y[7].isnan().all() and y[[*range(7), *range(8, 28)]].isfinite().all()
    assert drows.isfinite().all() and dweight[1].isnan().all() and dweight[[0, 2]].isfinite().all()


def test_only_what_is_asked_for(launches):
    rows, weight, ends = inputs([5, 0, 4], 6, 7)
    both = [t.clone().requires_grad_() for t in (rows, weight)]
    wanted = torch.autograd.grad(module.grouped_linear(*both, ends).square().sum(), both)
    assert launches == ["grouped_linear", "grouped_linear", "grouped_linear_weight"]
    for index, last in ((0, "grouped_linear"), (1, "grouped_linear_weight")):
        launches.clear()
        alone = [t.clone().requires_grad_(i == index) for i, t in enumerate((rows, weight))]
        (found,) = torch.autograd.grad(module.grouped_linear(*alone, ends).square().sum(), alone[index])
        assert torch.equal(found, wanted[index]) and launches == ["grouped_linear", last]


def test_selective_recomputation_keeps_products(launches):
    """Launches of two layers: forward, and the four of backward; "full" makes the first again."""
    rows, up, ends = inputs([5, 0, 4], 6, 16)
    leaves = rows.requires_grad_(), up.requires_grad_(), torch.randn(3, 16, 6).requires_grad_()

    def layer(x):
        return module.grouped_linear(module.grouped_linear(x, leaves[1], ends).relu(), leaves[2], ends)

    plain = torch.autograd.grad(layer(leaves[0]).square().sum(), leaves)
    assert len(launches) == 6
    for is_selective in (True, False):
        launches.clear()
        contexts = partial(_contexts, [], is_selective=is_selective)
        y = checkpoint(layer, leaves[0], use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        found = torch.autograd.grad(y.square().sum(), leaves)
        assert (len(launches) == 6) == is_selective
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_programs_call_it_with_their_routes(launches, assert_near):
    """Whatever the routing; a rank that no row reached has the product of nothing, and gradients of zeros."""
    _, weight, _, bias = inputs([2, 3, 0, 5], 6, 8, with_bias=True)
    for ids in ([3, 1, 0, 3, 3, 1, 3, 0, 1, 3], []):
        experts, x = torch.tensor(ids, dtype=torch.int64), torch.randn(len(ids), 6)
        routes, leaves = Routes(experts, 4), [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
        y = grouped.expert_linear(x[routes.by_expert.order], leaves[0], routes, leaves[1])
        own = experts[routes.by_expert.order]
        assert_near(
            y, torch.einsum("na,nab->nb", x[routes.by_expert.order].double(), weight[own].double()) + bias[own].double()
        )
        dweight, dbias = torch.autograd.grad(y.sum(), leaves)
        assert not dweight[2].any() and torch.equal(
            dbias, torch.bincount(own, minlength=4)[:, None].expand(4, 8).float()
        )
    assert launches == ["grouped_linear", "grouped_linear_weight"]
