"""How a `Trainer` trains, from what, and what came of it."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml

from autopar.cluster import ClusterSpec
from autopar.errors import ClusterError, ConstraintError
from autopar.files.text_files import near, parse_yaml, read_mapping, shown
from autopar.plan import Plan
from autopar.settings.arguments import check_numbers, check_path, whole, word, yes_no_or_none
from autopar.settings.compile_options import PlanOptions
from autopar.settings.loss_scale import loss_scale_of
from autopar.training.sections import (
    EvaluationSection,
    LoggingSection,
    OptimizerSection,
    ProfilerSection,
    ScheduleSection,
    Section,
    plain,
    section,
)
from codegen.runtime.guard import NonFinite
from codegen.runtime.loss_scale import LossScale
from codegen.runtime.options import RANGES
from cost_models.mixed import AnyCluster

Batch = Mapping[str, Any] | tuple[Any, ...]
Batches = Callable[[int], Iterator[Batch]] | Iterable[Batch]
"""Whole global batches, equal on every rank: `start_sample -> iterator from that sample on`, or something that can be
iterated anew, such as a DataLoader (which gives tuples as lists)."""

SECTIONS: Mapping[str, type[Section]] = {
    "optimizer": OptimizerSection,
    "schedule": ScheduleSection,
    "evaluation": EvaluationSection,
    "logging": LoggingSection,
    "profiler": ProfilerSection,
}
_OF_OPTIMIZER = {"lr": "learning_rate", "learning_rate": "learning_rate", "weight_decay": "weight_decay"}
"""What a file may say in its section `optimizer` -> the field that it is."""


@dataclass(frozen=True, slots=True)
class TrainerConfig(PlanOptions):
    """How to train. What bears on the plan (`precision`, `constraints`, `plan`, ...) is explained by PlanOptions.

    auto_parallel: plan for `cluster` and run on all its ranks; False trains the model as it is, on this process.
    cluster: a cluster, its text, a TOML file, or "detect" (what this machine has, shared by `num_processes` if that is
    given). steps: optimiser steps in all, those before a resumption included.
    optimizer, schedule, evaluation, logging, profiler: sections of their own (sections.py), as mappings or as values.
    gradient_accumulation_steps: as many successive batches are one optimiser step, whose loss is that of all of them
    joined; the plan splits the step into micro-batches as memory asks.
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
    first_step_check: compare the program's loss of the first batch with the model's own on one rank, before the first
    update (running/first_step.py): None where that fits and is quick, True whatever it costs, False never. A run that
    goes on from a checkpoint is not checked.
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
    gradient_accumulation_steps: int = 1
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    logging: LoggingSection = field(default_factory=LoggingSection)
    profiler: ProfilerSection = field(default_factory=ProfilerSection)
    non_finite: str = "skip"
    loss_scale: LossScale | Mapping[str, Any] | None = None
    seed: int = 0
    checkpoint_directory: str | None = None
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    log_every: int = 10
    collective_seconds: float | None = None
    first_step_check: bool | None = None
    measure_memory: bool = False

    def __post_init__(self) -> None:
        for name, value in self._as_files_have_them().items():
            object.__setattr__(self, name, value)
        for name, kind in SECTIONS.items():
            object.__setattr__(self, name, section(name, kind, getattr(self, name)))
        names = (each.name for each in dataclasses.fields(self))
        check_numbers({name: getattr(self, name) for name in names if name in RANGES})
        whole("gradient_accumulation_steps", self.gradient_accumulation_steps, 1)
        for name in ("auto_parallel", "measure_memory"):
            if not isinstance(getattr(self, name), bool):
                raise ConstraintError(f"{name} is true or false", values=repr(getattr(self, name)))
        yes_no_or_none("first_step_check", self.first_step_check)
        word("non_finite", self.non_finite, get_args(NonFinite))
        loss_scale_of(self.loss_scale, self.precision)
        for name in ("plan", "checkpoint_directory"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Plan):
                check_path(name, value)
        if not self.cluster:
            raise ConstraintError("cluster names one", values=repr(self.cluster), alternatives="detect, 2 cpu")
        if self.checkpoint_every and not self.checkpoint_directory:
            raise ConstraintError("checkpoint_every needs checkpoint_directory", values=str(self.checkpoint_every))
        PlanOptions.__post_init__(self)  # slots make a new class, which super() without arguments does not know

    def _as_files_have_them(self) -> dict[str, Any]:
        """Fields that Python may give otherwise than a file does, as it does: paths, a LossScale, numbers of numpy."""
        found: dict[str, Any] = {}
        for name in ("plan", "checkpoint_directory"):
            if isinstance(value := getattr(self, name), Path):
                found[name] = str(value)
        if isinstance(self.loss_scale, LossScale):
            found["loss_scale"] = dataclasses.asdict(self.loss_scale)
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if isinstance(value, float) and type(value) is not float:
                found[each.name] = float(value)
        return found

    @classmethod
    def from_mapping(
        cls, fields: Mapping[str, Any], source: str = "the configuration", overrides: Sequence[str] = ()
    ) -> TrainerConfig:
        """The configuration of a mapping as a file has it, with `overrides` such as "optimizer.lr=3e-4" over it.

        cluster and plan may be mappings too, of what a cluster's and a plan's file have.
        Raises ConstraintError for a field that does not exist, with the nearest names.
        """
        found = overridden(fields, overrides)
        known = [each.name for each in dataclasses.fields(cls)]
        for name in found:
            if name not in known:
                raise ConstraintError(f"{source} has an unknown field {name!r}", alternatives=near(name, known))
        if isinstance(found.get("cluster"), Mapping):
            found["cluster"] = ClusterSpec.from_table(found["cluster"])
        if isinstance(found.get("plan"), Mapping):
            found["plan"] = Plan.from_yaml(yaml.safe_dump(dict(found["plan"]), sort_keys=False), f"{source}: plan")
        return cls(**found)

    @classmethod
    def from_file(cls, path: str | Path, overrides: Sequence[str] = ()) -> TrainerConfig:
        """A YAML or TOML (by its ending) file of the fields. Raises ConstraintError."""
        return cls.from_mapping(read_mapping(path), str(path), overrides)

    def dump(self) -> dict[str, Any]:
        """All fields as `from_mapping` reads them back to an equal configuration: numbers, texts, lists, mappings."""
        found: dict[str, Any] = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        for name in SECTIONS:
            found[name] = plain(name, found[name].model_dump())
        if not isinstance(self.cluster, str):
            found["cluster"] = _cluster_data(self.cluster)
        if isinstance(self.plan, Plan):
            found["plan"] = yaml.safe_load(self.plan.to_yaml())
        for name in ("constraints", "compression", "loss_scale"):
            found[name] = None if found[name] is None else dict(found[name])
        return found


def overridden(fields: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A configuration's mapping with settings `name=value` or `section.name=value` over it; values are read as YAML.

    The optimiser's rate and decay are moved from its section to the fields that they are. Raises ConstraintError for
    what is no setting.
    """
    found = dict(fields)
    _move_rates(found)
    for each in overrides:
        path, equals, text = each.partition("=")
        section_name, _, rest = path.partition(".")
        names = [_OF_OPTIMIZER[rest]] if section_name == "optimizer" and rest in _OF_OPTIMIZER else path.split(".")
        if not equals or not all(names):
            raise ConstraintError(
                "an override is name=value", values=shown(each), alternatives="steps=100, optimizer.lr=3e-4"
            )
        value, _ = parse_yaml(text, each)
        level = found
        for name in names[:-1]:
            inner = level.get(name)
            if inner is not None and not isinstance(inner, (Mapping, str)):
                raise ConstraintError(f"{name} has no fields", values=shown(each))
            level[name] = {"name": inner} if isinstance(inner, str) else dict(inner or {})
            level = level[name]
        level[names[-1]] = value
        if names == ["optimizer"] and isinstance(value, Mapping):
            for name in _OF_OPTIMIZER.keys() & value.keys():
                found.pop(_OF_OPTIMIZER[name], None)
            _move_rates(found)
    return found


def _move_rates(fields: dict[str, Any]) -> None:
    """The rate and the decay stand in the section `optimizer` or above it; here the latter."""
    given = fields.get("optimizer")
    if not isinstance(given, Mapping):
        return
    rest = dict(given)
    for name, target in _OF_OPTIMIZER.items():
        if name in rest:
            value = rest.pop(name)
            if target in fields and fields[target] != value:
                raise ConstraintError(
                    f"{target} is there twice", values={f"optimizer.{name}": value, target: fields[target]}
                )
            fields[target] = value
    fields["optimizer"] = rest


def _cluster_data(cluster: AnyCluster) -> str | dict[str, Any]:
    """The cluster's text where that says all, else what its TOML file would have."""
    try:
        if ClusterSpec.parse(str(cluster)) == cluster:
            return str(cluster)
    except ClusterError:
        pass
    return tomllib.loads(cluster.to_toml())
