"""What the training loop drives: this rank's step of a generated program, or the plain model on one process."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn

from autopar.compiled import CompiledProgram
from autopar.errors import ConstraintError, DataError
from autopar.frontend.inputs import name_inputs
from autopar.frontend.loss_module import LossModule
from autopar.frontend.skeleton import in_training
from autopar.integrations.pretrained import notes_of
from autopar.running.weights import LazyState
from autopar.training import checkpoints
from autopar.training.config import Batch, TrainerConfig
from codegen.runtime.guard import Guard, NonFinite
from codegen.runtime.optimizers import call, settings_of
from codegen.runtime.reference import SameDropout


class RankLearner:
    """This rank's `step` of a generated program, which the loop drives.

    A call trains one step on a whole global batch and returns the global mean loss; it raises FloatingPointError to
    stop, as `save` does where a parameter is inf or nan. num_samples, num_steps: so far, the rows over all ranks.
    num_skipped: steps without an update. check: raises CheckpointError, after a step, for state that cannot be saved.
    """

    def __init__(self, program: CompiledProgram, config: TrainerConfig) -> None:
        self.program = program
        self.step = program.build(max_grad_norm=config.max_grad_norm, non_finite=config.non_finite, seed=config.seed)
        package = type(self.step).__module__.rpartition(".")[0]
        self.checkpoint = importlib.import_module(f"{package}.checkpoint")
        self.batch_error = importlib.import_module(f"{package}.batch").BatchError

    @property
    def num_samples(self) -> int:
        return int(self.step.num_samples)

    @property
    def num_steps(self) -> int:
        return int(self.step.rng.step)

    @property
    def num_skipped(self) -> int:
        return int(self.step.guard.num_skipped)

    def __call__(self, batch: Batch) -> float:
        try:
            return float(self.step(self.step.local_batch(name_inputs(self.program.model, batch, self.program.loss_fn))))
        except self.batch_error as error:
            raise DataError(str(error)) from None

    def check(self) -> None:
        with checkpoints.readable(self.checkpoint):
            self.checkpoint.check(self.step)

    def save(self, directory: Path) -> None:
        notes = {"plan": self.program.plan.to_yaml(), **notes_of(self.program.model)}
        others = LazyState(self.program.model)
        with checkpoints.readable(self.checkpoint):
            self.checkpoint.save(self.step, directory, others=others, notes=notes)

    def load(self, directory: Path) -> None:
        with checkpoints.readable(self.checkpoint):
            self.checkpoint.load(self.step, directory, others=checkpoints.state_of(self.program.model))


@dataclass
class PlainLearner:
    """The user's model trained eagerly, driven as a RankLearner is."""

    model: nn.Module
    loss_fn: Callable[..., torch.Tensor] | None
    factory: Callable[..., torch.optim.Optimizer]
    config: TrainerConfig
    batch_size: int
    num_samples: int = 0
    num_steps: int = 0

    @property
    def num_skipped(self) -> int:
        return self.guard.num_skipped

    def __post_init__(self) -> None:
        config = self.config
        for is_asked, reason, value in (
            (config.precision != "fp32", "a plain run is in fp32", config.precision),
            (config.compression, "a plain run has nothing to compress", f"{config.compression}"),
            (config.fp8, "a plain run has no fp8", "fp8=True"),
            (config.backend != "eager", "a plain run is eager", config.backend),
            (config.kernels == "on", "a plain run has no kernels of autopar's", "kernels='on'"),
        ):
            if is_asked:
                raise ConstraintError(reason, values=value, alternatives="auto_parallel")
        in_training(self.model)
        self.guard = Guard(
            cast(NonFinite, config.non_finite), [b for b in self.model.buffers() if b.device.type != "meta"]
        )
        self.optimizer = call(self.factory, [(n, p) for n, p in self.model.named_parameters() if p.requires_grad])
        self.settings = settings_of(self.optimizer)

    def __call__(self, batch: Batch) -> float:
        named = name_inputs(self.model, batch, self.loss_fn)
        self.model.zero_grad()  # also what the optimiser leaves out
        self.guard.before_forward()
        with SameDropout(self.config.seed, self.num_steps):
            loss = LossModule(self.model, self.loss_fn, named)(**named)
        loss.backward()
        self.guard.after_backward(loss)
        clip = self.config.max_grad_norm or math.inf
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        if not self.guard.is_on or self.guard.lets_pass(norm):
            nn.utils.clip_grads_with_norm_(self.model.parameters(), clip, norm)
            self.optimizer.step()
        self.num_steps += 1
        self.num_samples += self.batch_size
        return float(loss.detach())

    def check(self) -> None:
        checkpoints.require_resumable(self.model, self.factory)
        checkpoints.check_plain(self.model, self.optimizer)

    def save(self, directory: Path) -> None:
        if not all(torch.isfinite(p.detach()).all() for p in self.model.parameters()):
            raise FloatingPointError("some parameters are inf or nan")
        progress = {"step": self.num_steps, "num_samples": self.num_samples, "seed": self.config.seed}
        checkpoints.save_plain(self.model, self.optimizer, progress, directory, self.settings)

    def load(self, directory: Path) -> None:
        progress = checkpoints.load_plain(self.model, self.optimizer, directory, self.settings)
        self.num_steps, self.num_samples = progress["step"], progress["num_samples"]
