"""Random numbers that forward draws otherwise than as tensors of torch's default generator, while it is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError
from codegen.runtime.python_random import ArrayError, by_torch


@contextlib.contextmanager
def drawn_numbers(names: list[str]) -> Iterator[None]:
    """Within it Python's and numpy's random numbers are tensors without dims. names: gets those functions
    that are called.

    Raises TraceError for what no program can draw: arrays of numpy, and generators of the model's own.
    """
    with _NoGenerators(), by_torch(lambda tensor: tensor, names.append):
        try:
            yield
        except ArrayError as error:
            raise TraceError(
                "forward draws an array of numpy, or calls a random function of Python in a form that autopar does not "
                "know",
                values=str(error),
                alternatives=["torch.rand, torch.randn or torch.randint of the same shape", "one number at a time"],
            ) from None


class _NoGenerators(TorchFunctionMode):
    """Refuses a torch.Generator as an argument: its state is the model's own, and no two ranks have it alike."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise TraceError(
                "forward draws random numbers from a torch.Generator of its own, whose state no plan can follow",
                values=f"{getattr(func, '__name__', func)}(..., generator=...)",
                alternatives=[
                    "no generator: torch's default numbers are drawn alike under every plan, by the seed of the step",
                    "for noise that is to stay the same: a buffer that is filled in the constructor",
                ],
            )
        return func(*args, **kwargs)
