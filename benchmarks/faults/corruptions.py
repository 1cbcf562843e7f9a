"""Damage to checkpoints: it is noticed, the intact older one is used, and nothing in a checkpoint is executed."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError
from autopar.training import checkpoints
from benchmarks.faults.case import Case, Result
from codegen.runtime import checkpoint_files as files

COUNT = 200


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 3)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, chance: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])


def lengthen(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randint(1, 20)))


def zeros(path: Path, chance: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def missing(path: Path, chance: random.Random) -> None:
    path.unlink()


def folder(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def pickled(path: Path, chance: random.Random) -> None:
    path.write_bytes(pickle.dumps(Runs(path.parent.parent / "executed")))


def torch_saved(path: Path, chance: random.Random) -> None:
    torch.save({"model": Runs(path.parent.parent / "executed")}, path)


def old_format(path: Path, chance: random.Random) -> None:
    (path.parent / ".metadata").write_bytes(pickle.dumps(Runs(path.parent.parent / "executed")))


def extra(path: Path, chance: random.Random) -> None:
    """No damage: what else lies there is not read."""
    (path.parent / chance.choice(("notes.txt", "data.pt", "rank00009-00000.safetensors"))).write_bytes(
        pickle.dumps(Runs(path.parent.parent / "executed"))
    )


def emptied(path: Path, chance: random.Random) -> None:
    shutil.rmtree(path.parent)
    path.parent.mkdir()


def swapped(path: Path, chance: random.Random) -> None:
    """The same file of the other checkpoint."""
    path.write_bytes((path.parent.parent / "step-00000001" / path.name).read_bytes())


DAMAGES = (
    flip, truncate, lengthen, zeros, missing, folder, pickled, torch_saved, old_format, extra, emptied, swapped,
)  # fmt: skip


def cases(count: int | None, seed: int) -> Iterator[Case]:
    """Each takes some twenty milliseconds."""
    for index in range(COUNT if count is None else count):
        chance = random.Random(f"{seed} {index}")
        damage = DAMAGES[index % len(DAMAGES)]
        name = chance.choice((files.MANIFEST, "rank00000-00000.safetensors"))
        yield Case(f"{damage.__name__} of {name}, {seed} {index}", partial(tried, damage, name, chance))


def tried(damage: Any, name: str, chance: random.Random) -> Result:
    """Of two checkpoints the newer one is damaged; whatever is loaded must be one of them whole."""
    home = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        wanted = {step: _save(home, step) for step in (1, 2)}
        damage(home / "step-00000002" / name, chance)
        model, optimizer = _made(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = checkpoints.resume(home, lambda path: _load(model, optimizer, path))
            except AutoparError as error:
                result = Result("refused", error.constraint)
            else:
                step = int(found.name[-1]) if found is not None else 0
                is_equal = step in wanted and all(
                    torch.equal(value, wanted[step][name]) for name, value in model.state_dict().items()
                )
                result = Result("right") if is_equal else Result("wrong", f"loaded {found}, and is another state")
        return Result("wrong", "executed what is in a checkpoint") if (home / "executed").exists() else result
    except Exception as error:
        return Result("raw", f"{type(error).__name__}: {error}".splitlines()[0])
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    return model, torch.optim.AdamW(model.parameters())


def _save(home: Path, step: int) -> dict[str, torch.Tensor]:
    model, optimizer = _made(step)
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    progress = {"step": step, "num_samples": step, "seed": 0}
    checkpoints.write(home, step, lambda f: checkpoints.save_plain(model, optimizer, progress, f), True, lambda: None)
    return {name: value.clone() for name, value in model.state_dict().items()}


def _load(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    checkpoints.load_plain(model, optimizer, path)
