"""Convolutions with batch norms: every one of them reads channels_last memory, after one conversion per input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import autopar

BATCH = {"left": torch.randn(4, 3, 8, 8), "right": torch.randn(4, 3, 8, 8), "target": torch.randint(0, 5, (4,))}


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module], channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1, groups=2)
        self.norm = norm(channels) if norm is nn.BatchNorm2d else norm(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm(self.second(F.relu(self.first(x)))))


class Twins(nn.Module):
    """Two images, each through a stem of its own, then joined and through equal blocks."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 5, padding=2)
        self.blocks = nn.ModuleList(Block(norm, 8) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        x = torch.cat([self.left(left * 2), self.right(right)], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Convolutions(TorchDispatchMode):
    """Records of each convolution of a forward whether its operand is in channels_last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.are_ordered: list[bool] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.convolution.default:
            self.are_ordered.append(args[0].is_contiguous(memory_format=torch.channels_last))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("norm", "kernels", "are_ordered"),
    [(nn.BatchNorm2d, "on", True), (nn.BatchNorm2d, "off", False), (nn.GroupNorm, "on", False)],
)
def test_every_convolution_reads_channels_last(norm: type[nn.Module], kernels: str, are_ordered: bool) -> None:
    model = Twins(norm)
    options = {"example_inputs": BATCH, "loss_fn": F.cross_entropy, "kernels": kernels}
    program = autopar.compile(model, "1 cpu", **options)
    assert program.source.count("torch.channels_last") == (2 if are_ordered else 0)
    step = program.build(first_step_check=False)
    with Convolutions() as convolutions:
        loss = step.forward_backward(step.local_batch(BATCH))
    assert convolutions.are_ordered == [are_ordered] * 6
    reference = F.cross_entropy(model(BATCH["left"], BATCH["right"]), BATCH["target"])
    torch.testing.assert_close(torch.as_tensor(float(loss)), reference.detach(), rtol=1e-6, atol=0)


class Gridded(nn.Module):
    """A convolution of the images, one of a parameter, and one of a single image without its batch dim."""

    def __init__(self) -> None:
        super().__init__()
        self.grid = nn.Parameter(torch.randn(1, 3, 8, 8))
        self.images, self.of_grid, self.single = (nn.Conv2d(3, 8, 3, padding=1) for _ in range(3))
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, left: Tensor) -> Tensor:
        x = self.images(left) + self.of_grid(self.grid) + self.single(left.mean(0))
        return self.head(F.relu(self.norm(x)).mean((2, 3)))


def test_only_batches_of_images_are_converted() -> None:
    model, batch = Gridded(), {name: BATCH[name] for name in ("left", "target")}
    options = {"example_inputs": batch, "loss_fn": F.cross_entropy, "kernels": "on"}
    program = autopar.compile(model, "1 cpu", **options)
    assert program.source.count("torch.channels_last") == 1
    step = program.build(first_step_check=False)
    expected = F.cross_entropy(model(batch["left"]), batch["target"]).detach()
    torch.testing.assert_close(torch.as_tensor(float(step(step.local_batch(batch)))), expected, rtol=1e-6, atol=0)
