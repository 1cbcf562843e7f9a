"""Lightning's Trainer around an autopar program: `Trainer(strategy=AutoparStrategy("8 h100-sxm"))`, under torchrun.

What is compiled is the LightningModule's `training_step` up to its loss; the optimiser and schedule are those of
`configure_optimizers`. Validation, test and prediction run as written, on every rank, with the trained values.
Batches are those of one process: every rank's loaders give whole batches, and so the losses are those of one process.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, callbacks
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from autopar.cluster import is_on_cpu
from autopar.errors import CheckpointError, ConstraintError
from autopar.frameworks.building import (
    SameOptimizer,
    build_learner,
    check_rows,
    config_of,
    first_step,
    moved_schedule,
    parts_of,
    plain,
    rows_of_steps,
)
from autopar.frameworks.lightning_callbacks import AtSigterm, Values
from autopar.frameworks.lightning_loaders import loader_of
from autopar.frameworks.loops import LoopOptimizer, ModelValues, PendingLoss
from autopar.running.process_group import has_gpus, join_launched
from autopar.training.learners import RankLearner
from cost_models.mixed import AnyCluster

SILENT = (
    *("backward", "manual_backward", "configure_gradient_clipping", "on_after_backward", "on_before_backward"),
    *("on_before_optimizer_step", "on_before_zero_grad", "optimizer_zero_grad"),
)
"""Hooks of a LightningModule, and those of callbacks, that would find no gradients in the module."""

CHANGING = (
    *(callbacks.GradientAccumulationScheduler, callbacks.BaseFinetuning, callbacks.ModelPruning),
    *(callbacks.LearningRateFinder, callbacks.BatchSizeFinder),
)
"""Callbacks of Lightning's that do what a program, which is made once, does not follow."""

STATE_ENDING = ".autopar"
"""What the folder beside a checkpoint has after the checkpoint's name: the program's state, in parts of the ranks."""


class AutoparStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """A strategy that trains by a program's step on all ranks that torchrun started.

    cluster: as in `autopar.compile`, or "detect". options: those that bear on the plan (`precision`, `constraints`,
    `plan`, `backend`, ...), as autopar.TrainerConfig has them, and `seed` of dropout.
    `fit` raises ConstraintError, before its first step, for what would not be as on one process.
    """

    strategy_name = "autopar"
    optimizers: Any
    lr_scheduler_configs: Any

    def __init__(self, cluster: AnyCluster | str, **options: Any) -> None:
        self.config = config_of(cluster, options.pop("seed", 0), options)
        local = int(os.environ.get("LOCAL_RANK", "0"))
        on_gpu = has_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) and not is_on_cpu(cluster)
        device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
        super().__init__(device, precision_plugin=_Clipping())
        self.global_rank, self.local_rank = int(os.environ.get("RANK", "0")), local
        rank_zero_only.rank = self.global_rank  # loggers ask it who writes
        self.learner: RankLearner | None = None
        self.values: ModelValues | None = None
        self._pending, self._restored = PendingLoss(), ""

    # Ranks ------------------------------------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank prints and writes."""
        return self.global_rank == 0

    def setup_environment(self) -> None:
        """Join the other ranks; shuffling then follows rank 0's random state."""
        join_launched(is_on_cpu(self.config.cluster))
        state = [torch.get_rng_state()]
        if dist.is_initialized():
            dist.broadcast_object_list(state, src=0)
            torch.set_rng_state(state[0])
        super().setup_environment()

    def barrier(self, *given: Any, **named: Any) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank src's object."""
        found = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(found, src=src)
        return found[0]

    def model_to_device(self) -> None:
        """The module stays in host memory; the program has what trains."""
        self.model.to("cpu")

    # Training ---------------------------------------------------------------------------------------------------------

    def setup_optimizers(self, trainer: Any) -> None:
        """Plan and build the program for the first batch. Collective."""
        check_fit(trainer, self.lightning_module)
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ConstraintError(
                "a program has one optimiser",
                values=f"configure_optimizers returns {len(self.optimizers)}",
                alternatives="one optimiser with groups",
            )
        module, before = self.lightning_module, self.optimizers[0]
        self.step_module = TrainingStep(module)
        loader = loader_of(trainer.fit_loop._data_source.dataloader())
        example = self.batch_to_device(first_step(loader, 1), torch.device("cpu"))
        factory = SameOptimizer(before, self.step_module)
        self.learner = build_learner(self.step_module, self.config, factory, plain(example))
        parts = parts_of(loader)
        if len({getattr(each, "batch_size", None) for each in parts}) == 1:  # rows of others are no rows of the plan's
            check_rows(self.learner, (rows for each in parts for rows in rows_of_steps(each, 1)))
        self.values = ModelValues(self.learner, self.step_module)
        # Of the name that LearningRateMonitor logs.
        kind: Any = type(type(self.learner.optimizer).__name__, (LoopOptimizer,), {})
        self.optimizers = [kind(self.learner, self.values, self._pending)]
        for each in self.lr_scheduler_configs:
            moved_schedule(each.scheduler, before, self.optimizers[0])
        if isinstance(self.precision_plugin, _Clipping):
            self.precision_plugin.learner = self.learner
        others = [each for each in trainer.callbacks if not isinstance(each, (Values, AtSigterm))]
        trainer.callbacks = [Values(self.values, others), AtSigterm(self.root_device), *others]

    def training_step(self, *given: Any, **named: Any) -> Tensor:
        """The loss of a whole batch, whose gradients wait for their update; it is logged as `training_step` says."""
        assert self.learner is not None and self.values is not None
        self.model.to("cpu")
        self.values.give()
        self._pending.make_room(self.learner.optimizer)
        loss = self._pending.loss(self.learner.forward_backward(plain(given[0])))
        for name, options in self.step_module.logged.items():
            self.lightning_module.log(name, loss.detach(), **options)
        return loss

    def validation_step(self, *given: Any, **named: Any) -> Any:
        """As written, with the trained values."""
        self._look()
        return super().validation_step(*given, **named)

    def test_step(self, *given: Any, **named: Any) -> Any:
        """As written, with the trained values."""
        self._look()
        return super().test_step(*given, **named)

    def predict_step(self, *given: Any, **named: Any) -> Any:
        """As written, with the trained values."""
        self._look()
        return super().predict_step(*given, **named)

    def _look(self) -> None:
        if self.values is not None:
            self.values.take()
        self.model.to(self.root_device)

    # Files ------------------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state with the trained values. Collective."""
        if self.values is not None:
            self.values.take()
        found: dict[str, Any] = super().lightning_module_state_dict()
        return found

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing: it is in the folder beside the checkpoint, in parts of the ranks."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the checkpoint, and beside it the program's state. Collective."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.learner is not None and "optimizer_states" in checkpoint:
            self.learner.save(Path(f"{filepath}{STATE_ENDING}"), {})

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove the checkpoint and the program's state. Every rank calls this."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            super().remove_checkpoint(f"{filepath}{STATE_ENDING}")

    def load_checkpoint(self, checkpoint_path: Any, *given: Any, **named: Any) -> dict[str, Any]:
        """The checkpoint as Lightning wrote it."""
        self._restored = str(checkpoint_path)
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, *given, **named)
        return found

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Continue with the program's state. Collective. Raises CheckpointError where there is none."""
        assert self.learner is not None and self.values is not None
        folder = Path(f"{self._restored}{STATE_ENDING}")
        if not folder.is_dir():
            raise CheckpointError(
                "the checkpoint has the optimiser's state of another strategy",
                values=f"{self._restored} without {folder.name}",
                alternatives=["a new run from its weights", "a checkpoint that AutoparStrategy wrote"],
            )
        self.learner.load(folder)
        self.values.note()


class _Clipping(Precision):  # type: ignore[misc]
    """Clipping by the norm of all gradients, of which a rank has parts."""

    learner: RankLearner | None = None

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        assert self.learner is not None
        self.learner.step.clip(float(clip_val))


class TrainingStep(nn.Module):
    """A LightningModule's `training_step` as a module that takes a batch and returns the loss.

    logged: the names under which it logs its loss, with the options of each.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self.logged = _Logged()

    def forward(self, *items: Any, **named: Any) -> Tensor:
        """The loss. Raises ConstraintError for what depends on more than the batch, or logs more than the loss."""
        module: Any = self.module
        batch = named if named else items if len(items) > 1 else items[0]
        logs: list[tuple[str, Any, dict[str, Any]]] = []
        before = module._trainer
        module.log = lambda name, value, **options: logs.append((name, value, options))
        module.all_gather = lambda data, *given, **named: data  # as on one process, whose batch is the whole one
        object.__setattr__(module, "_trainer", _Hidden("the Trainer (current_epoch, global_step, ...)"))
        try:
            returned = (
                module.training_step(batch, _Hidden("batch_idx"))
                if _takes_index(module)
                else (module.training_step(batch))
            )
        finally:
            del module.log, module.all_gather
            object.__setattr__(module, "_trainer", before)
        if isinstance(returned, Mapping) and set(returned) - {"loss"}:
            raise _beyond(f"training_step returns {', '.join(sorted(set(returned) - {'loss'}))} beside its loss")
        loss: Tensor = returned["loss"] if isinstance(returned, Mapping) else returned
        for name, value, _ in logs:
            if value is not loss:
                raise _beyond(f"training_step logs {name!r}, which is not its loss")
        self.logged.clear()
        self.logged.update({name: options for name, _, options in logs})
        return loss


class _Logged(dict[str, dict[str, Any]]):
    """The same of all copies of a module: models are traced as copies."""

    def __deepcopy__(self, memo: Any) -> _Logged:
        return self


def _takes_index(module: Any) -> bool:
    return len(inspect.signature(module.training_step).parameters) > 1


def _beyond(what: str) -> ConstraintError:
    return ConstraintError(
        f"{what}, and a program computes the loss alone",
        alternatives=["self.log(name, loss) of the loss itself", "other figures in validation_step"],
    )


class _Hidden:
    """What a training step may not look at, since a program is made once."""

    def __init__(self, what: str) -> None:
        self._what = what

    def _refuse(self, *given: Any) -> Any:
        raise ConstraintError(
            f"training_step reads {self._what}, and a program is made once, of its batch alone",
            alternatives="a schedule from configure_optimizers, or an input of the batch",
        )

    __getattr__ = __bool__ = __int__ = __index__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __mod__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __truediv__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def check_fit(trainer: Any, module: LightningModule) -> None:
    """Raises ConstraintError for what Lightning would do to gradients that a program has in parts."""
    # What was asked for: a strategy that brings its own way to compute overrules it in silence.
    precision = trainer._accelerator_connector._precision_flag
    for is_asked, reason, values, instead in (
        (
            not module.automatic_optimization,
            "a program's step takes the place of backward and optimizer.step() in training_step",
            "automatic_optimization=False",
            "automatic_optimization=True, a training_step that returns the loss, and one optimiser",
        ),
        (
            trainer.accumulate_grad_batches != 1,
            "gradients are not accumulated over batches",
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}",
            "a loader with so many times the rows: the plan splits them as memory asks",
        ),
        (
            str(getattr(trainer.gradient_clip_algorithm, "value", "norm")) == "value" and trainer.gradient_clip_val,
            "gradients are clipped by their norm",
            'gradient_clip_algorithm="value"',
            '"norm"',
        ),
        (trainer.num_devices > 1, "torchrun starts the ranks", f"devices={trainer.num_devices}", "devices=1"),
        (
            precision != "32-true" or not isinstance(trainer.strategy.precision_plugin, _Clipping),
            "the program has its own precision",
            f"precision={precision!r}, {type(trainer.strategy.precision_plugin).__name__}",
            'AutoparStrategy(..., precision="bf16")',
        ),
    ):
        if is_asked:
            raise ConstraintError(reason, values=values, alternatives=instead)
    for callback in trainer.callbacks:
        if isinstance(callback, CHANGING):
            raise ConstraintError(
                "a callback changes what is trained, or how, after the program is made",
                values=type(callback).__name__,
                alternatives=[
                    "requires_grad=False before fit, or groups of the optimiser with schedules of their own",
                    "a learning rate or batch size that one process found",
                ],
            )
    for name in SILENT:
        if getattr(type(module), name, None) is not getattr(LightningModule, name, None):
            raise _hook(type(module).__name__, name)
        for callback in trainer.callbacks:
            own = getattr(type(callback), name, None)
            if own is not getattr(Callback, name, None) and not type(callback).__module__.startswith("lightning."):
                raise _hook(type(callback).__name__, name)


def _hook(owner: str, name: str) -> ConstraintError:
    return ConstraintError(
        "a hook that looks at gradients would find none in the module, or does what the program does",
        values=f"{owner}.{name}",
        alternatives="strategy.learner.step.gradients() for whole gradients, in on_train_batch_end",
    )
