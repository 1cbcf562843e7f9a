"""`Trainer`: train a model from a configuration and a source of batches, on one process or on many.

`TrainerConfig(auto_parallel=True)` plans for its cluster, generates the program and trains it: on every rank where
torchrun started this process, otherwise on processes of this machine that it starts itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.compiled import CompiledProgram
from autopar.errors import ConstraintError
from autopar.files.outputs import require_folder, require_writable
from autopar.running.process_group import under_launcher
from autopar.running.supervise import passing_on_sigterm
from autopar.training.callbacks import Callback, check_callbacks
from autopar.training.config import Batches, TrainerConfig
from autopar.training.feeding import check_evaluation
from autopar.training.loaders import check_batches
from autopar.training.loop import compile_program, fit_locally, fit_plain, fit_ranks, process_group
from autopar.training.metrics import Metric, metrics_of
from autopar.training.optimizers import Schedule, optimizer_factory, schedule_of
from autopar.training.records import check_logging
from autopar.training.result import BY_SIGTERM, TrainResult
from autopar.training.run import CONFIG_FILE, Setup
from codegen.runtime.processes import Ending


class Trainer:
    """Trains `model` on `batches`: `Trainer(model, config, batches).fit()`.

    model: on CPU, with values. `fit` sets the trained values in it, on every rank of a launcher. batches: whole global
    batches, equal on every rank. loss_fn, optimizer: as in autopar.compile; without an optimizer the configuration's.
    schedule: `optimizer -> scheduler`, any of torch's. It steps after each update (ReduceLROnPlateau after each
    evaluation) and resumes from checkpoints; by default the configuration's. eval_batches: with as many rows, evaluated
    as `config.evaluation` says. metrics: of these, functions `(logits, batch) -> {name: number}` that rank 0 calls with
    the whole batch and its logits; a number is a mean over the rows. callbacks: see `Callback`.
    Where processes are spawned (GPUs), all must be picklable.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainerConfig,
        batches: Batches,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        *,
        schedule: Schedule | None = None,
        eval_batches: Batches | None = None,
        metrics: Metric | Sequence[Metric] | None = None,
        callbacks: Sequence[Callback] = (),
        source: Mapping[str, Any] | None = None,
    ) -> None:
        rows, joined = config.global_batch_size, config.gradient_accumulation_steps
        for name, source_of in (("batches", batches), ("eval_batches", eval_batches)):
            if isinstance(source_of, Iterator):
                raise ConstraintError(
                    f"{name} must be able to start again, to plan with the first one and to resume",
                    values=type(source_of).__name__,
                    alternatives="a function start_sample -> iterator, a list, or a DataLoader",
                )
        if rows is not None and rows % joined:
            raise ConstraintError(
                "the batches that are joined to a step make its rows",
                values={"global_batch_size": rows, "gradient_accumulation_steps": joined},
                alternatives=f"a global_batch_size that {joined} divides",
            )
        check_batches(batches, None if rows is None else rows // joined)
        if schedule is not None and not callable(schedule):
            raise ConstraintError(
                "schedule is a function optimizer -> scheduler",
                values=type(schedule).__name__,
                alternatives="schedule=lambda optimizer: scheduler of the optimizer, or the configuration's section",
            )
        check_evaluation(config.evaluation, eval_batches, functions := metrics_of(metrics))
        self.setup = Setup(
            model=model,
            config=config,
            batches=batches,
            loss_fn=loss_fn,
            optimizer=optimizer or optimizer_factory(config),
            schedule=schedule or schedule_of(config),
            eval_batches=eval_batches,
            callbacks=check_callbacks(callbacks),
            metrics=functions,
            source=source or {},
        )
        self._program: CompiledProgram | None = None

    def compile(self) -> CompiledProgram:
        """Return the planned and generated program that `fit` trains. It is made once."""
        if self._program is None:
            self._program = compile_program(self.setup)
        return self._program

    def fit(self) -> TrainResult:
        """Train up to `config.steps` steps, from the last checkpoint if there is one.

        Raises AutoparError where no program can be planned, launch.RankError where a rank fails, and SystemExit with
        code 143 on SIGTERM (to this process, to a rank, or to all of them). With a checkpoint_directory it writes a
        last checkpoint first, and training that starts again continues from there.
        """
        config = self.setup.config
        if config.checkpoint_directory is not None:
            require_folder(Path(config.checkpoint_directory))
            path = Path(config.checkpoint_directory) / CONFIG_FILE
            require_writable(path, instead=f"another checkpoint_directory, or {CONFIG_FILE} moved elsewhere")
        check_logging(config)
        with passing_on_sigterm():
            result = self._fitted(config)
        if result.stopped == BY_SIGTERM:
            raise SystemExit(Ending.EXIT_CODE)
        return result

    def _fitted(self, config: TrainerConfig) -> TrainResult:
        if not config.auto_parallel:
            return fit_plain(self.setup)
        if under_launcher():
            with process_group(config):
                return fit_ranks(self.compile(), self.setup)
        return fit_locally(self.compile(), self.setup)
