"""Where a program's initial values come from: the user's model, or a function for a model on meta."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from autopar.errors import ModelError

Init = Callable[[str, torch.Size, torch.dtype], torch.Tensor]


def value_source(model: nn.Module, init: Init | None = None) -> Callable[[str], torch.Tensor]:
    """`name -> whole tensor` over parameters and buffers, tied names included; asked for one name at a time.

    Values on meta come from `init(name, shape, dtype)`; buffers that a module computes in its constructor (rotary
    frequencies) are made again by building that module anew. Raises ModelError where neither is possible.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    remade: dict[str, dict[str, torch.Tensor]] = {}

    def value(name: str) -> torch.Tensor:
        if name not in tensors:
            raise ModelError(f"the model has no value named {name!r}")
        tensor = tensors[name]
        if tensor.device.type != "meta":
            return tensor.detach()
        if init is not None and isinstance(tensor, nn.Parameter):
            return init(name, tensor.shape, tensor.dtype)
        owner = name.rpartition(".")[0]
        if owner not in remade:
            remade[owner] = _rebuilt_buffers(model.get_submodule(owner))
        leaf = name.rpartition(".")[2]
        if leaf in remade[owner]:
            return remade[owner][leaf]
        if init is not None:
            return init(name, tensor.shape, tensor.dtype)
        raise ModelError(
            f"{name} is on meta and has no value",
            alternatives="pass init=(name, shape, dtype) -> tensor to build(), or a model with weights",
        )

    return value


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
