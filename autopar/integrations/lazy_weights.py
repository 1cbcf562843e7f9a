"""A Hugging Face folder's model whose parameters stay in its files until a rank reads its part of them.

Parameters lie on meta, and each knows where its values are (`stored_of`), whatever modules a user puts around it.
Buffers, which are small, are made and loaded at once. Where a file's tensors are not one to one the model's (fused
experts, quantised weights, files of other formats), the folder is not for this module: `lazy_model` says so.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import ModelError
from codegen.runtime.weight_files import StoredTensor, WeightFileError, files_of, tensors_of

_STORED = "autopar_stored"


class NotOneToOne(Exception):
    """The folder's tensors must be converted, as transformers does while it loads them; the reason is its text."""


def stored_of(tensor: Tensor) -> StoredTensor | None:
    """Where a parameter on meta has its values."""
    found: StoredTensor | None = getattr(tensor, _STORED, None) if tensor.device.type == "meta" else None
    return found


def has_values(model: nn.Module) -> bool:
    """Whether every parameter has values, in memory or in a file."""
    return all(p.device.type != "meta" or stored_of(p) is not None for p in model.parameters())


def lazy_model(folder: Path, build: Callable[[], nn.Module]) -> nn.Module:
    """The model that `build` constructs, with the values of the folder's safetensors files.

    Raises NotOneToOne, and ModelError where the files lack a tensor or have one of another shape.
    """
    try:
        held = tensors_of(files_of(folder, "model"))
    except WeightFileError as error:
        raise ModelError(f"the weights in {folder} could not be loaded", values=str(error)) from error
    if not held:
        raise NotOneToOne("it has no safetensors files")
    with parameters_on_meta():
        model = build()
    _require_plain(model)
    found = _by_name(model, held)
    _require_all(model, found, folder)
    for names, parameter in _tied(model).values():
        setattr(parameter, _STORED, _one_of([found[name] for name in names if name in found], names))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in found:
                buffer.copy_(found[name].whole())
    return model


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules that are made meanwhile have their parameters on meta, and their buffers with values on the CPU."""
    register = nn.Module.register_parameter
    moved: Any = WeakIdKeyDictionary()

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            if parameter not in moved:
                on_meta = type(parameter)(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                on_meta.__dict__.update(parameter.__dict__)
                moved[parameter] = on_meta
            parameter = moved[parameter]
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _require_plain(model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    if getattr(config, "quantization_config", None) is not None:
        raise NotOneToOne("its weights are quantised")


def _by_name(model: nn.Module, held: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The files' tensors by the model's names, renamed as transformers does. Raises NotOneToOne for more than that."""
    rename = _renaming(model)
    state = model.state_dict(keep_vars=True)
    found: dict[str, StoredTensor] = {}
    for key, tensor in held.items():
        name, is_converted = rename(key, state)
        if is_converted:
            raise NotOneToOne(f"{key} is converted while it is loaded")
        if name in found:
            raise NotOneToOne(f"{key} and {found[name].key} are one tensor of the model")
        if name in state:
            found[name] = tensor
    return found


def _renaming(model: nn.Module) -> Callable[[str, Mapping[str, Tensor]], tuple[str, bool]]:
    """(a file's name, the model's state) -> (the model's name, whether transformers would change the values too)."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping  # optional, and heavy
        from transformers.core_model_loading import (  # optional, and heavy
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )
    except ImportError as error:
        raise NotOneToOne(f"this transformers loads weights in a way that is not known ({error})") from error
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    if len(renamings) + len(converters) < len(mapping):
        raise NotOneToOne("transformers converts its weights in a way that is not known")
    prefix = getattr(model, "base_model_prefix", None)

    def rename(key: str, state: Mapping[str, Tensor]) -> tuple[str, bool]:
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:  # transformers, too, then takes the name as it is
            name, pattern = rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=state)
        return name, pattern is not None

    return rename


def _tied(model: nn.Module) -> dict[int, tuple[list[str], nn.Parameter]]:
    """Every parameter with all its names."""
    found: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), ([], parameter))[0].append(name)
    return found


def _require_all(model: nn.Module, found: Mapping[str, StoredTensor], folder: Path) -> None:
    """Raises ModelError for what the files lack, NotOneToOne where transformers would make it itself."""
    state = model.state_dict(keep_vars=True)
    names_of = {name: names for names, _ in _tied(model).values() for name in names}
    missing = sorted(name for name in state if not any(each in found for each in names_of.get(name, [name])))
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_missing", None) or [])]
    needed = [name for name in missing if not any(re.search(pattern, name) for pattern in ignored)]
    needed += sorted(
        f"{name} {list(tensor.shape)} for {list(state[name].shape)}"
        for name, tensor in found.items()
        if tensor.shape != tuple(state[name].shape)
    )
    if needed:
        raise ModelError(
            f"the weights in {folder} are not all of the model's",
            values=f"{len(needed)} are missing or of another shape, such as {', '.join(needed[:3])}",
            alternatives=f"hf:{folder / 'config.json'}, for random weights",
        )
    if missing:
        raise NotOneToOne(f"it lacks {missing[0]}, which transformers makes anew")


def _one_of(candidates: list[StoredTensor], names: list[str]) -> StoredTensor:
    """The only tensor, or the first of several with the same values: else transformers does not tie them."""
    first, *others = candidates
    for other in others:
        if first.dtype != other.dtype or not _are_equal(first, other):
            raise NotOneToOne(f"{' and '.join(names)} are tied in the model, and differ in the files")
    return first


def _are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    return bool(torch.equal(first.whole(), second.whole()))
