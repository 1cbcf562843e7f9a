"""Models whose layers are like none of their neighbors, as pipelines on real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar

IDEAL = str(Path(__file__).resolve().parents[2] / "examples" / "clusters" / "ideal.toml")
WIDTH = 16


class Mixing(nn.Module):
    """Mixes features, or, transposed, positions; drops a tenth."""

    def __init__(self, of_positions: bool) -> None:
        super().__init__()
        size = 4 if of_positions else WIDTH
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(size, 2 * size), nn.Linear(2 * size, size)
        self.dropout, self.of_positions = nn.Dropout(0.1), of_positions

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = y.transpose(1, 2) if self.of_positions else y
        y = self.dropout(self.down(self.up(y).relu()))
        return x + (y.transpose(1, 2) if self.of_positions else y)


class Alternating(nn.Module):
    """Two layers of one kind and one of another in turn, the last turn cut short; one may also read what the first
    one made."""

    def __init__(self, reading: int | None = 4) -> None:
        super().__init__()
        self.reading = reading
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList([Mixing(index % 3 == 2) for index in range(7)])
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x + first if index == self.reading else x)
            first = x if index == 0 else first
        return self.head(x).flatten(0, 1)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, targets.flatten())


@pytest.mark.distributed
@pytest.mark.parametrize(
    "pins",
    [
        pytest.param({"pp": 4}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "recompute": "full", "micro_batches": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "schedule": "interleaved", "chunks": 2, "micro_batches": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_alternating_layers_with_dropout_in_a_pipeline(pins: dict[str, Any]) -> None:
    torch.manual_seed(0)
    batch = torch.randint(32, (2, 8, 4))
    report = autopar.verify(Alternating(), IDEAL, example_inputs=tuple(batch), loss_fn=loss, constraints=pins)
    assert report.ok(1e-5) and f"pp{pins['pp']}" in report.mesh


def test_layers_in_turns_are_one_loop() -> None:
    batch = tuple(torch.zeros(2, 8, 4, dtype=torch.int64))
    model = Alternating(reading=None)
    source = autopar.compile(model, IDEAL, example_inputs=batch, loss_fn=loss, constraints={"dp": 4}).source
    lines = [line.strip() for line in source.splitlines()]
    start = lines.index("for turn in range(2):")
    assert lines[start + 1 : start + 6 : 2] == [
        "for layer in self.layers_of(Mixing, 2 * turn, 2 * turn + 2):",
        "for layer in self.layers_of(Mixing2, turn, turn + 1):",
        "for layer in self.layers_of(Mixing, 4, 5):",
    ]
    assert len({line for line in lines if line.endswith("= layer(hidden_states)")}) == 1
