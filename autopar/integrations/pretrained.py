"""Trained values as a Hugging Face folder, or one safetensors file, written tensor by tensor."""

from __future__ import annotations

import copy
import fnmatch
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import CheckpointError, ModelError
from autopar.files.folder_swap import new_folder
from autopar.files.tensor_files import MOST_BYTES, TensorFiles, TensorSpec
from autopar.files.text_files import parse_json
from autopar.integrations.lazy_weights import stored_of
from codegen.runtime import checkpoint_files as files
from codegen.runtime.checkpoint import NON_PERSISTENT, OPTIMIZER
from codegen.runtime.checkpoint_files import Manifest, Piece

Values = Iterable[tuple[tuple[str, ...], Tensor]]
"""(all names, whole tensor), one at a time: what `step.whole_tensors(rank0_only=True)` gives."""

COMPANIONS = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken"),
    *("chat_template*", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
"""Files beside a model's weights that training leaves as they are."""


def save_pretrained(
    values: Values,
    model: nn.Module,
    directory: str | Path,
    *,
    source: str | Path | None = None,
    dtype: torch.dtype | None = None,
    most_bytes: int = MOST_BYTES,
) -> Path:
    """Write a folder that `from_pretrained` of transformers reads: config, sharded safetensors, tokenizer.

    values: trained ones, of which one at a time is in memory. What they lack (parameters that take no part in
    training) is written as the model has it. model: of transformers; its values do not matter otherwise, so it may be
    on meta. source: the folder that the model came from, whose tokenizer and generation settings are copied; by default
    the one that its configuration names. dtype: of floating tensors, by default the model's own.
    Raises ModelError for a model that is not of transformers, OutputError for a folder that autopar did not write.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained") or not hasattr(model, "save_pretrained"):
        raise ModelError("the model is not of transformers", values=type(model).__name__, alternatives="--safetensors")
    home = Path(source if source is not None else getattr(config, "name_or_path", None) or "/")
    saved = SavedNames(model)
    directory = Path(directory)
    with new_folder(directory, "the model") as fresh:
        outlines = {name: part for key in saved.keys for name, part in saved.parts(key, saved.outline(key)).items()}
        specs = {name: TensorSpec(tuple(part.shape), _cast(part, dtype)) for name, part in outlines.items()}
        with TensorFiles(fresh, "model", specs, most_bytes) as written:
            for key, value in _with_rest(values, model, saved):
                for name, part in saved.parts(key, value).items():
                    written.write(name, part)
        _write_config(model, config, fresh, home, dtype)
        if home.is_dir() and home != Path("/"):
            _copy_companions(home, fresh)
    return directory


class SavedNames:
    """The names under which transformers saves a model's tensors: `keys` are the model's own, each tied one once.

    Where transformers takes the model's tensors apart to save them (stacked experts), so does `parts`, if that can be
    done tensor by tensor; else the model's own names are kept, which `from_pretrained` reads as well.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._state: dict[str, Tensor] = model.state_dict(keep_vars=True)
        targets = getattr(model, "all_tied_weights_keys", None) or {}
        by_tensor: dict[int, list[str]] = {}
        for name, tensor in self._state.items():
            by_tensor.setdefault(id(tensor), []).append(name)
        self.key_of: dict[str, str] = {}
        for names in by_tensor.values():
            key = next((name for name in names if name not in targets), names[0])
            self.key_of |= dict.fromkeys(names, key)
        self.keys = tuple(dict.fromkeys(self.key_of.values()))
        self._revert = self._reversion()

    def outline(self, key: str) -> Tensor:
        """An empty tensor on meta like the model's."""
        return torch.empty_like(self._state[key], device="meta")

    def parts(self, key: str, value: Tensor) -> dict[str, Tensor]:
        """What is saved of a tensor, by name."""
        found: dict[str, Tensor] = self._revert(self._model, {key: value}) if self._revert else {key: value}
        return found

    def own(self, key: str) -> Tensor:
        """The model's own value. Raises ModelError for one on meta."""
        tensor = self._state[key]
        if (stored := stored_of(tensor)) is not None:
            return stored.whole()
        if tensor.device.type == "meta":
            raise ModelError(f"there is no value for {key}", values="it is not among the trained ones, and on meta")
        return tensor.detach()

    def _reversion(self) -> Any:
        try:
            from transformers.core_model_loading import revert_weight_conversion  # optional, and heavy
        except ImportError:
            return None
        outlines = {key: self.outline(key) for key in self.keys}
        try:
            whole = revert_weight_conversion(self._model, dict(outlines))
            parts: dict[str, Tensor] = {}
            for key, value in outlines.items():
                parts |= revert_weight_conversion(self._model, {key: value})
        except Exception:  # whatever a conversion cannot do with a part of what it wants
            return None
        same = {name: value.shape for name, value in whole.items()} == {name: v.shape for name, v in parts.items()}
        return revert_weight_conversion if same and whole.keys() != outlines.keys() else None


def _with_rest(values: Values, model: nn.Module, saved: SavedNames) -> Iterator[tuple[str, Tensor]]:
    """(the model's name, value) of all that is saved: the trained values, and then the model's own of what is left."""
    left = dict.fromkeys(saved.keys)
    for names, value in values:
        keys = dict.fromkeys(saved.key_of[name] for name in names if name in saved.key_of)
        for key in keys:
            if key in left:
                del left[key]
                yield key, value
    for key in left:
        yield key, saved.own(key)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _write_config(model: Any, config: Any, folder: Path, home: Path, dtype: torch.dtype | None) -> None:
    """config.json as for a model that is to be used: compiling turned its cache off, and set its dtype."""
    config = copy.deepcopy(config)
    parameter = next(iter(model.parameters()), None)
    config.dtype = dtype or (parameter.dtype if parameter is not None else None)
    config.architectures = [type(model).__name__]
    if hasattr(config, "use_cache"):
        config.use_cache = _read_json(home / "config.json").get("use_cache", True)
    config.save_pretrained(folder)
    if not (home / "generation_config.json").is_file() and model.can_generate():
        made = getattr(model, "generation_config", None)
        if made is not None:
            made.save_pretrained(folder)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _copy_companions(home: Path, folder: Path) -> None:
    for path in sorted(home.iterdir()):
        is_asked = any(fnmatch.fnmatch(path.name, pattern) for pattern in (*COMPANIONS, "generation_config.json"))
        if is_asked and path.is_file() and not re.search(r"\.safetensors|\.bin$", path.name):
            shutil.copyfile(path, folder / path.name)


# Checkpoints ----------------------------------------------------------------------------------------------------------


def notes_of(model: nn.Module) -> dict[str, str]:
    """What a checkpoint's manifest says of a transformers model, so that it can be exported without it."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict") or not hasattr(model, "save_pretrained"):
        return {}
    fields = {**config.to_dict(), "architectures": [type(model).__name__]}
    try:
        text = json.dumps(fields, default=str)
    except (TypeError, ValueError):  # a user's own kind of configuration
        return {}
    return {"hf_config": text, "hf_folder": str(getattr(config, "name_or_path", "") or "")}


def model_tensors(manifest: Manifest) -> dict[str, files.Stored]:
    """The parameters and buffers of a checkpoint, without the optimiser's state and what a model makes itself."""
    found = manifest.tensors.items()
    return {name: stored for name, stored in found if not name.startswith((OPTIMIZER, NON_PERSISTENT))}


def checkpoint_values(directory: Path, manifest: Manifest) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """The values of a checkpoint, one at a time. Raises DamagedError, before the first, for files that are damaged."""
    tensors = model_tensors(manifest)
    needed = {chunk.file for stored in tensors.values() for chunk in stored.chunks}
    kept = {name: sums for name, sums in manifest.files.items() if name in needed}
    files.require_intact(directory, Manifest(manifest.tensors, kept), 0, 1)
    for name, stored in tensors.items():
        value = torch.empty(stored.shape, dtype=stored.dtype)
        files.fill(directory, manifest, [Piece(name, stored.shape, (0,) * len(stored.shape), value)])
        yield (name,), value


def require_same_model(model: nn.Module, manifest: Manifest, directory: Path) -> None:
    """Raises CheckpointError for a checkpoint that has other names or shapes than the model."""
    state: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
    stored = model_tensors(manifest)
    held = {id(state[name]) for name in stored if name in state}
    wrong = [f"the model has no {name}" for name in stored if name not in state]
    wrong += [f"the checkpoint has no {n}" for n, value in state.items() if id(value) not in held and value.numel()]
    wrong += [
        f"{name} has shape {list(each.shape)} in the checkpoint, {list(state[name].shape)} in the model"
        for name, each in stored.items()
        if name in state and tuple(state[name].shape) != each.shape
    ]
    if wrong:
        some = "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise CheckpointError(f"{directory} is of another model", values=some)


def write_state(values: Values, specs: Mapping[str, TensorSpec], file: Path) -> None:
    """One safetensors file of `specs`, each value under all of its names that are there; complete or absent."""
    part = file.with_name(f".{file.name}.partial")
    try:
        with TensorFiles(part.parent, part.name, specs, most_bytes=2**63) as written:
            for names, value in values:
                for name in names:
                    if name in specs:
                        written.write(name, value)
        (part.parent / f"{part.name}.safetensors").rename(file)
    finally:
        (part.parent / f"{part.name}.safetensors").unlink(missing_ok=True)
