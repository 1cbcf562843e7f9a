"""Host memory and mapped files for what a step keeps off the device, and the copies between them and the device.

On CUDA memory is pinned and copies run on streams of their own. Elsewhere the host's tensors are further tensors in the
same memory: values and traffic are the same.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .traffic import Traffic

_NVME = "nvme:"


class HostMemory:
    """The host memory of this rank's tensors, with copies to the device and from it.

    where: "host", or "nvme:" and a folder, in which a rank keeps its tensors as files of a folder of its own
    (`rank_0`). The folder goes with `close`, at the latest when the process ends; what is left of a process that was
    killed is overwritten, but not what is still in use (ValueError). Files are no checkpoint: save one.
    holds_parameters: the shards of ZeRO-3 live here only. traffic: counts the bytes of a step.
    """

    def __init__(self, where: str, device: torch.device, holds_parameters: bool = False) -> None:
        if where != "host" and not (where.startswith(_NVME) and len(where) > len(_NVME)):
            raise ValueError(f'the optimizer is offloaded to "host" or "nvme:/a/folder", not to {where!r}')
        self.device = device
        self.traffic = Traffic()
        self.holds_parameters = holds_parameters
        self.folder = _own_folder(Path(where.removeprefix(_NVME))) if where != "host" else None
        if self.folder is not None:
            self._remover = weakref.finalize(self, _remove, *self.folder)
            # At its end a forked process runs multiprocessing's finalizers, and no others.
            Finalize(None, self._remover, exitpriority=0)
        self._num_files = 0
        self._streams: tuple[Any, Any] | None = None

    @property
    def is_mapped(self) -> bool:
        """Whether tensors are files."""
        return self.folder is not None

    def close(self) -> None:
        """Remove the files, where there are any; tensors stay readable, but take memory from now on."""
        if self.folder is not None:
            self._remover()

    def zeros(self, numel: int, dtype: torch.dtype, name: str) -> Tensor:
        """A flat tensor of zeros. name: goes into the file's name."""
        if self.folder is None:
            return self.staging(numel, dtype).zero_()
        path = self.folder[0] / f"{self._num_files:05d}.{name}"
        self._num_files += 1
        num_bytes = numel * dtype.itemsize
        with path.open("wb") as file:
            # Now, since a full disk would kill the process when a page is first written.
            os.posix_fallocate(file.fileno(), 0, max(1, num_bytes))
        return torch.from_file(str(path), shared=True, size=numel, dtype=dtype)

    def staging(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor with any values, in memory that the device copies from and to without the host's help."""
        return torch.empty(numel, dtype=dtype, pin_memory=self.device.type == "cuda")

    def copy_out(self, source: Tensor, target: Tensor) -> Any:
        """Begin to copy a gradient to the host; the event to wait for on the host, None if it is there already."""
        self.traffic.gradients_out += source.numel() * source.element_size()
        if self.device.type != "cuda":
            target.copy_(source)
            return None
        out, _ = self._side_streams()
        out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(out):
            target.copy_(source, non_blocking=True)
            return out.record_event()

    def copy_in(self, source: Tensor, target: Tensor) -> None:
        """Copy a master into the device's tensor, in its dtype; what is queued on the device from now on sees it."""
        self.traffic.masters_in += target.numel() * target.element_size()
        with self._side():
            target.copy_(self._cast(source, target.dtype), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).wait_stream(self._side_streams()[1])

    @contextmanager
    def bringing(self, source: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """A shard as a tensor of the device; a collective that starts in this context waits for its copy.

        Computation does not, and so goes on meanwhile.
        """
        self.traffic.parameters_in += source.numel() * dtype.itemsize
        with self._side():
            yield self._cast(source, dtype).to(self.device, non_blocking=True)

    @contextmanager
    def _side(self) -> Iterator[None]:
        if self.device.type != "cuda":
            yield
            return
        _, back = self._side_streams()
        back.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(back):
            yield

    def _cast(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """Casts on the host: half precision is half the traffic. Pinned memory is not reused before it was read."""
        return source if source.dtype == dtype else self.staging(source.numel(), dtype).copy_(source)

    def _side_streams(self) -> tuple[Any, Any]:
        if self._streams is None:
            self._streams = _new_stream(self.device), _new_stream(self.device)
        return self._streams


def _new_stream(device: torch.device) -> Any:
    stream: Any = torch.cuda.Stream
    return stream(device)


def _own_folder(parent: Path) -> tuple[Path, int]:
    """This rank's folder, empty, and the open file whose lock says that it is in use."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    folder = parent / f"rank_{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "in_use", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ValueError(f"{folder} is used by another step or process; name another folder") from None
    for left in folder.iterdir():
        if left.name != "in_use":
            left.unlink()
    return folder, lock


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
