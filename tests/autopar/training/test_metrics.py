"""Metrics of a Trainer's evaluations against a loop by hand, on one process and on many."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import Callback, Trainer, TrainerConfig, TrainState
from autopar.errors import ConstraintError, TrainingError
from autopar.launch import run_ranks
from autopar.training.metrics import Means, metric_values, metrics_of

ROWS = 8
CONFIG = TrainerConfig(auto_parallel=False, steps=4, learning_rate=0.1, log_every=0, evaluation={"every": 2})
PARALLEL = replace(CONFIG, auto_parallel=True, cluster="2 cpu", constraints={"tp": 2})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(torch.tanh(self.first(x)))
        return logits


def batches(count: int, seed: int = 0, rows: int = ROWS) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    xs = torch.randn(count, rows, 4, generator=generator)
    return [{"x": x, "y": x[:, :3].argmax(1)} for x in xs]


def accuracy(logits: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"accuracy": (logits.argmax(-1) == batch["y"]).float().mean()}


def spread(logits: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    return {"spread": float(logits.std(dim=-1).mean()), "rows": len(logits)}


def by_hand(data: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """Return the evaluations after two steps and after four."""
    model, records = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=CONFIG.weight_decay)
    for step, batch in enumerate(batches(4), 1):
        optimizer.zero_grad()
        F.cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        if step % 2 == 0:
            with torch.no_grad():
                logits = torch.cat([model(rows["x"]) for rows in data])
                target = torch.cat([rows["y"] for rows in data])
                right = float((logits.argmax(-1) == target).float().mean())
                loss = float(F.cross_entropy(logits, target))
                records.append({"loss": loss, "accuracy": right, "spread": float(logits.std(dim=-1).mean())})
    return records


class Seen(Callback):
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def on_evaluation(self, state: TrainState) -> None:
        self.records.append(dict(state.record))


@pytest.mark.distributed
@pytest.mark.parametrize("config", [CONFIG, PARALLEL], ids=("one process", "tp2"))
def test_metrics_are_those_of_the_loop_by_hand(config: TrainerConfig, tmp_path: Path) -> None:
    """Of batches of unequal numbers of rows, in all that tells them."""
    data = [*batches(2, seed=9), *batches(1, seed=8, rows=4)]
    expected, seen = by_hand(data), Seen()
    config = replace(config, logging={"directory": str(tmp_path)})
    result = Trainer(
        Net(),
        config,
        batches(4),
        loss_fn=F.cross_entropy,
        eval_batches=data,
        metrics=[accuracy, spread],
        callbacks=[seen],
    ).fit()
    assert [evaluated["step"] for evaluated in result.evaluations] == [2, 4]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = [line for line in lines if "eval_loss" in line]
    for want, *others in zip(expected, result.evaluations, told, seen.records, strict=True):
        evaluation, *records = others
        assert {name: evaluation[name] for name in want} == pytest.approx(want, rel=1e-4)
        assert evaluation["rows"] == pytest.approx((ROWS * ROWS * 2 + 4 * 4) / (2 * ROWS + 4))
        for record in records:
            assert {name: record[f"eval_{name}"] for name in want} == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("config", [CONFIG, pytest.param(PARALLEL, marks=(pytest.mark.distributed, pytest.mark.slow))])
def test_patience_watches_a_metric_in_its_direction(config: TrainerConfig) -> None:
    """Each evaluation finds one less than the one before: best at first if more is better, else at last."""
    for greater, steps in ((True, 4), (False, 8)):
        section = {"every": 1, "patience": 3, "metric": "countdown", "greater_is_better": greater}
        trainer = Trainer(
            Net(),
            replace(config, steps=8, evaluation=section),
            batches(8),
            loss_fn=F.cross_entropy,
            eval_batches=batches(1),
            metrics=Countdown(),
        )
        result = trainer.fit()
        assert len(result.losses) == steps
        assert result.stopped == ("3 evaluations without a better countdown than -2" if greater else "")


class Countdown:
    """Called once before the first step, too."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, logits: Tensor, batch: Any) -> dict[str, float]:
        self.calls += 1
        return {"countdown": -self.calls}


class OwnLoss(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x), y)


def test_what_cannot_be_measured_is_refused_before_anything_is_started() -> None:
    data = batches(1)
    with pytest.raises(ConstraintError, match="metrics need eval_batches"):
        Trainer(Net(), replace(CONFIG, evaluation={}), data, loss_fn=F.cross_entropy, metrics=accuracy)
    with pytest.raises(ConstraintError, match="metrics are functions"):
        Trainer(Net(), CONFIG, data, loss_fn=F.cross_entropy, eval_batches=data, metrics=["accuracy"])  # type: ignore[list-item]
    section = {"patience": 1, "metric": "accuracy"}
    with pytest.raises(ConstraintError, match="none of the metrics"):
        Trainer(Net(), replace(CONFIG, evaluation=section), data, eval_batches=data)
    single = replace(PARALLEL, cluster="1 cpu", constraints=None)
    for config in (single, CONFIG):
        with pytest.raises(ConstraintError, match="metrics need logits"):
            Trainer(OwnLoss(), config, data, eval_batches=data, metrics=accuracy).fit()
    seen = Seen()
    config = replace(CONFIG, evaluation={"metric": "precision"})
    with pytest.raises(ConstraintError, match="none of the metrics") as caught:
        Trainer(Net(), config, data, F.cross_entropy, eval_batches=data, metrics=accuracy, callbacks=[seen]).fit()
    assert "accuracy" in str(caught.value) and not seen.records


def test_functions_that_give_no_metrics_are_named() -> None:
    logits, batch = torch.zeros(2, 3), {"y": torch.zeros(2)}

    def wrong(value: Any) -> Any:
        return lambda logits, batch: value

    assert metric_values(metrics_of([wrong({"a": True}), wrong({"b": torch.tensor(2)})]), logits, batch) == {
        "a": 1,
        "b": 2,
    }
    for value in (0.5, {"a": "x"}, {"a": torch.zeros(2)}, {1: 0.5}, {"loss": 0.5}):
        with pytest.raises(ConstraintError, match="one number each"):
            metric_values(metrics_of(wrong(value)), logits, batch)
    with pytest.raises(ConstraintError, match="one number each"):
        metric_values([wrong({"a": 1}), wrong({"a": 2})], logits, batch)
    means = Means()
    means.add({"a": 1.0}, 3)
    with pytest.raises(ConstraintError, match="same names"):
        means.add({"b": 1.0}, 3)


def told(_: int) -> tuple[dict[str, float], str]:
    """Return a rank's values of a function that differs by rank, and of one that fails on rank 0 alone."""
    logits, rank = torch.zeros(2, 3), dist.get_rank()

    def fails(logits: Tensor, batch: Any) -> dict[str, float]:
        raise ZeroDivisionError(f"rank {rank}")

    values = metric_values([lambda logits, batch: {"rank": rank}], logits, {})
    try:
        metric_values([fails], logits, {})
    except (ZeroDivisionError, TrainingError) as error:
        return values, type(error).__name__
    return values, ""


@pytest.mark.distributed
def test_metrics_are_those_of_rank_0_on_all() -> None:
    first, second = run_ranks(told, (0,), 2)
    assert first == ({"rank": 0.0}, "ZeroDivisionError") and second == ({"rank": 0.0}, "TrainingError")


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, auto_parallel=True, cluster="1 cpu")])
def test_what_forward_counts_is_steps_and_no_evaluations(config: TrainerConfig) -> None:
    model = Counting()
    data = batches(4)
    Trainer(model, config, data, F.cross_entropy, eval_batches=data[:1], metrics=accuracy).fit()
    assert float(model.count) == config.steps
