"""`Trainer`: from a model, a configuration and a source of batches to a trained model, on one process or on many.

`TrainerConfig(auto_parallel=True)` plans for its cluster, generates the program and trains it: on every rank when
torchrun started this process, otherwise on processes of this machine that it starts itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

from autopar.compiled import CompiledProgram
from autopar.costs.updates import DefaultAdamW
from autopar.errors import ConstraintError
from autopar.files.outputs import require_folder
from autopar.training.config import Batches, TrainerConfig, TrainResult
from autopar.training.loaders import check_batches
from autopar.training.loop import compile_program, fit_locally, fit_plain, fit_ranks, process_group, under_launcher


class Trainer:
    """Trains `model` on `batches`: `Trainer(model, config, batches).fit()`.

    model: on CPU, with values; `fit` leaves the trained ones in it, on every rank that a launcher started. batches:
    whole global batches, equal on every rank. loss_fn, optimizer: as in autopar.compile, but for AdamW, which has the
    configuration's rate and decay. Where processes are spawned (GPUs), all must be picklable.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainerConfig,
        batches: Batches,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    ) -> None:
        if isinstance(batches, Iterator):
            raise ConstraintError(
                "batches must be able to start again, to plan with the first one and to resume",
                values=type(batches).__name__,
                alternatives="a function start_sample -> iterator, a list, or a DataLoader",
            )
        check_batches(batches, config.global_batch_size)
        self.model, self.config, self.batches, self.loss_fn = model, config, batches, loss_fn
        self.optimizer = optimizer
        self._program: CompiledProgram | None = None

    def compile(self) -> CompiledProgram:
        """The planned and generated program that `fit` trains; made once."""
        if self._program is None:
            self._program = compile_program(
                self.model, self.config, self.batches, self.loss_fn, self.optimizer_factory()
            )
        return self._program

    def fit(self) -> TrainResult:
        """Train up to `config.steps` steps, from the last checkpoint if there is one.

        Raises AutoparError for what cannot be planned, launch.RankError when a rank fails; started again, training
        continues from the last checkpoint.
        """
        if self.config.checkpoint_directory is not None:
            require_folder(Path(self.config.checkpoint_directory))
        if not self.config.auto_parallel:
            return fit_plain(self.model, self.config, self.batches, self.loss_fn, self.optimizer_factory())
        if under_launcher():
            with process_group(self.config.collective_seconds):
                return fit_ranks(self.compile(), self.config, self.batches)
        return fit_locally(self.compile(), self.config, self.batches)

    def optimizer_factory(self) -> Callable[..., torch.optim.Optimizer]:
        """The given factory, or AdamW as configured."""
        return self.optimizer or DefaultAdamW(self.config.learning_rate, self.config.weight_decay)
