"""Lightning's Trainer around an autopar program: `Trainer(strategy=AutoparStrategy("8 h100-sxm"))`, under torchrun.

autopar compiles the LightningModule's `training_step` up to its loss. Optimizer and schedule are those of
`configure_optimizers`. Validation, test and prediction run as written, on every rank, with the trained values. Batches
are those of one process: every rank's loaders yield whole batches, and the losses are those of one process.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, callbacks
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader, rank_zero_only
from torch import Tensor, nn

from autopar.cluster import is_on_cpu
from autopar.errors import CheckpointError, ConstraintError
from autopar.frameworks.building import (
    SameOptimizer,
    build_learner,
    check_rows,
    config_of,
    first_step,
    move_schedule,
    parts_of,
    plain,
    rows_of_steps,
)
from autopar.frameworks.lightning_callbacks import AtSigterm, ValueUpdates
from autopar.frameworks.loops import LoopOptimizer, ModelValues, PendingLoss
from autopar.running.process_group import has_gpus, join_launched
from autopar.training.learners import RankLearner
from cost_models.mixed_cluster import AnyCluster

SILENT = (
    *("backward", "manual_backward", "configure_gradient_clipping", "on_after_backward", "on_before_backward"),
    *("on_before_optimizer_step", "on_before_zero_grad", "optimizer_zero_grad"),
)
"""Hooks of a LightningModule, and of callbacks, that would find no gradients in the module."""

CHANGING = (
    *(callbacks.GradientAccumulationScheduler, callbacks.BaseFinetuning, callbacks.ModelPruning),
    *(callbacks.LearningRateFinder, callbacks.BatchSizeFinder),
)
"""Lightning's callbacks that change the training. A program is made once, and does not follow them."""

STATE_ENDING = ".autopar"
"""Ending of the folder beside a checkpoint, after the checkpoint's name. It has the program's state in shards."""


class AutoparStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """Trains by a program's step on all ranks of torchrun.

    cluster: as in `autopar.compile`, or "detect". options: the options of the plan (`precision`, `constraints`, `plan`,
    `backend`, ...), as autopar.TrainerConfig has them, and `seed` of dropout.
    `fit` raises ConstraintError, before its first step, for settings under which training would differ from one
    process.
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
        rank_zero_only.rank = self.global_rank  # loggers read it
        self.learner: RankLearner | None = None
        self.values: ModelValues | None = None
        self._pending, self._restored = PendingLoss(), ""

    # Ranks ------------------------------------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank prints and writes."""
        return self.global_rank == 0

    def setup_environment(self) -> None:
        """Join the other ranks. Shuffling then follows rank 0's random state."""
        join_launched(is_on_cpu(self.config.cluster))
        state = [torch.get_rng_state()]
        if dist.is_initialized():
            dist.broadcast_object_list(state, src=0)
            torch.set_rng_state(state[0])
        super().setup_environment()

    def barrier(self, *args: Any, **options: Any) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank src's object."""
        box = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(box, src=src)
        return box[0]

    def model_to_device(self) -> None:
        """Keep the module in host memory. The program holds the values that train."""
        self.model.to("cpu")

    # Training ---------------------------------------------------------------------------------------------------------

    def setup_optimizers(self, trainer: Any) -> None:
        """Plan and build the program for the first batch. Collective."""
        check_fit(trainer, self.lightning_module)
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1:
            raise ConstraintError(
                "a program has one optimizer",
                values=f"configure_optimizers returns {len(self.optimizers)}",
                alternatives="one optimizer with groups",
            )
        module, before = self.lightning_module, self.optimizers[0]
        self.step_module = TrainingStep(module)
        loader = loader_of(trainer.fit_loop._data_source.dataloader())
        example = self.batch_to_device(first_step(loader, 1), torch.device("cpu"))
        factory = SameOptimizer(before, self.step_module)
        self.learner = build_learner(self.step_module, self.config, factory, plain(example))
        parts = parts_of(loader)
        if len({getattr(part, "batch_size", None) for part in parts}) == 1:  # else rows differ from the plan's
            check_rows(self.learner, (rows for part in parts for rows in rows_of_steps(part, 1)))
        self.values = ModelValues(self.learner, self.step_module)
        # LearningRateMonitor logs the name of the class.
        kind: Any = type(type(self.learner.optimizer).__name__, (LoopOptimizer,), {})
        self.optimizers = [kind(self.learner, self.values, self._pending)]
        for scheduled in self.lr_scheduler_configs:
            move_schedule(scheduled.scheduler, before, self.optimizers[0])
        if isinstance(self.precision_plugin, _Clipping):
            self.precision_plugin.learner = self.learner
        others = [callback for callback in trainer.callbacks if not isinstance(callback, (ValueUpdates, AtSigterm))]
        trainer.callbacks = [ValueUpdates(self.values, others), AtSigterm(self.root_device), *others]

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        """Return the loss of a whole batch, whose gradients wait for the update; log it as `training_step` does."""
        assert self.learner is not None and self.values is not None
        self.model.to("cpu")
        self.values.give()
        self._pending.make_room(self.learner.optimizer)
        loss = self._pending.loss(self.learner.forward_backward(plain(args[0])))
        for name, log_options in self.step_module.logged.items():
            self.lightning_module.log(name, loss.detach(), **log_options)
        return loss

    def validation_step(self, *args: Any, **options: Any) -> Any:
        """Run the module's step with the trained values."""
        self._look()
        return super().validation_step(*args, **options)

    def test_step(self, *args: Any, **options: Any) -> Any:
        """Run the module's step with the trained values."""
        self._look()
        return super().test_step(*args, **options)

    def predict_step(self, *args: Any, **options: Any) -> Any:
        """Run the module's step with the trained values."""
        self._look()
        return super().predict_step(*args, **options)

    def _look(self) -> None:
        if self.values is not None:
            self.values.take()
        self.model.to(self.root_device)

    # Files ------------------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state with the trained values. Collective."""
        if self.values is not None:
            self.values.take()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return {}: the state is in the folder beside the checkpoint, in the ranks' shards."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the checkpoint, and the program's state beside it. Collective."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.learner is not None and "optimizer_states" in checkpoint:
            self.learner.save(Path(f"{filepath}{STATE_ENDING}"), {})

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove the checkpoint and the program's state. Every rank calls this."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            super().remove_checkpoint(f"{filepath}{STATE_ENDING}")

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Return the checkpoint as Lightning wrote it."""
        self._restored = str(checkpoint_path)
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **options)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Resume from the program's state. Collective. Raises CheckpointError where there is none."""
        assert self.learner is not None and self.values is not None
        folder = Path(f"{self._restored}{STATE_ENDING}")
        if not folder.is_dir():
            raise CheckpointError(
                "the checkpoint has the optimizer's state of another strategy",
                values=f"{self._restored} without {folder.name}",
                alternatives=["a new run from its weights", "a checkpoint that AutoparStrategy wrote"],
            )
        self.learner.load(folder)
        self.values.note()


class _Clipping(Precision):  # type: ignore[misc]
    """Clips by the norm of all gradients, of which a rank has shards."""

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
        """Return the loss. Raises ConstraintError for a loss of more than the batch, and for other figures logged."""
        module: Any = self.module
        batch = named if named else items if len(items) > 1 else items[0]
        logs: list[tuple[str, Any, dict[str, Any]]] = []
        before = module._trainer
        module.log = lambda name, value, **options: logs.append((name, value, options))
        module.all_gather = lambda data, *args, **options: data  # as on one process, whose batch is the whole one
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
    """A dict that all copies of a module share: models are traced as copies."""

    def __deepcopy__(self, memo: Any) -> _Logged:
        return self


def _takes_index(module: Any) -> bool:
    return len(inspect.signature(module.training_step).parameters) > 1


def _beyond(fault: str) -> ConstraintError:
    return ConstraintError(
        f"{fault}, and a program computes the loss alone",
        alternatives=["self.log(name, loss) of the loss itself", "other figures in validation_step"],
    )


class _Hidden:
    """A value that a training step may not read, since a program is made once."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self, *args: Any) -> Any:
        raise ConstraintError(
            f"training_step reads {self._name}, and a program is made once, of its batch alone",
            alternatives="a schedule from configure_optimizers, or an input of the batch",
        )

    __getattr__ = __bool__ = __int__ = __index__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __mod__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __truediv__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def check_fit(trainer: Any, module: LightningModule) -> None:
    """Raise ConstraintError for settings under which Lightning would need whole gradients."""
    # The user's flag: a strategy with its own precision plugin overrules it silently.
    precision = trainer._accelerator_connector._precision_flag
    for is_asked, reason, values, instead in (
        (
            not module.automatic_optimization,
            "a program's step takes the place of backward and optimizer.step() in training_step",
            "automatic_optimization=False",
            "automatic_optimization=True, a training_step that returns the loss, and one optimizer",
        ),
        (
            trainer.accumulate_grad_batches != 1,
            "gradients are not accumulated over batches",
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}",
            "a loader with as many times the rows: the plan splits them as memory requires",
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
                "a callback changes the training after the program is made",
                values=type(callback).__name__,
                alternatives=[
                    "requires_grad=False before fit, or groups of the optimizer with schedules of their own",
                    "a learning rate or batch size that was searched on one process",
                ],
            )
    for name in SILENT:
        if getattr(type(module), name, None) is not getattr(LightningModule, name, None):
            raise _hook(type(module).__name__, name)
        for callback in trainer.callbacks:
            hook = getattr(type(callback), name, None)
            if hook is not getattr(Callback, name, None) and not type(callback).__module__.startswith("lightning."):
                raise _hook(type(callback).__name__, name)


def _hook(owner: str, name: str) -> ConstraintError:
    return ConstraintError(
        "a hook that looks at gradients would find none in the module, or does what the program does",
        values=f"{owner}.{name}",
        alternatives="strategy.learner.step.gradients() for whole gradients, in on_train_batch_end",
    )


MODES = ("max_size_cycle", "min_size")
"""Modes in which every step has a batch of each loader."""


class JointLoader:
    """Several loaders as one. A batch is a dict or list of one batch of each, in the form of the loaders."""

    def __init__(self, loaders: Any) -> None:
        is_combined = isinstance(loaders, CombinedLoader)
        mode = loaders._mode if is_combined else MODES[0]
        iterables = loaders.iterables if is_combined else loaders
        if mode not in MODES:
            raise ConstraintError(
                "every step needs a batch of each loader, as a program is made once",
                values=f"CombinedLoader(mode={mode!r})",
                alternatives=[*(f"mode={name!r}" for name in MODES), "one loader of a concatenated dataset"],
            )
        self._combined = CombinedLoader(iterables, mode)  # not the loop's, which begins at its own first batch
        self.parts: list[Any] = list(self._combined.flattened)
        if len(self.parts) < 2 and isinstance(iterables, list | tuple):
            raise ConstraintError(
                "a list of loaders has several",
                values=f"{len(self.parts)} in a {type(iterables).__name__}",
                alternatives="the loader itself, whose batches are training_step's",
            )

    def __iter__(self) -> Iterator[Any]:
        for batch, _, _ in self._combined:
            yield batch


def loader_of(loaders: Any) -> Any:
    """Return a loader with training_step's batches. Raises ConstraintError for loaders that cannot be one."""
    return JointLoader(loaders) if isinstance(loaders, CombinedLoader | dict | list | tuple) else loaders
