"""Frozen parameters of any dtype, beside trained ones: equal to one process under every plan, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.launch import run_ranks
from codegen.runtime.collectives import as_sent
from codegen.runtime.parameters import Param
from tests.autopar.test_verify import TOLERANCE
from tests.turns import by_turns

IDEAL = str(Path(__file__).resolve().parents[2] / "examples" / "clusters" / "ideal.toml")
WIDTH = 16
VALUES = {
    "int64": torch.arange(WIDTH),
    "int16": torch.arange(WIDTH, dtype=torch.int16),
    "bool": torch.arange(WIDTH) % 3 == 0,
    "uint8": torch.arange(WIDTH, dtype=torch.uint8),
    "float16": torch.linspace(-1, 1, WIDTH).half(),
    "float8_e4m3fn": torch.linspace(-1, 1, WIDTH).to(torch.float8_e4m3fn),
    "complex64": torch.polar(torch.ones(WIDTH), torch.linspace(-1, 1, WIDTH)),
}
BATCH = {"x": torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH), "y": torch.linspace(1, 0, 8 * WIDTH).view(8, WIDTH)}


class Block(nn.Module):
    """A scale of few bits for each feature, as quantised and masked models keep them."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(value.clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.real if self.scale.is_complex() else self.scale
        return x + torch.tanh(self.linear(x) * scale.to(x.dtype))


class Net(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(value) for _ in range(3))
        self.table = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return ((x[:, self.table] - y) ** 2).mean()


def net(name: str) -> Net:
    torch.manual_seed(1)
    return Net(VALUES[name])


def test_what_has_no_gradient_asks_for_none() -> None:
    assert not Param((3,), dtype="int64").requires_grad and not Param((3,), dtype="bool").requires_grad
    assert Param((3,)).requires_grad and Param((3,), dtype="complex64").requires_grad


@pytest.mark.parametrize("name", VALUES)
def test_all_bytes_are_sent(name: str) -> None:
    value = VALUES[name].clone()
    received = torch.zeros_like(value)
    as_sent(received).copy_(as_sent(value))
    assert torch.equal(received.view(torch.uint8), value.view(torch.uint8))


@pytest.mark.parametrize("name", ["int64", pytest.param("complex64", marks=pytest.mark.slow)])
def test_one_rank_trains(name: str) -> None:
    model = net(name)
    step = autopar.compile(model, "1 cpu", example_inputs=BATCH).build()
    torch.testing.assert_close(step(step.local_batch(BATCH)), model(**BATCH).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "pins"), by_turns(list(VALUES), [{"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2}]), ids=str
)
def test_plans_train_as_one_process(name: str, pins: dict[str, Any]) -> None:
    report = autopar.verify(net(name), "2 cpu", example_inputs=BATCH, constraints=pins)
    assert report.ok(TOLERANCE), report


def _resumed(program: Any, folder: str) -> list[float]:
    """The losses of steps 2 and 3, without and with a checkpoint between them."""
    step = program.build()
    local = step.local_batch(BATCH)
    step(local)
    program.save_checkpoint(step, folder)
    losses = [float(step(local)) for _ in range(2)]
    again = program.build()
    program.load_checkpoint(again, folder)
    return [*losses, *(float(again(local)) for _ in range(2))]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["int64", "bool", "float16"])
def test_a_run_is_resumed(name: str, tmp_path: Path) -> None:
    program = autopar.compile(net(name), "2 cpu", example_inputs=BATCH, constraints={"dp": 2, "zero": 3})
    for first, second, *again in run_ranks(_resumed, (program, str(tmp_path / "checkpoint")), 2):
        assert [first, second] == again and second < first
