"""Models that run on one number of rows, as those of a whole graph: planned, and equal to one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import ConstraintError
from tests.autopar.test_verify import TOLERANCE
from tests.turns import by_turns

NODES, FEATURES, CLASSES = 24, 8, 4


class Convolution(nn.Module):
    """Two graph convolutions, the normalized adjacency matrix a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.register_buffer("adjacency", torch.rand(NODES, NODES).softmax(-1))

    def forward(self, x: Tensor) -> Tensor:
        return self.adjacency @ self.second(F.relu(self.adjacency @ self.first(x)))


class Degrees(nn.Module):
    """A factor for each node, of the number of its edges; self loops are left out by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.register_buffer("edges", torch.randint(NODES, (2, 96)))

    def forward(self, x: Tensor) -> Tensor:
        edges = self.edges[:, self.edges[0] != self.edges[1]]
        ones = torch.ones(edges.shape[1])
        degree = ones.new_zeros((NODES,)).scatter_add_(0, edges[1], ones)
        return self.second(torch.tanh(self.first(x))) * degree.clamp(min=1).rsqrt()[:, None]


class Positions(nn.Module):
    """A trained vector for each row of the batch, as a game's board or a set of sensors has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        self.position = nn.Parameter(torch.randn(NODES, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.linear(x) + self.position))


class Given(nn.Module):
    """The adjacency matrix an input, of which rows and columns are nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ self.second(torch.tanh(adjacency @ self.first(x)))


MODELS: list[Callable[[], nn.Module]] = [Convolution, Degrees, Positions, Given]
PLANS: list[tuple[str, dict[str, Any]]] = [
    ("1x4 cpu", {"dp": 4}),
    ("1x4 cpu", {}),
    ("1x4 cpu", {"dp": 2, "tp": 2}),
    ("1x2 cpu", {"pp": 2}),
    ("1x2 cpu", {"dp": 2, "zero": 3}),
]


def batch_of(model: nn.Module) -> dict[str, Tensor]:
    batch = {"x": torch.randn(NODES, FEATURES), "y": torch.randint(CLASSES, (NODES,))}
    return batch | ({"adjacency": torch.rand(NODES, NODES).softmax(-1)} if isinstance(model, Given) else {})


QUICK, *SLOW = by_turns(MODELS, PLANS, 2)


@pytest.mark.parametrize(("make", "plan"), [QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)])
def test_equal_to_one_process(make: Callable[[], nn.Module], plan: tuple[str, dict[str, Any]]) -> None:
    model, (cluster, pins) = make(), plan
    report = autopar.verify(
        model,
        cluster,
        example_inputs=batch_of(model),
        loss_fn=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        constraints=pins,
    )
    assert report.ok(TOLERANCE), str(report)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("cluster", ["8x8 a100-80g", "1x6 a100-80g", "1x4 a100-80g + 1x4 v100-32g"])
def test_planned_for_many_devices(cluster: str) -> None:
    """Layers are solved for few rows there, on which this model does not run."""
    model = Convolution()
    program = autopar.compile(model, cluster, example_inputs=batch_of(model), loss_fn=F.cross_entropy)
    assert program.plan.num_micro_batches == 1


def test_micro_batches_are_refused() -> None:
    model = Convolution()
    with pytest.raises(ConstraintError, match="whole batch at once"):
        autopar.compile(
            model,
            "1x4 cpu",
            example_inputs=batch_of(model),
            loss_fn=F.cross_entropy,
            constraints={"micro_batches": 2},
        )
