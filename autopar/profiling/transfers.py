"""Calls of transfers: copies between device and host, updates in host memory, and file traffic."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autopar.profiling.cases import ADAM_BYTES
from autopar.profiling.kernels import adamw
from autopar.profiling.load import Call


def transfer(sizes: Mapping[str, Any], device: torch.device, folder: Path, rank: int) -> Call:
    """Return the call of a transfer's case. Files go to `folder`; `remove_file` removes them."""
    operation, num_bytes = sizes["operation"], sizes["num_bytes"]
    if operation == "host update":
        return adamw(num_bytes // ADAM_BYTES, torch.device("cpu"))
    if operation.startswith("copy"):
        on_host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        on_device = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        target, source = (on_host, on_device) if operation == "copy to host" else (on_device, on_host)
        return lambda: target.copy_(source, non_blocking=True)
    path, content = file_of(folder, rank), os.urandom(2**20) * (num_bytes // 2**20)
    if operation == "disk write":
        return lambda: _write(path, content)
    _write(path, content)
    return lambda: _read(path)


def file_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank's disk traffic."""
    return folder / f".autopar-profile-{os.getpid()}-{rank}"


def remove_file(folder: Path, rank: int) -> None:
    """Remove the rank's file, after the last transfer."""
    file_of(folder, rank).unlink(missing_ok=True)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> None:
    """Read the file from the disk, without the system's page cache where the system can drop it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        while os.read(descriptor, 2**24):
            pass
    finally:
        os.close(descriptor)
