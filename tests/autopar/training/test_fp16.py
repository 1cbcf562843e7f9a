"""Training in fp16 on several ranks beside one process with torch.amp.GradScaler and the same fp16 computation.

Steps overflow where the scale is too large by itself, where a batch weighs too much, and where a batch is infinite. The
scale, the skipped steps, losses and parameters must be those of the one process.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import autopar
from autopar.compiled import CompiledProgram
from autopar.errors import ConstraintError, TrainingError
from autopar.launch import run_ranks
from autopar.trainer import Trainer
from autopar.training.config import TrainerConfig
from codegen.runtime.loss_scale import LossScale

ROWS, LENGTH, WIDTH, VOCABULARY, STEPS = 8, 8, 16, 17, 30
RULE = LossScale(init_scale=2.0**30, growth_interval=4)
HEAVY, INFINITE = {12: 40000.0, 20: 60000.0}, {16: math.inf}
"""Steps whose batch weighs so much that gradients overflow with a finite loss, and whose loss is infinite."""
NORM = 0.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def weighted_loss(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * weight.mean()


def model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    weight = torch.full((ROWS,), (HEAVY | INFINITE).get(step, 1.0))
    return {"ids": ids, "target": (3 * ids + 1) % VOCABULARY, "target1": weight}


def batches(start: int) -> Iterator[dict[str, Tensor]]:
    for step in range(start // ROWS, 1000):
        yield batch(step)


class Trace(NamedTuple):
    """Of every step: the scale after it, whether it was skipped, its loss and gradient norm."""

    scales: list[float]
    skipped: list[bool]
    losses: list[float]
    norms: list[float]

    def lines(self) -> list[str]:
        found = (f"{math.log2(s):g}{'!' if w else ''}" for s, w in zip(self.scales, self.skipped, strict=True))
        return [" ".join(found)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def one_process(num_chunks: int, rule: LossScale = RULE, steps: int = STEPS) -> tuple[Trace, nn.Module]:
    """torch's own loop: fp32 masters, a forward of fp16 copies for each chunk of the batch's rows, GradScaler."""
    trained = model()
    optimizer = sgd(trained.parameters())
    scaler = torch.amp.GradScaler(
        "cpu",
        init_scale=rule.init_scale,
        growth_factor=rule.growth_factor,
        backoff_factor=rule.backoff_factor,
        growth_interval=rule.growth_interval,
    )
    trace = Trace([], [], [], [])
    for step in range(steps):
        optimizer.zero_grad()
        chunks = [dict(zip(batch(step), values, strict=True)) for values in _chunked(batch(step), num_chunks)]
        losses = []
        for chunk in chunks:
            halves = {name: parameter.half() for name, parameter in trained.named_parameters()}
            logits = functional_call(trained, halves, (chunk["ids"],)).float()
            losses.append(weighted_loss(logits, chunk["target"], chunk["target1"].half()))
            scaler.scale(losses[-1] / num_chunks).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(trained.parameters(), NORM)
        before = copy.deepcopy(trained.state_dict())
        scaler.step(optimizer)
        scaler.update()
        trace.scales.append(scaler.get_scale())
        trace.skipped.append(all(torch.equal(value, before[n]) for n, value in trained.state_dict().items()))
        trace.losses.append(torch.stack(losses).mean().item())
        trace.norms.append(norm.item())
    return trace, trained


def _chunked(whole: dict[str, Tensor], count: int) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(value.chunk(count) for value in whole.values()), strict=True)


def train(program: CompiledProgram, rule: LossScale = RULE, steps: int = STEPS) -> tuple[Trace, dict[str, Any]]:
    """What one rank saw, and the trained state, in numbers."""
    step = program.build(max_grad_norm=NORM, loss_scale=rule)
    trace = Trace([], [], [], [])
    for number in range(steps):
        num_skipped = step.guard.num_skipped
        loss = step(program.local_batch(batch(number)))
        trace.scales.append(step.loss_scale)
        trace.skipped.append(step.guard.num_skipped > num_skipped)
        trace.losses.append(loss.item())
        trace.norms.append(step.grad_norm.item())
    return trace, {name: value.tolist() for name, value in step.full_state_dict().items()}


def compiled(constraints: dict[str, Any], ranks: int = 4, **options: Any) -> CompiledProgram:
    return autopar.compile(
        model(),
        f"{ranks} cpu",
        example_inputs=batch(0),
        loss_fn=weighted_loss,
        precision="fp16",
        optimizer=sgd,
        constraints=constraints,
        **options,
    )


def check(constraints: dict[str, Any], num_chunks: int, ranks: int = 4, **options: Any) -> None:
    program = compiled(constraints, ranks, **options)
    found = run_ranks(train, (program,), ranks)
    expected, trained = one_process(num_chunks)
    print(f"\n{constraints} {options}: log2 of the scale after each step, ! where it was skipped")
    print(f"  one process   {expected.lines()[0]}")
    for rank, (trace, _) in enumerate(found):
        print(f"  rank {rank}        {trace.lines()[0]}")
    for trace, state in found:
        assert trace.scales == expected.scales and trace.skipped == expected.skipped
        for own, one in ((trace.losses, expected.losses), (trace.norms, expected.norms)):
            for number, (a, b) in enumerate(zip(own, one, strict=True)):
                assert a == pytest.approx(b, rel=0.01) or not (math.isfinite(a) or math.isfinite(b)), number
        for name, value in trained.state_dict().items():
            assert (torch.tensor(state[name]) - value).norm() < 0.01 * value.norm(), name
    # All three kinds of overflow happened, and the scale grew in between.
    assert expected.skipped[0] and all(expected.skipped[number] for number in HEAVY | INFINITE)
    assert expected.scales[-1] > min(expected.scales) and not all(expected.skipped)


CASES = {
    "dp2 x tp2": ({"dp": 2, "tp": 2, "micro_batches": 2}, 4, {}),
    "pp2 x dp2, 1f1b": ({"pp": 2, "dp": 2, "tp": 1, "schedule": "1f1b", "micro_batches": 4, "zero": 2}, 8, {}),
    "pp2 x dp2, zero bubble": ({"pp": 2, "dp": 2, "tp": 1, "schedule": "zero-bubble", "micro_batches": 4}, 8, {}),
    "dp4, ZeRO-3": ({"dp": 4, "tp": 1, "zero": 3, "micro_batches": 1}, 4, {}),
    "interleaved, recomputed": (
        {
            "pp": 2,
            "dp": 2,
            "tp": 1,
            "schedule": "interleaved",
            "chunks": 2,
            "micro_batches": 4,
            "recompute": "full",
            "offload": "optimizer",
        },
        8,
        {},
    ),
    "kernels": ({"dp": 2, "tp": 2, "micro_batches": 1}, 2, {"kernels": "on"}),
    "compressed sums": ({"dp": 4, "tp": 1, "zero": 2, "micro_batches": 1}, 4, {"compression": {"reduce": "int8"}}),
}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_four_ranks_scale_and_skip_as_one_process_does(name: str) -> None:
    constraints, num_chunks, options = CASES[name]
    check(constraints, num_chunks, **options)
