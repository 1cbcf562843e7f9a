"""Layers that are called several times, or whose parameters something else reads, are no layers of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.frontend.trace import trace
from autopar.ir.graph import LayerRun
from tests.autopar.interpret import run_graph, tensors_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


class Stacks(nn.Module):
    """Two stacks of blocks, used as `use` says: it is given the model and what the first stack made."""

    def __init__(self, use: Callable[[Stacks, Tensor], tuple[Tensor, Tensor | float]]) -> None:
        super().__init__()
        self.use, self.stem = use, nn.Linear(8, 8)
        self.one, self.two = (nn.ModuleList(Block() for _ in range(3)) for _ in range(2))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        result, extra = self.use(self, through(self.one, self.stem(x)))
        return F.mse_loss(result, target) + extra


def through(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def cycles(model: Stacks, x: Tensor) -> tuple[Tensor, float]:
    """As of hierarchical recurrent models: the inner stack's last turn alone has gradients."""
    slow, fast = x, torch.zeros_like(x)
    for _ in range(2):
        for turn in range(2):
            with nullcontext() if turn else torch.no_grad():
                fast = through(model.two, fast + slow)
        slow = through(model.one, slow + fast)
    return slow, 0.0


def penalised(model: Stacks, x: Tensor) -> tuple[Tensor, Tensor]:
    return through(model.two, x), 0.01 * torch.stack([p.square().sum() for p in model.parameters()]).sum()


USES: Mapping[str, tuple[Callable[[Stacks, Tensor], tuple[Tensor, Tensor | float]], set[str]]] = {
    "apart": (lambda model, x: (through(model.two, x), 0.0), {"one", "two"}),
    "twice": (lambda model, x: (through(model.one, through(model.two, x)), 0.0), {"two"}),
    "cycles": (cycles, set()),
    "penalised": (penalised, set()),
    "one weight read": (lambda model, x: (through(model.two, x), model.two[1].up.weight.abs().sum()), {"one"}),
    "a part called": (lambda model, x: (through(model.two, x + model.one[1].down(x.repeat(1, 2))), 0.0), {"two"}),
}
"""What is done, and the stacks that are runs of layers."""


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(8, 8, generator=generator) for name in ("x", "target")}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", USES)
def test_runs_have_parameters_of_their_own(name: str) -> None:
    use, expected = USES[name]
    model = Stacks(use)
    graph = trace(model, batch())
    runs = [piece for piece in graph.body if isinstance(piece, LayerRun)]
    paths = [path for run in runs if len(run.instances) > 2 for path in run.instances]
    assert {path.partition(".")[0] for path in paths} == expected and len(paths) == len(set(paths))
    torch.testing.assert_close(run_graph(graph, tensors_of(model), batch()), model(**batch()))


def small_steps(parameters: Any) -> torch.optim.Optimizer:
    """With larger ones the loss of cycles explodes, and round-off with it."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


@pytest.mark.by_turns(2)
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "pins"), [("cycles", {"dp": 2, "zero": 3}), ("penalised", {"dp": 2, "zero": 3})])
def test_programs_equal_one_process(name: str, pins: dict[str, int]) -> None:
    torch.manual_seed(0)
    model, options = Stacks(USES[name][0]), {"optimizer": small_steps, "constraints": pins}
    report = autopar.verify(model, "2 cpu", example_inputs=batch(), **options)
    print(report)
    assert len(report.gradients) == 26 and report.ok(1e-5), str(report)
