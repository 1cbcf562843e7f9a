"""Model and loss as one module, and its loss in the precision of a program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError
from autopar.frontend.attributes import modules_of
from autopar.frontend.inputs import (
    Batch,
    NamedBatch,
    arguments_of_batch,
    example_values,
    model_arguments,
    split_names,
)
from autopar.frontend.trace_modes.operand_dtypes import operands_in
from autopar.frontend.trace_modes.specialization import begin_forward


class LossModule(nn.Module):
    """Model and loss as one module that takes a batch by name, as `batch` is, and returns the loss.

    with_logits: it returns (loss, logits) where the model returns logits (`_logits_of`). dtype: of floating-point
    parameters that were cast to half precision, which decides operand dtypes; None: not cast. keeps_buffers: write in
    place to buffers that forward replaces, as a trace needs; no backward may follow.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., torch.Tensor] | None,
        batch: Batch,
        *,
        with_logits: bool = False,
        dtype: torch.dtype | None = None,
        keeps_buffers: bool = True,
    ) -> None:
        super().__init__()
        self.with_logits, self.keeps_buffers = with_logits, keeps_buffers
        self.dtype = dtype
        self.model = model
        self.loss_fn = loss_fn
        self.containers = batch.containers if isinstance(batch, NamedBatch) else {}
        self.names = tuple(batch)
        self.values = example_values(batch)

    def forward(self, **batch: Any) -> Any:
        begin_forward(batch, self.values)
        arguments = arguments_of_batch({name: batch[name] for name in self.names}, self.containers)
        model_names, loss_names = split_names(self.model, tuple(arguments), self.loss_fn)
        positional, keyword = model_arguments(self.model, {name: arguments[name] for name in model_names})
        kept = kept_buffers if self.keeps_buffers else contextlib.nullcontext
        with operands_in(self.dtype), kept(self.model):
            output = self.model(*positional, **keyword)
        if self.loss_fn is None:
            loss = _loss_of(output)
        else:
            with operands_in(self.dtype, is_loss=True), kept(self.loss_fn):
                loss = _scalar(self.loss_fn(output, *(arguments[name] for name in loss_names)), "loss_fn")
        logits = _logits_of(output) if self.with_logits else None
        return loss if logits is None else (loss, logits)


@contextlib.contextmanager
def kept_buffers(model: Any) -> Iterator[None]:
    """Context manager after which buffers that forward replaces by others of equal shape and dtype are written in place
    instead.
    """
    modules = modules_of(model) if isinstance(model, nn.Module) else ()
    before = [(m._buffers, name, value) for m in modules for name, value in m._buffers.items()]
    yield
    for buffers, name, value in before:
        now = buffers.get(name)
        if value is None or now is None or now is value:
            continue
        if (now.shape, now.dtype) == (value.shape, value.dtype):
            with torch.no_grad():
                value.copy_(now)
            buffers[name] = value


def _logits_of(output: Any) -> torch.Tensor | None:
    """Return the model's logits: `output.logits`, output["logits"], the output, or the first of several outputs.

    Logits are a floating-point tensor with dims. None where there is no such tensor.
    """
    named = getattr(output, "logits", None)
    if named is None and isinstance(output, Mapping):
        named = output.get("logits")
    several = output if isinstance(output, (tuple, list)) else (output,)
    for tensor in (named,) if named is not None else several:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.dim():
            return tensor
    return None


def _loss_of(output: Any) -> torch.Tensor:
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None and isinstance(output, (tuple, list)):
        loss = next((item for item in output if isinstance(item, torch.Tensor) and item.dim() == 0), None)
    if loss is None:
        loss = output
    return _scalar(loss, "the model")


def _scalar(loss: Any, author: str) -> torch.Tensor:
    """Return `loss` as a tensor without dims. Raises TraceError unless it is one differentiable number."""
    if isinstance(loss, torch.Tensor) and loss.is_floating_point() and loss.numel() == 1:
        return loss.reshape(())
    what = type(loss).__name__
    if isinstance(loss, torch.Tensor):
        what = f"a tensor of shape {tuple(loss.shape)} and dtype {str(loss.dtype).removeprefix('torch.')}"
    raise TraceError(
        f"{author} returns no scalar loss",
        values=f"it returned {what}",
        alternatives=[
            "a floating-point tensor of one element, such as loss.mean()",
            "labels in example_inputs so that the model computes its loss, or loss_fn=",
        ],
    )


def loss_in(dtype: torch.dtype | None, module: LossModule, batch: Mapping[str, Any]) -> Tensor:
    """Return the module's loss with floating-point parameters cast to `dtype`; its own parameters are the masters.

    `operand_dtypes.py` casts operands. Gradients reach the masters in their dtype, rounded to `dtype` before, as in a
    program. None: no cast.
    """
    if dtype is None:
        loss: Tensor = module(**batch)
        return loss
    cast = {name: _cast(p, dtype) for name, p in module.named_parameters()}
    module.dtype = dtype
    with _AsPrograms():
        loss = functional_call(module, cast, kwargs=dict(batch))
        return loss


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


class _AsPrograms(TorchFunctionMode):
    """Context manager in which, as in programs, cross-entropy of half-precision logits is computed in fp32, and batch
    norm takes weights of its statistics' dtype.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.cross_entropy and args and args[0].dtype.itemsize < 4:
            args = (args[0].float(), *args[1:])
        kwargs = dict(kwargs or {})
        if func is F.batch_norm and len(args) > 1 and isinstance(args[1], Tensor):  # torch gives weights by name
            for name in ("weight", "bias"):
                value = kwargs.get(name)
                kwargs[name] = value if value is None else value.to(args[1].dtype)
        return func(*args, **kwargs)
