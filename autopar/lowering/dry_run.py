"""Run the emitted source of every distinct stage once on fake tensors, forward and backward.

`codegen/check_source.py` checks names and arguments of the emitted text. Whether shapes, strides, dtypes and devices
fit shows only in a run. So each distinct root class runs here as on a rank of its mesh: with local shapes, the rank's
parameters and stand-ins for all communication (stand_ins.py). Ranks of one mesh have equal shapes. Layers of one class
run once, and again only for arguments of another kind. Nothing is computed.

Not covered: layouts that only a device's kernel chooses (codegen/strides.py considers all of them), Triton kernels
(their references in torch run), recomputation, offload, compiled regions, and the code of a user's own Functions.
"""

from __future__ import annotations

import builtins
import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

import codegen
from autopar.frontend import fakes
from autopar.lowering.stand_ins import StandInMesh, stand_in
from codegen.program import PipelineProgram, Program
from codegen.runtime.parameters import Module, Param
from codegen.runtime.precision import compute_dtype, used_dtype
from codegen.runtime.stage_module import loss_gradient
from codegen.schemas import EmissionError
from codegen.source.names import argument

_Paths = Mapping[type[Module], tuple[str, ...]]
"""The paths of the instances of each layer class."""
_OURS = tuple(str(folder) for folder in (*map(Path, (*torch.__path__, *codegen.__path__)), Path(__file__).parents[1]))
"""Folders whose code runs under a generated program; other code is the user's."""


def dry_run(program: Program | PipelineProgram, files: Mapping[str, str]) -> None:
    """Run the emitted source. Raises EmissionError with the line and torch's reason if it cannot run.

    files: the text of the generated modules, by name.
    """
    with fakes.probing(), torch.inference_mode(False), torch.enable_grad():
        try:
            with fakes.Strict():
                _run(program, files)  # on meta tensors, which take a tenth of the time but support fewer operators
        except EmissionError as error:
            with fakes.mode(), fakes.Strict():
                try:
                    _run(program, files)
                except EmissionError:
                    raise error from None  # its wording is that of an error on a rank


def _run(program: Program | PipelineProgram, files: Mapping[str, str]) -> None:
    modules = _Modules(files)
    for root, layers, (axes, sizes) in modules.roots(program):
        _Run(modules, root, layers, StandInMesh.of(axes, sizes), program=program.any).run()


class _Modules:
    """The generated modules of one program, as a package next to the run time."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = files
        self.namespaces: dict[str, dict[str, Any]] = {}
        for file in sorted(files, key=lambda name: (name != "layers.py", name == "pipeline.py", name)):
            if file.endswith(".py"):
                self._load(file)

    def _load(self, file: str) -> None:
        space: dict[str, Any] = {"__name__": f"codegen.{file[:-3]}", "__package__": "codegen", "__file__": file}
        space["__builtins__"] = {**vars(builtins), "__import__": self._import}
        self.namespaces[file] = space
        with self.failing(file):
            exec(compile(self.files[file], file, "exec"), space)
        stand_in(space)

    def _import(self, name: str, space: Any = None, local: Any = None, wanted: Any = (), level: int = 0) -> Any:
        generated = {file[:-3]: SimpleNamespace(**names) for file, names in self.namespaces.items()}
        if level == 1 and not name:
            return SimpleNamespace(**{attribute: generated[attribute] for attribute in wanted})
        if level == 1 and name in generated:
            return generated[name]
        return builtins.__import__(name, space, local, wanted, level)

    def roots(self, program: Program | PipelineProgram) -> Iterator[tuple[type[Module], _Paths, tuple[Any, Any]]]:
        """Yield each distinct root class with its layers and its mesh."""
        if isinstance(program, Program):
            root = self.namespaces["model.py"][program.root.name]
            yield root, root.LAYERS, (program.axes, program.axis_sizes)
            return
        pipeline = self.namespaces["pipeline.py"]["PIPELINE"]
        seen = set()
        for number, stage in enumerate(pipeline.stages):
            mesh = pipeline.stage_mesh(number)
            layers = stage.program.LAYERS if stage.layers is None else stage.layers
            kind = stage.program, mesh.axes, mesh.sizes, tuple(min(len(paths), 2) for paths in layers.values())
            if kind not in seen:
                seen.add(kind)
                yield stage.program, layers, (mesh.axes, mesh.sizes)

    def failing(self, file: str, again: Callable[[], Any] | None = None) -> _Failing:
        return _Failing(self, file, again)

    def line(self, error: BaseException) -> tuple[str, int] | None:
        """Return the innermost generated line of an error's traceback; None if a user's own code raised it."""
        innermost = None
        for frame, number in traceback.walk_tb(error.__traceback__):
            if any(frame.f_globals is space for space in self.namespaces.values()):
                innermost = frame.f_code.co_filename, number
            elif innermost is not None and not frame.f_code.co_filename.startswith((*_OURS, "<")):
                return None
        return innermost


@dataclass(frozen=True, slots=True)
class _Failing:
    """Turns errors into EmissionErrors that name the generated line.

    again: repeats the failed step under anomaly detection, which knows the forward line whose backward fails.
    """

    modules: _Modules
    file: str
    again: Callable[[], Any] | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if error is None or isinstance(error, EmissionError) or not isinstance(error, Exception):
            return False
        if isinstance(error, fakes.UNDECIDED):
            return True  # torch cannot decide without values
        where = self.modules.line(error)
        if where is None and self.again is not None:
            where = _line_of_backward(self.again, self.modules.files)
        if where is None and not self._is_ours(error):
            return True
        file, number = where or (self.file, 0)
        lines = self.modules.files[file].splitlines()
        text = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        reason = " ".join(str(error).split()) or type(error).__name__
        problem = f"{type(error).__name__}: {reason}" + (" (in backward)" if self.again is not None else "")
        raise EmissionError(problem, text, f"{file}, line {number}" if number else file) from error

    def _is_ours(self, error: BaseException) -> bool:
        """Whether no code of the user ran."""
        names = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        return all(name.startswith((*_OURS, "<")) or name in self.modules.files for name in names)


def _line_of_backward(again: Callable[[], Any], files: Mapping[str, str]) -> tuple[str, int] | None:
    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(True, check_nan=False):
        warnings.simplefilter("always")
        with contextlib.suppress(Exception):  # its failure is known
            again()
    for warning in caught:
        for line in reversed(str(warning.message).splitlines()):
            parts = line.strip().split('"')
            if line.strip().startswith("File ") and len(parts) > 2 and parts[1] in files:
                return parts[1], int(parts[2].split()[2].rstrip(","))
    return None


@dataclass
class _Run:
    """One root class on one mesh."""

    modules: _Modules
    root: type[Module]
    paths: _Paths
    mesh: StandInMesh
    program: Program
    layers: dict[type[Module], _Layer] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return f"{self.root.__module__.rpartition('.')[2]}.py"

    def run(self) -> None:
        with self.modules.failing(self.file):
            model, inputs = self.model(), self.inputs()
            results = self.forward(model, inputs)
            with self.modules.failing(self.file, lambda: self.backward(model, self.forward(model, inputs))):
                self.backward(model, results)

    def model(self) -> Module:
        """Build the root with one layer of each class, and the parameters with which this rank computes."""
        layers = {cls: paths[:1] for cls, paths in self.paths.items()}
        one_each = {"LAYERS": layers, "RECOMPUTE": {}, "OFFLOAD": {}, "FIRST_LAYER": {}}
        model: Module = type(self.root.__name__, (self.root,), one_each)(self.mesh)
        for slot in model.slots():
            dtype = used_dtype(slot.spec.dtype, compute_dtype(self.program.precision))
            value = torch.empty(slot.spec.local_shape(self.mesh), dtype=dtype, device=self.mesh.device)
            used = nn.Parameter(value, requires_grad=slot.spec.requires_grad)
            for owner, attribute in slot.places:
                owner._parameters[attribute] = used
        self.layers = {cls: _Layer(model._instances[cls][0]) for cls in layers}
        object.__setattr__(model, "layers_of", self.layers_of)
        return model

    def layers_of(self, cls: type[Module], start: int = 0, stop: int | None = None) -> tuple[_Layer, ...]:
        """Return the layer of a class, twice if a loop has more than one, so that results become inputs."""
        return (self.layers[cls],) * min(len(self.paths[cls][start:stop]), 2)

    def inputs(self) -> dict[str, Any]:
        """Return forward's arguments, except sums over the batch."""
        received = {name: self.tensor(spec, spec.requires_grad) for name, spec in self.root.RECEIVES.items()}
        return received | {argument(name): self.tensor(spec) for name, spec in self.root.INPUTS.items()}

    def tensor(self, spec: Param, requires_grad: bool = False) -> Tensor:
        value = torch.empty(spec.local_shape(self.mesh), dtype=spec.dtype, device=self.mesh.device)
        return value.requires_grad_(requires_grad and spec.dtype.is_floating_point)

    def forward(self, model: Module, inputs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Run forward as a step does, and return its results."""
        for layer in self.layers.values():
            layer.results.clear()
        batch = {argument(name): inputs[argument(name)] for name in self.root.INPUTS}
        sums: dict[str, Any] = {}
        with torch.no_grad():
            if model.takes_sums:
                sums["sums"] = model.whole_sums(**batch)
            if model.counts_targets:
                sums["num_targets"] = model.count_targets(**batch)
            summing: list[Any] = [module for module in model.units() if module.needs_first_pass]
            for module in summing:
                module.begin_first_pass()
            if summing:
                model(**inputs, **sums)
            for module in summing:
                module.end_first_pass()
        if hasattr(model, "gives_logits"):
            model.gives_logits = True
        results = model(**inputs, **sums)
        return results if isinstance(results, tuple) else (results,)

    def backward(self, model: Module, results: tuple[Any, ...]) -> None:
        """Run backward from the gradients of later stages, or from the loss."""
        sends = list(self.root.SENDS.items())
        if not sends:
            (loss,) = results
            if loss.numel() != 1 or not loss.requires_grad:
                raise ValueError(f"the loss has shape {tuple(loss.shape)} and depends on no parameter")
            loss.backward(loss_gradient(loss, self.program.num_micro_batches))
            return
        for (name, spec), result in zip(sends, results, strict=True):
            if (tuple(result.shape), result.dtype) != (spec.local_shape(self.mesh), spec.dtype):
                sent, declared = (tuple(result.shape), result.dtype), (spec.local_shape(self.mesh), spec.dtype)
                raise ValueError(f"{name} is sent as {sent}, SENDS has {declared}")
        differentiable = [result for result in results if result.requires_grad]
        if differentiable:
            torch.autograd.backward(differentiable, [torch.empty_like(result) for result in differentiable])


class _Layer:
    """Stands for all layers of a class: it runs once per kind of arguments and returns those results again."""

    def __init__(self, layer: Module) -> None:
        self.layer = layer
        self.results: dict[Any, Any] = {}

    def __call__(self, *args: Any) -> Any:
        kind = tuple(_kind(arg) for arg in args)
        if kind not in self.results:
            self.results[kind] = self.layer(*args)
        return self.results[kind]


def _kind(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
