"""A linear layer whose weight gradient is computed later: the same numbers, and really later."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from codegen.runtime.deferred import DeferredGradients, linear


class TwoLayers(nn.Module):
    """A scale of its own, two linear layers of which the second has no bias and the first one's weight transposed."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.scale = nn.Parameter(torch.randn(5, generator=generator, dtype=torch.float64))
        self.weight = nn.Parameter(torch.randn(7, 5, generator=generator, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(7, generator=generator, dtype=torch.float64))
        self.last = nn.Parameter(torch.randn(3, 7, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(linear(x * self.scale, self.weight, self.bias))
        return linear(linear(h, self.weight.t()) @ torch.ones(5, 7, dtype=h.dtype), self.last)

    def plain(self, x: Tensor) -> Tensor:
        h = torch.tanh(F.linear(x * self.scale, self.weight, self.bias))
        return F.linear(F.linear(h, self.weight.t()) @ torch.ones(5, 7, dtype=h.dtype), self.last)


def inputs(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, 5, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("shape", [(4,), (2, 3), ()])
@pytest.mark.parametrize("recompute", [False, True])
def test_all_gradients_are_there_after_w(shape: tuple[int, ...], recompute: bool) -> None:
    reference = TwoLayers()
    expected = [torch.autograd.grad(reference.plain(x).square().sum(), x)[0] for x in inputs(*shape)]
    sum(reference.plain(x).square().sum() for x in inputs(*shape)).backward()
    model, queue = TwoLayers(), DeferredGradients()
    queue.attach(model)
    xs = inputs(*shape)
    losses = [(checkpoint(model, x, use_reentrant=False) if recompute else model(x)).square().sum() for x in xs]
    # Two I's before the first W, and one backward that is whole.
    for index in (0, 1):
        with queue.collecting(index):
            losses[index].backward()
        assert model.last.grad is None and model.bias.grad is None and model.scale.grad is not None
        torch.testing.assert_close(xs[index].grad, expected[index])
    queue.run(1)
    assert model.last.grad is not None
    losses[2].backward()
    queue.run(0)
    for (name, parameter), (_, wanted) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_outside_i_and_without_a_queue_it_is_linear() -> None:
    plain, model, queue = TwoLayers(), TwoLayers(), DeferredGradients()
    queue.attach(model)
    for x in inputs(4):
        assert torch.equal(model(x), plain.plain(x))
        model(x).sum().backward()
        plain(x.detach()).sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    frozen = TwoLayers().requires_grad_(False)
    queue.attach(frozen)
    x = inputs(4)[0]
    with queue.collecting(0):
        frozen(x).sum().backward()
    queue.run(0)
    assert x.grad is not None and frozen.weight.grad is None
