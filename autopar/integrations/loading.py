"""A model from its name on the command line: `module:factory`, `path/to/file.py:factory`, `hf:path/to/config.json` or
`hf:folder/with/weights`.

A factory is any callable without required arguments. It returns the module, or an object with attributes `model`,
`inputs` and `loss_fn` (such as `examples.models.Example`), or a tuple (model, inputs) or (model, inputs, loss_fn).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopar.errors import ModelError
from autopar.files.text_files import parse_json, shown
from autopar.frontend.garbage_collection import collection_paused
from autopar.integrations.lazy_weights import NotOneToOne, lazy_model

_FORMS = (
    "module:factory, for example examples.models:gpt2",
    "path/to/file.py:factory",
    "hf:path/to/config.json",
    "hf:folder/with/config/and/weights",
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, with a batch and a loss when its factory gave them.

    inputs: what `autopar.compile` takes as example_inputs, or None. loss_fn: None when the model returns its loss.
    """

    model: nn.Module
    inputs: Mapping[str, Any] | tuple[Any, ...] | None = None
    loss_fn: Callable[..., Tensor] | None = None


@collection_paused()
def load_model(spec: str, *, meta: bool = False, lazy: bool = False, **options: Any) -> LoadedModel:
    """The model that `spec` names, in training mode.

    meta: build parameters and buffers without memory, on the meta device; a factory's inputs are then on meta too.
    lazy: leave the weights of a Hugging Face folder in its files (`lazy_weights.py`) until a program is built or saved.
    options: keyword arguments for the factory, or fields that override the configuration's.
    Random weights are seeded with 0 unless the factory seeds them itself, so every process builds the same model; the
    caller's random state is left alone. Raises ModelError.
    """
    scheme, rest = _parts(spec)
    with torch.device("meta"):
        # torch keeps the constructors that it finds at the first use of a device, which would otherwise be while
        # transformers loads weights, with a torch.linspace of its own: torch's then ignored devices ever after.
        torch.empty(0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(0)
        if meta:
            stack.enter_context(torch.device("meta"))
        is_config = scheme == "hf"
        loaded = _from_config(Path(rest), options, meta, lazy) if is_config else _from_factory(scheme, rest, options)
    loaded.model.train()
    return loaded


def require_model(spec: str) -> None:
    """Raise ModelError where `load_model` would for the name: its module, factory or configuration file is missing."""
    scheme, rest = _parts(spec)
    if scheme == "hf":
        path = Path(rest)
        _read_architectures(path / "config.json" if path.is_dir() else path)
    else:
        _factory(scheme, rest)


def _parts(spec: str) -> tuple[str, str]:
    """Split `module:factory` at its colon, `hf:path` after the scheme."""
    if isinstance(spec, str):
        head, _, tail = spec.partition(":") if spec.startswith("hf:") else spec.rpartition(":")
        if head and tail:
            return head, tail
    hint = f"{spec}:FACTORY" if isinstance(spec, str) and spec.endswith(".py") else ""
    raise ModelError("a model is named by where it comes from", values=shown(spec), alternatives=(hint, *_FORMS))


def _factory(module_name: str, factory_name: str) -> Callable[..., Any]:
    module = _import(module_name)
    factory: Any = module
    for part in factory_name.split("."):
        factory = getattr(factory, part, None)
    if not callable(factory):
        raise ModelError(
            f"module {module_name!r} has no callable {factory_name!r}",
            values=f"{getattr(module, '__file__', module_name)}",
            alternatives="its own callables: " + ", ".join(_callables(module)),
        )
    found: Callable[..., Any] = factory
    return found


def _from_factory(module_name: str, factory_name: str, options: Mapping[str, Any]) -> LoadedModel:
    spec = f"{module_name}:{factory_name}"
    factory = _factory(module_name, factory_name)
    try:
        made = factory(**options)
    except (Exception, SystemExit) as error:  # the factory is the user's code: its error is the message
        raise ModelError(f"{spec} could not be called", values=f"{type(error).__name__}: {error}") from error
    loaded = _as_loaded(made)
    if loaded is None:
        raise ModelError(
            f"{spec} does not give a model",
            values=f"it returned {type(made).__name__}",
            alternatives=("a torch.nn.Module", "(model, inputs)", "(model, inputs, loss_fn)"),
        )
    return loaded


def _import(module_name: str) -> Any:
    """Import a module by its name or its file, with the working folder and the module's own folder on `sys.path`.

    Both come last there, so that a file in them hides no installed module. They stay: the factory, and processes that
    are started later, may import from them, too.
    """
    _add_to_path(Path.cwd())
    path = Path(module_name)
    is_file = module_name.endswith(".py")
    try:
        if is_file:
            if not path.is_file():
                raise ModelError("there is no such file", values=module_name, alternatives=_FORMS)
            module_name = path.stem
            _add_to_path(path.resolve().parent)
        origin = _file_of(module_name)
        if origin is not None:
            _add_to_path(origin.parent)
        if is_file and origin != path.resolve():
            raise ModelError(
                f"another module is imported by the name {module_name!r}",
                values=f"{path} is hidden by {origin or 'a module of Python itself'}",
                alternatives=["another name for the file", f"package.{module_name}:FACTORY, where it is in a package"],
            )
        return importlib.import_module(module_name)
    except ModelError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's module raises when imported
        raise ModelError(
            f"module {module_name!r} could not be imported",
            values=f"{type(error).__name__}: {error}",
            alternatives=_FORMS,
        ) from error


def _file_of(module_name: str) -> Path | None:
    """Return the file that an import of `module_name` runs, or ran."""
    if module_name in sys.modules:
        file = getattr(sys.modules[module_name], "__file__", None)
    else:
        found = importlib.util.find_spec(module_name)
        file = found.origin if found is not None and found.has_location else None
    return Path(file).resolve() if file else None


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path and not (folder == Path.cwd() and "" in sys.path):
        sys.path.append(str(folder))


def _callables(module: Any) -> list[str]:
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
    return sorted(name for name in own if callable(getattr(module, name)) and not name.startswith("_")) or ["none"]


def _as_loaded(made: Any) -> LoadedModel | None:
    if isinstance(made, nn.Module):
        return LoadedModel(made)
    parts = made if isinstance(made, tuple) else (getattr(made, "model", None), getattr(made, "inputs", None))
    if not isinstance(made, tuple):
        parts += (getattr(made, "loss_fn", None),)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        return None
    return LoadedModel(*parts)


def _from_config(path: Path, options: Mapping[str, Any], meta: bool, lazy: bool) -> LoadedModel:
    """A transformers model in fp32, whatever dtype its configuration was published in.

    Its weights are those of the folder that was named, where there are any; else random. meta: none at all.
    """
    folder = path
    path = path / "config.json" if path.is_dir() else path
    config, model_class = _config_and_class(path, options)
    build = model_class or _transformers().AutoModelForCausalLM.from_config
    has_weights = folder.is_dir() and any(True for pattern in _WEIGHTS for _ in folder.glob(pattern))
    if has_weights and not meta:
        if lazy and (model := _with_files(folder, config, build)) is not None:
            return LoadedModel(model)
        return LoadedModel(_with_weights(folder, config, model_class or _transformers().AutoModelForCausalLM))
    return LoadedModel(_built(path, config, build))


def _config_and_class(path: Path, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """The configuration, for training in fp32, and the class that its "architectures" name, if they do."""
    architectures = _read_architectures(path)
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, **options)
    except Exception as error:  # transformers raises many kinds for a configuration that it does not know
        raise ModelError(f"{path} is no configuration that transformers knows", values=_first_line(error)) from error
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model_class = getattr(transformers, architectures[0], None) if architectures else None
    if architectures and model_class is None:
        raise ModelError(
            f"transformers {transformers.__version__} has no class {architectures[0]!r}",
            values=f'"architectures" in {path}',
            alternatives="a class of transformers, or leave the field out for a causal language model",
        )
    config.dtype = torch.float32
    return config, model_class


def _transformers() -> Any:
    try:
        import transformers  # optional, and heavy
    except ImportError as error:
        raise ModelError("hf: needs transformers", alternatives="pip install 'autopar[hf]'") from error
    return transformers


def _built(path: Path, config: Any, build: Callable[[Any], nn.Module]) -> nn.Module:
    try:
        return build(config)
    except Exception as error:  # inconsistent sizes fail in the model's own constructors
        raise ModelError(f"the model of {path} could not be built", values=_first_line(error)) from error


def _with_files(folder: Path, config: Any, build: Callable[[Any], nn.Module]) -> nn.Module | None:
    """The model whose weights stay in the folder's files; None, with a warning, where they have to be converted."""
    try:
        model: Any = lazy_model(folder, lambda: _built(folder / "config.json", config, build))
    except NotOneToOne as reason:
        warnings.warn(
            f"the weights of {folder} are loaded whole by transformers, in every process: {reason}", stacklevel=5
        )
        return None
    config.name_or_path = str(folder)
    if (folder / "generation_config.json").exists() and hasattr(model, "generation_config"):
        model.generation_config = _transformers().GenerationConfig.from_pretrained(str(folder))
    return cast(nn.Module, model)


_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")


def _with_weights(folder: Path, config: Any, model_class: Any) -> nn.Module:
    """The model with the folder's weights, in fp32. Raises ModelError where they are not this configuration's."""
    try:
        model, found = model_class.from_pretrained(
            str(folder),
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            weights_only=True,
        )
    except Exception as error:  # transformers raises many kinds for damaged or unlike files
        raise ModelError(f"the weights in {folder} could not be loaded", values=_first_line(error)) from error
    missing = sorted(found["missing_keys"]) + sorted(str(key) for key in found["mismatched_keys"])
    if missing:
        raise ModelError(
            f"the weights in {folder} are not all of the model's",
            values=f"{len(missing)} are missing or of another shape, such as {', '.join(missing[:3])}",
            alternatives=f"hf:{folder / 'config.json'}, for random weights",
        )
    loaded: nn.Module = model
    return loaded


def _read_architectures(path: Path) -> list[str]:
    try:
        fields = parse_json(path.read_text())
    except OSError as error:
        raise ModelError(
            "an hf: model is a configuration file on this machine",
            values=f"{path}: {error.strerror}",
            alternatives="hf:path/to/config.json, or the folder that holds it",
        ) from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON", values=str(error)) from error
    names = fields.get("architectures") if isinstance(fields, dict) else None
    if not isinstance(names or [], list):
        raise ModelError(f'"architectures" in {path} is not a list', values=shown(names), alternatives="[name]")
    return [str(name) for name in names or []]


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'without a message'}"
