"""Where a program's initial values come from: the user's model, or a function for a model on meta."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import ModelError
from autopar.integrations.lazy_weights import stored_of
from autopar.ir.graph import Graph
from codegen.runtime.weight_files import StoredTensor, WeightFileError

Init = Callable[[str, torch.Size, torch.dtype], torch.Tensor]


class ValueSource:
    """`name -> whole tensor` over parameters and buffers, tied names included; asked for one name at a time.

    loss_fn: if it is a module (`nn.CrossEntropyLoss(weight=...)`), its tensors are those below `loss_fn`.
    tables: further tensors, which no module has registered.

    Values on meta are those of the files that they were left in (`stored`), or come from `init(name, shape, dtype)`;
    buffers that a module computes in its constructor (rotary frequencies) are made again by building that module anew.
    A call raises ModelError where none of this is possible.
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
            own = (*loss_fn.named_parameters(), *loss_fn.named_buffers())
            tensors |= {f"loss_fn.{name}": value for name, value in own}
        tensors |= tables or {}
        self._tensors = tensors
        self._remade: dict[str, dict[str, torch.Tensor]] = {}

    def stored(self, name: str) -> StoredTensor | None:
        """The file that has the tensor, where it was left in one."""
        return stored_of(self._tensors[name]) if name in self._tensors else None

    def outline(self, name: str) -> torch.Tensor:
        """The model's own tensor, which may lie on meta."""
        if name not in self._tensors:
            raise ModelError(f"the model has no value named {name!r}")
        return self._tensors[name]

    def __call__(self, name: str) -> torch.Tensor:
        """The whole tensor."""
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
    """Tensors that no module of the model has registered, by the names of the program's buffers."""
    return {each.name: each.value for each in graph.parameters if each.value is not None}


class LazyState(Mapping[str, torch.Tensor]):
    """The parameters and persistent buffers of a model under their first names; what lies in files is read if asked."""

    def __init__(self, model: nn.Module) -> None:
        persistent = model.state_dict(keep_vars=True).keys()
        buffers = [name for name, _ in model.named_buffers() if name in persistent]
        self._names = dict.fromkeys([*(name for name, _ in model.named_parameters()), *buffers])
        self._value = ValueSource(model)

    def outlines(self) -> dict[str, torch.Tensor]:
        """The model's own tensors, which may lie on meta."""
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
    """Copy trained values, each with all its names, into the model's own tensors and those of a loss that is a module;
    those on meta are made on the CPU."""
    roots = {"loss_fn": loss_fn} if isinstance(loss_fn, nn.Module) else {}
    for names, value in values:
        done: set[int] = set()
        made: torch.Tensor | None = None
        for name in names:
            owner_name, _, leaf = name.rpartition(".")
            first, _, rest = owner_name.partition(".")
            try:
                owner = roots[first].get_submodule(rest) if first in roots else model.get_submodule(owner_name)
            except AttributeError:  # a name that only the program has
                continue
            kind: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
            held = kind.get(leaf)
            if held is None or id(held) in done:
                continue
            if held.device.type == "meta":
                if made is None:
                    whole = value.detach().to("cpu", held.dtype, copy=True)
                    is_parameter = isinstance(held, nn.Parameter)
                    made = nn.Parameter(whole, held.requires_grad) if is_parameter else whole
                kind[leaf] = made
            else:
                held.copy_(value)
                done.add(id(held))


def write_values(values: Iterable[tuple[tuple[str, ...], torch.Tensor]], folder: Path) -> None:
    """Writes values for `read_values` of another process: one file per tensor, so that one at a time is in memory."""
    for number, (names, value) in enumerate(values):
        torch.save((names, value.detach().cpu().clone()), folder / f"{number:06d}.pt")


def read_values(folder: Path) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """What `write_values` wrote; each file is removed when it was read."""
    for path in sorted(folder.glob("*.pt")):
        names, value = torch.load(path, weights_only=True)
        path.unlink()
        yield tuple(names), value


def _rebuilt_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers of a module constructed anew from its config, which is how Hugging Face's rotary embeddings are made."""
    config = getattr(module, "config", None)
    if config is None:
        return {}
    try:
        with torch.device("cpu"):
            fresh = type(module)(config)
    except Exception:  # not a module that its config makes; the caller falls back to init
        return {}
    return dict(fresh.named_buffers(recurse=False))
