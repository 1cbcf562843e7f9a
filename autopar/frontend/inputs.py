"""The batch by name: the inputs of the model and of the loss, its rows, and its fake tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from autopar.errors import TraceError
from codegen.runtime.batch_checks import BatchError, flat_batch, leaves_of
from codegen.source.names import is_plain_name

Batch = Mapping[str, Any]

MOST_KNOWN = 1 << 20
"""The most elements of an input whose example values a trace knows."""
VALUE = "_autopar_example"
"""The attribute of a fake input with the example's value."""


@dataclass(frozen=True, slots=True)
class Container:
    """An argument that nests tensors in containers: its form, and the names of its tensors, in order."""

    form: TreeSpec
    names: tuple[str, ...]


class NamedBatch(dict[str, Any]):
    """A batch by name; tensors nested in containers have their own names.

    containers: by the names of their arguments. In the batch, the first leaf of a container takes its position.
    """

    def __init__(self, values: Mapping[str, Any], containers: Mapping[str, Container]) -> None:
        super().__init__(values)
        self.containers = containers

    @property
    def form(self) -> BatchForm:
        """Return the batch without its values."""
        return BatchForm(tuple(self), self.containers)

    def map(self, change: Callable[[Any], Any]) -> NamedBatch:
        """Return the same batch with changed values."""
        return NamedBatch({name: change(value) for name, value in self.items()}, self.containers)

    def __reduce__(self) -> tuple[Any, ...]:
        return NamedBatch, (dict(self), self.containers)


@dataclass(frozen=True, slots=True)
class BatchForm:
    """A batch without its values: its names in order, and its containers, as in NamedBatch."""

    names: tuple[str, ...]
    containers: Mapping[str, Container]

    def filled(self, values: Mapping[str, Any]) -> NamedBatch:
        """Return the batch with values by name. Raises KeyError for one that is missing."""
        return NamedBatch({name: values[name] for name in self.names}, self.containers)


def arguments_of_batch(values: Mapping[str, Any], containers: Mapping[str, Container]) -> dict[str, Any]:
    """Return the arguments of the model and the loss by name, in order, with containers in their original form."""
    first = {container.names[0]: name for name, container in containers.items()}
    inside = {name for container in containers.values() for name in container.names}
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name in first:
            container = containers[first[name]]
            arguments[first[name]] = tree_unflatten([values[part] for part in container.names], container.form)
        elif name not in inside:
            arguments[name] = value
    return arguments


def name_inputs(
    model: nn.Module, example_inputs: tuple[Any, ...] | Batch, loss_fn: Callable[..., torch.Tensor] | None = None
) -> NamedBatch:
    """Return the batch by name. Items of a tuple get forward's parameter names, then `target`, `target1` ... for
    loss_fn.

    Tensors in containers have their own names (`codegen.runtime.batch_checks.leaves_of`).
    """
    if isinstance(example_inputs, NamedBatch):
        return example_inputs
    if isinstance(example_inputs, Mapping):
        whole = _is_one_argument(model, example_inputs, loss_fn)
        return _checked({whole: dict(example_inputs)} if whole else dict(example_inputs))
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
    fields = getattr(items, "_fields", ())
    moved = [field for field, name in zip(fields, model_names, strict=False) if field != name and field in model_names]
    if moved:
        raise TraceError(
            "a named tuple's fields are in another order than forward's arguments, and items are passed by position",
            values=f"{', '.join(fields)} for forward({', '.join(names)})",
            alternatives="pass batch._asdict(), a dict by name, or a plain tuple in forward's order",
        )
    target_names = ["target" if i == 0 else f"target{i}" for i in range(num_targets)]
    return _checked(dict(zip(model_names + target_names, items, strict=True)))


def _is_one_argument(model: nn.Module, batch: Batch, loss_fn: Callable[..., torch.Tensor] | None) -> str:
    """Return the only argument of `forward(self, batch)`, which takes the whole dict, if no entry has its name."""
    names, has_args, has_kwargs = _parameters_of(model)
    is_whole = len(names) == 1 and names[0] not in batch and len(batch) > 1
    return names[0] if is_whole and not (has_args or has_kwargs or _num_targets(loss_fn)) else ""


def _checked(batch: dict[str, Any]) -> NamedBatch:
    """Return the batch. Raises TraceError for names that no argument can have, and for tensors that are not dense."""
    containers: dict[str, Container] = {}
    try:
        for name, value in batch.items():
            if isinstance(name, str) and (leaves := leaves_of(name, value)):
                containers[name] = Container(tree_flatten(value)[1], tuple(leaves))
        flat = NamedBatch(flat_batch(batch), containers)
    except BatchError as error:
        raise TraceError(
            "two inputs of the batch have one name", values=str(error), alternatives="rename one of them"
        ) from None
    for name, value in (*batch.items(), *flat.items()):
        if not isinstance(name, str) or not is_plain_name(name) or name.startswith("__") or name == "self":
            raise TraceError(
                "an input of the batch has a name that no argument of forward can have",
                values=repr(name),
                alternatives="use a Python identifier that is neither a keyword nor self",
            )
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise TraceError(
                "an input of the batch is not a dense tensor",
                values=f"{name}: {value.layout}",
                alternatives=f"pass {name}.to_dense()",
            )
    return flat


def split_names(
    model: nn.Module, names: tuple[str, ...], loss_fn: Callable[..., torch.Tensor] | None
) -> tuple[list[str], list[str]]:
    """Return the names of the entries that the model takes and that the loss takes, in order."""
    accepted, _, has_kwargs = _parameters_of(model)
    if loss_fn is None:
        return list(names), []
    num_targets = _num_targets(loss_fn)
    for_loss = [n for n in names if n not in accepted and not is_positional_name(n)]
    if has_kwargs and 0 <= num_targets < len(for_loss):
        for_loss = for_loss[len(for_loss) - num_targets :]
    return [n for n in names if n not in for_loss], for_loss


def model_arguments(model: nn.Module, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional values for `*args` models (names arg0, arg1 ...), keywords for the rest."""
    positional = tuple(value for name, value in arguments.items() if is_positional_name(name))
    return positional, {name: value for name, value in arguments.items() if not is_positional_name(name)}


def is_positional_name(name: str) -> bool:
    return name.startswith("arg") and name[3:].isdigit()


def _parameters_of(model: nn.Module) -> tuple[list[str], bool, bool]:
    """Return the names that forward takes, and whether it has *args and **kwargs."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    kinds = {p.kind for p in parameters}
    return names, inspect.Parameter.VAR_POSITIONAL in kinds, inspect.Parameter.VAR_KEYWORD in kinds


def _num_targets(loss_fn: Callable[..., torch.Tensor] | None) -> int:
    """Return how many arguments `loss_fn` requires after the output."""
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


def common_batch(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the rows of the batch: dim 0 of the first input that has dims."""
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
            alternatives="pass at least one row",
        )
    return int(sizes[0])


def has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == rows


def fake_input(value: Any, fake: FakeTensorMode, rows: int, batch_size: int | None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape = list(value.shape)
    if batch_size is not None and has_rows(value, rows):
        shape[0] = batch_size
    with fake:
        stand_in = torch.empty(shape, dtype=value.dtype, device="cpu")
    if (example_value := _example_value(value)) is not None:
        setattr(stand_in, VALUE, example_value)
    return stand_in


def example_values(batch: Batch) -> dict[str, torch.Tensor]:
    """Return the values of small inputs of the example batch, or of the example that fake inputs came from."""
    values = {name: _example_value(value) for name, value in batch.items()}
    return {name: value for name, value in values.items() if value is not None}


def _example_value(value: Any) -> torch.Tensor | None:
    is_real = type(value) is torch.Tensor and not value.is_meta and value.numel() <= MOST_KNOWN
    return value.detach() if is_real else getattr(value, VALUE, None)
