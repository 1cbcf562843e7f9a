"""Rows of experts sorted by counting and summed by token, in Triton's interpreter, against torch and fp64.

Run by test_kernels_isolated.py with TRITON_INTERPRET=1 in a process of its own.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from codegen.kernels.tile import Tile
from codegen.runtime import experts, grouped

sorting = importlib.import_module("codegen.kernels.counting_sort")
sums = importlib.import_module("codegen.kernels.token_sums")
pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.usefixtures("exact_bf16")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Several programs and tiles in every direction; the torch references may not stand in for a kernel."""

    def refuse(*_):
        raise AssertionError("the reference ran, not the kernel")

    monkeypatch.setattr(sorting, "counting_sort_reference", refuse)
    monkeypatch.setattr(sums, "token_sums_reference", refuse)
    for name, value in (("TILE_ELEMENTS", 64), ("MOST_PROGRAMS", 5), ("PROGRAMS_AT_ONCE", 2)):
        monkeypatch.setattr(sorting, name, value)
    monkeypatch.setattr(sums, "TILE", Tile(16))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("num_ids", [1, 3, 8, 60])
def test_sorts_as_torch_does(num_ids, dtype):
    """Few and many rows, among them whole tiles; all ids, some without a row, and one that has all."""
    generator = torch.Generator().manual_seed(0)
    for num_rows in (1, 15, 16, 17, 64, 333):
        for ids in (
            torch.randint(num_ids, (num_rows,), generator=generator),
            torch.randint(num_ids, (num_rows,), generator=generator) // 3 * 2,
            torch.full((num_rows,), num_ids - 1),
        ):
            ids = ids.to(dtype)
            order, inverse, ends = sorting.counting_sort(ids, num_ids)
            assert torch.equal(order, ids.sort(stable=True).indices) and torch.equal(order[inverse], order.sort()[0])
            assert torch.equal(inverse, order.argsort())
            assert torch.equal(ends, torch.bincount(ids, minlength=num_ids).cumsum(0, dtype=torch.int32))
            assert (order.dtype, inverse.dtype, ends.dtype) == (torch.int64, torch.int64, torch.int32)


def test_ids_out_of_range_have_no_place():
    """Reading rows by this order fails, as it does where torch counts them."""
    order, inverse, ends = sorting.counting_sort(torch.tensor([3, -1, 0, 9, 1, 1 << 33]), 4)
    assert order.tolist() == [2, 4, 0, -1, -1, -1] and inverse.tolist() == [2, -1, 0, -1, 1, -1]
    assert ends.tolist() == [1, 2, 2, 3]


def inputs(num_tokens, choices, width, dtype, weight_dtype):
    """[rows, places, order, choices], perhaps weights."""
    torch.manual_seed(0)
    num_rows = num_tokens * choices
    order = torch.randperm(num_rows)
    weights = [] if weight_dtype is None else [torch.rand(num_rows, 1).to(weight_dtype)]
    return [torch.randn(num_rows, width).to(dtype), order.argsort(), order, choices, *weights]


def check(arguments, assert_near, dy=None):
    """Values and all gradients."""
    rows, places, order, choices, *weights = arguments
    leaves = [tensor.detach().requires_grad_() for tensor in (rows, *weights)]
    y = sums.token_sums(leaves[0], places, order, choices, *leaves[1:])
    expected_dtype = rows.dtype if not weights else torch.promote_types(rows.dtype, weights[0].dtype)
    assert y.dtype == expected_dtype and y.shape == (len(rows) // choices, rows.shape[1])
    dy = torch.randn(y.shape).to(y.dtype) if dy is None else dy
    gradients = torch.autograd.grad(y, leaves, dy)
    assert [(g.dtype, g.shape) for g in gradients] == [(leaf.dtype, leaf.shape) for leaf in leaves]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    chosen = exact[0][places] * (exact[1] if weights else 1)
    expected = torch.stack([part.sum(0) for part in chosen.split(choices)])
    wanted = torch.autograd.grad(expected, exact, dy.double())
    for actual, right in zip((y, *gradients), (expected.detach(), *wanted), strict=True):
        assert_near(actual, right, rows.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighting", ["none", "alike", "fp32"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 5), (7, 4, 16), (5, 3, 37)])
def test_sums_match_fp64(shape, weighting, dtype, assert_near):
    weight_dtype = {"none": None, "alike": dtype, "fp32": torch.float32}[weighting]
    check(inputs(*shape, dtype, weight_dtype), assert_near)


def test_rows_in_any_strides_surrounded_by_nan(assert_near):
    rows, *rest = inputs(4, 2, 21, torch.float32, torch.float32)
    parted = torch.full((16, 30), float("nan"))[::2, 3:24].copy_(rows)
    check([parted, *rest], assert_near)
    check([rows.t().contiguous().t(), *rest], assert_near, torch.ones(()).expand(4, 21))


def test_only_what_is_asked_for():
    rows, places, order, choices, weights = inputs(4, 3, 9, torch.float32, torch.float32)
    both = [tensor.clone().requires_grad_() for tensor in (rows, weights)]
    wanted = torch.autograd.grad(sums.token_sums(both[0], places, order, choices, both[1]).square().sum(), both)
    for index in range(2):
        alone = [tensor.clone().requires_grad_(i == index) for i, tensor in enumerate((rows, weights))]
        y = sums.token_sums(alone[0], places, order, choices, alone[1])
        assert torch.equal(torch.autograd.grad(y.square().sum(), alone[index])[0], wanted[index])


def test_wrong_arguments_name_what_was_given():
    rows, places, order, choices, weights = inputs(4, 3, 9, torch.float32, torch.float32)
    with pytest.raises(ValueError, match=r"multiple of 5.*\(12, 9\), \(12,\), \(12,\)"):
        sums.token_sums(rows, places, order, 5)
    with pytest.raises(ValueError, match=r"each of 12 rows; got \(11, 1\)"):
        sums.token_sums(rows, places, order, choices, weights[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids", [[0, 3, 1, 0, 3, 3, 2, 1], [1] * 8, [3, 3, 3, 0, 0, 0, 0, 0]], ids=str)
def test_programs_call_them_with_their_routes(ids, dtype, assert_near):
    """Tokens go to their experts and back, against the same in fp64 without kernels, with all gradients."""
    torch.manual_seed(0)
    chosen, choices = torch.tensor(ids), 2
    inputs = [torch.randn(4, 19).to(dtype), torch.randn(4, 19, 21).to(dtype), torch.rand(8, 1).to(dtype)]

    def mixture(home, leaves):
        tokens, weight, weights = leaves
        routes = home.Routes(chosen, 4)
        rows = home.dispatch(tokens, routes, choices=choices)
        return home.combine(experts.expert_linear(rows, weight, routes), routes, weights, choices=choices)

    results = []
    for home, cast in ((grouped, dtype), (experts, torch.float64)):
        leaves = [tensor.to(cast).requires_grad_() for tensor in inputs]
        y = mixture(home, leaves)
        results.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaves)))
    for actual, right in zip(*results, strict=True):
        assert_near(actual / right.abs().max(), right / right.abs().max(), dtype)
