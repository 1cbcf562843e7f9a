"""transformers' Trainer around an autopar program: `trainer = parallelize(trainer, "8 h100-sxm")`, under torchrun.

The Trainer keeps its schedule, logs, callbacks, evaluations, checkpoints and files. The program's step replaces
forward, loss, backward, the sums of gradients, clipping and the update. Batches are those of one process: on any number
of ranks a step has `per_device_train_batch_size * gradient_accumulation_steps` rows. So the losses are those of the
same script on one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Trainer

from autopar.errors import CheckpointError, ConstraintError
from autopar.frameworks.accelerate_classes import ProgramOptimizer, stand_in
from autopar.frameworks.building import (
    SameOptimizer,
    build_learner,
    check_rows,
    config_of,
    first_step,
    move_schedule,
    plain,
    rows_of_steps,
)
from autopar.frameworks.loops import ModelValues
from autopar.frameworks.script_callbacks import LookingHandler
from autopar.frameworks.trainer_checks import check_trainer
from autopar.training.feeding import check_accumulation, join_batches
from autopar.training.learners import RankLearner
from codegen.runtime.processes import Ending
from cost_models.mixed_cluster import AnyCluster

STATE_FOLDER, SCHEDULE_FILE = "autopar", "scheduler.pt"
"""Names in the Trainer's checkpoint: the folder of the program's state, and the file of the schedule."""


def parallelize(trainer: Trainer, cluster: AnyCluster | str, **options: Any) -> Trainer:
    """Return the Trainer; its `train` now runs on all ranks of torchrun. `python script.py` alone needs "1 cpu".

    cluster: as in `autopar.compile`, or "detect". options: the options of the plan (`precision`, `constraints`, `plan`,
    `backend`, ...), as autopar.TrainerConfig has them.
    Raises ConstraintError, naming the argument or the method, where training would differ from one process.
    """
    check_trainer(trainer)
    trainer.config_of_program = config_of(cluster, trainer.args.seed, options)
    accelerator = stand_in(trainer.accelerator)
    trainer.gather_function = accelerator.gather_for_metrics
    trainer.script_optimizer = None
    if trainer.optimizer is not None:
        trainer.script_optimizer = SameOptimizer(trainer.optimizer, trainer.model)
    trainer.learner, trainer.values, trainer.waiting = None, None, []
    trainer.place_model_on_device = False
    trainer.model.to("cpu")  # the program holds the values that train, in shards
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (ProgramTrainer, kind), {"__module__": kind.__module__})
    handler = trainer.callback_handler
    handler.__class__, handler.looked, handler.take_values = LookingHandler, {}, trainer._take_values
    handler.ending = None
    return trainer


class ProgramTrainer(Trainer):  # type: ignore[misc]
    """The methods of a Trainer that its program's step replaces.

    learner, values: this rank's step, and the model's values beside its own; None before `train`. waiting: batches of
    the step that is not complete.
    """

    model: Any
    optimizer: Any
    learner: RankLearner | None
    waiting: list[Any]
    values: ModelValues | None

    # Training ---------------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **options: Any) -> Any:
        """Train as the Trainer does. Where a rank gets SIGTERM, write a checkpoint after the step and exit with code
        143; `resume_from_checkpoint=True` resumes from it."""
        handler, ending = self.callback_handler, Ending(self.args.device)
        handler.ending = ending
        try:
            output = super().train(*args, **options)
        finally:
            handler.ending = None
            ending.close()
        if handler.is_ending:
            raise SystemExit(Ending.EXIT_CODE)
        return output

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Plan and build the program. Its optimizer is the one that the Trainer would have made of the whole model."""
        if isinstance(self.optimizer, ProgramOptimizer) and self.values is not None:
            self.values.give()
            return cast(torch.optim.Optimizer, self.optimizer)
        self.model.train()
        count = self.args.gradient_accumulation_steps
        loader = self.get_train_dataloader()
        example = first_step(loader, count)
        factory = self.script_optimizer or self._made_of
        before = self.optimizer
        self.learner = build_learner(self.model, self.config_of_program, factory, example)
        check_accumulation(self.learner.program, count)
        most = self.args.max_steps if self.args.max_steps > 0 else None
        check_rows(self.learner, rows_of_steps(loader, count, most))
        if self.args.eval_strategy != "no" and self.eval_dataset is not None:
            self._check_evaluation()
        self.optimizer = ProgramOptimizer(self.learner)
        if self.lr_scheduler is not None:
            move_schedule(self.lr_scheduler, before, self.optimizer)
        self.values = ModelValues(self.learner, self.model)
        return cast(torch.optim.Optimizer, self.optimizer)

    def _made_of(self, named_parameters: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        """Call the Trainer's `create_optimizer`, or a subclass's, with these parameters in place of the model's."""
        model, optimizer = self.model, self.optimizer
        self.model, self.optimizer = cast(Any, _WithParameters(model, list(named_parameters))), None
        try:
            return cast(torch.optim.Optimizer, super().create_optimizer())
        finally:
            self.model, self.optimizer = model, optimizer

    _made_of.takes_names = True  # type: ignore[attr-defined]

    def _check_evaluation(self) -> None:
        """Raise an error, before the first step, for evaluations that the program cannot run."""
        assert self.learner is not None
        reason = self.learner.program.program.any.no_evaluation
        if reason and self.compute_metrics is None:
            raise ConstraintError(
                "this program has no evaluation mode", values=reason, alternatives='eval_strategy="no"'
            )
        if self.compute_metrics is not None:
            return
        sets = self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]
        for dataset in sets:
            check_rows(self.learner, rows_of_steps(self.get_eval_dataloader(dataset), 1))

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Compute the gradients of a step after the last of its batches. Return 0 for earlier ones, then the loss."""
        assert self.learner is not None and self.values is not None
        self.model.train()
        self.values.give()
        self.waiting.append(plain(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self.waiting = self.waiting, []
        loss = self.learner.forward_backward(batches[0] if len(batches) == 1 else join_batches(batches))
        return loss.detach().float().to(self.args.device)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the rows of a step, which are the same on any number of ranks."""
        return int(self._train_batch_size * args.gradient_accumulation_steps)

    def floating_point_ops(self, inputs: dict[str, Any]) -> float:
        """Return this rank's share: the Trainer adds up the ranks' figures."""
        return float(super().floating_point_ops(inputs)) / max(int(self.args.world_size), 1)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        self._take_values()  # before the best model's values are read into the same tensors
        return super()._finalize_training(trial, num_train_samples, start_time)

    def hyperparameter_search(self, *args: Any, **options: Any) -> Any:
        """Raise ConstraintError: trials on several ranks are not supported."""
        raise ConstraintError("hyperparameter_search is not supported", alternatives="start one run per trial")

    def log(self, *args: Any, **options: Any) -> None:
        """Log as the Trainer does. A subclass's override may look at the model."""
        self._take_for("log")
        super().log(*args, **options)

    # Evaluation -------------------------------------------------------------------------------------------------------

    def evaluate(self, *args: Any, **options: Any) -> Any:
        """Evaluate as the Trainer does. A subclass's override may look at the model."""
        self._take_for("evaluate")
        return super().evaluate(*args, **options)

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None, *args: Any, **options: Any
    ) -> Any:
        """Run the Trainer's loop. Losses alone come from the program, predictions from the whole model on each rank."""
        is_loss = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if self.values is not None:
            self.values.give()
        if is_loss and self.learner is not None:
            return super().evaluation_loop(dataloader, description, prediction_loss_only, *args, **options)
        self._take_values()
        try:
            self.model.to(self.args.device)
            return super().evaluation_loop(dataloader, description, prediction_loss_only, *args, **options)
        finally:
            self.model.to("cpu")
            if self.values is not None:
                self.values.note()

    def _take_values(self) -> None:
        if self.values is not None:
            self.values.take()

    def _take_for(self, method: str) -> None:
        if getattr(super(), method).__func__ is not getattr(Trainer, method):
            self._take_values()

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Return the loss from the program; further outputs come from the model, which has the trained values."""
        if not prediction_loss_only or self.learner is None:
            return cast(tuple[Any, Any, Any], super().prediction_step(model, inputs, prediction_loss_only, ignore_keys))
        return torch.tensor(self.learner.evaluate(plain(inputs)), device=self.args.device), None, None

    # Files ------------------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as on one process. Every rank calls this, unless training has ended."""
        self._take_values()
        super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        assert self.learner is not None
        self.learner.save(Path(output_dir) / STATE_FOLDER, {})
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULE_FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        assert self.learner is not None and self.values is not None
        folder = Path(checkpoint)
        if (folder / STATE_FOLDER).is_dir():
            self.learner.load(folder / STATE_FOLDER)
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULE_FILE, weights_only=True))
            self.values.note()
        elif any(folder.glob("optimizer.*")):
            raise CheckpointError(
                "the checkpoint has no state of a program",
                values=f"{folder} without {STATE_FOLDER}/",
                alternatives=["the model of that folder, in a new run", "a checkpoint that this Trainer wrote"],
            )


class _WithParameters:
    """A model with other `named_parameters`; all other attributes are the model's."""

    def __init__(self, model: nn.Module, named_parameters: list[tuple[str, Tensor]]) -> None:
        self._model, self._named = model, named_parameters

    def named_parameters(self, *args: Any, **options: Any) -> list[tuple[str, Tensor]]:
        return list(self._named)

    def parameters(self, *args: Any, **options: Any) -> list[Tensor]:
        return [tensor for _, tensor in self._named]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
