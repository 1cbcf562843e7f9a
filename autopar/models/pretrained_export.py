"""Trained values as a Hugging Face folder or a safetensors file, written tensor by tensor."""

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
from autopar.models.lazy_weights import stored_of
from codegen.runtime import checkpoint_files as files
from codegen.runtime.checkpoint import NON_PERSISTENT, OPTIMIZER
from codegen.runtime.checkpoint_files import Manifest, Piece

Values = Iterable[tuple[tuple[str, ...], Tensor]]
"""(all names, whole tensor), one at a time, as `step.whole_tensors(rank0_only=True)` yields them."""

COMPANIONS = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken"),
    *("chat_template*", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
"""Files beside a model's weights that training does not change."""


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

    values: trained values, with one at a time in memory. Parameters without one (they take no part in training) keep
    the model's values. model: of transformers; other values of it are not read, so it may be on meta. source: the
    folder that the model came from, whose tokenizer and generation settings are copied (default: the folder that its
    configuration names). dtype: of floating tensors (default: the model's).
    Raises ModelError for a model that is not of transformers, OutputError for a folder that autopar did not write.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained") or not hasattr(model, "save_pretrained"):
        raise ModelError(
            "the model is not of transformers", values=type(model).__name__, alternatives="--safetensors FILE"
        )
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
    """The names under which transformers saves a model's tensors. `keys` are the model's names, one per tied tensor.

    If transformers splits tensors to save them (stacked experts), so does `parts`, if this works tensor by tensor. Else
    the model's names stay, which `from_pretrained` reads as well.
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
        """Return an empty tensor on meta like the model's."""
        return torch.empty_like(self._state[key], device="meta")

    def parts(self, key: str, value: Tensor) -> dict[str, Tensor]:
        """Return the saved parts of a tensor, by name."""
        saved_parts: dict[str, Tensor] = self._revert(self._model, {key: value}) if self._revert else {key: value}
        return saved_parts

    def model_value(self, key: str) -> Tensor:
        """Return the model's value. Raises ModelError for a tensor on meta."""
        tensor = self._state[key]
        if (stored := stored_of(tensor)) is not None:
            return stored.whole()
        if tensor.device.type == "meta":
            raise ModelError(
                f"{key} has no value",
                values="it is on meta and not among the trained values",
                alternatives="the model with its weights, as hf:folder/with/config/and/weights",
            )
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
        except Exception:  # a conversion may raise anything for some of its tensors
            return None
        same = {name: value.shape for name, value in whole.items()} == {name: v.shape for name, v in parts.items()}
        return revert_weight_conversion if same and whole.keys() != outlines.keys() else None


def _with_rest(values: Values, model: nn.Module, saved: SavedNames) -> Iterator[tuple[str, Tensor]]:
    """Yield (the model's name, value) of all saved tensors: trained values first, then the model's for the rest."""
    remaining = dict.fromkeys(saved.keys)
    for names, value in values:
        keys = dict.fromkeys(saved.key_of[name] for name in names if name in saved.key_of)
        for key in keys:
            if key in remaining:
                del remaining[key]
                yield key, value
    for key in remaining:
        yield key, saved.model_value(key)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _write_config(model: Any, config: Any, folder: Path, home: Path, dtype: torch.dtype | None) -> None:
    """Write config.json for a model in use: compiling turned its cache off and set its dtype."""
    config = copy.deepcopy(config)
    parameter = next(iter(model.parameters()), None)
    config.dtype = dtype or (parameter.dtype if parameter is not None else None)
    config.architectures = [type(model).__name__]
    if hasattr(config, "use_cache"):
        config.use_cache = _read_json(home / "config.json").get("use_cache", True)
    config.save_pretrained(folder)
    if not (home / "generation_config.json").is_file() and model.can_generate():
        generation_config = getattr(model, "generation_config", None)
        if generation_config is not None:
            generation_config.save_pretrained(folder)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _copy_companions(home: Path, folder: Path) -> None:
    for path in sorted(home.iterdir()):
        is_asked = any(fnmatch.fnmatch(path.name, pattern) for pattern in (*COMPANIONS, "generation_config.json"))
        if is_asked and path.is_file() and not re.search(r"\.safetensors|\.bin$", path.name):
            shutil.copyfile(path, folder / path.name)


# Checkpoints ----------------------------------------------------------------------------------------------------------


def notes_of(model: nn.Module) -> dict[str, str]:
    """Return the notes in a checkpoint's manifest on a transformers model, with which it can be exported later."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict") or not hasattr(model, "save_pretrained"):
        return {}
    fields = {**config.to_dict(), "architectures": [type(model).__name__]}
    try:
        text = json.dumps(fields, default=str)
    except (TypeError, ValueError):  # a user-defined configuration
        return {}
    return {"hf_config": text, "hf_folder": str(getattr(config, "name_or_path", "") or "")}


def model_tensors(manifest: Manifest) -> dict[str, files.Stored]:
    """Return the parameters and buffers of a checkpoint, without optimizer state and non-persistent buffers."""
    tensors = manifest.tensors.items()
    return {name: stored for name, stored in tensors if not name.startswith((OPTIMIZER, NON_PERSISTENT))}


def checkpoint_values(directory: Path, manifest: Manifest) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the values of a checkpoint one at a time. Raises DamagedError, before the first, for damaged files."""
    tensors = model_tensors(manifest)
    needed = {chunk.file for stored in tensors.values() for chunk in stored.chunks}
    checksums = {name: sums for name, sums in manifest.files.items() if name in needed}
    files.require_intact(directory, Manifest(manifest.tensors, checksums), 0, 1)
    for name, stored in tensors.items():
        value = torch.empty(stored.shape, dtype=stored.dtype)
        files.fill(directory, manifest, [Piece(name, stored.shape, (0,) * len(stored.shape), value)])
        yield (name,), value


def require_same_model(model: nn.Module, manifest: Manifest, directory: Path) -> None:
    """Raise CheckpointError for a checkpoint with other names or shapes than the model."""
    state: Mapping[str, Tensor] = model.state_dict(keep_vars=True)
    stored = model_tensors(manifest)
    stored_ids = {id(state[name]) for name in stored if name in state}
    wrong = [f"the model has no {name}" for name in stored if name not in state]
    wrong += [
        f"the checkpoint has no {n}" for n, value in state.items() if id(value) not in stored_ids and value.numel()
    ]
    wrong += [
        f"{name} has shape {list(stored_tensor.shape)} in the checkpoint, {list(state[name].shape)} in the model"
        for name, stored_tensor in stored.items()
        if name in state and tuple(state[name].shape) != stored_tensor.shape
    ]
    if wrong:
        examples = "; ".join(wrong[:3]) + (f"; and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise CheckpointError(
            f"{directory} is of another model", values=examples, alternatives="--model with the model that was trained"
        )


def write_state(values: Values, specs: Mapping[str, TensorSpec], file: Path) -> None:
    """Write one safetensors file of `specs`, each value under all its names in `specs`; complete or absent."""
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
