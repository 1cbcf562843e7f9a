"""Environment variables and files that forward reads: what changes in them between steps is followed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar


class Outer(nn.Module):
    """Reads a weight and a switch of the environment, and a rate of a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.path = nn.Linear(6, 12), nn.Linear(12, 6), path

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden = hidden.tanh() if "OUTER_TANH" in os.environ else hidden.relu()
        rate = json.loads(self.path.read_text())["rate"]
        return float(os.getenv("OUTER_WEIGHT", "1.5")) * F.mse_loss(self.last(hidden), z) + rate * hidden.abs().mean()


def losses(take: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Of four steps, before each of which something else changes."""
    changes = (
        lambda: None,
        lambda: monkeypatch.setenv("OUTER_WEIGHT", "0.25"),
        lambda: path.write_text(json.dumps({"rate": 0.75})),
        lambda: monkeypatch.setenv("OUTER_TANH", "1"),
    )
    generator, found = torch.Generator().manual_seed(1), []
    for change in changes:
        change()
        found.append(take({name: torch.randn(8, 6, generator=generator) for name in "xz"}))
    monkeypatch.delenv("OUTER_WEIGHT")
    monkeypatch.delenv("OUTER_TANH")
    path.write_text(json.dumps({"rate": 0.1}))
    return found


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2)


def test_what_forward_reads_outside_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"rate": 0.1}))
    model = Outer(path)
    optimizer = sgd(model.parameters())

    def eagerly(batch: dict[str, Tensor]) -> float:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    right = losses(eagerly, path, monkeypatch)
    example = {name: torch.randn(8, 6) for name in "xz"}
    step = autopar.compile(Outer(path), "1 cpu", example_inputs=example, optimizer=sgd).build(first_step_check=False)
    found = losses(lambda batch: float(step(step.local_batch(batch))), path, monkeypatch)
    assert found == pytest.approx(right, rel=1e-5)
