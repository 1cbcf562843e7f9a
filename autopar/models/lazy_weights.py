"""A model from a Hugging Face folder whose parameters stay in the files until a rank reads its shard of them.

Parameters are on meta, and each knows the place of its values (`stored_of`), whatever modules wrap the model. Buffers,
which are small, are loaded at once. `lazy_model` refuses a folder whose tensors do not match the model's one to one
(fused experts, quantized weights, files of other formats).
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
    """Raised if transformers must convert the folder's tensors while loading; its text is the reason."""


def stored_of(tensor: Tensor) -> StoredTensor | None:
    """Return where the values of a parameter on meta are, or None."""
    stored: StoredTensor | None = getattr(tensor, _STORED, None) if tensor.device.type == "meta" else None
    return stored


def has_values(model: nn.Module) -> bool:
    """Return whether every parameter has values, in memory or in a file."""
    return all(p.device.type != "meta" or stored_of(p) is not None for p in model.parameters())


def lazy_model(folder: Path, build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that `build` constructs, with the values of the folder's safetensors files.

    Raises NotOneToOne, and ModelError if the files lack a tensor or have one of another shape.
    """
    try:
        in_files = tensors_of(files_of(folder, "model"))
    except WeightFileError as error:
        raise ModelError(
            f"the weights in {folder} cannot be loaded",
            values=str(error),
            alternatives=f"an intact copy of the folder, or hf:{folder / 'config.json'} for random weights",
        ) from error
    if not in_files:
        raise NotOneToOne("it has no safetensors files")
    with parameters_on_meta():
        model = build()
    _require_plain(model)
    by_name = _by_name(model, in_files)
    _require_all(model, by_name, folder)
    for names, parameter in _tied(model).values():
        setattr(parameter, _STORED, _one_of([by_name[name] for name in names if name in by_name], names))
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in by_name:
                buffer.copy_(by_name[name].whole())
    return model


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules that are built meanwhile on meta; their buffers have values on the CPU."""
    register = nn.Module.register_parameter
    meta_of: Any = WeakIdKeyDictionary()

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            if parameter not in meta_of:
                on_meta = type(parameter)(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
                on_meta.__dict__.update(parameter.__dict__)
                meta_of[parameter] = on_meta
            parameter = meta_of[parameter]
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _require_plain(model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    if getattr(config, "quantization_config", None) is not None:
        raise NotOneToOne("its weights are quantized")


def _by_name(model: nn.Module, in_files: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the files' tensors by the model's names, renamed as transformers does. Raises NotOneToOne for
    conversions."""
    rename = _renaming(model)
    state = model.state_dict(keep_vars=True)
    by_name: dict[str, StoredTensor] = {}
    for key, tensor in in_files.items():
        name, is_converted = rename(key, state)
        if is_converted:
            raise NotOneToOne(f"transformers converts {key} while loading")
        if name in by_name:
            raise NotOneToOne(f"{key} and {by_name[name].key} are one tensor of the model")
        if name in state:
            by_name[name] = tensor
    return by_name


def _renaming(model: nn.Module) -> Callable[[str, Mapping[str, Tensor]], tuple[str, bool]]:
    """Return a function from a file's name and the model's state to the model's name and whether values change too."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping  # optional, and heavy
        from transformers.core_model_loading import (  # optional, and heavy
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )
    except ImportError as error:
        raise NotOneToOne(f"this version of transformers loads weights in an unknown way ({error})") from error
    mapping = get_model_conversion_mapping(model)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    if len(renamings) + len(converters) < len(mapping):
        raise NotOneToOne("transformers converts its weights in an unknown way")
    prefix = getattr(model, "base_model_prefix", None)

    def rename(key: str, state: Mapping[str, Tensor]) -> tuple[str, bool]:
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:  # transformers also takes the name unchanged then
            name, pattern = rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=state)
        return name, pattern is not None

    return rename


def _tied(model: nn.Module) -> dict[int, tuple[list[str], nn.Parameter]]:
    """Return every parameter with all its names."""
    tied: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), ([], parameter))[0].append(name)
    return tied


def _require_all(model: nn.Module, by_name: Mapping[str, StoredTensor], folder: Path) -> None:
    """Raise ModelError for tensors that the files lack, NotOneToOne if transformers would initialize them."""
    state = model.state_dict(keep_vars=True)
    names_of = {name: names for names, _ in _tied(model).values() for name in names}
    missing = sorted(name for name in state if not any(alias in by_name for alias in names_of.get(name, [name])))
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_missing", None) or [])]
    needed = [name for name in missing if not any(re.search(pattern, name) for pattern in ignored)]
    needed += sorted(
        f"{name} {list(tensor.shape)} for {list(state[name].shape)}"
        for name, tensor in by_name.items()
        if tensor.shape != tuple(state[name].shape)
    )
    if needed:
        raise ModelError(
            f"the weights in {folder} do not match the model",
            values=f"{len(needed)} missing or of another shape, such as {', '.join(needed[:3])}",
            alternatives=f"hf:{folder / 'config.json'}, for random weights",
        )
    if missing:
        raise NotOneToOne(f"it lacks {missing[0]}, which transformers initializes")


def _one_of(candidates: list[StoredTensor], names: list[str]) -> StoredTensor:
    """Return the only tensor, or the first of several with equal values; transformers does not tie unequal ones."""
    first, *others = candidates
    for other in others:
        if first.dtype != other.dtype or not _are_equal(first, other):
            raise NotOneToOne(f"{' and '.join(names)} are tied in the model but differ in the files")
    return first


def _are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    return bool(torch.equal(first.whole(), second.whole()))
