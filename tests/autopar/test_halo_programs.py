"""Convolutions whose space is cut: neighbors' rows are exchanged where the search finds that it pays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.graph import Ref
from autopar.ir.placement import S

IDEAL = str(Path(__file__).resolve().parents[2] / "examples" / "clusters" / "ideal.toml")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up = nn.BatchNorm2d(width), nn.Conv2d(width, 2 * width, 1)
        self.down = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.relu(self.up(self.norm(self.wide(x)))))
        return y


class OneImage(nn.Module):
    """Of which a batch has no rows to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Block(6) for _ in range(2))
        self.head = nn.Conv2d(6, 3, 3, padding=2, dilation=2)

    def forward(self, pixels: Tensor, target: Tensor) -> Tensor:
        x = self.stem(pixels)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), target)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "pixels": torch.randn(1, 3, 64, 32, generator=generator),
        "target": torch.randn(1, 3, 32, 16, generator=generator),
    }


def test_rows_are_exchanged_where_it_pays() -> None:
    compiled = autopar.compile(OneImage(), IDEAL, example_inputs=batch(), constraints={"tp": 4})
    assert compiled.source.count("halo_convolution(") == 4
    assert compiled.best.assignment.tensors["", Ref("pixels")][compiled.plan.mesh.axes.index("tp")] == S(2)


@pytest.mark.slow
@pytest.mark.distributed
def test_programs_equal_one_process() -> None:
    torch.manual_seed(0)
    report = autopar.verify(OneImage(), IDEAL, example_inputs=batch(), constraints={"tp": 4, "recompute": "full"})
    assert report.gradients and report.ok(1e-5), str(report)
