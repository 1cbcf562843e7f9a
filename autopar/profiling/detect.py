"""The cluster of this process: GPUs known by name, or else the CPU, measured now."""

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
"""Time for which a measurement of a busy machine is valid."""
CACHE_FORMAT = 3
"""Part of the cache's key. Raise it when the same machine would be described differently."""


def detect(num_devices: int | None = None, *, refresh: bool = False) -> Cluster:
    """Describe this machine as a cluster.

    With CUDA: the visible GPUs (under torchrun, WORLD_SIZE devices on nodes of LOCAL_WORLD_SIZE), as the built-in
    device of their name with the memory of the GPUs here. num_devices takes fewer of one machine's GPUs.

    Otherwise the CPU: num_devices processes (default: WORLD_SIZE under torchrun, else 4) of one torch thread each, as
    `launch` starts them. They share the cores and the memory of this machine. Real processes that run at the same time
    measure their kernels and gloo collectives, which takes up to a minute. The result is cached under ~/.cache/autopar
    (or $XDG_CACHE_HOME/autopar), by CPU, cores, torch version and num_devices. `refresh` measures again.

    The time of other programs is subtracted, but on a busy machine the rest is less certain. Then a warning says so,
    and the cache keeps the result for ten minutes only. `autopar profile` measures more, and writes a file.

    Raises ClusterError for an unknown or mixed set of GPUs, counts that do not fit, and failed measuring processes.
    """
    require_one(num_devices)
    if torch.cuda.is_available():
        return detect_gpus(num_devices)
    return _detect_cpu(num_devices or from_launcher("WORLD_SIZE") or DEFAULT_CPU_PROCESSES, refresh)


@dataclass(frozen=True, slots=True)
class Machine:
    """The inputs of a CPU measurement: the CPU's model, the cores that this process may use, and torch's version."""

    cpu: str
    num_cores: float
    torch_version: str

    @staticmethod
    def here() -> Machine:
        """Return the machine that this process runs on."""
        return Machine(cpu_model(), available_cores(), torch.__version__)

    def cache_path(self, num_devices: int) -> Path:
        """Return the cache file of a measured cluster of num_devices processes."""
        key = f"{CACHE_FORMAT}|{self.cpu}|{self.num_cores}|{self.torch_version}|{num_devices}"
        return cache_folder() / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:16]}.toml"


def _detect_cpu(num_devices: int, refresh: bool) -> Cluster:
    path = Machine.here().cache_path(num_devices)
    if not refresh and (cached := _kept(path)):
        # The memory (a container's limit) may have changed since, and is cheap to look up.
        return cached.with_memory(host_memory_bytes() // num_devices)
    profile = measure(num_devices)
    if profile.measured.share < QUIET_SHARE:
        warnings.warn(
            f"the CPU was measured {BUSY} {1 - profile.measured.share:.0%} of the cores, so predictions are less "
            "certain. autopar.ClusterSpec.detect(refresh=True) measures again",
            stacklevel=4,
        )
    with contextlib.suppress(OSError):
        replace_file(path, profile.to_toml())
    return profile.cluster


def measure(num_processes: int) -> Profile:
    """Measure this machine's CPU, shared by num_processes processes, in less than a minute. Raises ClusterError."""
    with temporary_folder() as folder:
        raw = folder / "samples.jsonl"
        run_processes(num_processes, raw, "brief", timeout_seconds=180.0)
        samples = Samples.read(raw)
    if samples is None:
        raise ClusterError(
            "the measuring processes left no samples",
            values=str(raw),
            alternatives="run it again, or describe the cluster in a TOML file",
        )
    return fitted(samples)


def _kept(path: Path) -> Cluster | None:
    """Return the cached cluster, or None if it cannot be read or is an old measurement of a busy machine."""
    with contextlib.suppress(OSError, ValueError):
        cluster = Cluster.from_toml(path)
        if BUSY not in cluster.device.source or time.time() - path.stat().st_mtime < BUSY_CACHE_SECONDS:
            return cluster
    return None
