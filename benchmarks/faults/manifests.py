"""Manifests and indexes of weights that lie, with checksums that are right: nothing outside of the folder is read,
nothing large is allocated, and whatever is loaded is what was saved.

Every field of a checkpoint's manifest gets every odd value; every file is replaced by a link, a pipe or a folder.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
import os
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.training import checkpoints
from benchmarks.by_hand import compiled_for
from benchmarks.faults.case import Case, Result, drawn
from codegen.runtime import checkpoint_files as files
from codegen.runtime.weight_files import INDEX, WeightFileError, stored_weights

COUNT = 1200
ROOM = 2 * 2**30
"""Bytes of memory that a case may reserve beyond what the process has."""
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 7, 2**31, 2**62, 2**64, 10**400, 0.5, float("nan"), float("inf"), "", ".", "..", "x"),
    *("../outside.safetensors", "/etc/hostname", "a/b", "rank\x1b[2J", "x\x00", "load", "float32", "x" * 10**5),
    *([], {}, [[]], [-1], [2**40, 2**40], [2**62, 4], [True], {"x": 1}, [None] * 3),
)
NAMES: tuple[Any, ...] = (
    *("../outside.safetensors", "/etc/hostname", "/dev/zero", ".", "..", "", "a/b", "rank\x1b[2J", "x\x00y"),
    *("link.safetensors", "pipe", "missing.safetensors", None, 7, [], "x" * 300),
)


def _linked(path: Path) -> None:
    path.rename(path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")


def _linked_to_zeros(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _linked_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _hard_link(path: Path) -> None:
    os.link(path, path.parent.parent / "moved")


REPLACED: tuple[Callable[[Path], None], ...] = (
    _linked, _linked_to_zeros, _linked_to_itself, _pipe, _folder, _hard_link,
)  # fmt: skip


def cases(count: int | None, seed: int) -> list[Case]:
    """Each takes some twenty milliseconds."""
    return drawn(_all(), COUNT if count is None else count, seed)


def _all() -> Iterator[Case]:
    home = Path(tempfile.mkdtemp(prefix="faults-"))
    _save(home)
    body = _body(home / "checkpoint")
    shutil.rmtree(home)
    for (who, load), path in itertools.product(LOADERS.items(), _places(body)):
        where = ".".join(map(str, path))
        for value in ODD:
            yield Case(f"{who}: {where} = {value!r}"[:160], partial(_tried, load, partial(_changed, path, value)))
        yield Case(f"{who}: no {where}", partial(_tried, load, partial(_deleted, path)))
        if isinstance(path[-1], str):
            for name in NAMES:
                yield Case(f"{who}: {where} named {name!r}"[:160], partial(_tried, load, partial(_named, path, name)))
    for (who, load), replace in itertools.product(LOADERS.items(), REPLACED):
        for pattern in (files.MANIFEST, "*.safetensors"):
            yield Case(
                f"{who}: {pattern}: {replace.__name__}", partial(_tried, load, partial(_exchanged, pattern, replace))
            )
    for name in NAMES:
        yield Case(f"index of weights: {name!r}"[:160], partial(_index, name))


def _places(body: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field; the first of a list stands for the others."""
    items = body.items() if isinstance(body, dict) else enumerate(body[:1]) if isinstance(body, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(4, 4)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def _save(home: Path) -> dict[str, torch.Tensor]:
    model = _model(1)
    optimizer = _adam(model.parameters())
    model(torch.ones(4, 4)).square().mean().backward()
    optimizer.step()
    checkpoints.save_plain(model, optimizer, {"step": 1, "num_samples": 4, "seed": 0}, home / "checkpoint")
    outside = {str(number): torch.full(shape, 9.0) for number, shape in enumerate(((4, 4), (4,)))}
    save_file(outside, home / "outside.safetensors")
    return {name: value.clone() for name, value in model.state_dict().items()}


def _plain(folder: Path) -> dict[str, torch.Tensor]:
    model = _model(2)
    checkpoints.load_plain(model, _adam(model.parameters()), folder)
    return model.state_dict()


@functools.cache
def _program() -> autopar.CompiledProgram:
    batch = {"input": torch.ones(4, 4), "target": torch.zeros(4, 4)}
    return compiled_for(_model(2), batch, nn.functional.mse_loss, optimizer=_adam)


def _step(folder: Path) -> dict[str, torch.Tensor]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        step = _program().build(device="cpu")
        _program().load_checkpoint(step, folder)
        found: dict[str, torch.Tensor] = step.full_state_dict()
        return found
    finally:
        dist.destroy_process_group()


LOADERS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {"Trainer": _plain, "program": _step}


def _body(folder: Path) -> Any:
    return json.loads((folder / files.MANIFEST).read_text().split("\n")[1])


def _owner(body: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        body = body[key]
    return body


def _rewritten(folder: Path, change: Callable[[Any], None]) -> None:
    body = copy.deepcopy(_body(folder))
    change(body)
    text = json.dumps(body)
    head = {"format": files.FORMAT, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (folder / files.MANIFEST).write_text(f"{json.dumps(head)}\n{text}\n")


def _changed(path: tuple[Any, ...], value: Any, folder: Path) -> None:
    _rewritten(folder, lambda body: _owner(body, path).__setitem__(path[-1], value))


def _deleted(path: tuple[Any, ...], folder: Path) -> None:
    _rewritten(folder, lambda body: _owner(body, path).__delitem__(path[-1]))


def _named(path: tuple[Any, ...], name: Any, folder: Path) -> None:
    def change(body: Any) -> None:
        owner = _owner(body, path)
        owner[str(name)] = owner.pop(path[-1])

    _rewritten(folder, change)


def _exchanged(pattern: str, replace: Callable[[Path], None], folder: Path) -> None:
    replace(next(iter(sorted(folder.glob(pattern)))))


def _tried(load: Callable[[Path], dict[str, torch.Tensor]], damage: Callable[[Path], None], *_: object) -> Result:
    home = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        saved = _save(home)
        (home / "checkpoint" / "link.safetensors").symlink_to(home / "outside.safetensors")
        damage(home / "checkpoint")
        with _bounded_memory():
            found = load(home / "checkpoint")
        is_equal = found.keys() == saved.keys() and all(torch.equal(found[name], saved[name]) for name in saved)
        return Result("right") if is_equal else Result("wrong", "loaded what was not saved")
    except AutoparError as error:
        said = str(error)
        return Result("refused" if said.replace("\n", "").isprintable() else "raw", said.splitlines()[0])
    except Exception as error:
        return Result("raw", f"{type(error).__name__}: {error}".splitlines()[0][:300])
    finally:
        shutil.rmtree(home, ignore_errors=True)


class _bounded_memory:
    """No more than ROOM may be reserved: a huge shape then fails, as it would on a smaller machine."""

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, self.before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self.before)


def _index(name: Any) -> Result:
    """An index of weights that names another file."""
    home = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        folder = home / "weights"
        folder.mkdir()
        save_file({"weight": torch.full((4, 4), 9.0)}, home / "outside.safetensors")
        os.mkfifo(folder / "pipe")
        (folder / f"weights{INDEX}").write_text(json.dumps({"weight_map": {"weight": name}}))
        stored_weights(folder)("weight")
        return Result("wrong", "read another file")
    except (AutoparError, WeightFileError) as error:
        return Result("refused" if str(error).isprintable() else "raw", str(error))
    except Exception as error:
        return Result("raw", f"{type(error).__name__}: {error}".splitlines()[0][:300])
    finally:
        shutil.rmtree(home, ignore_errors=True)
