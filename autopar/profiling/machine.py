"""The system's data about this machine."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib import metadata
from pathlib import Path

import torch


def available_cores() -> float:
    """Return the cores that this process may use, by its affinity and by the container's quota, possibly a fraction."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError):
        # Without a quota the file says "max 100000", which is no float.
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, float(quota) / float(period))
    return cores


def cache_folder() -> Path:
    """Return the folder of autopar's measurements for this user, which need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar"


def own_version() -> str:
    """Return autopar's installed version."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version("autopar")
    return "from source"


def cpu_model() -> str:
    """Return the system's name of the CPU's model."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown CPU"


def host_memory_bytes() -> int:
    """Return the bytes of memory of this machine, or of the container if its limit is lower."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(name).read_text()))
    return min(limits)


def memory_bytes(device: torch.device, num_local: int) -> int:
    """Return the bytes that one process can use: its GPU's memory, or its share of the host's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory_bytes() // num_local


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the CPU's."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else cpu_model()


def driver_version() -> str:
    """Return the version of the NVIDIA kernel driver; empty if the system does not say."""
    with contextlib.suppress(OSError, IndexError):
        words = Path("/proc/driver/nvidia/version").read_text().splitlines()[0].split()
        return next((word for word in words if word[0].isdigit() and "." in word), "")
    return ""
