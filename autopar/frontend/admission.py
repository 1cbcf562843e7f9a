"""Refuse properties of a model that a traced graph does not show, before anything is traced.

A graph holds the operators of one forward. Backward hooks, hooks that rewrite state dicts, and tensors that share
memory act outside it: a program made from the graph would silently train without them.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy

from autopar.errors import ModelError, TraceError
from autopar.frontend.attributes import (
    attribute,
    is_a,
    modules_of,
    named_buffers,
    named_modules,
    named_parameters,
    named_tensors,
)

BACKWARD_HOOKS = {"_backward_hooks": "backward", "_backward_pre_hooks": "backward pre"}
GLOBAL_HOOKS = (
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
)
_REMOVE_HOOK = (
    "remove it (the handle that registering it returned has remove()) before compiling",
    "compute what it does in forward or in the loss, where it is traced",
)


def check_model(model: Any, param_dtype: torch.dtype | None = None) -> None:
    """Raise ModelError or TraceError, naming the module, parameter or buffer, for a property that a trace would lose.

    param_dtype: the dtype that parameters are cast to before tracing (bf16 training), if any.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            "the model is not a torch.nn.Module",
            values=f"{type(model).__name__}: {str(model)[:80]}",
            alternatives="pass an instance of a class derived from torch.nn.Module",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            "the model is a TorchScript module, which cannot be traced",
            values=type(model).__name__,
            alternatives="pass the Python module that it was scripted from",
        )
    _check_materialized(model)
    _check_module_hooks(model)
    for name, value in named_tensors(model):
        if value.is_inference():
            raise ModelError(
                "a tensor that was made under torch.inference_mode cannot be trained",
                values=name,
                alternatives="make or load the model outside torch.inference_mode",
            )
    for name, parameter in named_parameters(model):
        _check_parameter(name, parameter, param_dtype)
    _check_hidden(model)
    _check_memory(model)
    _check_state_dict(model)


def check_loss(model: nn.Module, loss_fn: Any) -> None:
    """Raise ModelError for a loss whose parameters would not be trained, or whose names collide with the model's."""
    if not isinstance(loss_fn, nn.Module):
        return
    trained = [name for name, parameter in named_parameters(loss_fn) if parameter.requires_grad]
    if trained:
        raise ModelError(
            "loss_fn has trainable parameters, but only the model's are trained",
            values=", ".join(trained),
            alternatives=[
                "pass a model that contains both and returns the loss",
                "loss_fn.requires_grad_(False), if they are constants",
            ],
        )
    if is_a(attribute(model, "loss_fn"), nn.Module) and loss_fn.state_dict():
        raise ModelError(
            "the model has a module named loss_fn, like the argument loss_fn",
            values=", ".join(loss_fn.state_dict()),
            alternatives="rename the model's module",
        )


def warn_of_gradients(model: nn.Module) -> None:
    """Warn where parameters already have gradients: a training step begins with zero_grad()."""
    names = [name for name, parameter in named_parameters(model) if parameter.grad is not None]
    if names:
        first = names[0] if len(names) == 1 else f"{len(names)} parameters, such as {names[0]},"
        warnings.warn(
            f"the program ignores the gradients of {first} since every step begins without gradients; "
            f"model.zero_grad() drops them",
            stacklevel=6,
        )


def traits_of(model: nn.Module) -> dict[str, str]:
    """Return the properties, besides values and code, that a program depends on: by name, of every parameter and
    module.

    A tied parameter has all its names. Modes are compared only where a part of the model is in training mode.
    """
    first: dict[int, str] = {}
    traits: dict[str, str] = {}
    for name, parameter in named_parameters(model, remove_duplicate=False):
        kind = f"{parameter.dtype} {list(parameter.shape)}".removeprefix("torch.")
        owner = first.setdefault(id(parameter), name)
        tie = f", tied to {owner}" if owner != name else ""
        traits[name] = f"{'trainable' if parameter.requires_grad else 'frozen'} {kind}{tie}"
    is_mixed = any(module.training for module in modules_of(model))
    for path, module in named_modules(model):
        mode = " in evaluation mode" if is_mixed and not module.training else ""
        traits[where(path)] = f"{type(module).__name__}{mode}"
    return traits


def require_traits(model: nn.Module, traits: dict[str, str]) -> None:
    """Raise ModelError where the model's properties differ from those that `traits_of` returned."""
    now = traits_of(model)
    changed = [name for name in traits | now if traits.get(name) != now.get(name)]
    if changed:
        some = [f"{name}: {traits.get(name, 'not there')} then, {now.get(name, 'not there')} now" for name in changed]
        some = some[:5] + ([f"and {len(some) - 5} more"] if len(some) > 5 else [])
        raise ModelError(
            "the model has changed since it was compiled, and the program would train it without the change",
            values="\n".join(some),
            alternatives="compile the model again",
        )


def where(path: str) -> str:
    """Return a module's path as messages print it."""
    return path or "the model itself"


def _check_materialized(model: nn.Module) -> None:
    tensors = named_tensors(model)
    lazy = next((name for name, tensor in tensors if is_lazy(tensor)), None)
    if lazy is not None:
        raise ModelError(
            "a lazy module has no shapes yet",
            values=lazy,
            alternatives="run the model once on example inputs, so that its parameters are made, then compile it",
        )


def _check_module_hooks(model: nn.Module) -> None:
    for table in GLOBAL_HOOKS:
        if getattr(torch_module, table, None):
            raise TraceError(
                "a hook for all modules is registered, which the generated program does not run",
                values=table.removeprefix("_").replace("_", " "),
                alternatives=_REMOVE_HOOK,
            )
    for path, module in named_modules(model):
        for table, kind in BACKWARD_HOOKS.items():
            if getattr(module, table, None):
                raise TraceError(
                    f"a module has a {kind} hook, which the generated program would not run",
                    values=f"{where(path)}: {_names(getattr(module, table))}",
                    alternatives=_REMOVE_HOOK,
                )


def _names(hooks: Any) -> str:
    functions = hooks.values() if isinstance(hooks, dict) else hooks
    return ", ".join(attribute(hook, "__qualname__", type(hook).__name__) for hook in functions)


def _check_parameter(name: str, parameter: Tensor, param_dtype: torch.dtype | None) -> None:
    hooks = getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None)
    if hooks:
        raise TraceError(
            "a parameter has a gradient hook, which the generated program would not run",
            values=f"{name}: {_names(hooks)}",
            alternatives=_REMOVE_HOOK,
        )
    if not parameter.requires_grad:
        return
    if parameter.is_complex():
        raise ModelError(
            "complex parameters cannot be trained",
            values=f"{name}: {parameter.dtype}",
            alternatives="use real parameters, and torch.view_as_complex in forward",
        )
    is_half = parameter.is_floating_point() and parameter.dtype.itemsize < 4
    if is_half and param_dtype is None:
        raise ModelError(
            "parameters in half precision would be trained with fp32 masters, unlike in one process",
            values=f"{name}: {str(parameter.dtype).removeprefix('torch.')}",
            alternatives=[
                'precision="bf16": the model computes in bf16, with fp32 masters and fp32 gradient sums',
                'precision="fp16": the same in fp16, with a scaled loss',
                "model.float(), which trains in fp32",
            ],
        )


def _check_hidden(model: nn.Module) -> None:
    """Refuse parameters that the model's `parameters()` leaves out: no training loop passes them to its optimizer."""
    try:
        public = {id(parameter) for parameter in model.parameters()}
    except Exception:  # a method that the model overrides; a training loop cannot call it either
        return
    hidden = [name for name, p in named_parameters(model) if p.requires_grad and id(p) not in public]
    if hidden:
        raise ModelError(
            "parameters() of the model leaves out parameters that require gradients, so a loop would not train them",
            values=", ".join(hidden[:4]) + (f" and {len(hidden) - 4} more" if len(hidden) > 4 else ""),
            alternatives="call requires_grad_(False) on those that stay fixed, or remove the override of parameters()",
        )


def _check_memory(model: nn.Module) -> None:
    """Refuse tensors that overlap in memory: an optimizer's update of one changes the other, which no graph shows."""
    ranges_of: dict[int, list[tuple[int, int, str, bool]]] = {}
    for name, tensor in named_tensors(model):
        if tensor.is_meta or isinstance(tensor, FakeTensor) or not tensor.numel() or tensor.layout is not torch.strided:
            continue
        start = int(tensor.storage_offset()) * tensor.itemsize
        span = 1 + sum((int(n) - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.requires_grad and span < tensor.numel():
            raise ModelError(
                "elements of a trained parameter share memory",
                values=f"{name} of shape {tuple(tensor.shape)}, strides {tensor.stride()}",
                alternatives="nn.Parameter(tensor.contiguous()), or expand it in forward",
            )
        ranges = ranges_of.setdefault(tensor.untyped_storage().data_ptr(), [])
        stop = start + span * tensor.itemsize
        for other_start, other_stop, other, is_trained in ranges:
            if start < other_stop and other_start < stop and (tensor.requires_grad or is_trained):
                raise ModelError(
                    "two tensors of the model share memory, and training one changes the other",
                    values=f"{other} and {name}",
                    alternatives=[
                        "assign one nn.Parameter to both modules (tied weights), or take views in forward",
                        "copy it: nn.Parameter(tensor.clone())",
                    ],
                )
        ranges.append((start, stop, name, tensor.requires_grad))


def _check_state_dict(model: nn.Module) -> None:
    """Refuse hooks and extra state that make the state dict more than parameters and buffers by name."""
    try:
        keys = set(model.state_dict(keep_vars=True))
    except Exception as error:  # a state_dict() that the model overrides
        raise TraceError(
            "state_dict() of the model cannot be called as torch calls it",
            values=f"state_dict(keep_vars=True) raises {type(error).__name__}: {error}",
            alternatives="give the override the arguments of torch.nn.Module.state_dict",
        ) from error
    parameters = {name for name, _ in named_parameters(model, remove_duplicate=False)}
    buffers = {name for name, _ in named_buffers(model, remove_duplicate=False)}
    unlike = sorted(keys - parameters - buffers) + sorted(parameters - keys)
    if unlike:
        raise TraceError(
            "the model's state dict differs from its parameters and buffers by name, which the program saves",
            values=", ".join(unlike[:5]),
            alternatives="remove the state-dict hooks, get_extra_state or state_dict() that change it",
        )
