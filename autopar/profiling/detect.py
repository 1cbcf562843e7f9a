"""The cluster that this process finds itself on: GPUs known by name, or else the CPU, measured on the spot."""

from __future__ import annotations

import contextlib
import hashlib
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from autopar.errors import ClusterError
from autopar.files.outputs import replace_file
from autopar.files.scratch import temporary_folder
from autopar.profiling.gpus import detect_gpus, from_launcher, require_one
from autopar.profiling.machine import available_cores, cache_folder, cpu_model, host_memory_bytes
from autopar.profiling.processes import run_processes
from autopar.profiling.profile import BUSY, DEFAULT_CPU_PROCESSES, QUIET_SHARE, Profile, fitted
from autopar.profiling.samples import Samples
from cost_models.machine import Cluster

BUSY_CACHE_SECONDS = 600.0
"""Seconds for which a measurement of a busy machine is used."""
CACHE_FORMAT = 3
"""Part of the cache's key; to be raised when the same machine would be described differently."""


def detect(num_devices: int | None = None, *, refresh: bool = False) -> Cluster:
    """This machine as a cluster.

    With CUDA: the visible GPUs (under torchrun, WORLD_SIZE devices on nodes of LOCAL_WORLD_SIZE), the built-in device
    of that name, with the memory that the GPU really has. num_devices takes fewer of one machine's GPUs.

    Otherwise the CPU: num_devices processes (default: WORLD_SIZE under torchrun, else 4) of one torch thread each, as
    `launch` starts them, sharing the cores and the memory of this machine. Their kernels and gloo collectives are
    measured in real processes that run at the same time, which takes up to a minute; the result is kept under
    ~/.cache/autopar (or $XDG_CACHE_HOME/autopar), by CPU, cores, torch version and num_devices. `refresh` measures
    anew.

    What other programs take is subtracted, but on a machine that is busy with them the rest is less certain: that is
    warned of, and kept for ten minutes only. `autopar profile` measures more, and into a file.

    Raises ClusterError for an unknown or mixed set of GPUs, counts that do not fit, and failed measuring processes.
    """
    require_one(num_devices)
    if torch.cuda.is_available():
        return detect_gpus(num_devices)
    return _detect_cpu(num_devices or from_launcher("WORLD_SIZE") or DEFAULT_CPU_PROCESSES, refresh)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a measurement of a CPU depends on: its model, the cores that this process may use, and torch."""

    cpu: str
    num_cores: float
    torch_version: str

    @staticmethod
    def here() -> Machine:
        """The machine that this process runs on."""
        return Machine(cpu_model(), available_cores(), torch.__version__)

    def cache_path(self, num_devices: int) -> Path:
        """Where the measured cluster of num_devices processes is kept."""
        key = f"{CACHE_FORMAT}|{self.cpu}|{self.num_cores}|{self.torch_version}|{num_devices}"
        return cache_folder() / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:16]}.toml"


def _detect_cpu(num_devices: int, refresh: bool) -> Cluster:
    path = Machine.here().cache_path(num_devices)
    if not refresh and (kept := _kept(path)):
        # The memory may have changed since (a container's limit), and costs nothing to look up.
        return kept.with_memory(host_memory_bytes() // num_devices)
    found = measure(num_devices)
    if found.measured.share < QUIET_SHARE:
        warnings.warn(
            f"the CPU was measured {BUSY} {1 - found.measured.share:.0%} of the cores, which makes predictions less "
            "certain. autopar.ClusterSpec.detect(refresh=True) measures anew",
            stacklevel=4,
        )
    with contextlib.suppress(OSError):
        replace_file(path, found.to_toml())
    return found.cluster


def measure(num_processes: int) -> Profile:
    """This machine's CPU, shared by so many processes, in less than a minute. Raises ClusterError."""
    with temporary_folder() as folder:
        raw = folder / "samples.jsonl"
        run_processes(num_processes, raw, "brief", timeout_seconds=180.0)
        samples = Samples.read(raw)
    if samples is None:
        raise ClusterError("the measuring processes left nothing to read", values=str(raw))
    return fitted(samples)


def _kept(path: Path) -> Cluster | None:
    """The cluster kept there, unless it cannot be read or is an old measurement of a busy machine."""
    with contextlib.suppress(OSError, ValueError):
        cluster = Cluster.from_toml(path)
        if BUSY not in cluster.device.source or time.time() - path.stat().st_mtime < BUSY_CACHE_SECONDS:
            return cluster
    return None
