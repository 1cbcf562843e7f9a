"""Several loaders of a LightningModule: figures are those of one process, or the loaders are refused by name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.utilities import CombinedLoader  # noqa: E402

from autopar.errors import ConstraintError  # noqa: E402
from autopar.frameworks.lightning import AutoparStrategy  # noqa: E402
from autopar.launch import run_ranks  # noqa: E402

WIDTH = 8
QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
)


class OfTwo(LightningModule):
    """Its loss has a batch of each of two loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)

    def training_step(self, batch: Any) -> Tensor:
        (x, y), (more, others) = batch.values() if isinstance(batch, dict) else batch
        loss = nn.functional.cross_entropy(self.layer(x), y) + 0.5 * nn.functional.mse_loss(self.layer(more), others)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.values.append(float(trainer.callback_metrics["loss"]))


def loaders() -> dict[str, Any]:
    """Of unlike lengths and rows, one of which has a short last batch."""
    generator = torch.Generator().manual_seed(0)
    first = [(torch.randn(WIDTH, generator=generator), torch.tensor(number % 4)) for number in range(24)]
    second = [(torch.randn(WIDTH, generator=generator), torch.randn(4, generator=generator)) for _ in range(10)]
    load: Any = torch.utils.data.DataLoader
    return {"a": load(first, batch_size=8, shuffle=True), "b": load(second, batch_size=4, shuffle=True)}


def as_dict() -> Any:
    return loaders()


def as_list() -> Any:
    return list(loaders().values())


def shortest() -> Any:
    return CombinedLoader(loaders(), "min_size")


def losses(make: Callable[[], Any], strategy: Any) -> list[float]:
    torch.manual_seed(3)
    recorder = Losses()
    trainer = Trainer(accelerator="cpu", devices=1, strategy=strategy, max_steps=5, callbacks=[recorder], **QUIET)
    trainer.fit(OfTwo(), make())
    return recorder.values


def rank(make: Callable[[], Any]) -> list[float]:
    me = str(dist.get_rank())
    os.environ |= {"RANK": me, "LOCAL_RANK": me, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    return losses(make, AutoparStrategy("2 cpu"))


@pytest.mark.parametrize(
    "make", [as_dict, *(pytest.param(make, marks=pytest.mark.slow) for make in (as_list, shortest))]
)
def test_losses_of_several_loaders_are_those_of_one_process(make: Callable[[], Any]) -> None:
    theirs = losses(make, "auto")
    assert len(theirs) == 5
    assert losses(make, AutoparStrategy("1 cpu")) == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_have_them_too() -> None:
    assert run_ranks(rank, (as_dict,), 2) == [pytest.approx(losses(as_dict, "auto"), rel=1e-5)] * 2


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: CombinedLoader(loaders(), "max_size"), "every step needs a batch of each loader"),
        (lambda: [loaders()["a"]], "a list of loaders has several"),
        (lambda: {"a": loaders()["a"], "b": one_time()}, "must be able to start again"),
    ],
)
def test_loaders_that_cannot_be_one_are_refused_before_the_first_step(make: Callable[[], Any], text: str) -> None:
    trainer = Trainer(accelerator="cpu", strategy=AutoparStrategy("1 cpu"), max_steps=1, **QUIET)
    with pytest.raises(ConstraintError, match=text) as caught:
        trainer.fit(OfTwo(), make())
    assert "instead" in str(caught.value) and trainer.global_step == 0


class Once(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return torch.zeros(WIDTH), torch.zeros(4)


def one_time() -> Any:
    return torch.utils.data.DataLoader(Once(), batch_size=4)


def test_a_cpu_cluster_stays_on_cpus_beside_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert AutoparStrategy("2 cpu").root_device == torch.device("cpu")
    joined: list[bool] = []
    monkeypatch.setattr("autopar.frameworks.lightning.join_launched", joined.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with contextlib.suppress(AssertionError):  # of Lightning's, which has no Trainer here
        AutoparStrategy("2 cpu").setup_environment()
    assert joined == [True]
