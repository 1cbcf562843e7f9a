"""Load a model by its name on the command line: `module:factory`, `path/to/file.py:factory`, `hf:path/to/config.json`
or `hf:folder/with/weights`.

A factory is any callable without required arguments. It returns the module, an object with attributes `model`, `inputs`
and `loss_fn` (such as `examples.models.Example`), or a tuple (model, inputs) or (model, inputs, loss_fn).
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
from autopar.models.lazy_weights import NotOneToOne, lazy_model

_FORMS = (
    "module:factory, for example examples.models:gpt2",
    "path/to/file.py:factory",
    "hf:path/to/config.json",
    "hf:folder/with/config/and/weights",
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, with the batch and the loss of its factory, if any.

    inputs: example_inputs for `autopar.compile`, or None. loss_fn: None if the model returns its loss.
    """

    model: nn.Module
    inputs: Mapping[str, Any] | tuple[Any, ...] | None = None
    loss_fn: Callable[..., Tensor] | None = None


@collection_paused()
def load_model(spec: str, *, meta: bool = False, lazy: bool = False, **options: Any) -> LoadedModel:
    """Load the model that `spec` names, in training mode.

    meta: build parameters and buffers without memory, on the meta device; a factory's inputs are then on meta too.
    lazy: leave the weights of a Hugging Face folder in its files (`lazy_weights.py`) until a program is built or saved.
    options: keyword arguments for the factory, or fields that override the configuration's.
    The seed of random weights is 0 unless the factory sets one, so every process builds the same model. The caller's
    random state does not change. Raises ModelError.
    """
    scheme, name = _parts(spec)
    with torch.device("meta"):
        # torch caches the constructors that it sees at the first use of a device. That would otherwise happen while
        # transformers, which loads weights, replaces torch.linspace, and torch.linspace would ignore devices from
        # then on.
        torch.empty(0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(0)
        if meta:
            stack.enter_context(torch.device("meta"))
        is_config = scheme == "hf"
        loaded = _from_config(Path(name), options, meta, lazy) if is_config else _from_factory(scheme, name, options)
    loaded.model.train()
    return loaded


def require_model(spec: str) -> None:
    """Raise ModelError if the module, factory or configuration file that `spec` names is missing."""
    scheme, name = _parts(spec)
    if scheme == "hf":
        path = Path(name)
        _read_architectures(path / "config.json" if path.is_dir() else path)
    else:
        _factory(scheme, name)


def _parts(spec: str) -> tuple[str, str]:
    """Split `module:factory` at its colon, `hf:path` after the scheme."""
    if isinstance(spec, str):
        head, _, tail = spec.partition(":") if spec.startswith("hf:") else spec.rpartition(":")
        if head and tail:
            return head, tail
    hint = f"{spec}:FACTORY" if isinstance(spec, str) and spec.endswith(".py") else ""
    raise ModelError("this is not the name of a model", values=shown(spec), alternatives=(hint, *_FORMS))


def _factory(module_name: str, factory_name: str) -> Callable[..., Any]:
    module = _import(module_name)
    factory: Any = module
    for part in factory_name.split("."):
        factory = getattr(factory, part, None)
    if not callable(factory):
        raise ModelError(
            f"module {module_name!r} has no callable {factory_name!r}",
            values=f"{getattr(module, '__file__', module_name)}",
            alternatives="one of its callables: " + ", ".join(_callables(module)),
        )
    function: Callable[..., Any] = factory
    return function


def _from_factory(module_name: str, factory_name: str, options: Mapping[str, Any]) -> LoadedModel:
    spec = f"{module_name}:{factory_name}"
    factory = _factory(module_name, factory_name)
    try:
        product = factory(**options)
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise ModelError(
            f"{spec} failed",
            values=f"{type(error).__name__}: {error}",
            alternatives="a factory that can be called with these options: -o NAME=VALUE",
        ) from error
    loaded = _as_loaded(product)
    if loaded is None:
        raise ModelError(
            f"{spec} does not return a model",
            values=f"it returned {type(product).__name__}",
            alternatives=("a torch.nn.Module", "(model, inputs)", "(model, inputs, loss_fn)"),
        )
    return loaded


def _import(module_name: str) -> Any:
    """Import a module by its name or its file, with the working folder and the module's folder on `sys.path`.

    Both come last, so that their files hide no installed module. They stay there, as the factory, and processes that
    start later, may import from them.
    """
    _add_to_path(Path.cwd())
    path = Path(module_name)
    is_file = module_name.endswith(".py")
    try:
        if is_file:
            if not path.is_file():
                raise ModelError("the file does not exist", values=module_name, alternatives=_FORMS)
            module_name = path.stem
            _add_to_path(path.resolve().parent)
        origin = _file_of(module_name)
        if origin is not None:
            _add_to_path(origin.parent)
        if is_file and origin != path.resolve():
            raise ModelError(
                f"another module has the name {module_name!r}",
                values=f"{path} is hidden by {origin or 'a module of Python itself'}",
                alternatives=["another name for the file", f"package.{module_name}:FACTORY, if it is in a package"],
            )
        return importlib.import_module(module_name)
    except ModelError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
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
        module_spec = importlib.util.find_spec(module_name)
        file = module_spec.origin if module_spec is not None and module_spec.has_location else None
    return Path(file).resolve() if file else None


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path and not (folder == Path.cwd() and "" in sys.path):
        sys.path.append(str(folder))


def _callables(module: Any) -> list[str]:
    names = (name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
    return sorted(name for name in names if callable(getattr(module, name)) and not name.startswith("_")) or ["none"]


def _as_loaded(product: Any) -> LoadedModel | None:
    if isinstance(product, nn.Module):
        return LoadedModel(product)
    parts = (
        product if isinstance(product, tuple) else (getattr(product, "model", None), getattr(product, "inputs", None))
    )
    if not isinstance(product, tuple):
        parts += (getattr(product, "loss_fn", None),)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        return None
    return LoadedModel(*parts)


def _from_config(path: Path, options: Mapping[str, Any], meta: bool, lazy: bool) -> LoadedModel:
    """Build a transformers model in fp32, whatever the dtype of its configuration.

    Its weights are those of the folder, if it has any, else random. meta: none at all.
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
    """Return the configuration, for training in fp32, and the class that its "architectures" name, if any."""
    architectures = _read_architectures(path)
    transformers = _transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, **options)
    except Exception as error:  # transformers raises many kinds of errors for an unknown configuration
        raise ModelError(
            f"transformers does not know the configuration {path}",
            values=_first_line(error),
            alternatives="a config.json of a model of this version of transformers, or a newer transformers",
        ) from error
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model_class = getattr(transformers, architectures[0], None) if architectures else None
    if architectures and model_class is None:
        raise ModelError(
            f"transformers {transformers.__version__} has no class {architectures[0]!r}",
            values=f'"architectures" in {path}',
            alternatives="a class of transformers, or no such field for a causal language model",
        )
    config.dtype = torch.float32
    return config, model_class


def _transformers() -> Any:
    try:
        import transformers  # optional and slow
    except ImportError as error:
        raise ModelError(
            "hf: needs transformers, which is not installed", alternatives="pip install 'autopar[hf]'"
        ) from error
    return transformers


def _built(path: Path, config: Any, build: Callable[[Any], nn.Module]) -> nn.Module:
    try:
        return build(config)
    except Exception as error:  # inconsistent sizes fail in the model's own constructors
        raise ModelError(
            f"the model of {path} cannot be built",
            values=_first_line(error),
            alternatives="consistent sizes in the configuration, or other -o NAME=VALUE",
        ) from error


def _with_files(folder: Path, config: Any, build: Callable[[Any], nn.Module]) -> nn.Module | None:
    """Return the model with its weights in the folder's files, or None, with a warning, if they need conversion."""
    try:
        model: Any = lazy_model(folder, lambda: _built(folder / "config.json", config, build))
    except NotOneToOne as reason:
        warnings.warn(f"every process loads all weights of {folder} through transformers: {reason}", stacklevel=5)
        return None
    config.name_or_path = str(folder)
    if (folder / "generation_config.json").exists() and hasattr(model, "generation_config"):
        model.generation_config = _transformers().GenerationConfig.from_pretrained(str(folder))
    return cast(nn.Module, model)


_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")


def _with_weights(folder: Path, config: Any, model_class: Any) -> nn.Module:
    """Return the model with the folder's weights, in fp32. Raises ModelError if they do not match the configuration."""
    try:
        model, loading_info = model_class.from_pretrained(
            str(folder),
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            weights_only=True,
        )
    except Exception as error:  # transformers raises many kinds of errors for damaged or other files
        raise ModelError(
            f"the weights in {folder} cannot be loaded",
            values=_first_line(error),
            alternatives=f"an intact copy of the folder, or hf:{folder / 'config.json'} for random weights",
        ) from error
    missing = sorted(loading_info["missing_keys"]) + sorted(str(key) for key in loading_info["mismatched_keys"])
    if missing:
        raise ModelError(
            f"the weights in {folder} do not match the model",
            values=f"{len(missing)} missing or of another shape, such as {', '.join(missing[:3])}",
            alternatives=f"hf:{folder / 'config.json'}, for random weights",
        )
    loaded: nn.Module = model
    return loaded


def _read_architectures(path: Path) -> list[str]:
    try:
        fields = parse_json(path.read_text())
    except OSError as error:
        raise ModelError(
            "hf: needs a configuration file on this machine",
            values=f"{path}: {error.strerror}",
            alternatives="hf:path/to/config.json, or its folder",
        ) from error
    except ValueError as error:
        raise ModelError(
            f"{path} is not JSON", values=str(error), alternatives="a config.json of transformers"
        ) from error
    names = fields.get("architectures") if isinstance(fields, dict) else None
    if not isinstance(names or [], list):
        raise ModelError(
            f'"architectures" in {path} must be a list', values=shown(names), alternatives='["LlamaForCausalLM"]'
        )
    return [str(name) for name in names or []]


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
