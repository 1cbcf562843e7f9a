"""torch.export of a model with its loss, what holds while forward is traced, and its errors in words."""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._dynamo import _trace_wrapped_higher_order_op
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.nn.attention import flex_attention
from torch.nn.modules import transformer

from autopar.errors import AutoparError, TraceError
from autopar.frontend.autograd_functions import call_function, outside_functions
from autopar.frontend.constants import Constants
from autopar.frontend.fakes import in_this_thread
from autopar.frontend.inputs import Batch
from autopar.frontend.loss_module import LossModule
from autopar.frontend.masks import plain_masks
from autopar.frontend.one_process import as_one_process
from autopar.frontend.strided import ByPosition
from autopar.frontend.user_line import raised_at
from autopar.frontend.value_checks import skipped_checks


def export(module: nn.Module, batch: Batch, unchecked: dict[str, None] | None = None) -> torch.export.ExportedProgram:
    """unchecked: gets the lines whose checks of values are left out (value_checks.py)."""
    clones = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in batch.items()}
    try:
        # torch prints the whole graph to stderr where a value decides; the error below says what matters of it.
        # The many graph modules that export makes on its way are read, never called: they need no code.
        with traceable(batch, unchecked), contextlib.redirect_stderr(io.StringIO()), _use_lazy_graph_module(True):
            return torch.export.export(module, (), clones, strict=False)
    except AutoparError:
        raise  # also of what a framework's module refuses in its forward
    except Exception as error:  # torch.export raises many kinds; each becomes one readable error
        raise _untraceable(error) from error


_FLEX_ON_CPU = "FlexAttention does not support backward on CPU"
"""How torch begins where it refuses to train flex_attention without a GPU, as which a trace appears to it."""


def _is_called_by(module: ModuleType) -> bool:
    """Whether a function of this module is under way in this thread."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != module.__file__:
        frame = frame.f_back
    return frame is not None


def _flex_attention(line: str = "") -> TraceError:
    return TraceError(
        "the model calls torch.nn.attention.flex_attention, whose mask and scores are code that no trace has",
        values=f"flex_attention or a block mask{line}",
        alternatives=[
            "scaled_dot_product_attention with the mask as a tensor of comparisons: windows, chunks and causal masks "
            "are recognised and then take no memory, and documents are exact on every axis",
            'a model of transformers with attn_implementation="sdpa"',
        ],
    )


_BY_SHAPE = "the shape of a result: {}"
_BY_VALUE = ("DataDependent", "DynamicOutputShape", "UserError", "Unsupported", "SpecViolationError")


def _untraceable(error: Exception) -> TraceError:
    """Forward's own error, or why torch could not trace it, with the user's line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    line = raised_at(error.__traceback__)
    if first.startswith(_FLEX_ON_CPU):
        return _flex_attention(f" at {line}" if line else "")
    what = f"{type(error).__name__}: {first}" + (f" at {line}" if line else "")
    if any(word in type(error).__name__ for word in _BY_VALUE):
        by_shape = "DynamicOutputShape" in type(error).__name__
        return TraceError(
            "torch.export could not trace the model: values of tensors, which a trace lacks, decide what it does",
            values=_BY_SHAPE.format(what) if by_shape else line or what,
            alternatives=[
                "the line without values of parameters, buffers or the batch (torch.where); values of what forward "
                "makes of numbers alone are known",
                "an option of the model that leaves the line out, or an input left out that it asks about (a mask "
                "of ones)",
                "a torch.library.custom_op around it",
            ],
        )
    return TraceError(
        "the model or its loss fails on the example inputs",
        values=what,
        alternatives=[
            "what runs in one process: try loss_fn(model(*inputs), *targets) on the same example inputs",
            "for what only tracing cannot do (numpy, Python's control of values): torch operators, or "
            "torch.library.custom_op",
        ],
    )


def forward_and_loss(
    model: nn.Module, loss_fn: Callable[..., torch.Tensor] | None, batch: Batch, *, with_logits: bool = False
) -> Any:
    """Forward and loss as they are exported. with_logits: (loss, logits) of a model that returns logits."""
    with traceable(batch):
        return LossModule(model, loss_fn, batch, with_logits=with_logits)(**batch)


@contextlib.contextmanager
def traceable(batch: Batch, unchecked: dict[str, None] | None = None) -> Iterator[None]:
    """What holds while forward is traced. unchecked: as `export` takes it."""
    packed = any("position_ids" in name for name in batch)
    with (
        as_one_process(),
        custom_backward(),
        skipped_checks(unchecked),
        plain_masks(packed_positions=packed),
        masks_as_given(),
        indexed_masks(),
        ByPosition(),
        Constants(),
    ):
        yield


@contextlib.contextmanager
def masks_as_given() -> Iterator[None]:
    """torch.nn's transformer layers do not look whether the values of a mask are causal: the mask says the same."""

    def told(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    own = transformer._detect_is_causal_mask
    with mock.patch.object(transformer, "_detect_is_causal_mask", in_this_thread(told, own)):
        yield


@contextlib.contextmanager
def indexed_masks() -> Iterator[None]:
    """Masks that are written as functions of places, which look tensors up by them, are calls of index."""

    def looked_up(x: torch.Tensor, indices: list[torch.Tensor]) -> torch.Tensor:
        if _is_called_by(flex_attention):  # create_block_mask, create_mask
            raise _flex_attention()
        found: torch.Tensor = torch.ops.aten.index(x, indices)
        return found

    own = _trace_wrapped_higher_order_op.mod_index
    with mock.patch.object(_trace_wrapped_higher_order_op, "mod_index", in_this_thread(looked_up, own)):
        yield


@contextlib.contextmanager
def custom_backward() -> Iterator[None]:
    """A custom autograd.Function becomes an operator; what a trace drops silently is refused: hooks and gradients."""

    # A classmethod of Python until torch 2.14, of C since.
    registered = torch.autograd.Function.__dict__["apply"]

    def applied(cls: type, *args: Any, **kwargs: Any) -> Any:
        return registered.__get__(None, cls)(*args, **kwargs)

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        is_saving = cls.__name__ == "_NoopSaveInputs"  # of checkpoints that are not reentrant, up to torch 2.12
        if cls.__module__ == "torch._library.autograd" or is_saving:
            return applied(cls, *args, **kwargs)  # of an operator with register_autograd: the graph has the call
        if cls.__module__ == "torch.utils.checkpoint":
            raise TraceError(
                "the model uses reentrant activation checkpointing, whose backward a traced graph does not have",
                values="torch.utils.checkpoint.checkpoint with use_reentrant=True",
                alternatives=[
                    "use_reentrant=False, which is traced through (transformers: gradient_checkpointing_enable("
                    'gradient_checkpointing_kwargs={"use_reentrant": False}))',
                    'none in the model: plans choose what to recompute, and {"recompute": "full"} asks for all layers',
                ],
            )
        return call_function(cls, args, kwargs)

    def refused(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise TraceError(
                f"forward calls {name}, of which a traced graph shows nothing",
                alternatives=[
                    "call it in the training loop",
                    "compute what it does with torch operators, or in a torch.library.custom_op with register_autograd",
                ],
            )

        return call

    with contextlib.ExitStack() as stack:
        apply_here = classmethod(in_this_thread(outside_functions(apply, applied), applied))
        stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", apply_here))
        for owner, name, label in _DROPPED_CALLS:
            own = getattr(owner, name)
            call = in_this_thread(outside_functions(refused(label), own), own)
            stack.enter_context(mock.patch.object(owner, name, call))
        yield


_DROPPED_CALLS = (
    (torch.Tensor, "register_hook", "Tensor.register_hook"),
    (torch.Tensor, "register_post_accumulate_grad_hook", "Tensor.register_post_accumulate_grad_hook"),
    (torch.Tensor, "backward", "Tensor.backward"),
    (torch.autograd, "backward", "torch.autograd.backward"),
    (torch.autograd, "grad", "torch.autograd.grad"),
)
