"""The demo's own comparison: the processes' losses are those of one process that starts from the same model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from autopar.trainer import Trainer
from autopar.training.config import TrainerConfig
from examples import demo

pytestmark = pytest.mark.distributed
SIZES = "--width 32 --layers 2 --heads 2 --batch 8 --seq 64"
STEPS = 3
ROUND_OFF = 1e-5
"""More than a hundred times what was measured; one step of training moves the loss by a thousand times as much."""


def run(model: str, out: Path) -> None:
    demo.main([*f"--models {model} --steps {STEPS} --cluster".split(), "2 cpu", *SIZES.split(), "--out", str(out)])


@pytest.mark.parametrize("model", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_losses_differ_by_round_off(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(model, tmp_path)
    found = re.search(rf"largest of {STEPS} +(\S+)", capsys.readouterr().out)
    assert found is not None and float(found[1]) < ROUND_OFF


class FromTheTrained(Trainer):
    """Whose plain run goes on with the model that the processes have trained."""

    trained: nn.Module

    def __init__(self, model: nn.Module, config: TrainerConfig, batches: Any) -> None:
        if config.auto_parallel:
            type(self).trained = model
        super().__init__(type(self).trained, config, batches)


@pytest.mark.slow
def test_a_reference_that_starts_from_the_trained_model_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "Trainer", FromTheTrained)
    with pytest.raises(SystemExit, match=r"error: the losses of GPT-2 differ by .*, round-off explains"):
        run("gpt2", tmp_path)
