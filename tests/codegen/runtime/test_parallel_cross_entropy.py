"""Cross-entropy over a sharded vocabulary against F.cross_entropy in float64; ranks are threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from codegen.runtime import cross_entropy as cross_entropy_module
from codegen.runtime.cross_entropy import cross_entropy


class ThreadAxis:
    """One of `size` ranks that run as threads: reductions through a shared list and a barrier."""

    def __init__(self, size: int, rank: int, slots: list[torch.Tensor | None], barrier: threading.Barrier) -> None:
        self.size, self.rank, self.slots, self.barrier = size, rank, slots, barrier
        self.num_reductions = 0

    def _reduce(self, x: torch.Tensor, combine: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        self.num_reductions += 1
        self.slots[self.rank] = x
        self.barrier.wait(900)
        result = combine(torch.stack([t for t in self.slots if t is not None]))
        self.barrier.wait(900)
        return result

    def sum_over(self, x: torch.Tensor) -> torch.Tensor:
        return self._reduce(x, lambda parts: parts.sum(0))

    def max_over(self, x: torch.Tensor) -> torch.Tensor:
        return self._reduce(x, lambda parts: parts.amax(0))


def on_ranks(size: int, work: Callable[[ThreadAxis], tuple[torch.Tensor, torch.Tensor]]):  # type: ignore[no-untyped-def]
    """work(axis) of every rank, in rank order."""
    slots: list[torch.Tensor | None] = [None] * size
    barrier = threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(ThreadAxis(size, rank, slots, barrier)), range(size)))


def reference(logits: torch.Tensor, target: torch.Tensor, divisor: float, **options: float):  # type: ignore[no-untyped-def]
    """(loss, gradient) in float64 by torch's own function."""
    x = logits.detach().double().requires_grad_()
    loss = F.cross_entropy(x, target, reduction="sum", **options) / divisor
    loss.backward()
    return loss.detach(), x.grad


def sharded(logits: torch.Tensor, target: torch.Tensor, size: int, divisor: float | torch.Tensor, **options: float):  # type: ignore[no-untyped-def]
    """(losses of the ranks, whole gradient); the upstream gradient is 3."""

    def work(axis: ThreadAxis) -> tuple[torch.Tensor, torch.Tensor]:
        part = logits.detach().chunk(size, 1)[axis.rank].clone().requires_grad_()
        loss = cross_entropy(part, target, divisor, vocab_axis=axis if size > 1 else None, **options)
        (loss * 3.0).backward()
        assert part.grad is not None and axis.num_reductions == (2 if size > 1 else 0)
        return loss.detach(), part.grad / 3.0

    losses, gradients = zip(*on_ranks(size, work), strict=True)
    return losses, torch.cat(gradients, 1)


@pytest.fixture(params=[1 << 18, 40], ids=["one chunk", "many chunks"], autouse=True)
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy_module, "_ELEMENTS_PER_CHUNK_CPU", request.param)


TARGET = torch.tensor([0, 11, 5, -100, 6, 3, -100, 8, 2])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_loss_and_gradient(size: int, label_smoothing: float, dtype: torch.dtype, bound: float) -> None:
    logits = (torch.randn(9, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4).to(dtype)
    losses, gradient = sharded(logits, TARGET, size, torch.tensor(14), label_smoothing=label_smoothing)
    loss, expected = reference(logits, TARGET, 14.0, label_smoothing=label_smoothing)
    for mine in losses:
        assert mine.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        # The loss is computed in float32 from bf16 logits: only the gradient is rounded to bf16.
        assert abs(mine.double() - loss) < min(bound, 1e-6) * loss
    assert gradient.dtype == dtype
    assert (gradient.double() - expected).abs().max() < bound * expected.abs().max()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_large_logits_stay_finite(size: int, shift: float) -> None:
    logits = torch.randn(9, 12) * 50 + shift
    logits[0, :6] = -torch.inf  # a whole rank without weight
    target = TARGET.clone()
    target[0] = 7
    losses, gradient = sharded(logits, target, size, 7.0)
    loss, expected = reference(logits, target, 7.0)
    for mine in losses:
        assert abs(mine.double() - loss) < 1e-5 * loss
    assert (gradient.double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("size", [1, 2])
def test_a_mean_without_a_target_is_torchs(size: int) -> None:
    logits = torch.randn(4, 12)
    for target in (torch.full((4,), -100), torch.full((4,), 2)[:0]):
        losses, gradient = sharded(logits[: len(target)], target, size, torch.tensor(0))
        assert all(mine.isnan() for mine in losses)
        assert not gradient.any() and gradient.shape == (len(target), 12)


def test_another_ignore_index_may_be_a_class() -> None:
    logits = torch.randn(9, 12, dtype=torch.float64)
    target = TARGET.clamp_min(5)
    losses, gradient = sharded(logits, target, 2, 2.5, ignore_index=5)
    loss, expected = reference(logits, target, 2.5, ignore_index=5)
    torch.testing.assert_close(losses[0], loss, rtol=1e-14, atol=0)
    torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=1e-16)


def test_gradient_by_finite_differences() -> None:
    logits = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, TARGET, 7.0, label_smoothing=0.2), (logits,))


def test_no_softmax_is_saved() -> None:
    saved: list[torch.Tensor] = []
    logits = torch.randn(64, 1000, requires_grad=True) * 1.0
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        cross_entropy(logits, torch.arange(64), 64.0)
    assert sorted(t.numel() for t in saved) == [1, 64, 64, 64000]
    assert max(saved, key=torch.numel).data_ptr() == logits.data_ptr()


def test_errors() -> None:
    with pytest.raises(IndexError, match="12 classes"):
        cross_entropy(torch.randn(2, 12), torch.tensor([1, 12]), 2.0)
    with pytest.raises(ValueError, match="N, V"):
        cross_entropy(torch.randn(2, 3, 12), torch.zeros(2, 3, dtype=torch.long), 2.0)
    with pytest.raises(ValueError, match="label_smoothing"):
        cross_entropy(torch.randn(2, 12), torch.tensor([1, 1]), 2.0, label_smoothing=1.5)
