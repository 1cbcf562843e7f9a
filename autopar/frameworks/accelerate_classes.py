"""An accelerator and an optimizer around a program's step, for loops that use Accelerate.

The loop sees one process that trains the whole global batch. Nothing is wrapped, split or gathered, since the step
does all of that. Only printing and saving depend on the real rank.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType, recursively_apply
from torch import Tensor, nn

from autopar.errors import CheckpointError, ConstraintError
from autopar.training.learners import RankLearner


class ProgramOptimizer(torch.optim.Optimizer):
    """The optimizer of a loop: `step()` updates by the program's step, and schedules find its groups.

    step_was_skipped: whether the last update was skipped, as in fp16 after an overflow.
    """

    def __init__(self, learner: RankLearner) -> None:
        # Optimizer's constructor is not called: groups and state are those of the step's optimizer.
        self.learner, self.step_was_skipped = learner, False
        if hasattr(learner.optimizer, "eval"):
            raise ConstraintError(
                "an optimizer that swaps its parameters for evaluation is not supported",
                values=type(learner.optimizer).__name__,
                alternatives="torch.optim.AdamW with a schedule",
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the step's optimizer, with this rank's shards of the parameters."""
        return self.learner.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the step's optimizer on this rank."""
        return self.learner.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The settings that the step's optimizer was made with."""
        return self.learner.optimizer.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update by the gradients of the last backward. Raises RuntimeError where there are none."""
        if closure is not None:
            raise ConstraintError("a program's update takes no closure", alternatives="optimizer.step()")
        before = self.learner.num_skipped
        self.learner.step.update()
        self.step_was_skipped = self.learner.num_skipped > before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.learner.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ConstraintError: the program computes no gradients for further parameters."""
        raise ConstraintError(
            "parameters cannot be added after the program is made",
            alternatives="put all trained parameters in the optimizer from the start, with lr=0 where they begin later",
        )

    def state_dict(self) -> dict[str, Any]:
        """Raise CheckpointError: a rank has a shard of the state."""
        raise _sharded("state_dict()")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise CheckpointError: a rank has a shard of the state."""
        raise _sharded("load_state_dict()")


def _sharded(call: str) -> CheckpointError:
    return CheckpointError(
        "every rank has a shard of the optimizer's state",
        values=f"optimizer.{call}",
        alternatives="program.save_checkpoint(step, folder) and program.load_checkpoint(step, folder) on every rank",
    )


class ProgramAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator around a program's step, for a loop. `stand_in` makes one from the loop's Accelerator."""

    flag_tensor: Any
    _optimizers: Any

    @property
    def distributed_type(self) -> Any:
        """The type of one process: models are not wrapped."""
        return DistributedType.NO

    @property
    def num_processes(self) -> int:
        """1: every rank reads the whole global batch, and counts as one process would."""
        return 1

    @property
    def dispatch_batches(self) -> bool:
        """False: every rank reads its own batches."""
        return False

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> nn.Module:
        """Return the model as it is."""
        self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> torch.optim.Optimizer:
        """Return a program's optimizer as it is."""
        self._optimizers.append(optimizer)
        return cast(torch.optim.Optimizer, optimizer)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Return a scheduler that takes one step per update, whatever the number of processes."""
        with_optimizer = self.step_scheduler_with_optimizer
        accelerated = AcceleratedScheduler(scheduler, self._optimizers, with_optimizer, split_batches=True)
        self._schedulers.append(accelerated)
        return accelerated

    def prepare_data_loader(self, data_loader: Any, device_placement: Any = None, **options: Any) -> Any:
        """Return the loader of one process, equal on all ranks: shuffling follows rank 0's random state, once per
        epoch."""
        seeded = getattr(data_loader, "worker_init_fn", None)
        if isinstance(seeded, functools.partial) and "rank" in seeded.keywords:  # the Trainer's, which differs by rank
            data_loader.worker_init_fn = functools.partial(seeded, rank=0)
        prepared = super().prepare_data_loader(data_loader, device_placement=False, **options)
        prepared.rng_types = ["torch"]
        return prepared

    def gather(self, tensor: Any) -> Any:
        """Return the values as they are: each rank has those of the whole batch."""
        return tensor

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the values as they are."""
        return tensor

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Return the values as they are."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the values as they are; of the last batch as many as it has rows, as on one process."""
        remainder = self.gradient_state.remainder
        if not self.gradient_state.end_of_dataloader or remainder <= 0:
            return input_data
        # A loss has no rows; accelerate returns it, too.
        return recursively_apply(lambda values: values[:remainder] if values.dim() else values, input_data)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip all gradients by their global norm in the next update; return the norm. Collective."""
        ids = {id(getattr(parameter, "parameter", parameter)) for parameter in parameters}
        if norm_type != 2:
            raise ConstraintError(
                "gradients are clipped by their Euclidean norm", values=f"norm_type={norm_type}", alternatives="2"
            )
        optimizer = self._optimizers[-1] if self._optimizers else None
        if not isinstance(optimizer, ProgramOptimizer):
            raise ConstraintError(
                "there is no program whose gradients could be clipped", alternatives="call prepare() first"
            )
        trained = [p for p in optimizer.learner.program.model.parameters() if p.requires_grad]
        if missing := sum(id(parameter) not in ids for parameter in trained):
            raise ConstraintError(
                "gradients are clipped by the norm of all of them",
                values=f"all but {missing} of {len(trained)} trained parameters",
                alternatives="clip_grad_norm_(model.parameters(), norm)",
            )
        return cast(Tensor, optimizer.learner.step.clip(float(max_norm)))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Raise ConstraintError: gradients are sharded over the ranks."""
        raise ConstraintError("gradients cannot be clipped one by one", alternatives="clip_grad_norm_")

    def check_trigger(self) -> bool:
        """Return whether any rank set the trigger since the last call. All ranks get the same answer. Collective."""
        if self.flag_tensor is None:
            self.flag_tensor = torch.zeros((), dtype=torch.long, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(self.flag_tensor, dist.ReduceOp.MAX)
        return bool(super().check_trigger())

    def end_training(self) -> None:
        """Finish the trackers. Ranks stay connected, since values that a script saves later are gathered from them."""
        for tracker in self.trackers:
            tracker.finish()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: the step unscales its gradients itself."""


def stand_in(accelerator: Accelerator, kind: type[ProgramAccelerator] = ProgramAccelerator) -> ProgramAccelerator:
    """Make the accelerator, with its state and settings, a ProgramAccelerator; return it.

    Raises ConstraintError for one with parallelism or mixed precision of its own.
    """
    state = accelerator.state
    for name, value in (
        ("mixed_precision", accelerator.mixed_precision if accelerator.mixed_precision != "no" else None),
        ("deepspeed_plugin", getattr(state, "deepspeed_plugin", None)),
        ("fsdp_plugin", getattr(state, "fsdp_plugin", None)),
        ("megatron_lm_plugin", getattr(state, "megatron_lm_plugin", None)),
        ("parallelism_config", getattr(accelerator, "parallelism_config", None)),
        ("dispatch_batches", accelerator.dispatch_batches or None),
    ):
        if value is not None:
            raise ConstraintError(
                "the accelerator has its own way to do what the program does",
                values=f"{name}={value if isinstance(value, (str, bool)) else type(value).__name__}",
                alternatives=['precision="bf16" or "fp16" of parallelize' if "precision" in name else f"no {name}"],
            )
    if type(accelerator) is not Accelerator:
        raise ConstraintError(
            "the accelerator must be of Accelerate's own class",
            values=type(accelerator).__name__,
            alternatives="parallelize(Accelerator(), cluster)",
        )
    accelerator.__class__ = kind
    return cast(ProgramAccelerator, accelerator)
