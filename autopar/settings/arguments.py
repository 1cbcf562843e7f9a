"""Checks of what a user gives, before anything is traced: types, counts, words."""

from __future__ import annotations

import keyword
import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from autopar.errors import AutoparError, ConstraintError, ModelError, TraceError
from autopar.files.text_files import shown
from codegen.runtime.options import problem


def whole(name: str, value: Any, least: int, kind: type[AutoparError] = ConstraintError) -> int:
    """A whole number of at least `least`; raises `kind`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise kind(
            f"{name} is a whole number of at least {least}", values=shown(value), alternatives=f"{least} or more"
        )
    return value


def word(name: str, value: Any, legal: tuple[str, ...]) -> str:
    """One of `legal`. Raises ConstraintError."""
    if not isinstance(value, str) or value not in legal:
        raise ConstraintError(f"{name} is not supported", values=shown(value), alternatives=", ".join(legal))
    return value


def yes_no_or_none(name: str, value: Any) -> None:
    """Raises ConstraintError for what is neither true nor false nor None."""
    if value is not None and not isinstance(value, bool):
        raise ConstraintError(f"{name} is true, false or null", values=shown(value), alternatives="null")


def check_module(model: Any) -> None:
    """Raises ModelError for what is no torch module."""
    if not isinstance(model, nn.Module):
        hint = "an instance: call the class" if isinstance(model, type) else "a torch.nn.Module"
        raise ModelError("the model is not a torch.nn.Module", values=shown(model), alternatives=hint)


def check_batch(example_inputs: Any) -> None:
    """Raises TraceError unless it is a tuple or a mapping whose keys are names that arguments can have."""
    forms = ["a tuple of the model's inputs and the loss' targets", "a dict of them by name"]
    if isinstance(example_inputs, Mapping):
        for name in example_inputs:
            if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
                raise TraceError(
                    "a name in the batch cannot be an argument of forward",
                    values=shown(name),
                    alternatives="letters, digits and underscores",
                )
    elif isinstance(example_inputs, (str, bytes, bool, int, float, type(None))):
        raise TraceError("example_inputs is not a batch", values=shown(example_inputs), alternatives=forms)
    if isinstance(example_inputs, (Mapping, tuple, list)) and not example_inputs:
        raise TraceError("example_inputs is empty", alternatives=forms)


def check_numbers(values: Mapping[str, Any]) -> None:
    """Raises ConstraintError for a number outside of what a run's numbers of that name may be."""
    for name, value in values.items():
        if wrong := problem(name, value):
            raise ConstraintError(wrong, values=shown(value))


def check_path(name: str, value: Any) -> None:
    """Raises ConstraintError for what names no file or folder."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or "\0" in str(value):
        raise ConstraintError(f"{name} is a path", values=shown(value), alternatives='"runs/first", or a pathlib.Path')
