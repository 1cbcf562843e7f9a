"""Names with control characters wherever a name is printed: no terminal is steered by one, and no error is raw.

Every place of the campaign of injection, and every word of the command line, gets each of FORMS. Whatever is printed
then, by a report, an error, a warning, or the source that is emitted, has visible characters alone.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.compiled import CompiledProgram
from autopar.errors import AutoparError, InternalError
from autopar.running.folder import write_folder
from autopar.training.config import TrainerConfig
from benchmarks.by_hand import sgd
from benchmarks.faults import injection
from benchmarks.faults.case import Case, Result, drawn, is_in_words

FORMS = ("a\x1b[2Jb", "a\x9b31mb", "a\x1b]0;t\x07b", "a\rb", "a\u202eb", "a\x7fb", "a\u2028b", "a\x00b")
NAME = "NAME"
"""Stands for the name in LINES."""
MODEL, CLUSTER = "examples.models:mlp", ("--cluster", "2 a100-80g")
LINES: tuple[tuple[str, ...], ...] = (
    *((command, NAME, *CLUSTER) for command in ("plan", "report", "simulate", "explain", "verify", "trial", "fit")),
    *((command, f"examples.models:{NAME}", *CLUSTER) for command in ("plan", "report", "simulate", "fit")),
    *((command, f"{NAME}.py:model", *CLUSTER) for command in ("plan", "verify")),
    *((command, f"{NAME}.yaml") for command in ("report", "explain", "train", "certify", "launch")),
    *(("plan", f"hf:{NAME}", *CLUSTER), ("plan", MODEL, "--cluster", NAME), ("plan", MODEL, "--cluster", f"2 {NAME}")),
    *(("plan", MODEL, "--cluster", f"{NAME}.toml"), ("fit", MODEL, *CLUSTER, "--price", f"{NAME}=1")),
    *(
        ("plan", MODEL, *CLUSTER, flag, NAME)
        for flag in ("--set", "--memory", "--precision", "--backend", "--compress")
    ),
    *(
        ("plan", MODEL, *CLUSTER, flag, NAME)
        for flag in ("--constraints", "--option", "--batch", "--seq", "--processes")
    ),
    *(("plan", MODEL, *CLUSTER, flag, f"{NAME}=2") for flag in ("--set", "--option", "--compress")),
    *(("plan", MODEL, *CLUSTER, flag, f"{name}={NAME}") for flag, name in (("--set", "dp"), ("--option", "layers"))),
    *(("plan", MODEL, *CLUSTER, flag, f"{NAME}/x/y") for flag in ("--out", "--html", "--timeline", "--code")),
    *(("plan", MODEL, *CLUSTER, flag, "taken\x1b[2J") for flag in ("--out", "--html", "--timeline", "--code")),
    *(
        ("report", MODEL, *CLUSTER, "--html", "page.html", "--log", NAME),
        ("tune", NAME),
        ("export", NAME, "--hf", "out"),
    ),
    *(("simulate", MODEL, *CLUSTER, flag, NAME) for flag in ("--framework", "--what-if", "--set")),
    *(("train", MODEL, f"{NAME}=1"), ("train", MODEL, f"steps={NAME}"), ("train", MODEL, f"optimizer={NAME}")),
    *(("train", MODEL, *CLUSTER, flag, NAME) for flag in ("--plan", "--data", "--checkpoint", "--steps")),
    *(("profile", "--like", NAME), ("compare", NAME, NAME), ("compare", f"{NAME}.yaml", f"{NAME}.yaml")),
    *(
        (NAME,),
        ("plan", f"--{NAME}"),
        ("plan", MODEL, NAME),
        ("plan", MODEL, *CLUSTER, f"--batch={NAME}"),
        (f"--{NAME}",),
    ),
)


def cases(count: int | None, seed: int) -> list[Case]:
    """Each takes some hundred milliseconds."""
    return drawn(_all(), count, seed)


def _all() -> Iterator[Case]:
    for words, form in itertools.product(LINES, FORMS):
        line = tuple(word.replace(NAME, form) for word in words)
        yield Case(f"autopar {' '.join(map(repr, line))}"[:160], partial(_command, line))
    places: dict[str, Callable[[str, Path], object]] = {**dict(injection.places()), **_FILES, **_RUNS}
    for (name, attempt), form in itertools.product(places.items(), FORMS):
        yield Case(f"{name}: {form!r}"[:160], partial(_judged, attempt, form))


def _hidden(text: str) -> str:
    """The characters of a text that steer a terminal."""
    return "".join(sorted({char for char in text if not char.isprintable() and char not in "\n\t"}))


def _command(line: tuple[str, ...]) -> Result:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, contextlib.chdir(folder):
        Path("taken\x1b[2J").write_text("mine")
        found = CliRunner().invoke(app, list(line))
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        return Result("raw", f"{type(found.exception).__name__}: {found.exception!r}"[:200])
    if hidden := _hidden(found.output):
        at = next(at for at, char in enumerate(found.output) if char in hidden)
        return Result("wrong", f"prints {hidden!r}: {found.output[max(0, at - 60) : at + 20]!r}")
    is_raw = "Traceback" in found.output or found.exit_code not in (0, 1, 2)
    return Result("raw" if is_raw else "refused" if found.exit_code else "right", found.output.strip()[-200:])


def _judged(attempt: Callable[[str, Path], object], form: str) -> Result:
    said, outcome = io.StringIO(), Result("right")
    use = injection.USE.set(_shown)
    try:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder, contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.redirect_stdout(said))
            stack.enter_context(contextlib.redirect_stderr(said))
            caught = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            attempt(form, Path(folder))
    except AutoparError as error:
        said.write(str(error))
        outcome = Result("raw" if isinstance(error, InternalError) else "refused", str(error).splitlines()[0])
    except Exception as error:
        said.write(str(error))
        is_told = is_in_words(error) or "null characters" in str(error)  # no class has such a name
        outcome = Result("refused" if is_told else "raw", f"{type(error).__name__}: {error!r}"[:200])
    finally:
        injection.USE.reset(use)
    text = said.getvalue() + "".join(str(each.message) for each in caught)
    if hidden := _hidden(text):
        at = next(at for at, char in enumerate(text) if char in hidden)
        return Result("wrong", f"prints {hidden!r}: {text[max(0, at - 60) : at + 20]!r}")
    return outcome


def _shown(program: CompiledProgram, folder: Path) -> None:
    """Print everything that autopar says of a program, and what it writes of it."""
    print(program.report(), program.explain(1.0), program.plan.to_yaml(), sep="\n")
    home = write_folder(program, folder / "program", weights=False, is_saved=False)
    for file in (*home.glob("*.py"), *home.glob("*.yaml"), *home.glob("*.md")):
        print(file.read_text(encoding="utf-8"))


# --- files ------------------------------------------------------------------------------------------------------------


def _read(words: tuple[str, ...], name: str, write: Callable[[str], str]) -> Callable[[str, Path], None]:
    """A command that reads a file with the name in it."""

    def attempt(form: str, folder: Path) -> None:
        (folder / name).write_text(write(form), encoding="utf-8")
        print(CliRunner().invoke(app, [word.replace("FILE", str(folder / name)) for word in words]).output)

    return attempt


def _yaml(key: str, value: Any = NAME) -> Callable[[str], str]:
    def write(form: str) -> str:
        text = {key.replace(NAME, form): value.replace(NAME, form) if isinstance(value, str) else value}
        return yaml.safe_dump(text, allow_unicode=False)

    return write


def _toml(line: str) -> Callable[[str], str]:
    return lambda form: line.replace(
        NAME, "".join(f"\\u{ord(char):04x}" if not char.isalnum() else char for char in form)
    )


_PLAN = ("plan", MODEL, *CLUSTER, "--constraints", "FILE")
_FILES: Mapping[str, Callable[[str, Path], None]] = {
    "key of constraints": _read(_PLAN, "given.yaml", _yaml(NAME, 2)),
    "value of constraints": _read(_PLAN, "given.yaml", _yaml("dp")),
    "pattern of constraints": _read(
        _PLAN, "given.yaml", lambda form: yaml.safe_dump({"parameters": {form: {"tp": "S(0)"}}, "tp": 2})
    ),
    "axis of constraints": _read(
        _PLAN, "given.yaml", lambda form: yaml.safe_dump({"parameters": {"*": {form: "S(0)"}}, "tp": 2})
    ),
    "raw YAML": _read(_PLAN, "given.yaml", lambda form: f"dp: {form}\n"),
    "raw TOML": _read(("plan", MODEL, "--cluster", "FILE"), "given.toml", lambda form: f'device = "{form}"\n'),
    "key of a cluster": _read(("plan", MODEL, "--cluster", "FILE"), "given.toml", _toml(f'"{NAME}" = 1\n')),
    "device of a cluster": _read(
        ("plan", MODEL, "--cluster", "FILE"), "given.toml", _toml(f'devices_per_node = 2\ndevice = "{NAME}"\n')
    ),
    "key of a configuration": _read(("train", "FILE"), "given.yaml", _yaml(NAME, 2)),
    "field of a section": _read(("train", "FILE"), "given.yaml", lambda form: yaml.safe_dump({"optimizer": {form: 1}})),
    "argument of an optimizer": _read(
        ("train", "FILE"),
        "given.yaml",
        lambda form: yaml.safe_dump({"model": MODEL, "cluster": "1 cpu", "optimizer": {"arguments": {form: 1}}}),
    ),
    **{
        f"{key} of a configuration": _read(("train", "FILE"), "given.yaml", _yaml(key))
        for key in ("model", "cluster", "precision", "backend", "plan", "optimizer", "schedule", "checkpoint_directory")
    },
    "key of a plan": _read(("report", "FILE"), "given.yaml", _yaml(NAME, 2)),
    "model of a plan": _read(("report", "FILE"), "given.yaml", lambda form: _plan(form, "model")),
    "cluster of a plan": _read(("report", "FILE"), "given.yaml", lambda form: _plan(form, "cluster")),
    "plan of another model": _read(
        ("report", "FILE", "--model", MODEL), "given.yaml", lambda form: _plan(form, "cluster")
    ),
    "log of a run": _read(
        ("report", MODEL, *CLUSTER, "--html", "FILE.html", "--log", "FILE"),
        "log.jsonl",
        lambda form: json.dumps({"step": 1, form: form}) + "\n",
    ),
    "configuration of transformers": _read(
        ("plan", "hf:FILE", *CLUSTER), "config.json", lambda form: json.dumps({"model_type": form, form: 1})
    ),
}


def _plan(form: str, key: str) -> str:
    text = Path(__file__).parents[2].joinpath("tests/golden/plans/mlp_dp2_tp2.yaml").read_text(encoding="utf-8")
    return yaml.safe_dump(yaml.safe_load(text) | {key: form}, sort_keys=False)


# --- runs -------------------------------------------------------------------------------------------------------------


class _Net(nn.Module):
    """Has a module, a number, a buffer and a metric of a name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.add_module(name, nn.Linear(4, 4))
        self.register_buffer(f"b{name}", torch.ones(4))
        setattr(self, f"n{name}", 0.5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self._modules[self.name](x) * getattr(self, f"n{self.name}") * self._buffers[f"b{self.name}"]  # type: ignore[misc]
        loss = y.square().mean()
        return {"loss": loss, self.name: loss.detach() * 2}


class _Plain(_Net):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)["loss"]


X = {"x": torch.ones(4, 4)}


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _compiled(form: str) -> CompiledProgram:
    return autopar.compile(_Plain(form), "1 cpu", example_inputs=X, optimizer=sgd)


def _trains(form: str, folder: Path) -> None:
    config = TrainerConfig(
        cluster="1 cpu", steps=3, log_every=1, checkpoint_directory=str(folder / form.replace("\x00", "")),
        checkpoint_every=1, logging={"directory": str(folder / "logs")},
    )  # fmt: skip
    print(autopar.Trainer(_Net(form), config, [X] * 4).fit().losses)


def _changes(form: str, folder: Path) -> None:
    program = _compiled(form)
    with _one_rank():
        step = program.build(device="cpu")
        step(step.local_batch(X))
        setattr(program.model, f"n{form}", "another")
        step(step.local_batch(X))


def _other_batch(form: str, folder: Path) -> None:
    program = _compiled(form)
    with _one_rank():
        step = program.build(device="cpu")
        step(step.local_batch({**X, form: X["x"]}))


def _other_checkpoint(form: str, folder: Path) -> None:
    program, other = _compiled(form), _compiled("other")
    with _one_rank():
        program.save_checkpoint(program.build(device="cpu"), folder / "checkpoint")
        other.load_checkpoint(other.build(device="cpu"), folder / "checkpoint")


def _no_checkpoint(form: str, folder: Path) -> None:
    program = _compiled("other")
    with _one_rank():
        program.load_checkpoint(program.build(device="cpu"), folder / form.replace("\x00", ""))


def _verified(form: str, folder: Path) -> None:
    print(autopar.verify(_Plain(form), "1 cpu", example_inputs=X))


def _certified(form: str, folder: Path) -> None:
    print(_compiled(form).certify(train=False))


def _pinned(form: str, folder: Path) -> None:
    pins = {"tp": 2, "parameters": {f"{form}.weight": {"tp": "S(7)"}}}
    autopar.compile(_Plain(form), "2 a100-80g", example_inputs=X, constraints=pins)


def _refused_forward(form: str, folder: Path) -> None:
    class Refuses(_Plain):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            setattr(self, f"n{self.name}", getattr(self, f"n{self.name}") + 1)
            raise ValueError(f"{self.name} is wrong")

    autopar.compile(Refuses(form), "1 cpu", example_inputs=X)


def _non_finite(form: str, folder: Path) -> None:
    model = _Plain(form)
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    config = TrainerConfig(
        cluster="1 cpu", steps=2, log_every=1, non_finite="stop", checkpoint_directory=str(folder / "c")
    )
    autopar.Trainer(model, config, [X] * 4).fit()


_RUNS: Mapping[str, Callable[[str, Path], None]] = {
    "training": _trains,
    "a changed number": _changes,
    "another batch": _other_batch,
    "another model's checkpoint": _other_checkpoint,
    "a checkpoint that is missing": _no_checkpoint,
    "verify": _verified,
    "certify": _certified,
    "a pinned parameter": _pinned,
    "an error in forward": _refused_forward,
    "values that are not finite": _non_finite,
}
