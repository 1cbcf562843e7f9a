"""Errors that a user can cause, one class per stage. Each has the constraint, the values and the alternatives.

Every class derives from `AutoparError`, which is a `ValueError`. A command line that catches `AutoparError` prints
`str(error)` without the traceback. Any other exception is a bug of ours and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from codegen.source.text import visible
from cost_models.certainty import Certainty

Values = str | Mapping[str, object]
Alternatives = str | Sequence[str]


class AutoparError(ValueError):
    """An input that autopar cannot honor.

    constraint: what must hold, or what went wrong, in one clause without a full stop. values: the offending values, as
    a phrase or by name. alternatives: accepted values, as a phrase or a list of choices. The message is

        constraint
          got: values
          instead: alternatives

    without the lines whose part is missing. Control characters are escaped. Errors survive pickling, so they reach
    other processes whole.
    """

    def __init__(
        self, constraint: str, *, values: Values | None = None, alternatives: Alternatives | None = None
    ) -> None:
        self.constraint = constraint
        self.values = values
        self.alternatives = alternatives
        super().__init__(_message(constraint, values, alternatives))

    def __reduce__(self) -> tuple[object, ...]:
        values = dict(self.values) if isinstance(self.values, Mapping) else self.values
        return _rebuild, (type(self), self.constraint, values, self.alternatives)


class ModelError(AutoparError):
    """A model could not be found, imported or built from its name or configuration."""


class TraceError(AutoparError):
    """The model, its loss or its example inputs cannot be captured as one static graph."""


class ClusterError(AutoparError):
    """A cluster description names unknown hardware, or its counts and links make no cluster."""


class ConstraintError(AutoparError):
    """A user's constraint matches nothing, contradicts another, or asks for an illegal placement."""


class PlanError(AutoparError):
    """A plan file cannot be read, or no longer fits the model it is applied to."""


class InfeasibleError(AutoparError):
    """Nothing fits: no mesh for this number of devices, or no plan inside a budget.

    needed_bytes: a budget per rank that is enough, where one is known. certainty: how sure that plan's bytes are; the
    plan may fit all the same.
    """

    needed_bytes: int | None = None
    certainty: Certainty | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return *super().__reduce__(), {"needed_bytes": self.needed_bytes, "certainty": self.certainty}


class DataError(AutoparError):
    """A batch differs from what the program was made for, or ranks that share its rows got different ones."""


class TrainingError(AutoparError):
    """Training cannot go on (loss or gradients are not finite), or begin: the program's loss is not the model's own."""


class WorldSizeError(AutoparError):
    """The number of running processes differs from the plan's number of ranks."""


class InternalError(AutoparError):
    """autopar made something wrong and noticed it before it ran: a bug of ours, not of the input."""


class OutputError(AutoparError):
    """A file or folder cannot be written, or exists and is not autopar's to replace."""


class CheckpointError(AutoparError):
    """A checkpoint is damaged, belongs to another model, or its folder cannot be used."""


def _rebuild(
    kind: type[AutoparError], constraint: str, values: Values | None, alternatives: Alternatives | None
) -> AutoparError:
    return kind(constraint, values=values, alternatives=alternatives)


def _message(constraint: str, values: Values | None, alternatives: Alternatives | None) -> str:
    lines = [constraint]
    if isinstance(values, Mapping):
        items = [f"{name} = {value}" for name, value in values.items()]
    else:
        items = [values] if values else []
    choices = [alternatives] if isinstance(alternatives, str) else list(alternatives or ())
    lines += _labelled("got", items)
    lines += _labelled("instead", [choice for choice in choices if choice])
    return visible("\n".join(lines))


def _labelled(label: str, items: list[str]) -> list[str]:
    """Return `label: item` on one line, or the label with one item per line below it."""
    if not items:
        return []
    if len(items) == 1 and "\n" not in items[0]:
        return [f"  {label}: {items[0]}"]
    return [f"  {label}:"] + [f"    {line}" for item in items for line in item.splitlines()]
