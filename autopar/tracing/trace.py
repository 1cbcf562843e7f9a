"""Model -> Graph: torch.export on a skeleton of the model, then simplification and layer folding.

The skeleton is a deep copy whose parameters and buffers are fake (shapes without memory) on the CPU, so that tracing
needs neither the memory of a 175B model nor touches the user's modules. Runs of equal blocks are traced at reduced
depth and extended (`depth.py`).
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils._pytree import tree_leaves

from autopar.errors import ModelError, TraceError
from autopar.graph import Graph, Input
from autopar.integrations.masks import plain_masks
from autopar.tracing import fakes
from autopar.tracing.admission import check_model, where
from autopar.tracing.depth import Dropped, Truncation, dropped_blocks, equal_runs, shorten
from autopar.tracing.depth_check import verified
from autopar.tracing.fakes import Results
from autopar.tracing.fx_import import FlatGraph, import_program
from autopar.tracing.layers import fold_layers
from autopar.tracing.other_rows import with_rows_of
from autopar.tracing.rebatch import LEAST_ROWS
from autopar.tracing.recorder import Record, record
from autopar.tracing.repeats import check_repeats
from autopar.tracing.simplify import simplify
from autopar.tracing.uncollected import uncollected
from autopar.tracing.user_line import raised_at
from codegen.names import is_plain_name

Batch = Mapping[str, Any]


class Cuts(tuple[Truncation, ...]):
    """Runs of equal blocks that may be shortened, and what the first trace with them leaves for those of other sizes.

    One object belongs to one model, batch and loss_fn, and is handed to traces of these only.
    """

    first: _First | None = None
    is_repeatable: bool = False  # forward was seen to do the same each time


@dataclass(frozen=True, slots=True)
class _First:
    """What `torch.export` made of the model at one number of rows, before anything was simplified."""

    flat: FlatGraph
    batch: dict[str, Any]
    param_dtype: torch.dtype | None


@uncollected()
def trace(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Batch,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    *,
    batch_size: int | None = None,
    param_dtype: torch.dtype | None = None,
    cuts: tuple[Truncation, ...] | None = None,
) -> Graph:
    """Trace `model` (and `loss_fn`) up to the scalar loss, in training mode.

    example_inputs: what the model takes, plus what `loss_fn(output, ...)` takes after the output. Only shapes and
    dtypes of tensors matter. batch_size: rows of dim 0 to trace at, the example's own by default. param_dtype: cast
    parameters and floating inputs first (bf16 training). cuts: runs of equal blocks to shorten, by default all that
    may be (`find_cuts`); () traces the whole model.
    Raises TraceError with torch's reason and the user's line.
    """
    check_model(model, param_dtype)
    batch = name_inputs(model, example_inputs, loss_fn)
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    rows = common_batch(tensors)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fake_batch = {name: _fake_input(value, fake, rows, batch_size, param_dtype) for name, value in batch.items()}
    if cuts is None:
        skeletons = (skeleton_of(model, fake, param_dtype) for _ in itertools.count())
        cuts = _sound_cuts(skeletons, loss_fn, fake_batch, fake)
    try:
        flat = _flat_graph(model, loss_fn, fake_batch, fake, param_dtype, cuts)
        graph = _to_graph(flat, fake_batch, rows, batch_size, cuts)
    except (TraceError, IndexError):
        if not cuts:
            raise
        graph = None
    if graph is None:  # the model counts its blocks itself: trace all of them
        return trace(model, example_inputs, loss_fn, batch_size=batch_size, param_dtype=param_dtype, cuts=())
    return graph


def _flat_graph(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    batch: dict[str, Any],
    fake: FakeTensorMode,
    param_dtype: torch.dtype | None,
    cuts: tuple[Truncation, ...],
) -> FlatGraph:
    """What is exported of the shortened model, or would be: a second size is worked out from the first (`Cuts`)."""

    def short() -> nn.Module:
        skeleton = skeleton_of(model, fake, param_dtype, cuts)
        shorten(skeleton, cuts)
        return skeleton

    def recorded(given: dict[str, Any]) -> Record:
        return record(short(), (), given, lambda candidate: _loss(candidate, loss_fn, given), results)

    results = Results(fake)
    if not (isinstance(cuts, Cuts) and cuts.is_repeatable):
        check_repeats(
            short(),
            (loss_fn,),
            lambda candidate: record(candidate, (), batch, lambda each: _loss(each, loss_fn, batch), results),
        )
        if isinstance(cuts, Cuts):
            cuts.is_repeatable = True
    first = cuts.first if isinstance(cuts, Cuts) else None
    if first is not None and first.param_dtype == param_dtype:
        before = {name: _fake_input(value, fake, 0, None, None) for name, value in first.batch.items()}
        # Whatever forward cannot do while it is recorded, an export may, or says why not.
        with contextlib.suppress(Exception):
            return with_rows_of(first.flat, recorded(before), recorded(batch), batch)
    module = _LossModule(short(), loss_fn, tuple(batch))
    flat = import_program(_export(module, batch), module, batch)
    rows = common_batch({name: value for name, value in batch.items() if isinstance(value, torch.Tensor)})
    if isinstance(cuts, Cuts) and rows >= LEAST_ROWS:
        cuts.first = _First(flat.copy(), batch, param_dtype)
    return flat


@uncollected()
def find_cuts(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Batch,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    param_dtype: torch.dtype | None = None,
) -> Cuts:
    """The runs of equal blocks of `model` that a trace may shorten, whatever the batch size.

    Traces that are given the same object share an export where they can.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    check_model(model, param_dtype)
    batch = name_inputs(model, example_inputs, loss_fn)
    fake_batch = {name: _fake_input(value, fake, 0, None, None) for name, value in batch.items()}
    return Cuts(_sound_cuts((skeleton_of(model, fake) for _ in itertools.count()), loss_fn, fake_batch, fake))


def _sound_cuts(
    skeletons: Iterator[nn.Module], loss_fn: Callable[..., torch.Tensor] | None, batch: Batch, fake: FakeTensorMode
) -> tuple[Truncation, ...]:
    """The runs of equal blocks in a model that behave equally. skeletons: of the model; some are used up."""
    skeleton = next(skeletons)
    cuts = equal_runs(skeleton)
    if not cuts:
        return ()
    models = itertools.chain([skeleton], skeletons)
    return verified(models, cuts, batch, lambda candidate: _loss(candidate, loss_fn, batch), fake)


def _loss(model: nn.Module, loss_fn: Callable[..., torch.Tensor] | None, batch: Batch) -> torch.Tensor:
    """Forward and loss as they are exported."""
    with _traceable(batch):
        loss: torch.Tensor = _LossModule(model, loss_fn, tuple(batch))(**batch)
        return loss


def _to_graph(
    flat: FlatGraph, fake_batch: Batch, rows: int, batch_size: int | None, cuts: tuple[Truncation, ...]
) -> Graph:
    simplify(flat)
    inputs = tuple(
        Input(name, flat.inputs[name], 0 if _has_rows(value, batch_size or rows) else None)
        for name, value in fake_batch.items()
        if isinstance(value, torch.Tensor)
    )
    return fold_layers(flat, inputs, cuts, batch_size or rows)


class _LossModule(nn.Module):
    """Model and loss as one module that takes the batch by name and returns the loss."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., torch.Tensor] | None, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.names = names

    def forward(self, **batch: Any) -> torch.Tensor:
        model_names, loss_names = split_names(self.model, self.names, self.loss_fn)
        positional, keyword = _model_arguments(self.model, {name: batch[name] for name in model_names})
        output = self.model(*positional, **keyword)
        if self.loss_fn is None:
            return _loss_of(output)
        return _scalar(self.loss_fn(output, *(batch[name] for name in loss_names)), "loss_fn")


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
    """`loss` as a tensor of no dims. Raises TraceError unless it is one number that can be differentiated."""
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


def _model_arguments(model: nn.Module, given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional values for `*args` models (names arg0, arg1 ...), keyword for the rest."""
    positional = tuple(value for name, value in given.items() if _is_positional_name(name))
    return positional, {name: value for name, value in given.items() if not _is_positional_name(name)}


def _is_positional_name(name: str) -> bool:
    return name.startswith("arg") and name[3:].isdigit()


def _parameters_of(model: nn.Module) -> tuple[list[str], bool, bool]:
    """Names that forward takes, and whether it has *args and **kwargs."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    kinds = {p.kind for p in parameters}
    return names, inspect.Parameter.VAR_POSITIONAL in kinds, inspect.Parameter.VAR_KEYWORD in kinds


def _num_targets(loss_fn: Callable[..., torch.Tensor] | None) -> int:
    """How many arguments `loss_fn` requires after the output."""
    if loss_fn is None:
        return 0
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return -1
    return max(len(required) - 1, 0)


def name_inputs(
    model: nn.Module, example_inputs: tuple[Any, ...] | Batch, loss_fn: Callable[..., torch.Tensor] | None = None
) -> dict[str, Any]:
    """The batch by name. A tuple's items get forward's parameter names, then `target`, `target1` ... for loss_fn."""
    if isinstance(example_inputs, Mapping):
        return _checked(dict(example_inputs))
    items = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    names, has_args, _ = _parameters_of(model)
    num_targets = _num_targets(loss_fn)
    if num_targets < 0:
        num_targets = len(items) - len(names) if not has_args else 1
    num_model = len(items) - num_targets
    if num_model < 1:
        raise TraceError(
            "example_inputs has too few items",
            values=f"{len(items)} for a loss_fn that needs {num_targets} besides the model's own",
            alternatives="pass (model inputs ..., targets ...)",
        )
    if num_model > len(names) and not has_args:
        raise TraceError(
            "example_inputs has more items than the model takes",
            values=f"{num_model} for forward({', '.join(names)})",
            alternatives="pass targets with a loss_fn that takes them, or a dict by name",
        )
    model_names = [names[i] if i < len(names) else f"arg{i - len(names)}" for i in range(num_model)]
    target_names = ["target" if i == 0 else f"target{i}" for i in range(num_targets)]
    return _checked(dict(zip(model_names + target_names, items, strict=True)))


def _checked(batch: dict[str, Any]) -> dict[str, Any]:
    """Raises TraceError for names that no argument can have, and for tensors that are no plain items of the batch."""
    for name, value in batch.items():
        if not isinstance(name, str) or not is_plain_name(name) or name.startswith("__") or name == "self":
            raise TraceError(
                "an input of the batch has a name that no argument of forward can have",
                values=repr(name),
                alternatives="a Python identifier that is neither a keyword nor self",
            )
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise TraceError(
                "an input of the batch is not a dense tensor",
                values=f"{name}: {value.layout}",
                alternatives=f"{name}.to_dense()",
            )
        leaves = [] if isinstance(value, torch.Tensor) else tree_leaves(value)
        if any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise TraceError(
                "an input of the batch holds tensors inside a container",
                values=f"{name}: {type(value).__name__} of {len(leaves)}",
                alternatives="every tensor under a name of its own, as arguments of forward",
            )
    return batch


def split_names(
    model: nn.Module, names: tuple[str, ...], loss_fn: Callable[..., torch.Tensor] | None
) -> tuple[list[str], list[str]]:
    """Which batch entries the model takes, and which the loss takes, in order."""
    accepted, _, has_kwargs = _parameters_of(model)
    if loss_fn is None:
        return list(names), []
    num_targets = _num_targets(loss_fn)
    for_loss = [n for n in names if n not in accepted and not _is_positional_name(n)]
    if has_kwargs and 0 <= num_targets < len(for_loss):
        for_loss = for_loss[len(for_loss) - num_targets :]
    return [n for n in names if n not in for_loss], for_loss


def common_batch(tensors: Mapping[str, torch.Tensor]) -> int:
    """Rows of the batch: dim 0 of the first input that has dims."""
    sizes = [value.shape[0] for value in tensors.values() if value.dim() > 0]
    if not sizes:
        raise TraceError(
            "example_inputs has no tensor with a batch dim",
            values=f"inputs {sorted(tensors)}",
            alternatives="pass the batch as a dict or tuple of tensors whose dim 0 is the batch",
        )
    if sizes[0] == 0:
        raise TraceError(
            "the batch of example_inputs is empty",
            values=", ".join(f"{name}: {tuple(value.shape)}" for name, value in tensors.items()),
            alternatives="at least one row",
        )
    return int(sizes[0])


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == rows


def _fake_input(
    value: Any, fake: FakeTensorMode, rows: int, batch_size: int | None, param_dtype: torch.dtype | None
) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape = list(value.shape)
    if batch_size is not None and _has_rows(value, rows):
        shape[0] = batch_size
    dtype = param_dtype if param_dtype is not None and value.is_floating_point() else value.dtype
    with fake:
        return torch.empty(shape, dtype=dtype, device="cpu")


def skeleton_of(
    model: nn.Module,
    fake: FakeTensorMode,
    param_dtype: torch.dtype | None = None,
    cuts: tuple[Truncation, ...] = (),
) -> nn.Module:
    """A deep copy of `model`, `in_training`, with every parameter and buffer fake; ties are kept.

    On the CPU, not on meta, since that is where a tensor lies that forward makes without naming a device. cuts: runs
    that will be shortened: what is deleted then is not copied.
    """
    dropped, kept = dropped_blocks(model, cuts)
    memo: dict[int, Any] = {id(block): Dropped() for block in dropped}
    for parameter in (p for module in kept for p in module._parameters.values() if p is not None):
        if id(parameter) not in memo:
            dtype = param_dtype if param_dtype is not None and parameter.is_floating_point() else parameter.dtype
            memo[id(parameter)] = fakes.parameter(fake, parameter, dtype)
    for buffer in (b for module in kept for b in module._buffers.values() if b is not None):
        if id(buffer) not in memo:
            memo[id(buffer)] = fakes.empty(fake, tuple(buffer.shape), buffer.dtype)
    skeleton = _copied(model, memo)
    config = getattr(skeleton, "config", None)
    if config is not None and hasattr(config, "use_cache"):
        config.use_cache = False
    return in_training(skeleton)


def in_training(model: nn.Module) -> nn.Module:
    """The model, in training mode if all of it is in evaluation mode, as pretrained ones come; parts are on purpose."""
    return model if any(module.training for module in model.modules()) else model.train()


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy. Raises ModelError that names the attribute which has none."""
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever an attribute's class raises
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception as cause:
                    if name in ("_modules", "_parameters", "_buffers"):
                        continue
                    raise ModelError(
                        "the model cannot be copied, which tracing does so that the model itself stays as it is",
                        values=f"{name} of {where(path)}, a {type(value).__name__}: {str(cause).splitlines()[0]}",
                        alternatives=[
                            "keep it out of the module, or give its class __deepcopy__ (locks, files, modules)",
                            "for tensors computed from parameters: torch.nn.utils.parametrizations in place of "
                            "torch.nn.utils.weight_norm, or prune.remove",
                        ],
                    ) from error
        raise ModelError("the model cannot be copied", values=f"{type(error).__name__}: {error}") from error


def _export(module: nn.Module, batch: Batch) -> torch.export.ExportedProgram:
    clones = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in batch.items()}
    try:
        # torch prints the whole graph to stderr where a value decides; the error below says what matters of it.
        # The many graph modules that export makes on its way are read, never called: they need no code.
        with _traceable(batch), contextlib.redirect_stderr(io.StringIO()), _use_lazy_graph_module(True):
            return torch.export.export(module, (), clones, strict=False)
    except TraceError:
        raise
    except Exception as error:  # torch.export raises many kinds; each becomes one readable error
        raise _untraceable(error) from error


_BY_VALUE = ("DataDependent", "DynamicOutputShape", "UserError", "Unsupported", "SpecViolationError")


def _untraceable(error: Exception) -> TraceError:
    """Forward's own error, or why torch could not trace it, with the user's line."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    line = raised_at(error.__traceback__)
    what = f"{type(error).__name__}: {first}" + (f" at {line}" if line else "")
    if any(word in type(error).__name__ for word in _BY_VALUE):
        return TraceError(
            "torch.export could not trace the model",
            values=what,
            alternatives="rewrite the line so that it does not depend on tensor values (torch.where, torch.cond), "
            "or wrap it in torch.library.custom_op",
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


@contextlib.contextmanager
def _traceable(batch: Batch) -> Iterator[None]:
    """What holds while forward is traced."""
    packed = any("position_ids" in name for name in batch)
    with refuse_custom_backward(), plain_masks(packed_positions=packed):
        yield


@contextlib.contextmanager
def refuse_custom_backward() -> Iterator[None]:
    """What a trace of forward drops silently is refused: backward of a custom autograd.Function, hooks, gradients."""

    registered = torch.autograd.Function.__dict__["apply"].__func__

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__ == "torch._library.autograd":  # of an operator with register_autograd: the graph has the call
            return registered(cls, *args, **kwargs)
        raise TraceError(
            "the model calls a custom autograd.Function, whose backward torch.export would drop",
            values=f"{cls.__module__}.{cls.__qualname__}",
            alternatives="register it with torch.library.custom_op and register_autograd",
        )

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
        stack.enter_context(mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)))
        for owner, name, label in _DROPPED_CALLS:
            stack.enter_context(mock.patch.object(owner, name, refused(label)))
        yield


_DROPPED_CALLS = (
    (torch.Tensor, "register_hook", "Tensor.register_hook"),
    (torch.Tensor, "register_post_accumulate_grad_hook", "Tensor.register_post_accumulate_grad_hook"),
    (torch.Tensor, "backward", "Tensor.backward"),
    (torch.autograd, "backward", "torch.autograd.backward"),
    (torch.autograd, "grad", "torch.autograd.grad"),
)
