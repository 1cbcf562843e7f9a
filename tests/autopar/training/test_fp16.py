"""Training in fp16 on several ranks beside one process with torch.amp.GradScaler and the same fp16 computation.

Steps overflow where the scale is too large by itself, where a batch weighs too much, and where a batch is infinite. The
scale, the skipped steps, losses and parameters must be those of the one process.
"""

from __future__ import annotations

import copy
import math
import sys
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
from autopar.verify import _one_step, verify_program
from codegen.runtime.loss_scale import LossScale
from examples.models import gpt2

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
        lines = (f"{math.log2(s):g}{'!' if w else ''}" for s, w in zip(self.scales, self.skipped, strict=True))
        return [" ".join(lines)]


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
    """Return the trace of one rank, and the trained state, as numbers."""
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
    by_rank = run_ranks(train, (program,), ranks)
    expected, trained = one_process(num_chunks)
    print(f"\n{constraints} {options}: log2 of the scale after each step, ! where it was skipped")
    print(f"  one process   {expected.lines()[0]}")
    for rank, (trace, _) in enumerate(by_rank):
        print(f"  rank {rank}        {trace.lines()[0]}")
    for trace, state in by_rank:
        assert trace.scales == expected.scales and trace.skipped == expected.skipped
        for values, one in ((trace.losses, expected.losses), (trace.norms, expected.norms)):
            for number, (a, b) in enumerate(zip(values, one, strict=True)):
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


# Trainers and their checkpoints --------------------------------------------------------------------------------------

CONFIG = TrainerConfig(
    cluster="1 cpu", precision="fp16", loss_scale=RULE, steps=18, max_grad_norm=NORM, learning_rate=0.1, log_every=0
)


def fit(config: TrainerConfig) -> tuple[Any, nn.Module]:
    trained = model()
    return Trainer(trained, config, batches, weighted_loss, sgd).fit(), trained


def check_near(model: nn.Module, expected: nn.Module, tolerance: float = 0.005) -> None:
    for name, value in expected.state_dict().items():
        assert (model.state_dict()[name] - value).norm() <= tolerance * value.norm(), name


@pytest.mark.parametrize("auto_parallel", [False, True])
def test_a_trainer_on_one_process_is_torchs_loop(auto_parallel: bool) -> None:
    expected, trained = one_process(1, steps=CONFIG.steps)
    result, model = fit(replace(CONFIG, auto_parallel=auto_parallel))
    assert result.num_skipped == sum(expected.skipped)
    assert result.losses == pytest.approx(expected.losses, rel=1e-3)
    check_near(model, trained)


@pytest.mark.slow
def test_bf16_trains_plainly_as_a_program_does() -> None:
    config = replace(CONFIG, precision="bf16", loss_scale=None, steps=6)
    (one, alone), (other, parallel) = (
        fit(replace(config, auto_parallel=auto_parallel)) for auto_parallel in (False, True)
    )
    assert one.losses == pytest.approx(other.losses, rel=0.01) and one.num_skipped == other.num_skipped == 0
    check_near(parallel, alone, 0.02)


@pytest.mark.parametrize(
    "auto_parallel", [False, pytest.param(True, marks=[pytest.mark.distributed, pytest.mark.slow])]
)
def test_a_run_goes_on_with_the_scale_of_its_checkpoint(tmp_path: Path, auto_parallel: bool) -> None:
    """Ended while the scale still falls and begun again, on two ranks from one: skips are those of one run."""
    config = replace(CONFIG, checkpoint_directory=str(tmp_path / "run"), auto_parallel=auto_parallel)
    expected, trained = one_process(2 if auto_parallel else 1, steps=config.steps)
    first, _ = fit(replace(config, steps=6))
    ranks = {"cluster": "2 cpu", "constraints": {"dp": 2, "zero": 3}} if auto_parallel else {}
    second, resumed = fit(replace(config, **ranks))
    assert second.first_step == 6
    assert first.num_skipped == 6 and second.num_skipped == sum(expected.skipped) - 6
    assert second.losses == pytest.approx(expected.losses[6:], rel=1e-3)
    check_near(resumed, trained)


@pytest.mark.slow
def test_gradients_that_overflow_at_a_scale_of_one_stop_a_run() -> None:
    """No scale is to blame then: the weight alone leaves fp16's range. Where it may go on, a scale below 1 is found."""
    config = replace(CONFIG, loss_scale={"init_scale": 4}, steps=20)

    def heavy(start: int) -> Iterator[dict[str, Tensor]]:
        for batch in batches(start):
            yield {**batch, "target1": torch.full((ROWS,), 60000.0)}

    class Steep(Model):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 1000.0

    torch.manual_seed(0)
    with pytest.raises(TrainingError, match="with a loss scale of 1: nothing was updated"):
        Trainer(Steep(), replace(config, non_finite="stop"), heavy, weighted_loss, sgd).fit()
    assert 3 < Trainer(Steep(), config, heavy, weighted_loss, sgd).fit().num_skipped < 20


# Verification --------------------------------------------------------------------------------------------------------


def _distorting(*args: Any) -> Any:
    """Of the program that is verified, a gradient is off by a hundredth, which is ten units of fp16."""
    loss, gradients, scale = _one_step(*args)
    return loss, gradients | {"head.weight": 1.01 * gradients["head.weight"]}, scale


@pytest.mark.distributed
@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 12])
def test_verification_runs_steps_again_that_overflow(number: int) -> None:
    """The batch of step 12 weighs so much that the first scales of the default rule overflow."""
    options = {"example_inputs": batch(number), "loss_fn": weighted_loss, "precision": "fp16", "max_grad_norm": NORM}
    report = autopar.verify(model(), "2 cpu", constraints={"dp": 2}, steps=2, **options)
    assert report.tolerance == torch.finfo(torch.float16).eps
    assert report.ok(), report
    assert 1e-5 < report.largest_gradient < 0.01, "half precision was compared, and with fp32"


def test_verification_sees_an_error_beyond_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled({}, 1)
    assert verify_program(program, batch(0), steps=1).ok()
    monkeypatch.setattr(sys.modules[verify_program.__module__], "_one_step", _distorting)
    report = verify_program(program, batch(0), steps=1)
    assert not report.ok() and report.beyond(report.tolerance) == ("head.weight",)


# What is asked for ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"precision": "bf16", "loss_scale": {"init_scale": 2.0}}, "needs precision 'fp16'"),
        ({"precision": "fp16", "loss_scale": {"init_scal": 2.0}}, "init_scale"),
        ({"precision": "fp16", "loss_scale": {"growth_interval": 0}}, "growth_interval"),
        ({"precision": "fp16", "loss_scale": 1024}, "loss_scale must be a mapping"),
        ({"precision": "half"}, "fp32, bf16, fp16"),
    ],
)
def test_a_wrong_scale_is_refused_by_name(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConstraintError, match=text):
        TrainerConfig(**fields)


def test_fp8_is_refused_in_fp16() -> None:
    with pytest.raises(ConstraintError, match="fp8 does not work with fp16"):
        compiled({}, 1, fp8=True)


def test_a_scale_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("precision: fp16\nloss_scale:\n  init_scale: 1024\n  growth_interval: 7\n")
    config = TrainerConfig.from_file(path)
    assert config.loss_scale == {"init_scale": 1024, "growth_interval": 7}


@pytest.mark.slow
def test_fp16_is_priced_by_what_devices_multiply_in() -> None:
    """V100s have no bf16, and multiply it as fp32; where both are there they cost the same, in memory always."""
    example = gpt2(layers=2, width=1024, num_heads=8, batch_size=16, seq_len=256)

    def prediction(cluster: str, precision: str) -> Any:
        settings = {"constraints": {"dp": 8}, "kernels": "off", "example_inputs": example.inputs}
        return autopar.compile(example.model, cluster, precision=precision, **settings).plan.prediction

    ampere, volta = (
        [prediction(cluster, precision) for precision in ("fp16", "bf16")] for cluster in ("8 a100-80g", "8 v100-32g")
    )
    assert ampere[0].step_seconds == pytest.approx(ampere[1].step_seconds)
    assert ampere[0].peak_bytes == ampere[1].peak_bytes and volta[0].peak_bytes == volta[1].peak_bytes
    assert volta[0].step_seconds < 0.7 * volta[1].step_seconds
