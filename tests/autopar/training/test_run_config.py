"""A TrainerConfig refuses, dumps and reads settings; callbacks keep their attributes."""

from __future__ import annotations

import math
import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from autopar import Callback, Trainer, TrainerConfig, TrainState
from autopar.errors import ConstraintError, OutputError
from autopar.training.callbacks import sendable_attributes, set_attributes
from codegen.runtime.loss_scale import LossScale
from tests.autopar.training.test_run import CONFIG, PARALLEL, Net, batches


@pytest.mark.parametrize(
    ("section", "eval_data", "said"),
    [
        ({"every": 5, "metric": "acc"}, batches(1), "none of the metrics"),
        ({}, lambda start: iter(batches()), "has no end"),
        ({}, [], "no eval_batches"),
        ({"patience": 2}, None, "needs eval_batches"),
        ({"every": 2}, None, "needs eval_batches"),
    ],
)
def test_evaluations_that_cannot_be_made_are_refused_before_training(section: Any, eval_data: Any, said: str) -> None:
    with pytest.raises(ConstraintError, match=said):
        Trainer(Net(), replace(CONFIG, evaluation=section), batches(), eval_batches=eval_data)


def test_folders_that_cannot_be_written_are_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "metrics.jsonl").mkdir()
    for section in (
        {"profiler": {"directory": str(tmp_path / "file" / "traces")}},
        {"logging": {"directory": str(tmp_path)}},
        {"checkpoint_directory": str(tmp_path)},
    ):
        with pytest.raises(OutputError):
            Trainer(Net(), replace(CONFIG, **section), batches()).fit()


class Locked(Callback):
    """Has something that cannot be sent to another process."""

    def __init__(self) -> None:
        self.lock, self.steps = threading.Lock(), 0

    def on_step(self, state: TrainState) -> None:
        self.steps += 1


class Slotted(Callback):
    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step(self, state: TrainState) -> None:
        self.seen.append(state.record["loss"])


def test_what_callbacks_note_comes_back_to_each_of_them() -> None:
    """As `fit` takes it from rank 0: what cannot be sent is left as it was, and moves nothing to another callback."""
    theirs, ours = (Locked(), Slotted(), Locked()), (Locked(), Slotted(), Locked())
    for index, callback in enumerate(theirs):
        for _ in range(index + 1):
            callback.on_step(TrainState(1, 2, 0, {"loss": 0.5}))
    lock = ours[0].lock
    set_attributes(ours, pickle.loads(pickle.dumps(sendable_attributes(theirs))))
    assert (ours[0].steps, ours[1].seen, ours[2].steps) == (1, [0.5, 0.5], 3)
    assert ours[0].lock is lock and not hasattr(ours[1], "steps")


def test_the_dump_has_what_python_may_give(tmp_path: Path) -> None:
    """Paths, numbers of numpy, tuples, infinities and a LossScale are written as a file has them, and read back."""
    config = replace(
        CONFIG,
        checkpoint_directory=tmp_path,
        plan=tmp_path / "plan.yaml",
        learning_rate=np.float64(0.25),
        precision="fp16",
        loss_scale=LossScale(init_scale=4.0),
        optimizer={"arguments": {"betas": (0.9, 0.95), "most": math.inf}},
    )
    assert TrainerConfig.from_mapping(yaml.safe_load(yaml.safe_dump(config.dump()))) == config
    with pytest.raises(ConstraintError, match=r"optimizer\.arguments"):
        replace(CONFIG, optimizer={"arguments": {"dtype": torch.bfloat16}})


def test_a_whole_section_may_be_overridden_with_its_rate() -> None:
    config = TrainerConfig.from_mapping({"learning_rate": 0.5}, overrides=["optimizer={name: sgd, lr: 0.25}"])
    assert (config.optimizer.name, config.learning_rate) == ("sgd", 0.25)


def test_sections_are_checked() -> None:
    for wrong, match in (
        ({"schedule": {"warmup_steps": "8"}}, r"schedule\.warmup_steps"),
        ({"schedule": {"warmup": 8}}, "did you mean 'warmup_steps'"),
        ({"schedule": "cosin"}, r"schedule\.name"),
        ({"evaluation": {"patience": 0}}, r"evaluation\.patience"),
        ({"optimizer": 3}, "optimizer is a group of fields"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
    ):
        with pytest.raises(ConstraintError, match=match):
            TrainerConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConstraintError, match="did you mean 'adam'"):
        Trainer(Net(), replace(CONFIG, optimizer="adamv"), batches())  # type: ignore[arg-type]
    with pytest.raises(ConstraintError, match=r"evaluation\.every needs eval_batches"):
        Trainer(Net(), replace(CONFIG, evaluation={"every": 1}), batches())


def test_overrides_go_over_a_file(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("steps: 5\noptimizer: {name: sgd, lr: 1e-3}\nconstraints: {tp: 2}\n")
    overrides = ["optimizer.lr=3e-4", "constraints.dp=2", "cluster=4 cpu", "schedule.name=linear", "steps=7"]
    config = TrainerConfig.from_file(file, overrides)
    assert config.learning_rate == 3e-4 and config.optimizer.name == "sgd" and config.steps == 7
    assert config.constraints == {"tp": 2, "dp": 2} and config.cluster == "4 cpu" and config.schedule.name == "linear"
    for wrong in ("steps", "=3", "steps.x=3", "optimizer.betas=1"):
        with pytest.raises(ConstraintError):
            TrainerConfig.from_file(file, [wrong])
    with pytest.raises(ConstraintError, match="learning_rate is set twice"):
        TrainerConfig.from_mapping({"learning_rate": 0.1, "optimizer": {"lr": 0.2}})


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_is_repeated_from_its_dump(tmp_path: Path) -> None:
    """The dump has what was found of the machine, the plan and all rates: the same plan and the same losses."""
    plan = Trainer(Net(), replace(PARALLEL, max_grad_norm=0.5), batches()).compile().plan
    config = replace(
        PARALLEL, cluster="detect", num_processes=2, max_grad_norm=0.5, plan=plan, schedule={"name": "cosine"}
    )
    first = Trainer(Net(), replace(config, checkpoint_directory=str(tmp_path / "a")), batches()).fit()
    again = TrainerConfig.from_file(tmp_path / "a" / "config.yaml", [f"checkpoint_directory={tmp_path / 'b'}"])
    assert again.plan == plan and not isinstance(again.cluster, str)
    second = Trainer(Net(), again, batches()).fit()
    assert second.program is not None and first.program is not None
    assert second.program.plan == first.program.plan and second.losses == first.losses
    assert replace(again, checkpoint_directory=None) == replace(
        TrainerConfig.from_mapping(again.dump()), checkpoint_directory=None
    )
