"""A Trainer's work besides steps: schedules, evaluation, callbacks, logs, joined batches; against loops by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from autopar import Callback, Trainer, TrainerConfig, TrainState
from autopar.errors import CheckpointError, ConstraintError, DataError
from autopar.training.records import read_records

CONFIG = TrainerConfig(auto_parallel=False, steps=6, learning_rate=0.1, log_every=0)
ROWS = 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.last(self.norm(torch.tanh(self.first(x)))) - y).square().mean()


def batches(count: int = 5, rows: int = ROWS, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    xs = torch.randn(count, rows, 4, generator=generator)
    return [{"x": x, "y": x.sum(1, keepdim=True).sin()} for x in xs]


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return OneCycleLR(optimizer, max_lr=0.2, total_steps=20)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def by_hand(
    steps: int, make: Any, data: list[dict[str, Tensor]], schedule: Any = None, every: int = 0, clip: float = math.inf
) -> tuple[nn.Module, list[float], list[float]]:
    """The model, its losses and rates, of a loop as a user writes it."""
    model = Net()
    optimizer = make(model)
    scheduler = None if schedule is None else schedule(optimizer)
    losses, rates = [], []
    for step in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        loss = model(**data[step % len(data)])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(loss.detach()))
        if scheduler is not None and not every:
            scheduler.step()
        elif scheduler is not None and (step + 1) % every == 0:
            scheduler.step(evaluated(model))
    return model, losses, rates


def evaluated(model: nn.Module) -> float:
    with torch.no_grad():
        return sum(float(model(**batch)) for batch in batches(3, seed=9)) / 3


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.01)


SLOW = (pytest.mark.distributed, pytest.mark.slow)
PARALLEL = replace(CONFIG, auto_parallel=True, cluster="2 cpu", constraints={"dp": 2, "zero": 3})


@pytest.mark.parametrize("config", [CONFIG, pytest.param(PARALLEL, marks=pytest.mark.distributed)])
def test_any_schedule_of_torch_is_that_of_the_loop_by_hand(config: TrainerConfig, tmp_path: Path) -> None:
    _, losses, rates = by_hand(6, adamw, batches(), one_cycle)
    config = replace(config, checkpoint_directory=str(tmp_path), checkpoint_every=3)
    Trainer(Net(), replace(config, steps=3), batches(), schedule=one_cycle).fit()
    result = Trainer(Net(), config, batches(), schedule=one_cycle).fit()  # goes on
    assert result.first_step == 3 and result.losses == pytest.approx(losses[3:], rel=1e-5)
    records = read_records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["learning_rate"] for record in records] == pytest.approx(rates, rel=1e-12)
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-5)


def test_a_schedule_that_waits_for_the_loss_takes_that_of_evaluations() -> None:
    model, losses, rates = by_hand(6, adamw, batches(), plateau, every=2)
    config = replace(CONFIG, evaluation={"every": 2}, logging={})
    result = Trainer(model := Net(), config, batches(), schedule=plateau, eval_batches=batches(3, seed=9)).fit()
    assert result.losses == pytest.approx(losses, rel=1e-6) and result.model is model
    assert [record["step"] for record in result.evaluations] == [2, 4, 6]
    assert result.evaluations[-1]["loss"] == pytest.approx(evaluated(model), rel=1e-6)


@pytest.mark.parametrize("name", ["linear", "cosine", "inverse-sqrt", "constant"])
def test_named_schedules_are_those_of_transformers(name: str) -> None:
    import transformers

    from autopar.training.optimizers import schedule_of

    config = replace(CONFIG, steps=40, schedule={"name": name, "warmup_steps": 8})
    ours = schedule_of(config)
    assert ours is not None
    optimizers = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0) for _ in range(2)]
    theirs: Any = {
        "linear": lambda o: transformers.get_linear_schedule_with_warmup(o, 8, 40),
        "cosine": lambda o: transformers.get_cosine_schedule_with_warmup(o, 8, 40),
        "inverse-sqrt": lambda o: transformers.get_inverse_sqrt_schedule(o, 8),
        "constant": lambda o: transformers.get_constant_schedule_with_warmup(o, 8),
    }[name]
    first, second = ours(optimizers[0]), theirs(optimizers[1])
    for _ in range(40):
        assert optimizers[0].param_groups[0]["lr"] == pytest.approx(
            optimizers[1].param_groups[0]["lr"], rel=1e-9, abs=1e-12
        )
        for optimizer, scheduler in zip(optimizers, (first, second), strict=True):
            optimizer.step()
            scheduler.step()


@pytest.mark.parametrize("config", [CONFIG, pytest.param(PARALLEL, marks=SLOW)])
def test_named_optimisers_and_their_groups(config: TrainerConfig) -> None:
    def groups(model: nn.Module) -> torch.optim.Optimizer:
        still = [p for n, p in model.named_parameters() if p.ndim <= 1 or n.startswith("last")]
        rest = [p for n, p in model.named_parameters() if p.ndim > 1 and not n.startswith("last")]
        parts = [{"params": rest}, {"params": still, "weight_decay": 0.0}]
        return torch.optim.Adam(parts, lr=0.1, weight_decay=0.3, betas=(0.8, 0.9))

    _, losses, _ = by_hand(6, groups, batches(), clip=0.5)
    section = {"name": "adam", "no_decay": ["1d", "last*"], "arguments": {"betas": [0.8, 0.9]}}
    config = replace(config, optimizer=section, weight_decay=0.3, max_grad_norm=0.5)
    assert Trainer(Net(), config, batches()).fit().losses == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("config", [CONFIG, pytest.param(PARALLEL, marks=SLOW)])
def test_successive_batches_are_one_step(config: TrainerConfig) -> None:
    small = batches(6, ROWS // 2)
    whole = [{n: torch.cat([small[i][n], small[i + 1][n]]) for n in ("x", "y")} for i in (0, 2, 4)]
    _, losses, _ = by_hand(6, adamw, whole)
    result = Trainer(Net(), replace(config, gradient_accumulation_steps=2), small).fit()
    assert result.losses == pytest.approx(losses, rel=1e-5) and result.num_samples == 6 * ROWS


def test_batches_that_do_not_join_are_refused() -> None:
    config = replace(CONFIG, gradient_accumulation_steps=2)
    uneven = [{"x": torch.zeros(4, 4), "y": torch.zeros(4, 1)}, {"x": torch.zeros(4, 5), "y": torch.zeros(4, 1)}]
    with pytest.raises(DataError, match="more than their rows"):
        Trainer(Net(), config, uneven).fit()
    with pytest.raises(ConstraintError, match="joined to a step"):
        Trainer(Net(), replace(config, global_batch_size=7), batches())


class Watch(Callback):
    def __init__(self, stop_at: int = 0) -> None:
        self.events: list[str] = []
        self.losses: list[float] = []
        self.stop_at = stop_at

    def on_start(self, state: TrainState) -> None:
        self.events.append(f"start {state.step}")

    def on_step(self, state: TrainState) -> bool:
        self.losses.append(state.record["loss"])
        return state.step == self.stop_at

    def on_evaluation(self, state: TrainState) -> None:
        self.events.append(f"evaluation {state.step}")

    def on_checkpoint(self, state: TrainState) -> None:
        self.events.append(f"checkpoint {Path(state.record['checkpoint']).name}")

    def on_end(self, state: TrainState) -> None:
        self.events.append(f"end {state.step}")


@pytest.mark.parametrize("config", [CONFIG, pytest.param(PARALLEL, marks=SLOW)])
def test_callbacks_see_all_and_end_training(config: TrainerConfig, tmp_path: Path) -> None:
    watch = Watch(stop_at=4)
    config = replace(config, checkpoint_directory=str(tmp_path), evaluation={"every": 3})
    result = Trainer(Net(), config, batches(), callbacks=[watch], eval_batches=batches(3, seed=9)).fit()
    assert watch.losses == list(result.losses) and len(result.losses) == 4
    assert watch.events == ["start 0", "evaluation 3", "evaluation 4", "checkpoint step-00000004", "end 4"]
    assert "Watch" in result.stopped and result.checkpoint == tmp_path / "step-00000004"
    with pytest.raises(ConstraintError, match="a class"):
        Trainer(Net(), CONFIG, batches(), callbacks=[Watch])  # type: ignore[list-item]


@pytest.mark.parametrize("config", [CONFIG, pytest.param(PARALLEL, marks=SLOW)])
def test_training_without_hope_stops_also_after_a_resumption(config: TrainerConfig, tmp_path: Path) -> None:
    """With a rate of 0 nothing improves: the first evaluation is the best."""
    section = {"every": 1, "patience": 3}
    config = replace(
        config, learning_rate=0.0, weight_decay=0.0, evaluation=section, checkpoint_directory=str(tmp_path)
    )
    two = Trainer(Net(), replace(config, steps=2), batches(), eval_batches=batches(1, seed=9)).fit()
    assert len(two.evaluations) == 2 and not two.stopped
    rest = Trainer(Net(), config, batches(), eval_batches=batches(1, seed=9)).fit()
    assert len(rest.evaluations) == 2 and "3 evaluations without a better loss" in rest.stopped
    assert rest.evaluations[0]["loss"] == pytest.approx(two.evaluations[0]["loss"], rel=1e-6)
    again = Trainer(Net(), config, batches(), eval_batches=batches(1, seed=9)).fit()
    assert not again.losses and again.first_step == 4 and again.stopped == rest.stopped


class Stream:
    """Batches that can only go forward, and say where they are."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        while True:
            self.at += 1
            yield batches(1, seed=self.at)[0]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_stream_goes_on_where_its_checkpoint_was(tmp_path: Path) -> None:
    config = replace(CONFIG, checkpoint_directory=str(tmp_path))
    whole = Trainer(Net(), replace(CONFIG, steps=6), Stream()).fit()
    listed = Trainer(Net(), replace(CONFIG, steps=6), [batches(1, seed=at)[0] for at in range(1, 7)]).fit()
    assert whole.losses == listed.losses  # the look at the first batch took none
    Trainer(Net(), replace(config, steps=2), Stream()).fit()
    result = Trainer(Net(), config, Stream()).fit()
    assert result.first_step == 2 and result.losses == pytest.approx(whole.losses[2:], rel=1e-6)


def test_what_cannot_be_saved_is_told_after_the_first_step(tmp_path: Path) -> None:
    class Unsavable(Stream):
        def state_dict(self) -> Any:
            return {"at": self.at, "folder": Path("x")}

    config = replace(CONFIG, checkpoint_directory=str(tmp_path))
    watch = Watch()
    with pytest.raises(CheckpointError, match="state of the batches"):
        Trainer(Net(), config, Unsavable(), callbacks=[watch]).fit()
    assert not watch.losses


# Logs ----------------------------------------------------------------------------------------------------------------


def test_the_log_of_another_run_is_kept(tmp_path: Path) -> None:
    config = replace(CONFIG, logging={"directory": str(tmp_path)}, steps=2)
    for _ in range(2):
        Trainer(Net(), config, batches()).fit()
    assert [len(read_records(tmp_path / name)) for name in ("metrics.jsonl", "metrics.1.jsonl")] == [2, 2]


def test_numbers_that_are_not_finite_are_json_too(tmp_path: Path) -> None:
    spoiled = [{"x": torch.full((ROWS, 4), math.inf), "y": torch.zeros(ROWS, 1)}, *batches(1)]
    Trainer(Net(), replace(CONFIG, logging={"directory": str(tmp_path)}, steps=2), spoiled).fit()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == "nan" and lines[0]["skipped"] == 1 and lines[1]["loss"] < 10


def test_tensorboard_has_what_the_lines_have(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = replace(CONFIG, logging={"directory": str(tmp_path), "tensorboard": True}, evaluation={"every": 3})
    result = Trainer(Net(), config, batches(), eval_batches=batches(1)).fit()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [scalar.value for scalar in events.Scalars("loss")] == pytest.approx(result.losses, rel=1e-6)
    assert [scalar.step for scalar in events.Scalars("eval_loss")] == [3, 6]
    with pytest.raises(ConstraintError, match=r"needs logging\.directory"):
        Trainer(Net(), replace(CONFIG, logging={"tensorboard": True}), batches()).fit()


@pytest.mark.slow
@pytest.mark.distributed
def test_every_rank_writes_the_trace_of_the_window(tmp_path: Path) -> None:
    config = replace(PARALLEL, profiler={"directory": str(tmp_path), "first_step": 2, "num_steps": 1}, steps=4)
    Trainer(Net(), config, batches()).fit()
    for rank in range(2):
        events = json.loads((tmp_path / f"rank_{rank}.json").read_text())["traceEvents"]
        steps = [event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep#")]
        assert steps and set(steps) == {"ProfilerStep#1"}


# Batches of other shapes ---------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """A small language model with dropout: what it draws follows from the seed, the step and the rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(32, 16)
        layers = (nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(2))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


def token_batches(*shapes: tuple[int, int]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(32, shape, generator=generator) for shape in shapes]
    return [{"ids": tokens, "labels": torch.where(tokens < 3, -100, tokens)} for tokens in ids]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "constraints",
    [
        {"dp": 2, "zero": 3, "micro_batches": 2},
        {"tp": 2},
        {"pp": 2, "micro_batches": 2, "schedule": "zero-bubble"},
    ],
)
def test_batches_of_other_shapes_train_as_on_one_process(constraints: dict[str, Any], tmp_path: Path) -> None:
    """Lengths in buckets, a short batch, and (once) a resumption in the middle of an epoch."""
    data, held_out = token_batches((8, 12), (4, 6), (8, 12)), token_batches((4, 6), (8, 3))
    section = {"name": "sgd", "arguments": {"momentum": 0.9}}  # AdamW makes large what is round-off (biases of keys)
    config = replace(CONFIG, steps=8, learning_rate=0.1, optimizer=section, evaluation={"every": 4})
    plain = Trainer(Tokens(), config, data, eval_batches=held_out).fit()
    parallel = replace(config, auto_parallel=True, cluster="2 cpu", constraints=constraints)
    parallel = replace(parallel, checkpoint_directory=str(tmp_path))
    if done := 3 if "zero" in constraints else 0:
        Trainer(Tokens(), replace(parallel, steps=done), data, eval_batches=held_out).fit()
    result = Trainer(model := Tokens(), parallel, data, eval_batches=held_out).fit()
    assert result.first_step == done and result.losses == pytest.approx(plain.losses[done:], rel=2e-5)
    assert result.num_samples == plain.num_samples == 2 * 20 + 12
    for ours, theirs in zip(result.evaluations, plain.evaluations, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5)
    assert plain.model is not None
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.slow
@pytest.mark.distributed
def test_batches_of_other_shapes_in_fp16_skip_and_warm_up_as_on_one_process() -> None:
    """The first scale overflows: steps of all shapes share one scale, and the schedule waits for the one skipped.

    The second is far from where gradients overflow, which ranks with fewer rows reach later than one process does.
    """
    data = token_batches((8, 12), (8, 6), (4, 12))
    config = replace(
        CONFIG,
        steps=6,
        precision="fp16",
        loss_scale={"init_scale": 2.0**30, "backoff_factor": 2.0**-16},
        optimizer={"name": "sgd", "arguments": {"momentum": 0.9}},  # as in the test before
        schedule={"name": "linear", "warmup_steps": 2},
    )
    plain = Trainer(Tokens(), config, data).fit()
    parallel = replace(config, auto_parallel=True, cluster="2 cpu", constraints={"dp": 2, "zero": 3})
    result = Trainer(Tokens(), parallel, data).fit()
    assert result.num_skipped == plain.num_skipped > 0
    assert result.losses == pytest.approx(plain.losses, rel=2e-3)


def test_rows_that_ranks_cannot_share_are_refused_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.launch.mp.get_context", lambda _: pytest.fail("a rank was started"))
    uneven = [*batches(1), *batches(1, rows=7)]
    with pytest.raises(DataError, match="divided among the data-parallel ranks"):
        Trainer(Net(), PARALLEL, uneven).fit()
    loader: Any = torch.utils.data.DataLoader([{"x": b["x"][0], "y": b["y"][0]} for b in batches(11)], batch_size=8)
    with pytest.raises(DataError, match="3 rows on dp2"):
        Trainer(Net(), PARALLEL, loader).fit()
    with pytest.raises(DataError, match="3 rows on dp2"):
        Trainer(Net(), replace(PARALLEL, evaluation={"every": 1}), batches(), eval_batches=loader).fit()


class OtherInEvaluation(Net):
    """Computes another loss in evaluation mode, which a program made from the training trace does not have."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        return loss if self.training else loss.sqrt()


def test_a_program_that_cannot_evaluate_is_told_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.launch.mp.get_context", lambda _: pytest.fail("a rank was started"))
    config = replace(PARALLEL, evaluation={"every": 2})
    with pytest.raises(ConstraintError, match="no evaluation mode"):
        Trainer(OtherInEvaluation(), config, batches(), eval_batches=batches(1)).fit()
