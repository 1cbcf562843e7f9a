"""Chunked linear cross entropy with its kernels in Triton's interpreter, against log-sum-exp and its gradient in fp64.

Run by test_kernels_isolated.py with TRITON_INTERPRET=1 in a process of its own.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from codegen.kernels.tile import Tile
from tests.codegen.kernels.replayed_axis import on_ranks

module = importlib.import_module("codegen.kernels.linear_cross_entropy")
kernels = importlib.import_module("codegen.kernels.linear_cross_entropy_kernels")
pytestmark = pytest.mark.usefixtures("poisoned_memory")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IGNORE = -100
INF = float("inf")


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    """The torch path may not stand in for a kernel."""
    assert module.use_triton(torch.ones(1))
    launched = set()

    def count(kernel):
        class Launcher:
            def __getitem__(self, grid):
                launched.add(kernel)
                return getattr(original, kernel)[grid]

        original = type("Original", (), {kernel: getattr(kernels, kernel)})
        monkeypatch.setattr(kernels, kernel, Launcher())

    for kernel in ("_statistics_kernel", "_gradient_kernel", "_scale_kernel"):
        count(kernel)
    yield launched
    assert "_statistics_kernel" in launched


def expected(logits, x, weight, target, divisor, dloss):
    """(loss, dx, dweight, dbias) in fp64 from the logits as rounded to their dtype."""
    logits, x, weight = logits.detach().double(), x.detach().double(), weight.detach().double()
    dlogits, loss = torch.zeros_like(logits), torch.zeros((), dtype=torch.float64)
    for row, label in enumerate(target.tolist()):
        if label == IGNORE:
            continue
        loss += torch.logsumexp(logits[row], 0) - logits[row, label]
        dlogits[row] = torch.softmax(logits[row], 0)
        dlogits[row, label] -= 1
    dlogits *= dloss / divisor
    return loss / divisor, dlogits @ weight, dlogits.t() @ x, dlogits.sum(0)


def check(x, weight, bias, target, assert_near, dloss=0.5, **options):
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias) if tensor is not None]
    loss = module.linear_cross_entropy(
        leaves[0], leaves[1], target, leaves[2] if bias is not None else None, ignore_index=IGNORE, **options
    )
    gradients = torch.autograd.grad(loss, leaves, torch.tensor(dloss))
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert [(g.dtype, g.shape) for g in gradients] == [(leaf.dtype, leaf.shape) for leaf in leaves]
    divisor = options.get("num_targets", max(1, (target != IGNORE).sum().item()))
    logits = torch.nn.functional.linear(x, weight, bias)
    wanted = expected(logits, x, weight, target, divisor, dloss)
    assert_near(loss, wanted[0])
    for gradient, right in zip(gradients, wanted[1:], strict=False):
        assert_near(gradient, right)
    with torch.no_grad():
        alone = module.linear_cross_entropy(x, weight, target, bias, ignore_index=IGNORE, **options)
    assert torch.equal(alone, loss.detach())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "hidden", "num_classes", "chunk_rows", "with_bias"),
    [(1, 7, 4, 1, False), (7, 5, 9, 3, True), (6, 8, 65, 2, False), (5, 16, 300, 64, True)],
)
def test_matches_fp64(num_rows, hidden, num_classes, chunk_rows, with_bias, dtype, assert_near):
    torch.manual_seed(0)
    target = torch.randint(num_classes, (num_rows,))
    target[1::3] = IGNORE
    x, weight = torch.randn(num_rows, hidden).to(dtype), torch.randn(num_classes, hidden).to(dtype)
    bias = torch.randn(num_classes).to(dtype) if with_bias else None
    check(x, weight, bias, target, assert_near, chunk_rows=chunk_rows)


@pytest.mark.parametrize("max_block", [16, 64])
def test_rows_longer_than_a_block(max_block, monkeypatch, assert_near):
    tiles = (Tile(max_block),)
    monkeypatch.setattr(module, "ELEMENT_TILES", tiles)
    for name in ("STATISTICS_TILES", "ELEMENT_TILES"):
        monkeypatch.setattr(kernels, name, tiles)
    torch.manual_seed(1)
    target = torch.tensor([0, 15, 16, 99, IGNORE])
    check(torch.randn(5, 6), torch.randn(100, 6), torch.randn(100), target, assert_near, chunk_rows=2, num_targets=1)


def test_a_mean_without_a_target_is_torchs(assert_near):
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    loss = module.linear_cross_entropy(x, weight, torch.full((3,), IGNORE))
    gradients = torch.autograd.grad(loss, (x, weight))
    assert loss.isnan() and all((g == 0).all() for g in gradients)


def test_only_what_is_asked_for(kernels_only):
    x, weight = torch.randn(4, 3), torch.randn(5, 3)
    target = torch.tensor([0, 4, 2, 1])
    both = [t.clone().requires_grad_() for t in (x, weight)]
    dx, dw = torch.autograd.grad(module.linear_cross_entropy(*both, target), both)
    assert kernels_only == {"_statistics_kernel", "_gradient_kernel", "_scale_kernel"}
    alone = x.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(module.linear_cross_entropy(alone, weight, target), alone), (dx,))
    alone = weight.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(module.linear_cross_entropy(x, alone, target), alone), (dw,))


def test_infinite_and_huge_logits(assert_near):
    """A bias of -inf takes an entry out; logits of 1e4 keep their digits."""
    bias = torch.tensor([0.0, -INF, 1e4, 1e4 + 2, -1e4, 0.0, 0.0])
    weight, x = torch.randn(7, 3), torch.randn(4, 3)
    check(x, weight, bias, torch.tensor([2, 3, 4, IGNORE]), assert_near, chunk_rows=3)


def test_nan_stays_in_its_row():
    x = torch.randn(4, 3)
    x[1] = float("nan")
    x[2] = INF
    x.requires_grad_()
    loss = module.linear_cross_entropy(x, torch.randn(5, 3), torch.tensor([0, IGNORE, 2, 1]), num_targets=1)
    (dx,) = torch.autograd.grad(loss, x)
    assert loss.isnan()
    assert (dx[1] == 0).all() and dx[2].isnan().all() and dx[[0, 3]].isfinite().all()


@pytest.mark.parametrize("label", [-1, 6, 2**40])
def test_target_out_of_range_is_nan(label):
    x = torch.randn(2, 3, requires_grad=True)
    loss = module.linear_cross_entropy(x, torch.randn(6, 3), torch.tensor([label, 2]))
    (dx,) = torch.autograd.grad(loss, x)
    assert loss.isnan() and dx[0].isnan().all() and dx[1].isfinite().all()


def test_strided_inputs_surrounded_by_nan(assert_near):
    torch.manual_seed(2)

    def strided(num_rows, num_cols):
        view = torch.full((2 * num_rows, num_cols + 5), float("nan"))[::2, 2 : 2 + num_cols]
        return view.copy_(torch.randn(num_rows, num_cols))

    target = torch.tensor([0, 9, 10, 9, IGNORE, 9, 1, 9])[::2]
    check(strided(4, 6), strided(11, 6), strided(1, 11)[0], target, assert_near, chunk_rows=3)
    check(torch.randn(6, 4).t(), torch.randn(6, 11).t(), torch.randn(22)[::2], target, assert_near, chunk_rows=4)


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (2, torch.float16), (3, torch.float32)])
def test_sharded_vocabulary(size, dtype, assert_near):
    torch.manual_seed(3)
    x, weight, bias = torch.randn(7, 4).to(dtype), torch.randn(6 * size, 4).to(dtype), torch.randn(6 * size).to(dtype)
    bias[:6] -= 50  # the first rank's logits are far below
    target = torch.tensor([0, 5, 6, 6 * size - 1, IGNORE, 7, 1])

    def work(axis):
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight.chunk(size)[axis.rank])]
        part = bias.chunk(size)[axis.rank].clone().requires_grad_()
        loss = module.linear_cross_entropy(*leaves, target, part, vocab_axis=axis, chunk_rows=3)
        return loss.detach(), *torch.autograd.grad(loss, (*leaves, part))

    results, collectives = on_ranks(size, work)
    assert collectives == 3  # one for each chunk
    wanted = expected(torch.nn.functional.linear(x, weight, bias), x, weight, target, 6, 1.0)
    losses, dxs, dws, dbs = zip(*results, strict=True)
    for loss in losses:
        assert_near(loss, wanted[0])
    assert_near(torch.stack(dxs).double().sum(0), wanted[1], dtype)
    assert_near(torch.cat(dws), wanted[2])
    assert_near(torch.cat(dbs), wanted[3])


def test_sharded_forward_takes_one_collective(assert_near):
    x, weight, target = torch.randn(7, 4), torch.randn(10, 4), torch.tensor([0, 4, 5, 9, IGNORE, 3, 8])

    def work(axis):
        return module.linear_cross_entropy(x, weight.chunk(2)[axis.rank], target, vocab_axis=axis, chunk_rows=2)

    results, collectives = on_ranks(2, work)
    assert collectives == 1
    for loss in results:
        assert_near(loss, expected(x @ weight.t(), x, weight, target, 6, 1.0)[0])
