"""Manifests whose checksum is right and whose contents are not: whoever wrote one could compute a checksum, too."""

import copy
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from autopar.errors import CheckpointError
from autopar.training import checkpoints
from codegen.runtime import checkpoint_files as files
from codegen.runtime.optimizers import settings_of

PROGRESS = {"step": 1, "num_samples": 1, "seed": 0}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    net = model()
    folder = tmp_path / "checkpoint"
    checkpoints.save_plain(net, torch.optim.SGD(net.parameters(), 0.1), PROGRESS, folder)
    save_file({"0": torch.zeros(4, 4), "1": torch.zeros(4)}, tmp_path / "outside.safetensors")
    return folder


def body_of(folder: Path) -> Any:
    return json.loads((folder / files.MANIFEST).read_text().split("\n")[1])


def rewrite(folder: Path, body: Any) -> None:
    text = json.dumps(body)
    head = {"format": files.FORMAT, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (folder / files.MANIFEST).write_text(f"{json.dumps(head)}\n{text}\n")


def load(folder: Path) -> None:
    net = model()
    checkpoints.load_plain(net, torch.optim.SGD(net.parameters(), 0.1), folder)


def chunk(body: Any, **changes: Any) -> None:
    names = ("file", "key", "offsets", "shape")
    found = body["tensors"]["weight"]["chunks"][0]
    for name, value in changes.items():
        found[names.index(name)] = value


def rename(body: Any, name: str) -> None:
    """Lists a file of another name, and reads from it."""
    (old,) = body["files"]
    body["files"] = {name: body["files"][old]}
    for tensor in body["tensors"].values():
        for each in tensor["chunks"]:
            each[0] = name


def first_file(body: Any, num_bytes: Any, checksum: Any = 1) -> None:
    body["files"][next(iter(body["files"]))] = [num_bytes, checksum]


CHANGES: dict[str, Callable[[Any], object]] = {
    "a piece in a file that is not listed": lambda body: chunk(body, file="outside.safetensors"),
    "a piece above the folder": lambda body: chunk(body, file="../outside.safetensors"),
    "a listed file above the folder": lambda body: rename(body, "../outside.safetensors"),
    "an absolute path": lambda body: rename(body, "/etc/hostname"),
    "the folder itself": lambda body: rename(body, "."),
    "a control character": lambda body: rename(body, "rank\x1b[2J"),
    "a shape beyond its pieces": lambda body: body["tensors"]["weight"].update(shape=[2**40, 4]),
    "a shape and a piece beyond the file": lambda body: (
        body["tensors"]["weight"].update(shape=[2**40, 4]),
        chunk(body, shape=[2**40, 4]),
    ),
    "an extra tensor without pieces": lambda body: body["tensors"].update(
        {"optimizer.weight.exp_avg": {"shape": [2**50], "dtype": "float32", "chunks": []}}
    ),
    "a negative size": lambda body: body["tensors"]["weight"].update(shape=[-4, -4]),
    "a size that is a truth value": lambda body: body["tensors"]["bias"].update(shape=[True]),
    "a size that is no whole number": lambda body: body["tensors"]["weight"].update(shape=[4.0, 4]),
    "a piece outside of its tensor": lambda body: chunk(body, offsets=[1, 0]),
    "a piece of another rank": lambda body: chunk(body, offsets=[0]),
    "one piece for two tensors": lambda body: body["tensors"].update(twin=copy.deepcopy(body["tensors"]["weight"])),
    "a dtype that is a function": lambda body: body["tensors"]["weight"].update(dtype="load"),
    "a file of negative length": lambda body: first_file(body, -1),
    "a file longer than it is": lambda body: first_file(body, 2**60),
    "a checksum of too many bits": lambda body: first_file(body, 300, 2**40),
    "a negative step": lambda body: body["record"]["progress"].update(step=-3),
    "an endless step": lambda body: body["record"]["progress"].update(step=10**30),
    "classes of optimizers that are no names": lambda body: body["record"]["optimizer"].update(kinds=[{}]),
    "groups that are no groups": lambda body: body["record"]["optimizer"].update(groups=["lr"]),
    "notes that are a number": lambda body: body["record"].update(notes=7),
    "a state that is no number": lambda body: body["record"].update(numbers={"optimizer.weight.step": "x"}),
    "no tensors": lambda body: body.update(tensors=[]),
    "no record": lambda body: body.update(record={}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_illegal_manifests_are_refused(saved: Path, change: Callable[[Any], object]) -> None:
    load(saved)  # as it was written
    body = body_of(saved)
    change(body)
    rewrite(saved, body)
    with pytest.raises(checkpoints.DamagedCheckpoint):
        load(saved)


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", "fast"), ("lr", float("nan")), ("lr", 10**400), ("momentum", [0.1]), ("nesterov", 3), ("foreach", {})],
)
def test_settings_of_another_kind_are_refused(saved: Path, name: str, value: Any) -> None:
    body = body_of(saved)
    body["record"]["optimizer"]["groups"][0][name] = value
    rewrite(saved, body)
    with pytest.raises(CheckpointError, match=name):
        load(saved)


def test_a_setting_that_only_a_schedule_adds_is_no_other_kind(tmp_path: Path) -> None:
    def scheduled() -> tuple[nn.Module, torch.optim.Optimizer, list[dict[str, Any]]]:
        net = model()
        optimizer = torch.optim.Adafactor(net.parameters(), 0.1)
        before = settings_of(optimizer)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return net, optimizer, before

    net, optimizer, before = scheduled()
    checkpoints.save_plain(net, optimizer, PROGRESS, tmp_path / "checkpoint", before)
    net, optimizer, before = scheduled()
    assert checkpoints.load_plain(net, optimizer, tmp_path / "checkpoint", before)["step"] == 1


@pytest.mark.parametrize("kind", ["link", "hard to end", "folder"])
def test_only_regular_files_are_opened(saved: Path, kind: str) -> None:
    (name,) = body_of(saved)["files"]
    path = saved / name
    if kind == "link":
        path.rename(saved.parent / "moved.safetensors")
        path.symlink_to(saved.parent / "moved.safetensors")
    else:
        path.unlink()
        path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(checkpoints.DamagedCheckpoint, match="link|regular"):
        load(saved)


def test_a_linked_manifest_is_not_followed(saved: Path) -> None:
    path = saved / files.MANIFEST
    path.rename(saved.parent / "manifest.json")
    path.symlink_to(saved.parent / "manifest.json")
    with pytest.raises(checkpoints.DamagedCheckpoint, match="link"):
        load(saved)
