"""Numbers that mean nothing for every option that takes one: of each command, of saved programs, of configurations and
of functions. Everything here is to be refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.compiled import CompiledProgram
from autopar.files.scratch import lasting_folder
from autopar.training.config import SECTIONS, TrainerConfig
from benchmarks.faults.case import Case, Result, drawn
from benchmarks.faults.inputs import refused

HEXADECIMAL = "0x10"
"""A number in YAML, not of the options that take text."""
TEXTS: tuple[str, ...] = (
    "nan",
    "-nan",
    "inf",
    "-inf",
    "-1",
    "-0.5",
    "1e400",
    "-1e400",
    "x",
    "",
    HEXADECIMAL,
    "1e",
    "9" * 5000,
)
NAN, INF = float("nan"), float("inf")
VALUES: tuple[Any, ...] = (NAN, INF, -INF, -1, -0.5, "1", True, [1], {}, 1j, -(10**400), torch.tensor(NAN))
MEANT: Mapping[str, tuple[Any, ...]] = {
    "max_grad_norm": ("inf", "1e400", "9" * 5000, INF),
    "steps": ("9" * 5000,),
    "checkpoint_every": ("9" * 5000,),
    "log_every": ("9" * 5000,),
    "seed": ("9" * 5000,),
    "keep_checkpoints": ("9" * 5000,),
}
"""Values with a meaning of their own: no clipping, or no end."""

MODEL, CLUSTER = "examples.models:mlp", ("--cluster", "2 a100-80g")
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "report": (MODEL, *CLUSTER),
    "compare": ("first.yaml", "second.yaml"),
    "profile": ("--out", "out.toml"),
    "tune": ("folder",),
    "train": (MODEL, *CLUSTER),
}
"""Of a command; of the others MODEL and CLUSTER."""
BATCH = {"input": torch.ones(4, 4), "target": torch.zeros(4, 4)}
LOSS_SCALE = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


def cases(count: int | None, seed: int) -> list[Case]:
    """Each takes some milliseconds; what were accepted would run."""
    return drawn((*_of_commands(), *_of_programs(), *_of_configurations(), *_of_functions()), count, seed)


def _numbers_of(callback: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """The name and the flag of each option of a command that takes a number."""
    for parameter in inspect.signature(callback).parameters.values():
        kind, *rest = get_args(parameter.annotation)
        if {int, float} & {kind, *get_args(kind)}:
            declared = [each for each in rest[0].param_decls or () if each.startswith("--")]
            yield parameter.name, (declared or ["--" + parameter.name.replace("_", "-")])[0]


def _of_commands() -> Iterator[Case]:
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.callback.__name__
        for option, flag in _numbers_of(command.callback):
            for text in TEXTS:
                if text not in MEANT.get(option, ()):
                    words = (name, *ARGUMENTS.get(name, (MODEL, *CLUSTER)), f"{flag}={text}")
                    yield Case(f"autopar {' '.join(words)}"[:160], partial(_command, words))
    for text in TEXTS:
        for words in (
            ("fit", MODEL, *CLUSTER, "--price", f"a100-80g={text}"),
            ("plan", MODEL, *CLUSTER, "--memory", text),
            ("plan", MODEL, *CLUSTER, "--memory", f"{text}GiB"),
            ("plan", MODEL, *CLUSTER, "-o", f"layers={text}"),
            *(("plan", MODEL, *CLUSTER, "--set", f"{axis}={text}") for axis in ("dp", "tp", "zero", "micro_batches")),
            ("simulate", MODEL, *CLUSTER, "--set", f"dp={text}"),
            ("plan", MODEL, "--cluster", f"{text} a100-80g"),
            *(
                ("train", MODEL, f"{field}={text}")
                for field in ("steps", "optimizer.lr", "schedule.final", "loss_scale.init_scale")
            ),
        ):
            if text != HEXADECIMAL and not (words[-1].startswith("steps=") and text in MEANT["steps"]):
                yield Case(f"autopar {' '.join(words)}"[:160], partial(_command, words))


def _command(words: tuple[str, ...]) -> Result:
    with contextlib.chdir(tempfile.gettempdir()):
        found = CliRunner().invoke(app, list(words))
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        return Result("raw", f"{type(found.exception).__name__}: {found.exception}"[:200])
    said = found.stderr.strip().splitlines() or [""]
    if found.exit_code == 2 and not any("Traceback" in line for line in said):
        return Result("refused", said[0])
    return Result("raw" if found.exit_code else "wrong", f"exit code {found.exit_code}: {said[-1]}"[:300])


# --- saved programs ---------------------------------------------------------------------------------------------------


@cache
def _program() -> CompiledProgram:
    torch.manual_seed(0)
    return autopar.compile(nn.Linear(4, 4), "1 cpu", example_inputs=BATCH, loss_fn=nn.functional.mse_loss)


@cache
def _main() -> Path:
    folder = lasting_folder() / "program"
    return _program().save(folder, weights=False) / "main.py"


def _of_programs() -> Iterator[Case]:
    for option in ("steps", "learning-rate", "seed", "checkpoint-every", "max-grad-norm", "log-every"):
        for text in TEXTS:
            if text not in MEANT.get(option.replace("-", "_"), ()):
                yield Case(f"main.py --{option}={text}"[:160], partial(_script, (f"--{option}={text}",)))


def _script(words: tuple[str, ...]) -> Result:
    file, said = _main(), io.StringIO()
    argv, path = list(sys.argv), list(sys.path)
    sys.argv = [str(file), *words]
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            runpy.run_path(str(file), run_name="__main__")
    except SystemExit as ended:
        return Result("refused" if ended.code == 2 else "raw", said.getvalue().strip()[-200:])
    finally:
        sys.argv, sys.path[:] = argv, path
    return Result("wrong", "accepted")


# --- configurations ---------------------------------------------------------------------------------------------------


def _of_configurations() -> Iterator[Case]:
    numbers = {"steps", "gradient_accumulation_steps", "num_processes"}
    fields = [(each.name, each.type) for each in dataclasses.fields(TrainerConfig) if each.name not in SECTIONS]
    for name, kind in fields:
        if name in numbers or "int" in str(kind).split(" | ") or "float" in str(kind).split(" | "):
            yield from _values(f"TrainerConfig {name}", name, lambda value, name=name: TrainerConfig(**{name: value}))
    for section, model in SECTIONS.items():
        for name, field in model.model_fields.items():
            if {int, float} & {field.annotation, *get_args(field.annotation)}:
                yield from _values(
                    f"{section}.{name}",
                    name,
                    lambda value, section=section, name=name: TrainerConfig(**{section: {name: value}}),
                )
    for name in LOSS_SCALE:
        yield from _values(
            f"loss_scale.{name}", name, lambda value, n=name: TrainerConfig(precision="fp16", loss_scale={n: value})
        )


def _of_functions() -> Iterator[Case]:
    for name in ("max_grad_norm", "seed"):
        yield from _values(f"build {name}", name, lambda value, n=name: _program().build(**{n: value}))
    for name in ("max_restarts", "collective_seconds"):
        yield from _values(f"launch {name}", name, lambda value, n=name: _program().launch(print, **{n: value}))
    yield from _values("explain seconds", "seconds", lambda value: _program().explain(value))
    yield from _values("predict global_batch_size", "", lambda value: _predicted(global_batch_size=value))
    for name in ("dp", "cp", "ep", "pp", "zero", "micro_batches", "capacity_factor", "expert_skew", "memory"):
        yield from _values(f"predict {name}", "", lambda value, n=name: _predicted({n: value}))
    yield from _values("compile global_batch_size", "", lambda value: _compiled(global_batch_size=value))
    for name in ("dp", "tp", "pp", "zero", "micro_batches", "chunks", "memory"):
        yield from _values(f"compile {name}", "", lambda value, n=name: _compiled(constraints={n: value}))
    given: dict[str, Any] = {"example_inputs": BATCH, "loss_fn": nn.functional.mse_loss}
    for function, names in (
        (autopar.verify, ("steps", "max_grad_norm", "seed")),
        (autopar.trial, ("plans", "steps", "rounds")),
    ):
        for name in names:
            yield from _values(
                f"{function.__name__} {name}",
                name,
                lambda value, f=function, n=name: f(nn.Linear(4, 4), "2 cpu", **given, **{n: value}),
            )


@cache
def _predictor() -> autopar.Predictor:
    return autopar.Predictor(nn.Linear(4, 4), example_inputs=BATCH, loss_fn=nn.functional.mse_loss)


def _predicted(strategy: Mapping[str, Any] | None = None, **options: Any) -> Any:
    return _predictor().predict("2 a100-80g", {"dp": 2, **(strategy or {})}, **options)


def _compiled(**options: Any) -> Any:
    inputs: dict[str, Any] = {"example_inputs": BATCH, "loss_fn": nn.functional.mse_loss}
    return autopar.compile(nn.Linear(4, 4), "2 a100-80g", **inputs, **options)


def _values(text: str, name: str, attempt: Callable[[Any], Any]) -> Iterator[Case]:
    for value in VALUES:
        if not any(value is each for each in MEANT.get(name, ())):
            yield Case(f"{text}={value!r}"[:160], lambda value=value: refused(lambda: attempt(value)))  # type: ignore[misc]
