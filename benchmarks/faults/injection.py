"""Strings with code in every field that a user, or a file that a user was given, fills: nothing of them is executed.

Each payload would make a file, at import, at a call, or inside an f-string. What is accepted is emitted whole, parsed,
imported with everything that `main.py` imports, and the file must not be there.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

import autopar
from autopar.cli import app
from autopar.cluster import ClusterSpec
from autopar.compiled import CompiledProgram
from autopar.errors import AutoparError
from autopar.lowering.assembly import files_of, program_of
from autopar.lowering.passes import passes
from autopar.plan import Plan
from autopar.planning.user_plans import reprice
from autopar.running.folder import write_folder
from autopar.training.config import TrainerConfig
from benchmarks.faults.case import Case, Result, drawn
from benchmarks.verify_pipelines import cluster_of
from examples.models import EXAMPLES

COUNT = 800
CODE = "open({path!r}, 'w').close()"
FORMS: tuple[str, ...] = (
    "{code}",
    '"; {code}; "',
    "'; {code}; '",
    '"""\n{code}\n"""',
    "'''\n{code}\n'''",
    "x\n{code}",
    "x\r{code}\n#",
    "x\u2028{code}",
    '\\"\n{code}\n#',
    '\\"""\n{code}\n"""',
    "{{{code}}}",
    "{{__import__('pathlib').Path({path!r}).touch()}}",
    '" + str({code}) + "',
    "x = {code}",
    "x={code}",
    "x): {code}\n    def g(",
    "%({code})s",
    "!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{path!r}]]",
    'nvme:/tmp/x"\n{code}\n#',
    "nvme:/tmp/x', {code}, '",
    'nvme:/tmp/x", f=({code}), g="',
    "$(touch {path})",
    "`touch {path}`",
    "; touch {path};",
)


def cases(count: int | None, seed: int) -> list[Case]:
    """A sample of every payload in every place."""
    found = [
        Case(f"{name}: {form!r}"[:160], lambda attempt=attempt, form=form: _judged(attempt, form))  # type: ignore[misc]
        for (name, attempt), form in itertools.product(places(), FORMS)
    ]
    return drawn(found, COUNT if count is None else count, seed)


def places() -> Iterator[tuple[str, Callable[[str, Path], None]]]:
    """Every place that a text can be put in, with what puts it there; `USE` gets each program that comes of it."""
    yield from _plan_places()
    yield from _other_places()


def _judged(attempt: Callable[[str, Path], None], form: str) -> Result:
    folder = Path(tempfile.mkdtemp(prefix="injection_"))
    sentinel = folder / "executed"
    code = CODE.format(path=str(sentinel))
    outcome = Result("right")
    try:
        attempt(form.format(code=code, path=str(sentinel)), folder)
    except AutoparError as error:
        outcome = Result("refused", str(error).splitlines()[0])
    except Exception as error:
        outcome = Result("raw", " ".join(f"{type(error).__name__}: {error}".split())[:200])
    executed = sentinel.exists()
    shutil.rmtree(folder)
    return Result("wrong", "the code was executed") if executed else outcome


def _use(program: CompiledProgram, folder: Path) -> None:
    USE.get()(program, folder)


def _emitted(program: CompiledProgram, folder: Path) -> None:
    """The program's folder is written, every file of ours parsed, and imported as main.py does."""
    home = write_folder(program, folder / folder.name, weights=False, is_saved=False)
    for file in home.glob("*.py"):
        ast.parse(file.read_text(encoding="utf-8"))
    program.load_package()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        argv, sys.argv = sys.argv, ["main.py", "--help"]
        try:
            runpy.run_path(str(home / "main.py"), run_name="__main__")
        finally:
            sys.argv = argv
            for name in [name for name in sys.modules if name.partition(".")[0] == "autopar_program"]:
                del sys.modules[name]


USE: ContextVar[Callable[[CompiledProgram, Path], None]] = ContextVar("USE", default=_emitted)
"""Uses of a program."""


# --- plans ------------------------------------------------------------------------------------------------------------


@cache
def _base(pinned: tuple[tuple[str, Any], ...]) -> CompiledProgram:
    example = EXAMPLES["gpt2"](layers=3)
    return autopar.compile(
        example.model, cluster_of(2), example_inputs=example.inputs, loss_fn=example.loss_fn, constraints=dict(pinned)
    )


PLAIN, PIPELINE = (("dp", 2),), (("pp", 2), ("micro_batches", 2), ("offload", "optimizer"), ("recompute", "full"))


def _plan_places() -> Iterator[tuple[str, Callable[[str, Path], None]]]:
    """Every key and every value of a plan with one stage and of one with several."""
    for name, pinned in (("plan", PLAIN), ("pipeline", PIPELINE)):
        data = yaml.safe_load(_base(pinned).plan.to_yaml())
        for path in _paths(data):
            where = f"{name} {'.'.join(map(str, path))}"
            if _is_first_of_its_kind(path, data):
                yield where, _with_value(pinned, path, is_key=False)
                if isinstance(path[-1], str):
                    yield f"{where} (key)", _with_value(pinned, path, is_key=True)


def _paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [found for key, value in items for found in ((*path, key), *_paths(value, (*path, key)))]


def _is_first_of_its_kind(path: tuple[Any, ...], data: Any) -> bool:
    """One parameter stands for all of them."""
    owner = data
    for key in path[:-1]:
        owner = owner[key]
    if str(path[0]).startswith("predicted"):
        return path[:2] in (("predicted_bytes",), ("predicted_bytes", "activations"))
    return len(path) < 3 or next(iter(owner if isinstance(owner, dict) else range(len(owner)))) == path[-1]


def _with_value(
    pinned: tuple[tuple[str, Any], ...], path: tuple[Any, ...], is_key: bool
) -> Callable[[str, Path], None]:
    def attempt(text: str, folder: Path) -> None:
        program = _base(pinned)
        data = yaml.safe_load(program.plan.to_yaml())
        owner = data
        for key in path[:-1]:
            owner = owner[key]
        if is_key:
            owner[text] = owner.pop(path[-1])
        else:
            owner[path[-1]] = text
        file = folder / "plan.yaml"
        file.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
        plan = Plan.from_file(file)
        _report(file)
        assert program.request is not None
        result = reprice(program.request, plan)
        lowered = program_of(result.best, passes(fp8=result.best.plan.fp8))
        made = replace(program, best=result.best, result=result, program=lowered, files=files_of(lowered))
        _use(made, folder)

    return attempt


def _report(file: Path) -> None:
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["report", str(file)])
    if result.exit_code:
        raise RuntimeError(result.output)


# --- everything else --------------------------------------------------------------------------------------------------


class _Model(nn.Module):
    """A linear layer of any name, and what it takes of any name."""

    def __init__(self, name: str = "layer") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.get_submodule(self.name)(x) if "." not in self.name else x
        return found


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _compiled(model: nn.Module, cluster: Any = "2 a100-80g", target: str = "target", **options: Any) -> CompiledProgram:
    inputs = {"x": torch.ones(4, 4), target: torch.zeros(4, 4)}
    return autopar.compile(model, cluster, example_inputs=inputs, loss_fn=_loss, **({"kernels": "off"} | options))


def _class_name(text: str, folder: Path) -> None:
    _use(_compiled(type(text, (_Model,), {})()), folder)


def _layer_class_name(text: str, folder: Path) -> None:
    block = type(text, (nn.Linear,), {})

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(block(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x

    _use(_compiled(Stack()), folder)


def _module_name(text: str, folder: Path) -> None:
    try:
        model = _Model(text)
    except KeyError as error:  # torch refuses dots
        raise AutoparError(str(error)) from None
    _use(_compiled(model), folder)


def _layers_name(text: str, folder: Path) -> None:
    """A list of layers of that name, whose paths are written as an f-string."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(text, nn.ModuleList(nn.Linear(4, 4) for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self._modules[text]:  # type: ignore[union-attr]
                x = layer(x).relu()
            return x

    try:
        model = Stack()
    except KeyError as error:
        raise AutoparError(str(error)) from None
    _use(_compiled(model), folder)


def _buffer_name(text: str, folder: Path) -> None:
    class Buffered(_Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer(text, torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self._buffers[text]

    try:
        model = Buffered()
    except KeyError as error:
        raise AutoparError(str(error)) from None
    _use(_compiled(model), folder)


def _batch_key(text: str, folder: Path) -> None:
    _use(_compiled(_Model(), target=text), folder)


def _option(name: str) -> Callable[[str, Path], None]:
    return lambda text, folder: _use(_compiled(_Model(), **{name: text}), folder)


def _pin(name: str) -> Callable[[str, Path], None]:
    return lambda text, folder: _use(_compiled(_Model(), constraints={name: text}), folder)


def _cluster_text(text: str, folder: Path) -> None:
    _use(_compiled(_Model(), cluster=text), folder)


def _cluster_name(key: str) -> Callable[[str, Path], None]:
    def attempt(text: str, folder: Path) -> None:
        ideal = Path("examples/clusters/ideal.toml").read_text(encoding="utf-8")
        quoted = '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r") + '"'
        changed = ideal.replace('"cpu-ideal"' if key == "device" else '"ideal-link"', quoted)
        (folder / "cluster.toml").write_text(changed, encoding="utf-8")
        _use(_compiled(_Model(), cluster=ClusterSpec.from_toml(folder / "cluster.toml")), folder)

    return attempt


def _output_folder(text: str, folder: Path) -> None:
    program = _base(PLAIN)
    try:
        home = program.save(folder / text.replace("/", "_")[:100], weights=False)
    except (OSError, ValueError) as error:
        raise AutoparError(str(error)) from None
    for file in home.glob("*.py"):
        ast.parse(file.read_text(encoding="utf-8"))


def _configuration(key: str) -> Callable[[str, Path], None]:
    def attempt(text: str, folder: Path) -> None:
        file = folder / "train.yaml"
        file.write_text(yaml.safe_dump({key: text}), encoding="utf-8")
        config = TrainerConfig.from_file(file)
        if key in ("precision", "backend", "compression", "constraints"):
            _use(_compiled(_Model(), **{key: getattr(config, key)}), folder)
        elif key == "plan":
            _use(_compiled(_Model(), plan=config.plan), folder)
        elif key == "cluster":
            _cluster_text(str(config.cluster), folder)

    return attempt


def _raw_yaml(text: str, folder: Path) -> None:
    """The payload itself as a file."""
    file = folder / "given.yaml"
    file.write_text(f"model: {text}\n", encoding="utf-8")
    Plan.from_file(file)


def _setting(text: str, folder: Path) -> None:
    from autopar.models.job import constraints_of

    _use(_compiled(_Model(), constraints=constraints_of([f"offload={text}"], None, None)), folder)


def _other_places() -> Iterator[tuple[str, Callable[[str, Path], None]]]:
    yield from (("class name", _class_name), ("layer class name", _layer_class_name), ("module name", _module_name))
    yield from (("list of layers", _layers_name), ("buffer name", _buffer_name), ("batch key", _batch_key))
    yield from (
        (f"option {name}", _option(name)) for name in ("precision", "backend", "kernels", "plan", "compression")
    )
    yield from ((f"pin {name}", _pin(name)) for name in ("offload", "schedule", "recompute", "memory", "parameters"))
    yield from (
        ("cluster", _cluster_text),
        ("device name", _cluster_name("device")),
        ("link name", _cluster_name("link")),
    )
    yield from (("output folder", _output_folder), ("plan file", _raw_yaml), ("--set offload", _setting))
    keys = ("precision", "backend", "compression", "constraints", "plan", "cluster", "checkpoint_directory", "model")
    yield from ((f"configuration {key}", _configuration(key)) for key in keys)
