"""The cluster that this process finds itself on: GPUs known by name, or else the CPU, measured on the spot."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from autopar.errors import ClusterError
from autopar.profiling.machine import available_cores, cpu_model, host_memory_bytes
from autopar.profiling.processes import run_processes
from autopar.profiling.profile import BUSY, DEFAULT_CPU_PROCESSES, QUIET_SHARE, Profile, fitted
from autopar.profiling.samples import Samples
from autopar.scratch import temporary_folder
from cost_models import catalog
from cost_models.machine import Cluster

BUSY_CACHE_SECONDS = 600.0
"""For how long a measurement of a busy machine is used."""
CACHE_FORMAT = 3
"""Part of the cache's key; to be raised when the same machine would be described differently."""

GPU_NAMES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (r"(NVIDIA )?(Tesla )?V100-SXM\d(-.*)?", ("v100-16g", "v100-32g"), ""),
    (r"(NVIDIA )?A100-SXM4-\d+GB", ("a100-40g", "a100-80g"), ""),
    (r"(NVIDIA )?A100(-PCIE-\d+GB| \d+GB PCIe)", ("a100-40g", "a100-80g"), "pcie4"),
    (r"(NVIDIA )?H100( SXM5)?( 80GB HBM3)?", ("h100-sxm",), ""),
    (r"(NVIDIA )?H200( SXM)?", ("h200-sxm",), ""),
    (r"(NVIDIA )?B200", ("b200",), ""),
    (r"(NVIDIA )?(GeForce )?RTX 3090", ("rtx3090",), ""),
    (r"(NVIDIA )?(GeForce )?RTX 4090", ("rtx4090",), ""),
    (r"(NVIDIA )?L4", ("l4",), ""),
    (r"(NVIDIA )?A10G", ("a10g",), ""),
    (r"(NVIDIA )?L40S", ("l40s",), ""),
)
"""What the driver calls a GPU (the whole name), the built-in devices of that name by memory, and the link inside a node
if it is not the device's usual one. Slices (MIG), PCIe and NVL variants of other chips are other devices: no match."""


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
    if num_devices is not None and num_devices < 1:
        raise ClusterError("a cluster needs at least one device", values={"num_devices": num_devices})
    if torch.cuda.is_available():
        return _detect_gpus(num_devices)
    return _detect_cpu(num_devices or _from_launcher("WORLD_SIZE") or DEFAULT_CPU_PROCESSES, refresh)


def cache_folder() -> Path:
    """Where autopar keeps what it measured of this user's machines; need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar"


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _detect_gpus(num_devices: int | None) -> Cluster:
    visible = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = sorted({gpu.name for gpu in visible})
    if len(names) != 1:
        raise ClusterError(
            "all visible GPUs must be equal",
            values=", ".join(names) or "no visible GPU",
            alternatives="CUDA_VISIBLE_DEVICES with GPUs of one kind",
        )
    num_nodes, per_node = _gpu_counts(len(visible), num_devices)
    # Plans must fit the smallest of them.
    memory_bytes = min(gpu.total_memory for gpu in visible)
    for pattern, family, link in GPU_NAMES:
        if re.fullmatch(pattern, names[0]):
            nearest = min(family, key=lambda name: abs(catalog.device(name).memory_bytes - memory_bytes))
            words = [f"{num_nodes}x{per_node}", nearest, *([link] if link else [])]
            return Cluster.parse(" ".join(words)).with_memory(memory_bytes)
    raise ClusterError(
        "this GPU is not among the built-in devices",
        values=names[0],
        alternatives=[
            "a TOML file with the figures of the device and its links, given as cluster",
            f"one of the built-in devices, if it is close enough: {', '.join(catalog.devices())}",
        ],
    )


def _gpu_counts(num_visible: int, num_devices: int | None) -> tuple[int, int]:
    """(nodes, devices per node). Launchers may show each process its own GPU only, hence no check if one is visible."""
    world, local = _from_launcher("WORLD_SIZE"), _from_launcher("LOCAL_WORLD_SIZE")
    if world is None:
        if (num_devices or num_visible) > num_visible:
            raise ClusterError(
                "there are fewer visible GPUs than devices asked for",
                values={"num_devices": num_devices, "visible GPUs": num_visible},
                alternatives=f"at most {num_visible}, or a cluster by name such as '2x8 h100-sxm'",
            )
        return 1, num_devices or num_visible
    local = local or min(world, num_visible)
    if world % local or (1 < num_visible < local) or num_devices not in (None, world):
        raise ClusterError(
            "the launcher's processes must be one per GPU, equally many on every node",
            values={
                "WORLD_SIZE": world,
                "LOCAL_WORLD_SIZE": local,
                "visible GPUs": num_visible,
                "num_devices": num_devices or "not given",
            },
            alternatives=f"torchrun --nproc-per-node with at most {num_visible} processes, and no other num_devices",
        )
    return world // local, local


def _from_launcher(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


# --- CPU --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    """What a measurement of a CPU depends on: its model, the cores that this process may use, and torch."""

    cpu: str
    num_cores: float
    torch_version: str

    @staticmethod
    def here() -> Machine:
        """This machine."""
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
            "certain. autopar.detect.detect(refresh=True) measures anew",
            stacklevel=4,
        )
    with contextlib.suppress(OSError):
        _write(path, found.to_toml())
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


def _write(path: Path, text: str) -> None:
    """All of the file or nothing, whoever reads it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(temporary, path)
