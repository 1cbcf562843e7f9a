"""transformers' Trainer around a program on four processes does what it does on one: losses, norms, rates, files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("accelerate")

from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from autopar.errors import AutoparError  # noqa: E402
from autopar.frameworks.building import rows_of_steps  # noqa: E402
from autopar.frameworks.transformers import parallelize  # noqa: E402
from autopar.launch import run_ranks  # noqa: E402

RANKS, STEPS, LENGTH, WORDS = 4, 6, 16, 64
NUMBERS = ("loss", "grad_norm", "learning_rate", "eval_loss", "step", "train_loss", "total_flos")
CONFIG = LlamaConfig(
    vocab_size=WORDS,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
)


def samples(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Sequences of which each has another number of targets."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        ids = torch.randint(WORDS, (LENGTH,), generator=generator)
        labels = torch.where(torch.arange(LENGTH) < number % 9, -100, ids)
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def trainer_of(folder: Path, kind: type[Trainer] = Trainer, model: Any = None, **named: Any) -> Trainer:
    torch.manual_seed(0)
    arguments = named.pop("trainer", {})
    settings: dict[str, Any] = dict(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        per_device_eval_batch_size=8,
        max_steps=STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    args = TrainingArguments(**{**settings, **named})
    return kind(
        model=model or LlamaForCausalLM(CONFIG),
        args=args,
        train_dataset=samples(40, 1),
        eval_dataset=samples(16, 2),
        **arguments,
    )


def numbers(trainer: Trainer) -> list[dict[str, float]]:
    return [{name: entry[name] for name in NUMBERS if name in entry} for entry in trainer.state.log_history]


def script(folder: Path, adapt: Callable[[Trainer], Trainer]) -> dict[str, Any]:
    """Trains over an epoch's end, trains on from the checkpoint of step 3, predicts, and saves."""
    trainer = adapt(trainer_of(folder / "run"))
    trainer.train()
    figures: dict[str, Any] = {"whole": numbers(trainer)}
    trainer.save_model(str(folder / "saved"))
    again = adapt(trainer_of(folder / "again", load_best_model_at_end=True))
    again.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-3"))
    figures["resumed"] = numbers(again)
    figures["after"] = again.evaluate()["eval_loss"]
    figures["logits"] = again.predict(samples(4, 3)).predictions
    figures["weights"] = {name: value.detach().numpy().copy() for name, value in trainer.model.state_dict().items()}
    figures["rows"] = trainer.get_total_train_batch_size(trainer.args)
    return figures


def rank(folder: Path) -> dict[str, Any] | None:
    me = dist.get_rank()
    os.environ |= {"RANK": str(me), "LOCAL_RANK": str(me), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    figures = script(folder, lambda trainer: parallelize(trainer, f"{RANKS} cpu", constraints={"pp": 2, "dp": 2}))
    return figures if me == 0 else None


@pytest.mark.slow
@pytest.mark.distributed
def test_losses_files_and_resumption_are_those_of_one_process(tmp_path: Path) -> None:
    ours = run_ranks(rank, (tmp_path / "ranks",), RANKS)[0]
    theirs = script(tmp_path / "one", lambda trainer: trainer)
    for name in ("whole", "resumed"):
        assert len(ours[name]) == len(theirs[name]) >= STEPS
        for mine, one in zip(ours[name], theirs[name], strict=True):
            assert mine == pytest.approx(one, rel=1e-5)
    assert ours["rows"] == theirs["rows"] == 8
    assert ours["after"] == pytest.approx(theirs["after"], rel=1e-5)
    np.testing.assert_allclose(ours["logits"], theirs["logits"], rtol=1e-3, atol=1e-4)
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "ranks" / "saved").state_dict()
    for name, value in theirs["weights"].items():
        np.testing.assert_allclose(ours["weights"][name], value, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(saved[name], value, rtol=1e-3, atol=1e-4)
    files = [{path.name for path in (tmp_path / who / "run").iterdir()} for who in ("ranks", "one")]
    assert files[0] == files[1]


@pytest.mark.slow
def test_an_optimiser_and_a_schedule_of_ones_own_are_taken(tmp_path: Path) -> None:
    figures = []
    for adapt in (lambda trainer: trainer, lambda trainer: parallelize(trainer, "1 cpu")):
        torch.manual_seed(0)
        model = LlamaForCausalLM(CONFIG)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        arguments = {"optimizers": (optimizer, schedule)}
        trainer = adapt(trainer_of(tmp_path, model=model, trainer=arguments, eval_strategy="no", save_strategy="no"))
        trainer.train()
        figures.append(numbers(trainer))
    for ours, theirs in zip(*reversed(figures), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


class OwnLoss(Trainer):
    def compute_loss(self, *args: Any, **named: Any) -> Any:
        return 2 * super().compute_loss(*args, **named)


class Looks(TrainerCallback):
    def on_pre_optimizer_step(self, *args: Any, **named: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ({"bf16": True}, "bf16: autocast"),
        ({"activation_checkpointing": True}, "activation_checkpointing"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"neftune_noise_alpha": 0.1}, "neftune"),
        ({"torch_compile": True}, "torch_compile"),
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy"),
        ({"kind": OwnLoss}, "compute_loss is overridden"),
        ({"trainer": {"compute_loss_func": lambda *args, **options: None}}, "compute_loss_func"),
        ({"trainer": {"callbacks": [Looks()]}}, "gradients before the update"),
        ({"model": LlamaForSequenceClassification}, "gradient_accumulation_steps=2"),
    ],
)
def test_what_would_be_otherwise_is_refused_before_the_first_step(
    tmp_path: Path, named: dict[str, Any], text: str
) -> None:
    if "model" in named:
        named = {"model": named["model"](CONFIG)}
    with pytest.raises(AutoparError, match=text):
        parallelize(trainer_of(tmp_path, **named), "1 cpu")


@pytest.mark.parametrize(
    ("samples_of_epoch", "drop_last", "most", "sizes"),
    [
        (40, False, None, {8}),
        (42, False, None, {8, 2}),
        (42, True, None, {8}),
        (42, False, 5, {8}),
        (3, False, None, {3}),
    ],
)
def test_rows_of_steps_are_known_ahead(
    samples_of_epoch: int, drop_last: bool, most: int | None, sizes: set[int]
) -> None:
    """Two batches of four make a step; the last of an epoch takes what is left, unless the run ends before it."""
    loader = torch.utils.data.DataLoader(range(samples_of_epoch), batch_size=4, drop_last=drop_last)  # type: ignore[arg-type]
    assert rows_of_steps(loader, 2, most) - {0} == sizes


def test_parameters_in_half_precision_are_refused_unless_asked_for(tmp_path: Path) -> None:
    """One process would update them in bf16, a program fp32 masters."""
    trainer = parallelize(trainer_of(tmp_path, model=LlamaForCausalLM(CONFIG).bfloat16()), "1 cpu")
    with pytest.raises(AutoparError, match="in half precision"):
        trainer.train()


def test_processes_that_the_arguments_do_not_know_of_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(AutoparError, match="do not know of the launched processes"):
        parallelize(trainer, "4 cpu")


def test_what_does_not_bear_on_the_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match="takes options of the plan"):
        parallelize(trainer_of(tmp_path), "1 cpu", steps=3)


def total(model: torch.nn.Module) -> float:
    return sum(p.abs().sum().item() for p in model.parameters())


class Average:
    """An average of weights, which holds the model by itself."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.seen = model, list[float]()

    def update(self) -> None:
        self.seen.append(total(self.model))


class Averaging(TrainerCallback):
    def __init__(self, average: Average) -> None:
        self.average = average

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.average.update()


class ByName(TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.seen.append(total(named["model"]))

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        self.seen.append(total(model))


class Logging(Trainer):
    def log(self, logs: dict[str, float], *args: Any, **named: Any) -> None:
        super().log(logs | {"total": total(self.model)}, *args, **named)


def seen_values(folder: Path, adapt: Callable[[Trainer], Trainer]) -> list[float]:
    """Return the values that callbacks and a subclass see in the model while it trains."""
    trainer = adapt(trainer_of(folder, Logging, eval_strategy="no", save_strategy="no"))
    callbacks = Averaging(Average(trainer.model)), ByName()
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train()
    logged = [entry["total"] for entry in trainer.state.log_history]
    return callbacks[0].average.seen + callbacks[1].seen + logged


@pytest.mark.slow
def test_who_looks_at_the_model_in_the_midst_of_training_finds_what_is_trained(tmp_path: Path) -> None:
    ours = seen_values(tmp_path / "ours", lambda trainer: parallelize(trainer, "1 cpu"))
    theirs = seen_values(tmp_path / "theirs", lambda trainer: trainer)
    assert len(set(ours)) == STEPS  # the first step has no rate yet
    assert ours == pytest.approx(theirs, rel=1e-5)


class Watching(TrainerCallback):
    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {"at": []}

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.steps["at"].append(state.global_step)


@pytest.mark.slow
def test_values_are_not_gathered_for_a_callback_that_only_counts(tmp_path: Path) -> None:
    trainer = parallelize(trainer_of(tmp_path, eval_strategy="no", save_strategy="no", max_steps=2), "1 cpu")
    trainer.add_callback(Watching())
    gathered: list[int] = []
    take = trainer.callback_handler.take_values
    trainer.callback_handler.take_values = lambda: (gathered.append(1), take())
    trainer.train()
    assert not gathered


class StopsAlone(TrainerCallback):
    """Ends training on one rank, as one does whose clock is ahead."""

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if dist.get_rank() == 1:
            control.should_training_stop = True


def stopping_rank(folder: Path) -> list[bool]:
    me = dist.get_rank()
    os.environ |= {"RANK": str(me), "LOCAL_RANK": str(me), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    trainer = parallelize(trainer_of(folder), "2 cpu")
    trainer.add_callback(StopsAlone())
    handler, control = trainer.callback_handler, trainer.control
    agreed = handler.on_step_end(trainer.args, trainer.state, control)
    return [agreed.should_training_stop, agreed.should_epoch_stop]


@pytest.mark.distributed
def test_what_a_callback_asks_for_on_one_rank_is_done_by_all(tmp_path: Path) -> None:
    assert run_ranks(stopping_rank, (tmp_path,), 2) == [[True, False]] * 2
