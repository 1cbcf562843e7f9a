"""`autopar export`: write a checkpoint as a Hugging Face folder or a safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from autopar.cli.options import Force, Options
from autopar.cli.output import say
from autopar.errors import CheckpointError, ConstraintError, OutputError
from autopar.files.folder_swap import require_replaceable
from autopar.files.outputs import require_folder
from autopar.files.scratch import temporary_folder
from autopar.files.tensor_files import TensorSpec
from autopar.models.job import parse_settings
from autopar.models.loading import load_model
from autopar.models.pretrained_export import (
    checkpoint_values,
    model_tensors,
    require_same_model,
    save_pretrained,
    write_state,
)
from autopar.training.checkpoints import latest, readable
from codegen.runtime.checkpoint_files import MANIFEST, Manifest, read_manifest

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(
    checkpoint: Annotated[
        str, typer.Argument(help="a checkpoint, or a folder with the newest one", show_default=False)
    ],
    hf: Annotated[
        str | None, typer.Option("--hf", help="write a folder that from_pretrained reads", metavar="FOLDER")
    ] = None,
    safetensors: Annotated[
        str | None, typer.Option("--safetensors", help="write a plain state dict", metavar="FILE")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="the model that was trained \\[default with --hf: the model that the checkpoint names]"),
    ] = None,
    option: Options = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16 \\[default: the checkpoint's]")] = None,
    force: Force = False,
) -> None:
    """Write a checkpoint's weights in a common format; any plan may have trained them."""
    if (hf is None) == (safetensors is None):
        raise ConstraintError(
            "export writes one format at a time",
            values="--hf and --safetensors" if hf else "no format",
            alternatives=["--hf FOLDER", "--safetensors FILE"],
        )
    if dtype not in (None, *DTYPES):
        raise ConstraintError("--dtype names an unknown dtype", values=dtype, alternatives=list(DTYPES))
    if hf is not None:
        require_replaceable(Path(hf))
    directory, manifest = _read_checkpoint(Path(checkpoint))
    options, wanted = parse_settings(option or (), "--option"), DTYPES[dtype] if dtype else None
    if hf is not None:
        module, source = _model(model, manifest, options)
        require_same_model(module, manifest, directory)
        with readable():
            folder = save_pretrained(checkpoint_values(directory, manifest), module, hf, source=source, dtype=wanted)
        say(f"{directory} written to {folder}")
    elif safetensors is not None:
        _write_file(directory, manifest, model, options, wanted, Path(safetensors), force)
        say(f"{directory} written to {safetensors}")


def _read_checkpoint(checkpoint: Path) -> tuple[Path, Manifest]:
    """Return the checkpoint's folder and manifest. Raises CheckpointError."""
    folder = checkpoint if (checkpoint / MANIFEST).exists() else latest(checkpoint)
    if folder is None:
        raise CheckpointError(
            "the folder has no complete checkpoint",
            values=str(checkpoint),
            alternatives="the checkpoint folder of a training run (train --checkpoint FOLDER)",
        )
    with readable():
        return folder, read_manifest(folder)


def _model(spec: str | None, manifest: Manifest, options: dict[str, Any]) -> tuple[Any, str | None]:
    """Return the model on meta and its source folder, if it has one."""
    notes = manifest.record.get("notes", {})
    if spec is not None:
        home = spec.removeprefix("hf:")
        source = home if Path(home).is_dir() else str(Path(home).parent)
        return load_model(spec, meta=True, **options).model, source if spec.startswith("hf:") else None
    if "hf_config" not in notes:
        raise CheckpointError(
            "the checkpoint names no Hugging Face model",
            alternatives="--model hf:FOLDER with the model that was trained",
        )
    with temporary_folder() as folder:
        (folder / "config.json").write_text(notes["hf_config"], encoding="utf-8")
        module = load_model(f"hf:{folder / 'config.json'}", meta=True, **options).model
    noted_folder: str | None = notes.get("hf_folder") or None
    if noted_folder is not None:
        say(f"note: the tokenizer and other files come from {noted_folder}, which the checkpoint names", as_note=True)
    return module, noted_folder


def _write_file(
    directory: Path,
    manifest: Manifest,
    model: str | None,
    options: dict[str, Any],
    dtype: torch.dtype | None,
    file: Path,
    force: bool,
) -> None:
    """Write one file with all names of the model's state dict, or without a model with the checkpoint's names."""
    if file.exists() and not force:
        raise OutputError(
            "the output file exists", values=str(file), alternatives=["another file name", "--force to replace it"]
        )
    require_folder(file.parent)
    file.parent.mkdir(parents=True, exist_ok=True)
    names_of: dict[str, tuple[str, ...]] = {name: (name,) for name in model_tensors(manifest)}
    if model is not None:
        module = load_model(model, meta=True, **options).model
        require_same_model(module, manifest, directory)
        state = module.state_dict(keep_vars=True)
        names_of = {name: tuple(alias for alias in state if state[alias] is state[name]) for name in names_of}
    specs = {
        name: TensorSpec(stored.shape, dtype if dtype and stored.dtype.is_floating_point else stored.dtype)
        for key, stored in model_tensors(manifest).items()
        for name in names_of[key]
    }
    with readable():
        values = checkpoint_values(directory, manifest)
        write_state(((names_of[names[0]], value) for names, value in values), specs, file)
