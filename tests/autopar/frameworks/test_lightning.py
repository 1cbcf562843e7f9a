"""Lightning's Trainer with AutoparStrategy on four processes has the figures of one; other steps are refused."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    BaseFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
)

from autopar.errors import AutoparError  # noqa: E402
from autopar.frameworks.lightning import AutoparStrategy  # noqa: E402
from autopar.launch import run_ranks  # noqa: E402

RANKS, STEPS, WIDTH = 4, 8, 32


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        guessed = self.layers(x)
        self.log("held_out", nn.functional.cross_entropy(guessed, y))
        self.log("accuracy", (guessed.argmax(-1) == y).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Figures(Callback):
    """Records the figures that each step and each validation logs, and the rate."""

    def __init__(self) -> None:
        self.logged: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.logged += [float(trainer.callback_metrics["loss"]), trainer.optimizers[0].param_groups[0]["lr"]]

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.logged += [float(trainer.callback_metrics[name]) for name in ("held_out", "accuracy")]


def loader(count: int, shuffle: bool) -> Any:
    generator = torch.Generator().manual_seed(count)
    rows = [(torch.randn(WIDTH, generator=generator), torch.tensor(number % 8)) for number in range(count)]
    return torch.utils.data.DataLoader(rows, batch_size=8, shuffle=shuffle)  # type: ignore[arg-type]


def fit(folder: Path, strategy: Any, steps: int, resumed: Path | None = None) -> dict[str, Any]:
    torch.manual_seed(3)
    module, figures = Classifier(), Figures()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=steps,
        gradient_clip_val=0.5,
        check_val_every_n_epoch=None,
        val_check_interval=4,
        callbacks=[figures, ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, loader(48, True), loader(16, False), ckpt_path=None if resumed is None else str(resumed))
    weights = {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}
    return {"figures": figures.logged, "weights": weights}


def script(folder: Path, strategy: Any) -> list[dict[str, Any]]:
    """A whole run, and one that goes on from its checkpoint at half."""
    whole = fit(folder, strategy(), STEPS)
    return [whole, fit(folder / "again", strategy(), STEPS, folder / "step=4.ckpt")]


def rank(folder: Path) -> list[dict[str, Any]] | None:
    me = dist.get_rank()
    os.environ |= {"RANK": str(me), "LOCAL_RANK": str(me), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    result = script(folder, lambda: AutoparStrategy(f"{RANKS} cpu"))
    return result if me == 0 else None


@pytest.mark.slow
@pytest.mark.distributed
def test_figures_weights_and_resumption_are_those_of_one_process(tmp_path: Path) -> None:
    ours = run_ranks(rank, (tmp_path / "ranks",), RANKS)[0]
    theirs = script(tmp_path / "one", lambda: "auto")
    for mine, one in zip(ours, theirs, strict=True):
        assert len(one["figures"]) >= STEPS
        assert mine["figures"] == pytest.approx(one["figures"], rel=1e-5)
        for name, value in one["weights"].items():
            np.testing.assert_allclose(mine["weights"][name], value, rtol=1e-3, atol=1e-4)


def looked_at(folder: Path, strategy: Any) -> list[Any]:
    """Return the outcome of a run without validations: the mean of the values of all steps, the last ones, and those of
    a checkpoint that was loaded after it."""
    torch.manual_seed(3)
    module, seen = Classifier(), Seen()
    averaged = EMAWeightAveraging(decay=0.5, use_buffers=False)
    checkpoints = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=4,
        limit_val_batches=0,
        callbacks=[seen, averaged, checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, loader(32, True), loader(16, False))
    after = [float(value.detach().sum()) for value in module.parameters()]
    mine = torch.load(folder / "step=2.ckpt", weights_only=True)["current_model_state"]["layers.0.weight"]
    trainer.limit_val_batches = 1.0
    metrics = trainer.validate(module, loader(16, False), ckpt_path=str(folder / "step=2.ckpt"), verbose=False)
    return [
        *after,
        *seen.sums,
        float(mine.sum()),
        *metrics[0].values(),
        type(trainer.optimizers[0]).__name__ == "AdamW",
    ]


class Seen(Callback):
    """The values at the end of an epoch and of training."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.sums.append(float(next(module.parameters()).detach().sum()))

    on_train_end = on_train_epoch_end


def test_values_are_the_trained_ones_wherever_callbacks_look(tmp_path: Path) -> None:
    theirs = looked_at(tmp_path / "one", "auto")
    before = signal.getsignal(signal.SIGTERM)
    assert looked_at(tmp_path / "program", AutoparStrategy("1 cpu")) == pytest.approx(theirs, rel=1e-4)
    assert signal.getsignal(signal.SIGTERM) is before


class Thawing(BaseFinetuning):
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.layers[0])


class LogsMore(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("norm", batch[0].norm())
        return super().training_step(batch, batch_idx)


class LooksAtIndex(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (2 if batch_idx % 2 else 1)


class LooksAtEpoch(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.current_epoch)


class ClipsItself(Classifier):
    def configure_gradient_clipping(self, *args: Any, **named: Any) -> None:
        pass


class ByHand(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "named", "text"),
    [
        (LogsMore, {}, r"^training_step logs 'norm'[\s\S]*other figures in validation_step"),
        (LooksAtIndex, {}, "batch_idx"),
        (LooksAtEpoch, {}, "current_epoch"),
        (ClipsItself, {}, "configure_gradient_clipping"),
        (ByHand, {}, "automatic_optimization"),
        (Classifier, {"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
        (Classifier, {"callbacks": [GradientAccumulationScheduler({1: 2})]}, "GradientAccumulationScheduler"),
        (Classifier, {"callbacks": [Thawing()]}, "Thawing"),
        (Classifier, {"callbacks": [LearningRateFinder()]}, "LearningRateFinder"),
        (Classifier, {"precision": "bf16-mixed"}, "its own precision"),
        (Classifier, {"precision": "64-true"}, "its own precision"),
        (Classifier, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "clipped by their norm"),
    ],
)
def test_what_would_be_otherwise_is_refused_before_the_first_step(
    tmp_path: Path, module: type[LightningModule], named: dict[str, Any], text: str
) -> None:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = Trainer(
        accelerator="cpu", strategy=AutoparStrategy("1 cpu"), max_steps=1, default_root_dir=tmp_path, **quiet, **named
    )
    with pytest.raises(AutoparError, match=text):
        trainer.fit(module(), loader(16, False))
    assert trainer.global_step == 0
