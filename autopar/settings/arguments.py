"""Checks of user input before tracing: types, numbers, words, paths."""

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
    """Return a whole number of at least `least`. Raises `kind`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise kind(
            f"{name} must be a whole number of at least {least}", values=shown(value), alternatives=f"{least} or more"
        )
    return value


def word(name: str, value: Any, legal: tuple[str, ...]) -> str:
    """Return one of `legal`. Raises ConstraintError."""
    if not isinstance(value, str) or value not in legal:
        raise ConstraintError(f"{name} has an unknown value", values=shown(value), alternatives=", ".join(legal))
    return value


def yes_no_or_none(name: str, value: Any) -> None:
    """Raise ConstraintError for a value other than true, false and None."""
    if value is not None and not isinstance(value, bool):
        raise ConstraintError(
            f"{name} must be true, false or null", values=shown(value), alternatives="true, false or null"
        )


def check_module(model: Any) -> None:
    """Raise ModelError for a value that is no torch module."""
    if not isinstance(model, nn.Module):
        hint = "an instance: call the class" if isinstance(model, type) else "a torch.nn.Module"
        raise ModelError("the model is not a torch.nn.Module", values=shown(model), alternatives=hint)


def check_batch(example_inputs: Any) -> None:
    """Raise TraceError for a value that is neither a tuple nor a mapping with legal argument names."""
    forms = ["a tuple of the model's inputs and the loss's targets", "a dict of them by name"]
    if isinstance(example_inputs, Mapping):
        for name in example_inputs:
            if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
                raise TraceError(
                    "a name in the batch is not a legal argument name",
                    values=shown(name),
                    alternatives="a name of letters, digits and underscores that is not a Python keyword",
                )
    elif isinstance(example_inputs, (str, bytes, bool, int, float, type(None))):
        raise TraceError("example_inputs is not a batch", values=shown(example_inputs), alternatives=forms)
    if isinstance(example_inputs, (Mapping, tuple, list)) and not example_inputs:
        raise TraceError("example_inputs is empty", values=shown(example_inputs), alternatives=forms)


def check_numbers(values: Mapping[str, Any]) -> None:
    """Raise ConstraintError for a number outside the range of its name."""
    for name, value in values.items():
        if wrong := problem(name, value):
            raise ConstraintError(wrong, values=shown(value))


def check_path(name: str, value: Any) -> None:
    """Raise ConstraintError for a value that is no path."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or "\0" in str(value):
        raise ConstraintError(
            f"{name} must be a path", values=shown(value), alternatives='"runs/first", or a pathlib.Path'
        )
