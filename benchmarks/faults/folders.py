"""Outputs over what is there already: nothing that autopar did not make is lost, whatever the output's name."""

from __future__ import annotations

import functools
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

import autopar
from autopar.compiled import CompiledProgram
from autopar.errors import AutoparError
from autopar.files.folder_swap import MARK
from autopar.files.outputs import write_output
from autopar.training import checkpoints
from benchmarks.faults.case import Case, Result
from examples.models import gpt2

COUNT = 150
NAMES = ("out", "out.d/llama-3.1", ".", "..", "link", "a/../out", "file", "out/runtime", "checkpoints", "pipe")
STRANGE = (
    "notes.txt", "runtime/mine.py", "__pycache__/x.pyc", MARK + ".bak", "step-00000002/mine", "main.py", ".hidden",
)  # fmt: skip
"""Names of a stranger's files, some of which autopar uses too."""


@functools.cache
def program() -> CompiledProgram:
    example = gpt2(layers=1, width=16, num_heads=2, batch_size=2, seq_len=8)
    return autopar.compile(example.model, "1 cpu", example_inputs=example.inputs, loss_fn=example.loss_fn)


def a_program(at: Path) -> None:
    program().save(at, weights=False)


def a_file(at: Path) -> None:
    write_output(at, "mesh: 1\n")


def a_checkpoint(at: Path) -> None:
    model = nn.Linear(2, 2)
    progress = {"step": 3, "num_samples": 3, "seed": 0}
    save = partial(checkpoints.save_plain, model, torch.optim.SGD(model.parameters()), progress)
    for step in (1, 2, 3, 4):
        checkpoints.write(at, step, save, True, lambda: None)


WRITERS: tuple[Callable[[Path], None], ...] = (a_program, a_file, a_checkpoint)


def cases(count: int | None, seed: int) -> Iterator[Case]:
    """Each takes some fifty milliseconds."""
    for index in range(COUNT if count is None else count):
        chance = random.Random(f"{seed} {index}")
        writer, name, is_second = WRITERS[index % 3], chance.choice(NAMES), chance.random() < 0.5
        text = f"{writer.__name__} to {name}{' over its own' if is_second else ''}, {seed} {index}"
        yield Case(text, partial(tried, writer, name, is_second, chance))


def tried(writer: Callable[[Path], None], name: str, is_second: bool, chance: random.Random) -> Result:
    """is_second: what is written lies there already, and a stranger's files have come into it."""
    home, before = Path(tempfile.mkdtemp(prefix="faults-")), os.getcwd()
    try:
        work = home / "work"
        work.mkdir()
        os.chdir(work)
        (work / "elsewhere").mkdir()
        (work / "elsewhere" / "notes").write_text("mine")
        (work / "link").symlink_to("elsewhere")
        (work / "file").write_text("mine")
        os.mkfifo(work / "pipe") if name == "pipe" and writer is not a_file else None
        if is_second:
            with warnings.catch_warnings(), _tolerated():
                writer(work / name)
        strangers = _strew(work / name, chance)
        kept = _texts(home, strangers)
        try:
            writer(work / name)
            result = Result("right")
        except AutoparError as error:
            result = Result("refused", error.constraint)
        lost = {text for text in kept if text not in _texts(home, None)}
        is_link_kept = (work / "link").is_symlink() and os.path.exists(work / "elsewhere" / "notes")
        return result if not lost and is_link_kept else Result("wrong", f"lost {sorted(lost) or 'the link'}")
    except Exception as error:
        return Result("raw", f"{type(error).__name__}: {error}".splitlines()[0])
    finally:
        os.chdir(before)
        shutil.rmtree(home, ignore_errors=True)


class _tolerated:
    """The first write may be refused as well."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> bool:
        return kind is not None and issubclass(kind, AutoparError)


def _strew(at: Path, chance: random.Random) -> list[Path]:
    """Files of a stranger in and beside the place, some with names that autopar uses."""
    made = []
    for index in range(chance.randint(0, 3)):
        name = chance.choice(STRANGE)
        path = (at if chance.random() < 0.7 else at.parent) / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"stranger's {index}")
        except OSError:
            continue
        made.append(path)
    return made


def _texts(home: Path, only: list[Path] | None) -> set[str]:
    """What is in the strangers' files, wherever they are now."""
    paths = only if only is not None else [path for path in home.rglob("*") if path.is_file()]
    found = {path.read_bytes().decode(errors="replace") for path in paths if path.is_file()}
    return found if only is not None else found | {"mine"}
