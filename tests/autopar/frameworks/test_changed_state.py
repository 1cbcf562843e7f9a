"""Numbers, masks, buffers and flags that scripts of other packages change on the model: the losses of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from autopar.frameworks import accelerate as of_accelerate
from autopar.frameworks import transformers as of_transformers
from autopar.frameworks.lightning import AutoparStrategy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.beta, self.uses_bias = nn.Linear(12, 16), nn.Linear(16, 12), 0.3, True
        self.mask = torch.ones(16)
        self.register_buffer("weights", torch.ones(12))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.inner(x) * self.mask
        if self.uses_bias:
            hidden = hidden + 0.1
        errors = F.mse_loss(self.outer(hidden) * self.weights, labels)
        return {"loss": errors + self.beta * hidden.square().mean()}


class LossOnly(Net):
    """As Accelerate and Lightning have it here."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return super().forward(x, labels)["loss"]


def changes(model: Net, step: int) -> None:
    model.beta = 0.3 + 0.2 * step
    model.mask[step] = 0.0
    model.weights.mul_(0.8)


def switches(model: Net, step: int) -> None:
    model.uses_bias = step < 1


Change = Callable[[Net, int], None]


def samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{name: torch.randn(12, generator=generator) for name in ("x", "labels")} for _ in range(32)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def eager(change: Change) -> list[float]:
    model, losses = LossOnly(), []
    optimizer = sgd(model)
    for step, batch in enumerate(DataLoader(samples(), batch_size=8)):
        change(model, step)
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def with_accelerate(change: Change, folder: Path) -> list[float]:
    accelerator, model, losses = of_accelerate.parallelize(Accelerator(cpu=True), "1 cpu"), LossOnly(), []
    prepared, optimizer, loader = accelerator.prepare(model, sgd(model), DataLoader(samples(), batch_size=8))
    for step, batch in enumerate(loader):
        prepared.train()
        change(model, step)
        loss = prepared(**batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def with_trainer(change: Change, folder: Path) -> list[float]:
    losses, model = [], Net()

    class Changing(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            change(model, state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **named: Any) -> None:
            losses.extend([float(logs["loss"])] if "loss" in logs else [])

    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=8, num_train_epochs=1, use_cpu=True, logging_steps=1,
        report_to=[], learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0, save_strategy="no",
        disable_tqdm=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=samples(), callbacks=[Changing()], optimizers=(sgd(model), None))
    of_transformers.parallelize(trainer, "1 cpu").train()
    return losses


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = LossOnly()

    def training_step(self, batch: Any, index: int) -> Any:
        gathered = self.all_gather(batch["x"])  # on one process the batch itself
        return self.net(gathered, batch["labels"])

    def configure_optimizers(self) -> Any:
        return sgd(self)


def with_lightning(change: Change, folder: Path) -> list[float]:
    losses: list[float] = []

    class Changing(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            change(module.net, index)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            losses.append(float(outputs["loss"]))

    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "max_epochs": 1, "callbacks": [Changing()]}
    trainer = lightning.Trainer(strategy=AutoparStrategy("1 cpu"), **quiet)
    trainer.fit(Module(), DataLoader(samples(), batch_size=8))
    return losses


LOOPS = (with_accelerate, with_trainer, with_lightning)


@pytest.mark.slow
@pytest.mark.parametrize("change", [changes, switches])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_a_script_changes_is_followed(
    loop: Callable[[Change, Path], list[float]], change: Change, tmp_path: Path
) -> None:
    assert loop(change, tmp_path) == pytest.approx(eager(change), rel=1e-4)


def test_values_and_statistics_may_be_written_together_where_they_are_up_to_date() -> None:
    """With a buffer that forward updates, and a number."""

    class Averaging(LossOnly):
        def forward(self, x: Tensor, labels: Tensor) -> Any:
            with torch.no_grad():
                self.weights.lerp_(labels.square().mean(0), 0.1)
            return super().forward(x, labels)

    @torch.no_grad()
    def writes(model: Any, step: int) -> None:
        model.outer.weight.clamp_(-0.2, 0.2), model.weights.mul_(0.9)
        model.beta = 0.3 + 0.1 * step

    accelerator, model = of_accelerate.parallelize(Accelerator(cpu=True), "1 cpu"), Averaging()
    prepared, optimizer, loader = accelerator.prepare(model, sgd(model), DataLoader(samples(), batch_size=8))
    by_hand = Averaging()
    by_hand_optimizer = sgd(by_hand)
    for step, batch in enumerate(loader):
        writes(accelerator.unwrap_model(prepared), step), writes(by_hand, step)
        loss = prepared(**batch)
        accelerator.backward(loss)
        optimizer.step(), optimizer.zero_grad()
        right = by_hand(**batch)
        right.backward()
        by_hand_optimizer.step(), by_hand_optimizer.zero_grad()
        assert float(loss) == pytest.approx(float(right), rel=1e-5)
