"""Explain why torch could not trace a model: kinds of reasons, by where and how torch stopped."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from autopar.errors import TraceError
from autopar.frontend.user_line import raised_at

_TORCH = Path(torch.__file__).parent
_CONTROL_FLOW = frozenset({"cond", "while_loop", "map", "scan", "associative_scan"})
"""Functions of torch whose arguments are functions of the user's, in files of the same name."""

_BY_VALUE = ("DataDependent", "DynamicOutputShape", "Unsupported", "UserError", "SpecViolationError")
_FLEX_ON_CPU = "FlexAttention does not support backward on CPU"
"""The beginning of torch's message where it refuses to train flex_attention without a GPU; a trace looks like that."""


class UntraceableError(TraceError):
    """An error of forward, or of tracing it: `trace.py` finds out whether forward runs in one process."""


def untraceable(error: Exception, drawn: Sequence[str] = ()) -> TraceError:
    """Return autopar's error for one of torch.export, with the user's line.

    drawn: functions of Python that forward asked for random numbers before.
    """
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    line = raised_at(error.__traceback__)
    place = f" at {line}" if line else ""
    if first.startswith(_FLEX_ON_CPU):
        return flex_attention(place)
    operator = next((name for cause in _causes(error) for name in _control_flow(cause)), "")
    if operator:
        return control_flow(operator, place)
    what = f"{type(error).__name__}: {first}{place}"
    if drawn:
        return TraceError(
            "torch.export could not trace a forward that draws random numbers in Python; what it does next may depend "
            "on them",
            values={"drawn by": ", ".join(dict.fromkeys(drawn)), "stopped": line or what},
            alternatives=[
                "use the number in arithmetic alone, drawn anew in every step: no float(), `if`, index or option",
                "for a layer that is skipped at random: multiply its result by a torch.bernoulli (stochastic depth)",
                "decide in the training loop, or pass random tensors as inputs of the batch",
            ],
        )
    if ".numpy()" in first or "numpy" in _innermost_file(error):
        return TraceError(
            "forward passes tensors to numpy, but a trace follows torch's operators alone",
            values=line or what,
            alternatives=["use torch operators in place of numpy's", "put a torch.library.custom_op around the line"],
        )
    if any("nested" in file for file in _files_of_torch(error)):
        return TraceError(
            "forward makes nested tensors, which have no sharding",
            values=line or what,
            alternatives="use padded tensors with a mask",
        )
    if any(word in type(error).__name__ for word in _BY_VALUE):
        by_shape = "DynamicOutputShape" in type(error).__name__
        return TraceError(
            "torch.export could not trace the model: values of tensors, which a trace lacks, decide what it does",
            values=f"the shape of a result: {what}" if by_shape else line or what,
            alternatives=[
                "write the line without values of parameters, buffers or the batch (torch.where); values that forward "
                "computes from numbers alone are known",
                "set an option of the model that skips the line, or leave out the input that it tests (a mask of ones)",
                "put a torch.library.custom_op around it",
            ],
        )
    return UntraceableError(
        "torch.export could not trace the model",
        values=what,
        alternatives=[
            "if only tracing fails (numpy, memory of tensors, Python branches on values): use torch operators, or put "
            "a torch.library.custom_op around the line",
        ],
    )


def failing(error: Exception, dtype: torch.dtype | None = None) -> TraceError:
    """Return the error for a model or loss that does not run in one process, cast to `dtype` or as it is."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    line = raised_at(error.__traceback__)
    what = f"{type(error).__name__}: {first}" + (f" at {line}" if line else "")
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        return TraceError(
            f"the model or its loss fails with parameters and floating inputs in {name}, as `precision` casts them",
            values=what,
            alternatives=["cast in forward where dtypes meet (buffer.to(x.dtype))", 'precision="fp32"'],
        )
    return TraceError(
        "the model or its loss fails on the example inputs",
        values=what,
        alternatives="make it run in one process: try loss_fn(model(*inputs), *targets) on the same example inputs",
    )


def takes_number(line: str) -> TraceError:
    """Return the error for a forward that computes with a number taken out of a tensor."""
    return TraceError(
        "forward takes a number out of a tensor, so its computation depends on values",
        values=line,
        alternatives=[
            "keep it a tensor (no .item(), float(), int() or tolist() in forward, no index or size by a random number)",
            "in a mixture of experts, use torch.nn.functional.grouped_mm instead of slices of counted sizes",
        ],
    )


def control_flow(name: str, place: str) -> TraceError:
    """Return the error for an operator of torch that runs user functions under a condition or in a loop."""
    return TraceError(
        "forward calls a control flow operator of torch, which a generated program cannot contain",
        values=f"torch's {name}{place}",
        alternatives=[
            "for cond: use torch.where of both results, where both can be computed",
            "for loops: use a Python loop over a number of steps that is known without values",
        ],
    )


def flex_attention(place: str = "") -> TraceError:
    """Return the error for masks and scores that are functions."""
    return TraceError(
        "the model calls torch.nn.attention.flex_attention, whose mask and scores are functions",
        values=f"flex_attention or a block mask{place}",
        alternatives=[
            "use scaled_dot_product_attention with the mask as a tensor of comparisons: windows, chunks and causal "
            "masks are recognized and then take no memory, and documents are exact on every axis",
            'a model of transformers with attn_implementation="sdpa"',
        ],
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _control_flow(error: BaseException) -> Iterator[str]:
    """Yield the control flow operators of torch that were being called."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        path = Path(frame.f_code.co_filename)
        if path.parent == _TORCH / "_higher_order_ops" and frame.f_code.co_name == path.stem in _CONTROL_FLOW:
            yield path.stem


def _files_of_torch(error: BaseException) -> list[str]:
    """Return the files of torch, relative to its folder, that were running."""
    paths = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [str(path.relative_to(_TORCH)) for path in paths if path.is_relative_to(_TORCH)]


def _innermost_file(error: BaseException) -> str:
    frames = list(traceback.walk_tb(error.__traceback__))
    return frames[-1][0].f_code.co_filename if frames else ""
