"""The source of a program's initial values: the user's model, or a function for a model on meta."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import ModelError
from autopar.ir.graph import Graph
from autopar.models.lazy_weights import stored_of
from codegen.runtime.weight_files import StoredTensor, WeightFileError

Init = Callable[[str, torch.Size, torch.dtype], torch.Tensor]


class ValueSource:
    """`name -> whole tensor` over parameters and buffers, tied names included, for one name at a time.

    loss_fn: if it is a module (`nn.CrossEntropyLoss(weight=...)`), its tensors get names below `loss_fn`.
    tables: further tensors, which no module has registered.

    Values on meta come from the files that they were left in (`stored`), or from `init(name, shape, dtype)`. Buffers
    that a module computes in its constructor (rotary frequencies) come from building that module again. A call raises
    ModelError where none of this is possible.
    """

    def __init__(
        self,
        model: nn.Module,
        init: Init | None = None,
        loss_fn: Any = None,
        tables: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._model, self._init = model, init
        tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        tensors |= dict(model.named_buffers(remove_duplicate=False))
        if isinstance(loss_fn, nn.Module):
            loss_tensors = (*loss_fn.named_parameters(), *loss_fn.named_buffers())
            tensors |= {f"loss_fn.{name}": value for name, value in loss_tensors}
        tensors |= tables or {}
        self._tensors = tensors
        self._remade: dict[str, dict[str, torch.Tensor]] = {}

    def stored(self, name: str) -> StoredTensor | None:
        """Return the file that has the tensor, where it was left in one."""
        return stored_of(self._tensors[name]) if name in self._tensors else None

    def outline(self, name: str) -> torch.Tensor:
        """Return the model's own tensor, which may be on meta."""
        if name not in self._tensors:
            raise ModelError(f"the model has no value named {name!r}")
        return self._tensors[name]

    def __call__(self, name: str) -> torch.Tensor:
        """Return the whole tensor."""
        tensor = self.outline(name)
        if tensor.device.type != "meta":
            return tensor.detach()
        if (stored := stored_of(tensor)) is not None:
            try:
                return stored.whole().to(tensor.dtype)
            except WeightFileError as error:
                raise ModelError("weights cannot be read", values=str(error)) from None
        if self._init is not None and isinstance(tensor, nn.Parameter):
            return self._init(name, tensor.shape, tensor.dtype)
        owner, _, leaf = name.rpartition(".")
        if owner not in self._remade:
            self._remade[owner] = _rebuilt_buffers(self._model.get_submodule(owner))
        if leaf in self._remade[owner]:
            return self._remade[owner][leaf]
        if self._init is not None:
            return self._init(name, tensor.shape, tensor.dtype)
        raise ModelError(
            f"{name} is on meta and has no value",
            alternatives="pass init=(name, shape, dtype) -> tensor to build(), or a model with weights",
        )


def tables_of(graph: Graph) -> dict[str, torch.Tensor]:
    """Return tensors that no module of the model has registered, by the names of the program's buffers."""
    return {parameter.name: parameter.value for parameter in graph.parameters if parameter.value is not None}


class LazyState(Mapping[str, torch.Tensor]):
    """A model's parameters and persistent buffers by their first names. Values in files are read on access."""

    def __init__(self, model: nn.Module) -> None:
        persistent = model.state_dict(keep_vars=True).keys()
        buffers = [name for name, _ in model.named_buffers() if name in persistent]
        self._names = dict.fromkeys([*(name for name, _ in model.named_parameters()), *buffers])
        self._value = ValueSource(model)

    def outlines(self) -> dict[str, torch.Tensor]:
        """Return the model's own tensors, which may be on meta."""
        return {name: self._value.outline(name) for name in self._names}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._value(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@torch.no_grad()
def set_values(model: nn.Module, values: Iterable[tuple[tuple[str, ...], torch.Tensor]], loss_fn: Any = None) -> None:
    """Copy trained values, each with all its names, into the tensors of the model and of a loss that is a module.
    Tensors on meta are replaced by new ones on the CPU."""
    roots = {"loss_fn": loss_fn} if isinstance(loss_fn, nn.Module) else {}
    for names, value in values:
        done: set[int] = set()
        fresh: torch.Tensor | None = None
        for name in names:
            owner_name, _, leaf = name.rpartition(".")
            first, _, rest = owner_name.partition(".")
            try:
                owner = roots[first].get_submodule(rest) if first in roots else model.get_submodule(owner_name)
            except AttributeError:  # a name that only the program has
                continue
            kind: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
            tensor = kind.get(leaf)
            if tensor is None or id(tensor) in done:
                continue
            if tensor.device.type == "meta":
                if fresh is None:
                    whole = value.detach().to("cpu", tensor.dtype, copy=True)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    fresh = nn.Parameter(whole, tensor.requires_grad) if is_parameter else whole
                kind[leaf] = fresh
            else:
                tensor.copy_(value)
                done.add(id(tensor))


def write_values(values: Iterable[tuple[tuple[str, ...], torch.Tensor]], folder: Path) -> None:
    """Write values for another process's `read_values`: one file per tensor, so that one at a time is in memory."""
    for number, (names, value) in enumerate(values):
        torch.save((names, value.detach().cpu().clone()), folder / f"{number:06d}.pt")


def read_values(folder: Path) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yield the values of `write_values`; remove each file after reading it."""
    for path in sorted(folder.glob("*.pt")):
        names, value = torch.load(path, weights_only=True)
        path.unlink()
        yield tuple(names), value


def _rebuilt_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Rebuild a module from its config and return its buffers, as Hugging Face makes rotary embeddings."""
    config = getattr(module, "config", None)
    if config is None:
        return {}
    try:
        with torch.device("cpu"):
            fresh = type(module)(config)
    except Exception:  # its config does not build this module; the caller falls back to init
        return {}
    return dict(fresh.named_buffers(recurse=False))
