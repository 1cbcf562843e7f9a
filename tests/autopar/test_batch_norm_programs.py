"""Batch norm while the batch is cut: the statistics, and the running ones, are one process' own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.first, self.second = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(self.two(F.relu(self.first(self.one(x))))))


class Images(nn.Module):
    """Blocks with norms, one without weights, one without running statistics, and one of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bare = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8, affine=False)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.norm, self.head = nn.BatchNorm2d(8, track_running_stats=False), nn.Linear(8, 6)
        self.last = nn.BatchNorm1d(6)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x = self.bare(self.stem(pixels * 3 + 5))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.last(self.head(self.norm(x).mean((2, 3)))), labels)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(6, (8,), generator=generator)
    return {"pixels": torch.randn(8, 3, 8, 8, generator=generator), "labels": labels}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("pins", [{"dp": 2, "zero": 3, "recompute": "full"}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}])
def test_statistics_are_those_of_one_process(pins: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ranks = pins["dp"] * pins.get("tp", 1) * pins.get("pp", 1)
    report = autopar.verify(Images(), f"{ranks} cpu", example_inputs=batch(), constraints=pins)
    assert len(report.buffers) == 3 * 8 and report.gradients
    assert report.ok(1e-5), str(report)


def test_the_batch_is_not_gathered() -> None:
    compiled = autopar.compile(Images(), "4 cpu", example_inputs=batch(), constraints={"dp": 4})
    assert "gather" not in compiled.source
    assert len(re.findall(r"batch_norm\([^()]*\bdp,?\s*\)", compiled.source)) == 5


@pytest.mark.slow
@pytest.mark.distributed
def test_half_precision_takes_statistics_of_float32() -> None:
    compiled = autopar.compile(Images(), "2 cpu", example_inputs=batch(), constraints={"tp": 2}, precision="bf16")
    losses = autopar.launch.run_ranks(first_loss, (compiled, batch()), 2)
    torch.manual_seed(0)
    assert losses == pytest.approx([Images()(**batch()).item()] * 2, rel=0.05)


def first_loss(compiled: autopar.CompiledProgram, inputs: dict[str, Tensor]) -> float:
    torch.manual_seed(0)
    step = compiled.build()
    return step(compiled.local_batch(inputs)).item()
