"""The configuration of a `Trainer`."""

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
from codegen.runtime.loss_scale import LossScale
from codegen.runtime.non_finite import NonFinite
from codegen.runtime.options import RANGES
from cost_models.mixed_cluster import AnyCluster

Batch = Mapping[str, Any] | tuple[Any, ...]
Batches = Callable[[int], Iterator[Batch]] | Iterable[Batch]
"""Whole global batches, equal on every rank: `start_sample -> iterator from that sample on`, or an iterable that can be
read again, such as a DataLoader (whose lists count as tuples)."""

SECTIONS: Mapping[str, type[Section]] = {
    "optimizer": OptimizerSection,
    "schedule": ScheduleSection,
    "evaluation": EvaluationSection,
    "logging": LoggingSection,
    "profiler": ProfilerSection,
}
_OF_OPTIMIZER = {"lr": "learning_rate", "learning_rate": "learning_rate", "weight_decay": "weight_decay"}
"""Names in a file's section `optimizer` -> the fields that they set."""


@dataclass(frozen=True, slots=True)
class TrainerConfig(PlanOptions):
    """The settings of a training run. PlanOptions explains those of the plan (`precision`, `constraints`, `plan`, ...).

    auto_parallel: plan for `cluster` and run on all its ranks; False trains the model as it is, on this process.
    cluster: a cluster, its text, a TOML file, or "detect" (this machine's devices, shared by `num_processes` if set).
    steps: optimizer steps in all, including those before a resumption.
    optimizer, schedule, evaluation, logging, profiler: sections (sections.py), as mappings or as values.
    gradient_accumulation_steps: number of successive batches that form one optimizer step. Its loss is that of all of
    them joined. The plan splits the step into micro-batches as memory requires.
    checkpoint_directory: folder to write every `checkpoint_every` steps (0: only at the end) and to resume from.
    keep_checkpoints: how many of the newest stay, at least 2 (one may turn out damaged). On resumption the seed, rates
    and other settings of the optimizer are this configuration's; only what training itself changed in them continues.
    log_every: steps between printed lines where no terminal shows a progress bar; 0 prints nothing.
    non_finite: the reaction to a step whose loss or gradient norm is inf or nan. "skip" leaves parameters, optimizer
    state and buffers as they are (more than ten in a row stop the run), "stop" ends the run at once, "ignore" trains
    on. In all cases checkpoints are written only of finite parameters. loss_scale: for precision "fp16": init_scale,
    growth_factor, backoff_factor and growth_interval, by default those of torch.amp.GradScaler. A step that overflows
    at a scale above 1 is skipped under any `non_finite`. collective_seconds: how long ranks wait for one another before
    the run ends with an error. This is how a rank that hangs is noticed. Choose it longer than any rank makes the
    others wait, for instance to load a batch. Default: 120 where this process starts the ranks, and torch's own (1800,
    for NCCL 600) where a launcher does. first_step_check: compare the program's loss of the first batch with the
    model's own on one rank, before the first update (running/first_step.py). None: where that fits and is quick. True:
    whatever it costs. False: never. A run that resumes from a checkpoint is not checked. measure_memory: follow tensors
    through the first two steps of a run on CPU (a few times slower) to find the peak.
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
        names = (setting.name for setting in dataclasses.fields(self))
        check_numbers({name: getattr(self, name) for name in names if name in RANGES})
        whole("gradient_accumulation_steps", self.gradient_accumulation_steps, 1)
        for name in ("auto_parallel", "measure_memory"):
            if not isinstance(getattr(self, name), bool):
                raise ConstraintError(
                    f"{name} is a bool", values=repr(getattr(self, name)), alternatives="True or False"
                )
        yes_no_or_none("first_step_check", self.first_step_check)
        word("non_finite", self.non_finite, get_args(NonFinite))
        loss_scale_of(self.loss_scale, self.precision)
        for name in ("plan", "checkpoint_directory"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Plan):
                check_path(name, value)
        if not self.cluster:
            raise ConstraintError("cluster names no cluster", values=repr(self.cluster), alternatives="detect, 2 cpu")
        if self.checkpoint_every and not self.checkpoint_directory:
            raise ConstraintError(
                "checkpoint_every needs checkpoint_directory",
                values=f"checkpoint_every={self.checkpoint_every}",
                alternatives="set checkpoint_directory, or checkpoint_every=0",
            )
        PlanOptions.__post_init__(self)  # slots make a new class, which super() without arguments does not find

    def _as_files_have_them(self) -> dict[str, Any]:
        """Return fields that Python may set in other types than a file has: paths, a LossScale, numbers of numpy."""
        converted: dict[str, Any] = {}
        for name in ("plan", "checkpoint_directory"):
            if isinstance(value := getattr(self, name), Path):
                converted[name] = str(value)
        if isinstance(self.loss_scale, LossScale):
            converted["loss_scale"] = dataclasses.asdict(self.loss_scale)
        for name in (setting.name for setting in dataclasses.fields(self)):
            value = getattr(self, name)
            if isinstance(value, float) and type(value) is not float:
                converted[name] = float(value)
        return converted

    @classmethod
    def from_mapping(
        cls, fields: Mapping[str, Any], source: str = "the configuration", overrides: Sequence[str] = ()
    ) -> TrainerConfig:
        """Return the configuration of a file's mapping, with `overrides` such as "optimizer.lr=3e-4" applied.

        cluster and plan may be mappings too, with the contents of a cluster's and a plan's file.
        Raises ConstraintError for a field that does not exist, with the nearest names.
        """
        values = overridden(fields, overrides)
        names = [setting.name for setting in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise ConstraintError(f"{source} has an unknown field {name!r}", alternatives=near(name, names))
        if isinstance(values.get("cluster"), Mapping):
            values["cluster"] = ClusterSpec.from_table(values["cluster"])
        if isinstance(values.get("plan"), Mapping):
            values["plan"] = Plan.from_yaml(yaml.safe_dump(dict(values["plan"]), sort_keys=False), f"{source}: plan")
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path, overrides: Sequence[str] = ()) -> TrainerConfig:
        """Read the fields from a YAML or TOML file, by its ending. Raises ConstraintError."""
        return cls.from_mapping(read_mapping(path), str(path), overrides)

    def dump(self) -> dict[str, Any]:
        """Return all fields as numbers, texts, lists and mappings. `from_mapping` reads them to an equal
        configuration."""
        values: dict[str, Any] = {setting.name: getattr(self, setting.name) for setting in dataclasses.fields(self)}
        for name in SECTIONS:
            values[name] = plain(name, values[name].model_dump())
        if not isinstance(self.cluster, str):
            values["cluster"] = _cluster_data(self.cluster)
        if isinstance(self.plan, Plan):
            values["plan"] = yaml.safe_load(self.plan.to_yaml())
        for name in ("constraints", "compression", "loss_scale"):
            values[name] = None if values[name] is None else dict(values[name])
        return values


def overridden(fields: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply settings `name=value` or `section.name=value`, with values in YAML, to a configuration's mapping.

    The optimizer's rate and decay move from its section to their own fields. Raises ConstraintError for a text that is
    no setting.
    """
    values = dict(fields)
    _move_rates(values)
    for override in overrides:
        path, equals, text = override.partition("=")
        section_name, _, rest = path.partition(".")
        names = [_OF_OPTIMIZER[rest]] if section_name == "optimizer" and rest in _OF_OPTIMIZER else path.split(".")
        if not equals or not all(names):
            raise ConstraintError(
                "an override is name=value", values=shown(override), alternatives="steps=100, optimizer.lr=3e-4"
            )
        value, _ = parse_yaml(text, override)
        level = values
        for name in names[:-1]:
            inner = level.get(name)
            if inner is not None and not isinstance(inner, (Mapping, str)):
                raise ConstraintError(f"{name} has no fields", values=shown(override))
            level[name] = {"name": inner} if isinstance(inner, str) else dict(inner or {})
            level = level[name]
        level[names[-1]] = value
        if names == ["optimizer"] and isinstance(value, Mapping):
            for name in _OF_OPTIMIZER.keys() & value.keys():
                values.pop(_OF_OPTIMIZER[name], None)
            _move_rates(values)
    return values


def _move_rates(fields: dict[str, Any]) -> None:
    """Move the rate and the decay from the section `optimizer` to the fields above it."""
    section = fields.get("optimizer")
    if not isinstance(section, Mapping):
        return
    rest = dict(section)
    for name, target in _OF_OPTIMIZER.items():
        if name in rest:
            value = rest.pop(name)
            if target in fields and fields[target] != value:
                raise ConstraintError(
                    f"{target} is set twice",
                    values={f"optimizer.{name}": value, target: fields[target]},
                    alternatives="set one of them",
                )
            fields[target] = value
    fields["optimizer"] = rest


def _cluster_data(cluster: AnyCluster) -> str | dict[str, Any]:
    """Return the cluster's text if the text says everything, else the contents of its TOML file."""
    try:
        if ClusterSpec.parse(str(cluster)) == cluster:
            return str(cluster)
    except ClusterError:
        pass
    return tomllib.loads(cluster.to_toml())
