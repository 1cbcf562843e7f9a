"""Cross-entropy kernels in Triton's interpreter, against log-sum-exp and its gradient in fp64.

Run by test_kernels_isolated.py with TRITON_INTERPRET=1 in a process of its own.
"""

from __future__ import annotations

import pytest
import torch

from codegen.kernels import cross_entropy as module
from codegen.kernels.cross_entropy import cross_entropy
from codegen.kernels.tile import Tile

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
IGNORE = -100
INF = float("inf")


def expected(logits, target, dloss, ignore_index):
    """(loss, dlogits) in fp64: the closed form, rows one by one."""
    logits, dloss = logits.detach().double(), dloss.double()
    loss, dlogits = torch.zeros(len(target)).double(), torch.zeros_like(logits)
    for row, label in enumerate(target.tolist()):
        if label == ignore_index:
            continue
        loss[row] = torch.logsumexp(logits[row], 0) - logits[row, label]
        dlogits[row] = torch.softmax(logits[row], 0) * dloss[row]
        dlogits[row, label] -= dloss[row]
    return loss, dlogits


def check(logits, target, dloss, assert_near, ignore_index=IGNORE):
    logits = logits.detach().requires_grad_()
    loss = cross_entropy(logits, target, ignore_index)
    assert type(loss.grad_fn).__name__ == "_CrossEntropyBackward", "the reference ran, not the kernel"
    assert loss.dtype == torch.float32 and loss.shape == target.shape
    (dlogits,) = torch.autograd.grad(loss, logits, dloss)
    assert dlogits.dtype == logits.dtype and dlogits.shape == logits.shape
    loss_wanted, dlogits_wanted = expected(logits, target, dloss, ignore_index)
    assert_near(loss, loss_wanted)
    assert_near(dlogits, dlogits_wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize(("num_rows", "num_classes"), [(1, 1), (3, 7), (6, 65), (2, 1000)])
def test_matches_fp64(num_rows, num_classes, ignored, dtype, assert_near):
    torch.manual_seed(0)
    target = torch.randint(num_classes, (num_rows,))
    if ignored != "none":
        target[:: 1 if ignored == "all" else 2] = IGNORE
    check(torch.randn(num_rows, num_classes).to(dtype) * 2, target, torch.randn(num_rows), assert_near)


def set_blocks(monkeypatch, largest):
    for name in ("FORWARD_TILES", "BACKWARD_TILES"):
        monkeypatch.setattr(module, name, (Tile(largest),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_classes", [16, 17, 31, 100])
def test_rows_longer_than_a_block(num_classes, dtype, monkeypatch, assert_near):
    set_blocks(monkeypatch, 16)
    torch.manual_seed(1)
    # The target in the first block, at a border, in the last, ragged block.
    target = torch.tensor([0, 15, num_classes - 1])
    check(torch.randn(3, num_classes).to(dtype) * 3, target, torch.randn(3), assert_near)


def test_row_longer_than_the_real_block(assert_near):
    num_classes = 2 * module.FORWARD_TILES[0].most + 3
    torch.manual_seed(2)
    check(torch.randn(2, num_classes), torch.tensor([num_classes - 1, 5]), torch.randn(2), assert_near)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_block", [4, 64])
def test_extreme_logits(max_block, dtype, monkeypatch, assert_near):
    set_blocks(monkeypatch, max_block)
    big = 9984.0  # exact in bf16 and fp16
    logits = torch.tensor(
        [
            [big, -big, 0, 0, 0, 0, 0, big, 0],
            [-big] * 9,
            [-INF, -INF, -INF, -INF, 1, 2, 3, 4, -INF],  # a first block of -inf alone
            [1, 2, 3, 4, -INF, -INF, -INF, -INF, -INF],  # last blocks of -inf alone
            [1, 2, 3, 4, 5, 6, 7, 8, -INF],  # target at probability 0: infinite loss
        ]
    ).to(dtype)
    target = torch.tensor([7, 0, 7, 0, 8])
    check(logits, target, torch.tensor([1.0, -2.0, 0.5, 1.0, 1.0]), assert_near)


def test_row_of_only_minus_infinity_is_nan_as_in_torch():
    logits = torch.full((2, 5), -INF)
    logits[1] = 0.0
    target = torch.tensor([1, 1])
    torch.testing.assert_close(
        cross_entropy(logits, target),
        torch.nn.functional.cross_entropy(logits, target, reduction="none"),
        equal_nan=True,
    )


def test_ignored_row_of_nan_has_zero_loss_and_gradient():
    logits = torch.randn(2, 9)
    logits[0] = float("nan")
    logits.requires_grad_()
    loss = cross_entropy(logits, torch.tensor([IGNORE, 3]))
    (dlogits,) = torch.autograd.grad(loss.sum(), logits)
    assert loss[0] == 0 and loss[1] > 0
    assert (dlogits[0] == 0).all() and dlogits[1].isfinite().all()


@pytest.mark.parametrize("ignore_index", [0, 4, -1])
def test_other_ignore_index(ignore_index, assert_near):
    torch.manual_seed(3)
    target = torch.tensor([2, ignore_index, 3])
    check(torch.randn(3, 6), target, torch.randn(3), assert_near, ignore_index)


@pytest.mark.parametrize("label", [-1, 6, 7, -101, 2**40])
def test_target_out_of_range_is_nan_and_reads_nothing(label):
    logits = torch.randn(2, 6, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([label, 2]))
    (dlogits,) = torch.autograd.grad(loss.sum(), logits)
    assert loss[0].isnan() and loss[1].isfinite()
    assert dlogits[0].isnan().all() and dlogits[1].isfinite().all()


def test_strided_inputs_surrounded_by_nan(assert_near):
    """A read outside the given elements would turn the result into nan."""
    torch.manual_seed(4)
    buffer = torch.full((8, 20), float("nan"))
    logits = buffer[::2, 3:14]
    logits.copy_(torch.randn(4, 11))
    check(logits, torch.tensor([0, 9, 10, 9, 3, 9, 1, 9])[::2], torch.ones(()).expand(4), assert_near)
    check(torch.randn(11, 4).t(), torch.tensor([0, 10, 3, 1]), torch.randn(8)[::2], assert_near)
