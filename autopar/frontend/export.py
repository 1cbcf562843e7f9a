"""Run torch.export on a model with its loss, in the contexts that tracing needs."""

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
from torch.nn.attention import flex_attention as flex_module
from torch.nn.modules import transformer

from autopar.errors import AutoparError, TraceError
from autopar.frontend.fakes import in_this_thread
from autopar.frontend.inputs import Batch
from autopar.frontend.loss_module import LossModule
from autopar.frontend.state.function_caches import functions_of
from autopar.frontend.trace_modes.activation_checkpoints import followed_checkpoints
from autopar.frontend.trace_modes.as_strided import ByPosition
from autopar.frontend.trace_modes.autograd_functions import call_function, outside_functions
from autopar.frontend.trace_modes.constants import Constants, Unwritten
from autopar.frontend.trace_modes.data_access import DataAccess
from autopar.frontend.trace_modes.drawn_numbers import drawn_numbers, floats_of_draws
from autopar.frontend.trace_modes.hugging_face_masks import plain_masks
from autopar.frontend.trace_modes.inner_gradients import traceable_gradients
from autopar.frontend.trace_modes.module_moves import moved_in_place
from autopar.frontend.trace_modes.one_process import as_one_process
from autopar.frontend.trace_modes.running_statistics import written_statistics
from autopar.frontend.trace_modes.specialization import Specializing
from autopar.frontend.trace_modes.value_checks import skipped_checks
from autopar.frontend.untraceable import flex_attention, untraceable
from autopar.frontend.user_line import innermost_lines


def export(module: nn.Module, batch: Batch, unchecked: dict[str, None] | None = None) -> torch.export.ExportedProgram:
    """Export `module`. unchecked: gets the lines whose value checks are left out (value_checks.py)."""
    clones = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in batch.items()}
    drawn: list[str] = []
    try:
        # torch prints the whole graph to stderr where a value decides; the error below has the relevant part.
        # The many graph modules that export makes on its way are read, never called: they need no code.
        with (
            traceable(batch, unchecked, drawn, module),
            floats_of_draws(functions_of(module)),
            _unwatched_attributes(),
            contextlib.redirect_stderr(io.StringIO()),
            _use_lazy_graph_module(True),
        ):
            return torch.export.export(module, (), clones, strict=False)
    except AutoparError:
        raise  # also exceptions of a framework's module in its forward
    except Exception as error:  # torch.export raises many kinds; each becomes one readable error
        raise untraceable(error, drawn) from error


def _is_called_by(module: ModuleType) -> bool:
    """Return whether a function of this module is running in this thread."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != module.__file__:
        frame = frame.f_back
    return frame is not None


def forward_and_loss(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    batch: Batch,
    *,
    with_logits: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return forward and loss as they are exported. with_logits: (loss, logits) of a model that returns logits. dtype:
    see LossModule.
    """
    with traceable(batch, module=model):
        return LossModule(model, loss_fn, batch, with_logits=with_logits, dtype=dtype)(**batch)


@contextlib.contextmanager
def traceable(
    batch: Batch,
    unchecked: dict[str, None] | None = None,
    drawn: list[str] | None = None,
    module: nn.Module | None = None,
) -> Iterator[None]:
    """Context manager in which forward is traced. unchecked: see `export`. drawn: gets the names of Python's random
    functions that forward calls. module: its small buffers may be asked for values.
    """
    packed = any("position_ids" in name for name in batch)
    with (
        as_one_process(),
        custom_backward(),
        skipped_checks(unchecked),
        plain_masks(packed_positions=packed),
        masks_as_given(),
        indexed_masks(),
        ByPosition(),
        DataAccess(),
        written_statistics(),
        Unwritten(),
        Constants(module),
        Specializing(),
        innermost_lines(),
        drawn_numbers([] if drawn is None else drawn),
        traceable_gradients(),
        moved_in_place(),
        followed_checkpoints(),
    ):
        yield


@contextlib.contextmanager
def masks_as_given() -> Iterator[None]:
    """Context manager in which transformer layers of torch.nn do not test whether a mask is causal: the mask says the
    same.
    """

    def told(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    original = transformer._detect_is_causal_mask
    with mock.patch.object(transformer, "_detect_is_causal_mask", in_this_thread(told, original)):
        yield


@contextlib.contextmanager
def _unwatched_attributes() -> Iterator[None]:
    """Context manager in which torch.export does not compare all attributes before and after, which fails for values
    that no pytree takes.

    It warns of tensors that forward sets on modules; `state/repeatable.py` refuses a forward that reads them later.
    """
    from torch.export import _trace as owner  # torch imports it with the first export

    name = "_detect_attribute_assignment"
    if not hasattr(owner, name):
        yield
        return
    original = getattr(owner, name)
    with mock.patch.object(owner, name, in_this_thread(lambda module: contextlib.nullcontext(), original)):
        yield


@contextlib.contextmanager
def indexed_masks() -> Iterator[None]:
    """Context manager in which masks written as functions of positions look up tensors by calls of index."""

    def looked_up(x: torch.Tensor, indices: list[torch.Tensor]) -> torch.Tensor:
        if _is_called_by(flex_module):  # create_block_mask, create_mask
            raise flex_attention()
        rows: torch.Tensor = torch.ops.aten.index(x, indices)
        return rows

    original = _trace_wrapped_higher_order_op.mod_index
    with mock.patch.object(_trace_wrapped_higher_order_op, "mod_index", in_this_thread(looked_up, original)):
        yield


@contextlib.contextmanager
def custom_backward() -> Iterator[None]:
    """Context manager in which a custom autograd.Function is an operator, and calls that a trace drops raise."""

    # A classmethod of Python until torch 2.14, in C since.
    registered = torch.autograd.Function.__dict__["apply"]

    def applied(cls: type, *args: Any, **kwargs: Any) -> Any:
        return registered.__get__(None, cls)(*args, **kwargs)

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        is_saving = cls.__name__ == "_NoopSaveInputs"  # of checkpoints that are not reentrant, up to torch 2.12
        if cls.__module__ == "torch._library.autograd" or is_saving:
            return applied(cls, *args, **kwargs)  # of an operator with register_autograd: the graph has the call
        return call_function(cls, args, kwargs)

    def refused(name: str) -> Callable[..., Any]:
        instead = _INSTEAD_OF_HOOKS if name == "Tensor.register_hook" else "call it in the training loop"

        def call(*args: Any, **kwargs: Any) -> Any:
            raise TraceError(
                f"forward calls {name}, which a traced graph does not show",
                alternatives=[
                    instead,
                    "write it with torch operators, or as a torch.library.custom_op with register_autograd",
                ],
            )

        return call

    with contextlib.ExitStack() as stack:
        apply_here = classmethod(in_this_thread(outside_functions(apply, applied), applied))
        stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", apply_here))
        for owner, name, label in _DROPPED_CALLS:
            original = getattr(owner, name)
            call = in_this_thread(outside_functions(refused(label), original), original)
            stack.enter_context(mock.patch.object(owner, name, call))
        yield


_INSTEAD_OF_HOOKS = (
    "a torch.autograd.Function of a module of yours: its forward returns x.view_as(x), and its backward what the hook "
    "makes of the gradient"
)
_DROPPED_CALLS = (
    (torch.Tensor, "register_hook", "Tensor.register_hook"),
    (torch.Tensor, "register_post_accumulate_grad_hook", "Tensor.register_post_accumulate_grad_hook"),
    (torch.Tensor, "backward", "Tensor.backward"),
    (torch.autograd, "backward", "torch.autograd.backward"),
)
