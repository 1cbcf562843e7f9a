"""The sections of a `TrainerConfig`: optimizer, schedule, evaluation, logging, profiler.

They are pydantic models: strict about types ("8" is no number), closed (an unknown field is an error), and frozen.
`section` makes one from the user's mapping or section, with errors in our words.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from autopar.errors import ConstraintError
from autopar.files.text_files import near, shown

Scheduled = Literal["constant", "linear", "cosine", "inverse-sqrt"]
Whole = Annotated[int, Field(ge=0)]
Texts = Annotated[tuple[str, ...], Field(strict=False)]


def plain(name: str, value: Any) -> Any:
    """Return a value as a file has it: numbers, texts, lists, mappings. Raises ConstraintError for other values."""
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(name, item) for item in value]
    if isinstance(value, Path):
        return str(value)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    raise ConstraintError(
        f"{name} has values that a file may have: numbers, texts, lists, mappings",
        values=shown(value),
        alternatives="Trainer(optimizer=factory), which takes any values",
    )


class Section(BaseModel):
    """A group of fields of a configuration."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class OptimizerSection(Section):
    """The optimizer of a Trainer that is given none. In a file or on a command line, `optimizer.lr` and
    `optimizer.weight_decay` set the configuration's learning_rate and weight_decay."""

    name: str = "adamw"
    """A class of torch.optim in small letters (adamw, adam, sgd, adafactor, ...), or a factory `module:name`."""
    no_decay: Texts = ()
    """Patterns of the names of parameters without weight decay, such as "*.bias"; "1d" stands for all with one dim."""
    arguments: Mapping[str, Any] = {}
    """Further keyword arguments of the class or the factory, such as betas or momentum, as a file may have them."""

    @field_validator("arguments")
    @classmethod
    def _as_files_have_them(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        values: dict[str, Any] = plain("optimizer.arguments", arguments)
        return values


class ScheduleSection(Section):
    """The factor on the learning rate after each step, where a Trainer is given no schedule."""

    name: Scheduled = "constant"
    """The factor after the warm-up: constant, or down to `final` on a line, half a cosine, or as 1 / sqrt(step)."""
    warmup_steps: Whole = 0
    """The steps in which the factor rises on a line from 0 to 1."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The factor at the last step, of linear and cosine."""


class EvaluationSection(Section):
    """The steps at which a Trainer with `eval_batches` evaluates, and the evaluations that end training."""

    every: Whole = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    num_batches: Annotated[int, Field(ge=1)] | None = None
    """Batches of one evaluation; None takes all, which a source without end does not have."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Evaluations in a row without an improvement after which training stops; None never stops."""
    metric: str = "loss"
    """What improves: "loss", or the name of a metric, of which less is better unless greater_is_better."""
    greater_is_better: bool = False
    """Whether more of `metric` is better."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """The least change that counts as an improvement."""


class LoggingSection(Section):
    """Logs of each step, besides the terminal."""

    directory: str | None = None
    """The folder of metrics.jsonl and TensorBoard's files; by default checkpoint_directory. Without both, no log."""
    tensorboard: bool = False
    """Whether TensorBoard's files are written too, which needs `pip install 'autopar[tensorboard]'`."""
    wandb: str | None = None
    """The project of Weights & Biases to log to, where wandb is installed."""


class ProfilerSection(Section):
    """A window of steps whose torch.profiler trace each rank writes."""

    directory: str | None = None
    """The folder of the traces, rank_0.json and so on, for Perfetto or chrome://tracing; None profiles nothing."""
    first_step: Annotated[int, Field(ge=1)] = 3
    """The first step of the window, counted from where the run starts or resumes."""
    num_steps: Annotated[int, Field(ge=1)] = 2
    """The number of steps in the window."""


Kind = TypeVar("Kind", bound=Section)


def section(name: str, kind: type[Kind], value: object) -> Kind:
    """Return a section from itself, from a mapping, or (None) with its defaults. Raises ConstraintError."""
    if isinstance(value, kind):
        return value
    if value is None:
        return kind()
    if isinstance(value, str) and "name" in kind.model_fields:
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise ConstraintError(
            f"{name} is a group of fields", values=shown(value), alternatives=", ".join(kind.model_fields)
        )
    try:
        return kind.model_validate(dict(value))
    except ValidationError as error:
        raise _refused(name, kind, error) from None


def _refused(name: str, kind: type[Section], error: ValidationError) -> ConstraintError:
    """Return pydantic's first error in our words."""
    first = error.errors()[0]
    where = ".".join((name, *(str(part) for part in first["loc"])))
    if first["type"] == "extra_forbidden":
        field = str(first["loc"][-1])
        return ConstraintError(f"there is no field {where}", alternatives=near(field, kind.model_fields))
    text = first["msg"][:1].lower() + first["msg"][1:]
    return ConstraintError(f"{where}: {text}", values=shown(first["input"]))
