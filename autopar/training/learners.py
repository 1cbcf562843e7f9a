"""Learners, which the training loop drives: this rank's step of a generated program, or the plain model."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from autopar.compiled import CompiledProgram
from autopar.errors import ConstraintError, DataError, TraceError
from autopar.frontend.inputs import name_inputs
from autopar.frontend.loss_module import LossModule, kept_buffers, loss_in
from autopar.frontend.skeleton import in_training
from autopar.running.build import take_also
from autopar.running.state import check_checkpoint, load_checkpoint, save_checkpoint
from autopar.running.state_follower import followed
from autopar.settings.loss_scale import loss_scale_of
from autopar.training import checkpoints
from autopar.training.config import Batch, TrainerConfig
from autopar.training.loaders import num_rows
from autopar.training.metrics import NO_LOGITS
from autopar.training.shapes import is_of_another_shape, program_of_shape
from codegen.runtime import watch
from codegen.runtime.diagnosis import BATCH
from codegen.runtime.non_finite import Guard, NonFinite
from codegen.runtime.optimizers import call, settings_of
from codegen.runtime.reference import SameDropout
from codegen.runtime.stage_module import loss_gradient


class RankLearner:
    """This rank's `step` of a generated program, which the loop drives.

    A call trains one step on a whole global batch and returns the global mean loss. It raises FloatingPointError to
    stop, as `save` does where a parameter is inf or nan. num_samples, num_steps: so far; samples are rows over all
    ranks. num_skipped: steps without an update. check: raises CheckpointError, after a step, where its state cannot be
    saved.
    """

    def __init__(self, program: CompiledProgram, config: TrainerConfig) -> None:
        self.program, self.config = program, config
        self._num_shapes = 1
        self.step = program.build(
            max_grad_norm=config.max_grad_norm,
            non_finite=config.non_finite,
            loss_scale=config.loss_scale,
            seed=config.seed,
            first_step_check=config.first_step_check,
        )
        runtime = type(self.step).__module__.rpartition(".")[0]
        self.batch_error = importlib.import_module(f"{runtime}.batch_checks").BatchError

    @property
    def num_samples(self) -> int:
        return int(self.step.num_samples)

    @property
    def num_steps(self) -> int:
        return int(self.step.rng.step)

    @property
    def num_skipped(self) -> int:
        return int(self.step.guard.num_skipped)

    @property
    def grad_norm(self) -> float | None:
        return None if self.step.grad_norm is None else float(self.step.grad_norm)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.step.optimizer
        return optimizer

    @property
    def loss_scale(self) -> float | None:
        return None if self.step.loss_scaling is None else float(self.step.loss_scaling.value)

    def __call__(self, batch: Batch) -> float:
        return float(self._of(batch, self.step, f"step {self.num_steps + 1}"))

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Compute the gradients of a whole global batch without an update; return the global mean loss (0-dim)."""
        loss: torch.Tensor = self._of(batch, self.step.forward_backward, f"step {self.num_steps + 1}")
        return loss

    def evaluate(self, batch: Batch) -> float:
        """Return the global mean loss in evaluation mode."""
        return float(self._of(batch, self.step.evaluate, self._evaluation))

    def evaluate_with_logits(self, batch: Batch) -> tuple[float, torch.Tensor]:
        """Return the loss, and on every rank the model's logits of the whole batch."""
        loss, logits = self._of(batch, partial(self.step.evaluate, logits=True), self._evaluation)
        return float(loss), logits

    @property
    def _evaluation(self) -> str:
        return f"step.evaluate after step {self.num_steps}"

    def _of(self, batch: Batch, function: Callable[..., Any], call: str) -> Any:
        """Call `function` with this rank's part of a batch. call: its name among the calls that all ranks must make."""
        try:
            named = name_inputs(self.program.model, batch, self.program.loss_fn)
            with watch.entered(f"{call}{BATCH}{_described(named)}"):
                if not self.step.takes(named) and is_of_another_shape(self.program, named):
                    with contextlib.suppress(TraceError):  # the model takes no such batch: the step raises the error
                        take_also(self.step, program_of_shape(self.program, self.config, batch, self._num_shapes))
                        self._num_shapes += 1
                return function(self.step.local_batch(named))
        except self.batch_error as error:
            raise DataError(str(error)) from None
        except watch.DataDiffer as error:
            raise DataError(f"the ranks were given different batches: {error}") from None

    def share_changes(self) -> None:
        """Repeat on every rank the changes that callbacks made to rank 0's model. Collective."""
        if (follower := followed(self.step)) is not None:
            follower.share()

    def check(self) -> None:
        check_checkpoint(self.step)

    def save(self, directory: Path, notes: Mapping[str, str]) -> None:
        save_checkpoint(self.program, self.step, directory, notes)

    def load(self, directory: Path) -> Mapping[str, str]:
        """Resume from a checkpoint; return its notes."""
        return load_checkpoint(self.program, self.step, directory)


def _described(batch: Mapping[str, Any]) -> str:
    """Return the rows, shapes and dtypes of a batch's tensors."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    rows = sorted({value.shape[0] for value in tensors.values() if value.ndim})
    words = (f"{name} {tuple(value.shape)} {str(value.dtype)[6:]}" for name, value in tensors.items())
    return f"{' or '.join(map(str, rows)) or 'no'} rows ({', '.join(words)})"


@dataclass
class PlainLearner:
    """The user's model trained eagerly, with a RankLearner's interface, in the precision of a program on one rank."""

    model: nn.Module
    loss_fn: Callable[..., torch.Tensor] | None
    factory: Callable[..., torch.optim.Optimizer]
    config: TrainerConfig
    num_samples: int = 0
    num_steps: int = 0
    grad_norm: float | None = None

    @property
    def num_skipped(self) -> int:
        return self.guard.num_skipped

    @property
    def loss_scale(self) -> float | None:
        return None if self.scaling is None else self.scaling.value

    def __post_init__(self) -> None:
        config = self.config
        for is_asked, reason, value in (
            (config.compression, "a plain run has nothing to compress", f"{config.compression}"),
            (config.fp8, "a plain run has no fp8", "fp8=True"),
            (config.backend != "eager", "a plain run is eager", config.backend),
            (config.kernels == "on", "a plain run has no kernels of autopar's", "kernels='on'"),
        ):
            if is_asked:
                raise ConstraintError(reason, values=value, alternatives="auto_parallel=True")
        in_training(self.model)
        scale = loss_scale_of(config.loss_scale, config.precision)
        self.scaling = None if scale is None else scale.begin()
        written = [b for b in self.model.buffers() if b.device.type != "meta"]
        self.guard = Guard(cast(NonFinite, config.non_finite), written, loss_scaling=self.scaling)
        self.optimizer = call(self.factory, [(n, p) for n, p in self.model.named_parameters() if p.requires_grad])
        self.settings = settings_of(self.optimizer)

    def __call__(self, batch: Batch) -> float:
        named = name_inputs(self.model, batch, self.loss_fn)
        self.model.zero_grad()  # also gradients of parameters that the optimizer leaves out
        self.guard.before_forward()
        # The guard restores buffers. Forward's new ones are stored after backward, which may read the old ones.
        with kept_buffers(self.model), kept_buffers(self.loss_fn):
            module = LossModule(self.model, self.loss_fn, named, keeps_buffers=False)
            with SameDropout(self.config.seed, self.num_steps):
                loss = loss_in(self.config.dtype, module, named)
            torch.autograd.backward(loss, loss_gradient(loss, 1, loss_scaling=self.scaling))
        self.guard.after_backward(loss)
        clip = self.config.max_grad_norm or math.inf
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.scaling is not None:
            self.scaling.unscale(gradients)
        norm = nn.utils.get_total_norm(gradients)
        self.grad_norm = float(norm)
        if not self.guard.is_on or self.guard.lets_pass(norm):
            nn.utils.clip_grads_with_norm_(self.model.parameters(), clip, norm)
            self.optimizer.step()
        self.num_steps += 1
        self.num_samples += num_rows(batch)
        return float(loss.detach())

    def evaluate(self, batch: Batch) -> float:
        """Return the mean loss in evaluation mode."""
        return float(self._evaluated(batch, with_logits=False))

    def evaluate_with_logits(self, batch: Batch) -> tuple[float, torch.Tensor]:
        """Return the loss and the model's logits. Raises ConstraintError for a model that returns none."""
        result = self._evaluated(batch, with_logits=True)
        if not isinstance(result, tuple):
            raise ConstraintError(NO_LOGITS, alternatives="no metrics")
        return float(result[0]), result[1]

    @torch.no_grad()
    def _evaluated(self, batch: Batch, with_logits: bool) -> Any:
        named = name_inputs(self.model, batch, self.loss_fn)
        modes = [(module, module.training) for module in self.model.modules()]
        # A counter that forward increments counts steps, as in a program, whose evaluations restore all state.
        kept = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        self.model.eval()
        try:
            both = LossModule(self.model, self.loss_fn, named, with_logits=with_logits)
            return loss_in(self.config.dtype, both, named)
        finally:
            for module, is_training in modes:
                module.training = is_training
            for buffer, before in kept:
                buffer.copy_(before)

    def share_changes(self) -> None:
        """Do nothing: the model that callbacks change is the one that trains."""

    def check(self) -> None:
        checkpoints.require_resumable(self.model, self.factory)
        checkpoints.check_plain(self.model, self.optimizer)

    def save(self, directory: Path, notes: Mapping[str, str]) -> None:
        if not all(torch.isfinite(p.detach()).all() for p in self.model.parameters()):
            raise FloatingPointError("some parameters are inf or nan")
        progress: dict[str, Any] = {"step": self.num_steps, "num_samples": self.num_samples, "seed": self.config.seed}
        if self.scaling is not None:
            progress["loss_scale"] = self.scaling.state()
        checkpoints.save_plain(self.model, self.optimizer, progress, directory, self.settings, notes)

    def load(self, directory: Path) -> Mapping[str, str]:
        """Resume from a checkpoint; return its notes."""
        progress = checkpoints.load_plain(self.model, self.optimizer, directory, self.settings)
        self.num_steps, self.num_samples = progress["step"], progress["num_samples"]
        if self.scaling is not None:
            self.scaling.load(progress.get("loss_scale"))
        return checkpoints.read_notes(directory)
