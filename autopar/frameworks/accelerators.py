"""An accelerator and an optimiser around a program's step, for loops that use Accelerate.

The loop sees one process that trains the whole global batch: nothing is wrapped, no batch is shared out, nothing is
gathered, because the step does all of that. Only who prints and saves is decided by the real rank.
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
    """What a loop holds as its optimiser: `step()` updates by the program's step, and schedulers find its groups.

    step_was_skipped: whether the last update was left out, as in fp16 after an overflow.
    """

    def __init__(self, learner: RankLearner) -> None:
        # Not Optimizer's own constructor: groups and state are those of the step's optimiser.
        self.learner, self.step_was_skipped = learner, False
        if hasattr(learner.optimizer, "eval"):
            raise ConstraintError(
                "an optimiser that swaps its parameters for evaluation is not supported",
                values=type(learner.optimizer).__name__,
                alternatives="torch.optim.AdamW with a schedule",
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the step's optimiser, with this rank's parts of the parameters."""
        return self.learner.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the step's optimiser on this rank."""
        return self.learner.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The settings that the step's optimiser was made with."""
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
        """Raises ConstraintError: the program computes no gradients for further parameters."""
        raise ConstraintError(
            "parameters cannot be added once there is a program",
            alternatives="all that is to be trained in the optimiser from the start, with lr=0 where it begins later",
        )

    def state_dict(self) -> dict[str, Any]:
        """Raises CheckpointError: a rank has a part of the state."""
        raise _parted("state_dict()")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises CheckpointError: a rank has a part of the state."""
        raise _parted("load_state_dict()")


def _parted(what: str) -> CheckpointError:
    return CheckpointError(
        "every rank has a part of the optimiser's state",
        values=f"optimizer.{what}",
        alternatives="program.save_checkpoint(step, folder) and program.load_checkpoint(step, folder) on every rank",
    )


class ProgramAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator that stands in a loop around a program's step; `stand_in` makes one of a given Accelerator."""

    flag_tensor: Any
    _optimizers: Any

    @property
    def distributed_type(self) -> Any:
        """That of one process: models are not wrapped."""
        return DistributedType.NO

    @property
    def num_processes(self) -> int:
        """One: every rank reads the whole global batch, and counts as one process would."""
        return 1

    @property
    def dispatch_batches(self) -> bool:
        """False: every rank reads for itself."""
        return False

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> nn.Module:
        """The model as it is."""
        self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: Any = None) -> torch.optim.Optimizer:
        """A program's optimiser as it is."""
        self._optimizers.append(optimizer)
        return cast(torch.optim.Optimizer, optimizer)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """A scheduler that takes one step per update, whatever the number of processes."""
        with_optimizer = self.step_scheduler_with_optimizer
        made = AcceleratedScheduler(scheduler, self._optimizers, with_optimizer, split_batches=True)
        self._schedulers.append(made)
        return made

    def prepare_data_loader(self, data_loader: Any, device_placement: Any = None, **options: Any) -> Any:
        """The loader of one process, equal on all ranks: shuffling follows rank 0's random state, once per epoch."""
        seeded = getattr(data_loader, "worker_init_fn", None)
        if isinstance(seeded, functools.partial) and "rank" in seeded.keywords:  # the Trainer's: others on each rank
            data_loader.worker_init_fn = functools.partial(seeded, rank=0)
        made = super().prepare_data_loader(data_loader, device_placement=False, **options)
        made.rng_types = ["torch"]
        return made

    def gather(self, tensor: Any) -> Any:
        """The values as they are: each rank has those of the whole batch."""
        return tensor

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The values as they are."""
        return tensor

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """The values as they are."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The values as they are; of the last batch so many as it has rows, as on one process."""
        remainder = self.gradient_state.remainder
        if not self.gradient_state.end_of_dataloader or remainder <= 0:
            return input_data
        # A loss has no rows; accelerate returns it, too.
        return recursively_apply(lambda values: values[:remainder] if values.dim() else values, input_data)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Let the coming update clip all gradients by their global norm, which is returned. Collective."""
        given = {id(getattr(each, "own", each)) for each in parameters}
        if norm_type != 2:
            raise ConstraintError(
                "gradients are clipped by their Euclidean norm", values=f"norm_type={norm_type}", alternatives="2"
            )
        optimizer = self._optimizers[-1] if self._optimizers else None
        if not isinstance(optimizer, ProgramOptimizer):
            raise ConstraintError(
                "there is no program whose gradients could be clipped", alternatives="prepare() first"
            )
        trained = [each for each in optimizer.learner.program.model.parameters() if each.requires_grad]
        if missing := sum(id(each) not in given for each in trained):
            raise ConstraintError(
                "gradients are clipped by the norm of all of them",
                values=f"all but {missing} of {len(trained)} trained parameters",
                alternatives="clip_grad_norm_(model.parameters(), norm)",
            )
        return cast(Tensor, optimizer.learner.step.clip(float(max_norm)))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Raises ConstraintError: ranks have parts of the gradients."""
        raise ConstraintError("gradients cannot be clipped one by one", alternatives="clip_grad_norm_")

    def check_trigger(self) -> bool:
        """Whether a rank has set the trigger since the last time, equal on all, which end together. Collective."""
        if self.flag_tensor is None:
            self.flag_tensor = torch.zeros((), dtype=torch.long, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(self.flag_tensor, dist.ReduceOp.MAX)
        return bool(super().check_trigger())

    def end_training(self) -> None:
        """Trackers end. The ranks stay joined, since values that a script saves after this are gathered from them."""
        for tracker in self.trackers:
            tracker.finish()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Nothing: the step unscales its gradients itself."""


def stand_in(accelerator: Accelerator, kind: type[ProgramAccelerator] = ProgramAccelerator) -> ProgramAccelerator:
    """The same accelerator, with the state and settings that it has, which from now on is a ProgramAccelerator.

    Raises ConstraintError for one that was given parallelism or mixed precision of its own.
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
                "the accelerator has a way of its own to do what the program does",
                values=f"{name}={value if isinstance(value, (str, bool)) else type(value).__name__}",
                alternatives=['precision="bf16" or "fp16" of parallelize' if "precision" in name else f"no {name}"],
            )
    if type(accelerator) is not Accelerator:
        raise ConstraintError("the accelerator is of a class of its own", values=type(accelerator).__name__)
    accelerator.__class__ = kind
    return cast(ProgramAccelerator, accelerator)
