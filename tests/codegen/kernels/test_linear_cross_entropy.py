"""Chunked linear cross entropy in torch operations: against the unfused pair, over gloo, and what it allocates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from codegen.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from codegen.runtime.mesh import Axis
from tests.codegen.runtime.ranks import run_ranks


def random_inputs(num_rows: int, hidden: int, num_classes: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    torch.manual_seed(0)
    leaves = [torch.randn(s, dtype=dtype) for s in ((num_rows, hidden), (num_classes, hidden), (num_classes,))]
    target = torch.randint(num_classes, (num_rows,))
    target[::4] = -100
    return [*(leaf.requires_grad_() for leaf in leaves), target]


@pytest.mark.parametrize("chunk_rows", [None, 1, 4, 11])
@pytest.mark.parametrize("num_targets", [None, 1, 20.5])
def test_is_the_unfused_pair(chunk_rows: int | None, num_targets: float | None) -> None:
    x, weight, bias, target = random_inputs(11, 5, 13)
    options = {"bias": bias, "num_targets": num_targets}
    ours = linear_cross_entropy(x, weight, target, chunk_rows=chunk_rows, **options)
    theirs = linear_cross_entropy_reference(x, weight, target, **options)
    torch.testing.assert_close(ours, theirs)
    upstream = torch.tensor(3.0, dtype=torch.float64)
    wanted = torch.autograd.grad(theirs, (x, weight, bias), upstream)
    # Twice through one graph: the gradients that wait in it are not used up.
    for _ in range(2):
        actual = torch.autograd.grad(ours, (x, weight, bias), upstream, retain_graph=True)
        torch.testing.assert_close(actual, wanted)


def test_mean_is_torchs() -> None:
    x, weight, bias, target = random_inputs(9, 4, 7)
    theirs = torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight, bias), target)
    torch.testing.assert_close(linear_cross_entropy(x, weight, target, bias), theirs)


def test_passes_gradcheck() -> None:
    x, weight, bias, target = random_inputs(4, 3, 5)
    assert torch.autograd.gradcheck(
        lambda *a: linear_cross_entropy(*a[:2], target, a[2], chunk_rows=3), (x, weight, bias)
    )


def test_no_rows() -> None:
    x, weight = torch.zeros(0, 4, requires_grad=True), torch.ones(3, 4, requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.zeros(0, dtype=torch.int64))
    dx, dw = torch.autograd.grad(loss, (x, weight))
    assert loss.isnan() and dx.shape == (0, 4) and (dw == 0).all()


def test_accumulating_in_bf16_rounds_once_more_per_chunk() -> None:
    x, weight, _, target = random_inputs(64, 8, 16, torch.bfloat16)
    exact_leaf = weight.detach().double().requires_grad_()
    exact_loss = linear_cross_entropy_reference(x.detach().double(), exact_leaf, target)
    (exact,) = torch.autograd.grad(exact_loss, exact_leaf)
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        loss = linear_cross_entropy(x, weight, target, chunk_rows=4, accumulate_dtype=dtype)
        (dw,) = torch.autograd.grad(loss, weight)
        assert dw.dtype == torch.bfloat16
        errors[dtype] = ((dw.double() - exact).norm() / exact.norm()).item()
    assert errors[torch.float32] < 2**-8 < errors[torch.bfloat16] < 16 * 2**-8


def test_small_gradients_keep_their_digits_in_fp16_under_a_loss_scale() -> None:
    """Rows that are all but right: dlogits near 1e-5, whose products with weights are below fp16's normal numbers."""
    torch.manual_seed(0)
    weight = 0.02 * torch.randn(16, 64).half()
    target = torch.arange(16)
    x = (weight.float() * 12 / weight.float().square().sum(1, keepdim=True)).half()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    wide = [leaf.detach().double().requires_grad_() for leaf in (x, weight)]
    scale = 2.0**12
    exact = torch.autograd.grad(linear_cross_entropy_reference(*wide, target) * scale, wide)
    found = torch.autograd.grad(linear_cross_entropy(x, weight, target) * scale, (x, weight))
    for own, right in zip(found, exact, strict=True):
        assert float(right.abs().max()) > 1e-4
        assert ((own.double() - right).norm() / right.norm()).item() < 2e-3


class LargestResult(TorchDispatchMode):
    """The most elements of any tensor that an operation returned."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_whole_logits_never_exist() -> None:
    num_rows, hidden, num_classes, chunk_rows = 256, 4, 100, 16
    x, weight, _, target = random_inputs(num_rows, hidden, num_classes, torch.bfloat16)
    with LargestResult() as unfused:
        linear_cross_entropy_reference(x, weight, target).backward()
    with LargestResult() as ours:
        linear_cross_entropy(x, weight, target, chunk_rows=chunk_rows).backward()
    assert unfused.numel == num_rows * num_classes
    assert ours.numel == chunk_rows * num_classes


def rank_of_vocabulary(rank: int, world_size: int) -> list[Any]:
    axis = Axis("tp", world_size, rank, dist.group.WORLD)
    x, weight, bias, target = random_inputs(11, 5, 12)
    part, bias_part = (t.detach().chunk(world_size)[rank].clone().requires_grad_() for t in (weight, bias))
    loss = linear_cross_entropy(x, part, target, bias_part, vocab_axis=axis, chunk_rows=4)
    with torch.no_grad():
        alone = linear_cross_entropy(x, part, target, bias_part, vocab_axis=axis, chunk_rows=4)
    assert torch.equal(alone, loss)
    dx, dw, db = torch.autograd.grad(loss, (x, part, bias_part))
    return [t.numpy() for t in (loss.detach(), axis.sum_over(dx), dw, db)]


@pytest.mark.distributed
def test_sharded_vocabulary_over_gloo() -> None:
    x, weight, bias, target = random_inputs(11, 5, 12)
    wanted = linear_cross_entropy_reference(x, weight, target, bias)
    dx, dw, db = torch.autograd.grad(wanted, (x, weight, bias))
    results = [[torch.as_tensor(array) for array in arrays] for arrays in run_ranks(rank_of_vocabulary, 2)]
    for loss, dx_sum, _, _ in results:
        torch.testing.assert_close(loss, wanted.detach())
        torch.testing.assert_close(dx_sum, dx)
    torch.testing.assert_close(torch.cat([r[2] for r in results]), dw)
    torch.testing.assert_close(torch.cat([r[3] for r in results]), db)


def test_one_rank_is_no_group() -> None:
    x, weight, bias, target = random_inputs(5, 3, 4)
    alone = linear_cross_entropy(x, weight, target, bias, vocab_axis=Axis("tp"))
    torch.testing.assert_close(alone, linear_cross_entropy_reference(x, weight, target, bias))


def test_wrong_arguments_name_what_was_given() -> None:
    x, weight, bias, target = random_inputs(5, 3, 4)
    with pytest.raises(ValueError, match=r"weight \[V, H\].*\(5, 3\), \(4, 2\)"):
        linear_cross_entropy(x, weight[:, :2], target)
    with pytest.raises(ValueError, match=r"bias must have shape \(4,\), got \(3,\)"):
        linear_cross_entropy(x, weight, target, bias[:3])
    with pytest.raises(ValueError, match="one floating dtype, target int64"):
        linear_cross_entropy(x, weight.float(), target)
    with pytest.raises(ValueError, match="one floating dtype, target int64"):
        linear_cross_entropy(x, weight, target.int())
    with pytest.raises(ValueError, match="chunk_rows must be at least 1, got 0"):
        linear_cross_entropy(x, weight, target, chunk_rows=0)
    with pytest.raises(ValueError, match="accumulate_dtype must be torch.float64 or torch.float64"):
        linear_cross_entropy(x, weight, target, accumulate_dtype=torch.bfloat16)
