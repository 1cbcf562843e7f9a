"""How a `Trainer` trains, from what, and what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, get_args

from autopar.compiled import CompiledProgram
from autopar.errors import ConstraintError
from autopar.files.text_files import near, read_mapping
from autopar.settings.arguments import check_numbers, word
from autopar.settings.compile_options import PlanOptions
from autopar.settings.loss_scale import loss_scale_of
from codegen.runtime.guard import NonFinite
from codegen.runtime.loss_scale import LossScale
from codegen.runtime.options import RANGES
from cost_models.mixed import AnyCluster

Batch = Mapping[str, Any] | tuple[Any, ...]
Batches = Callable[[int], Iterator[Batch]] | Iterable[Batch]
"""Whole global batches, equal on every rank: `start_sample -> iterator from that sample on`, or something that can be
iterated anew, such as a DataLoader (which gives tuples as lists)."""


@dataclass(frozen=True, slots=True)
class TrainerConfig(PlanOptions):
    """How to train. What bears on the plan (`precision`, `constraints`, `plan`, ...) is explained by PlanOptions.

    auto_parallel: plan for `cluster` and run on all its ranks; False trains the model as it is, on this process.
    cluster: a cluster, its text, a TOML file, or "detect" (what this machine has, shared by `num_processes` if that is
    given). steps: optimiser steps in all, those before a resumption included.
    checkpoint_directory: where to write every `checkpoint_every` steps (0: only at the end) and to resume from.
    keep_checkpoints: how many of the newest stay, at least 2 (one may turn out damaged). On resumption the
    seed, rates and other settings of the optimiser are this configuration's; only what training itself changed in them
    continues.
    log_every: steps between printed lines where there is no terminal for a progress bar; 0 prints nothing.
    non_finite: what a step does whose loss or gradient norm is inf or nan: "skip" leaves parameters, optimiser state
    and buffers as they are (more than ten in a row stop the run), "stop" ends the run at once, "ignore" trains on.
    Checkpoints are only written of finite parameters, whatever it is.
    loss_scale: of precision "fp16", init_scale, growth_factor, backoff_factor and growth_interval, by default those of
    torch.amp.GradScaler. A step that overflows at a scale above 1 is skipped, whatever non_finite is.
    collective_seconds: how long ranks wait for one another before the run ends with an error, which is how a rank that
    hangs is noticed: longer than any rank takes for what the others wait for, such as to load a batch. By default 120
    where this process starts the ranks, and torch's own (1800, of NCCL 600) where a launcher does.
    measure_memory: follow tensors through the first two steps of a run on CPU (a few times slower) to find the peak.
    """

    auto_parallel: bool = True
    cluster: AnyCluster | str = "detect"
    num_processes: int | None = None
    steps: int = 100
    _: KW_ONLY
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    max_grad_norm: float | None = None
    non_finite: str = "skip"
    loss_scale: LossScale | Mapping[str, Any] | None = None
    seed: int = 0
    checkpoint_directory: str | None = None
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    log_every: int = 10
    collective_seconds: float | None = None
    measure_memory: bool = False

    def __post_init__(self) -> None:
        names = (field.name for field in dataclasses.fields(self))
        check_numbers({name: getattr(self, name) for name in names if name in RANGES})
        for name in ("auto_parallel", "measure_memory"):
            if not isinstance(getattr(self, name), bool):
                raise ConstraintError(f"{name} is true or false", values=repr(getattr(self, name)))
        word("non_finite", self.non_finite, get_args(NonFinite))
        loss_scale_of(self.loss_scale, self.precision)
        for name in ("plan", "checkpoint_directory"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (str, Path)) and str(value)):
                raise ConstraintError(f"{name} is a path", values=repr(value))
        if not self.cluster:
            raise ConstraintError("cluster names one", values=repr(self.cluster), alternatives="detect, 2 cpu")
        if self.checkpoint_every and not self.checkpoint_directory:
            raise ConstraintError("checkpoint_every needs checkpoint_directory", values=str(self.checkpoint_every))
        PlanOptions.__post_init__(self)  # slots make a new class, which super() without arguments does not know

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any], source: str = "the configuration") -> TrainerConfig:
        """Raises ConstraintError for a field that does not exist, with the nearest names."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise ConstraintError(f"{source} has an unknown field {name!r}", alternatives=near(name, known))
        return cls(**fields)

    @classmethod
    def from_file(cls, path: str | Path) -> TrainerConfig:
        """A YAML or TOML (by its ending) file of the fields. Raises ConstraintError."""
        return cls.from_mapping(read_mapping(path), str(path))


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run did.

    losses: of each step from `first_step` (0 unless resumed) on, inf or nan where it was skipped.
    step_seconds: median without the first steps.
    peak_bytes: per rank, of tensors; empty if not measured. num_samples: rows trained on so far. checkpoint: the last
    one written or resumed from. num_skipped: steps without an update, since loss or gradients were not finite.
    program: None for a plain run.
    """

    losses: tuple[float, ...]
    first_step: int
    step_seconds: float
    peak_bytes: tuple[int, ...]
    num_samples: int
    checkpoint: Path | None = None
    num_skipped: int = 0
    program: CompiledProgram | None = None
