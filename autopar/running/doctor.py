"""Check this machine for training and name its problems: `autopar doctor`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.profiling.gpus import detect_gpus
from autopar.profiling.machine import available_cores, cache_folder, cpu_model, driver_version, host_memory_bytes
from autopar.units import bytes_text
from codegen.runtime.compiled_layers import why_unavailable

LEAST_SHARED_BYTES = 2**30
"""Room in /dev/shm. NCCL and DataLoader workers exchange data through it; containers have 64 MiB by default."""
LEAST_FILES = 4096
"""Open files per process. A rank needs some for every peer and for every file of a checkpoint."""
LEAST_FREE_BYTES = 2**30
COMMAND_SECONDS = 10.0
HANDSHAKE_SECONDS = 60.0
TESTED_TORCH = ((2, 11), (2, 14))
ALL_OK, WARNING, PROBLEM = "ok", "warning", "problem"


@dataclass(frozen=True, slots=True)
class Check:
    """One line: a name; "ok", "warning" or "problem"; the finding; and advice where the status is not ok."""

    name: str
    status: str
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Health:
    """All checks, in order."""

    checks: tuple[Check, ...]

    @property
    def has_problem(self) -> bool:
        return any(check.status == PROBLEM for check in self.checks)


def examine_machine(handshake: Callable[[], None]) -> Health:
    """Run every check. handshake: starts two processes that meet, and raises AutoparError where they cannot."""
    return Health(
        (
            *_versions(),
            *_devices(),
            *_communication(),
            _handshake(handshake),
            shared_memory(Path("/dev/shm")),
            open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
            disk(cache_folder()),
            *_clock(),
            *_compilers(),
            threads(os.environ),
        )
    )


def _versions() -> Iterator[Check]:
    yield Check("python", ALL_OK, platform.python_version())
    yield torch_version(torch.__version__)
    yield Check("autopar", ALL_OK, _version("autopar") or "not installed, run from its sources")
    transformers = _version("transformers")
    advice = "pip install transformers, for hf: models"
    yield Check("transformers", ALL_OK, transformers or f"not installed ({advice})")


def torch_version(text: str) -> Check:
    """Check that autopar is tested with this version of torch."""
    numbers = tuple(int(word) for word in text.split("+")[0].split(".")[:2])
    low, high = TESTED_TORCH
    if numbers < low:
        return Check("torch", PROBLEM, text, f"install torch {low[0]}.{low[1]} or later")
    if numbers > high:
        return Check("torch", WARNING, text, f"autopar is tested up to torch {high[0]}.{high[1]}: run its tests first")
    return Check("torch", ALL_OK, text)


def _version(name: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return ""


def _devices() -> Iterator[Check]:
    cores, memory = available_cores(), bytes_text(host_memory_bytes())
    yield Check("cpu", ALL_OK, f"{cpu_model()}, {cores:g} cores, {memory}")
    if not torch.cuda.is_available():
        if driver_version() or Path("/dev/nvidiactl").exists():
            yield Check(
                "gpus",
                PROBLEM,
                f"the driver {driver_version()} is there, torch {torch.__version__} sees no GPU".replace("  ", " "),
                "install a torch build for CUDA that the driver supports, and set CUDA_VISIBLE_DEVICES to GPUs",
            )
        else:
            yield Check("gpus", ALL_OK, "none: autopar plans for any cluster, and trains on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        driver = f", driver {driver_version()}" if driver_version() else ""
        yield Check(f"gpu {index}", ALL_OK, f"{gpu.name}, {bytes_text(gpu.total_memory)}{driver}")
    try:
        yield Check("cluster", ALL_OK, str(detect_gpus(None)))
    except AutoparError as error:
        yield Check("cluster", WARNING, error.constraint, "`autopar profile` measures devices that are not built in")
    yield from _links()


def _links() -> Iterator[Check]:
    count = torch.cuda.device_count()
    if count < 2:
        return
    apart = [
        (a, b) for a in range(count) for b in range(count) if a != b and not torch.cuda.can_device_access_peer(a, b)
    ]
    topology = _output_of("nvidia-smi", "topo", "-m")
    kinds = " ".join(sorted(_link_words(topology))) if topology else "of unknown kind"
    if apart:
        pairs = ", ".join(f"{a}-{b}" for a, b in apart if a < b)
        yield Check("links", WARNING, f"no peer access: {pairs}", "check the virtual machine's or PCIe's ACS settings")
    else:
        yield Check("links", ALL_OK, f"peer access between all GPUs, {kinds}")


def _link_words(matrix: str) -> set[str]:
    """Return the kinds of links in nvidia-smi's output: NV18, PIX, PXB, PHB, NODE, SYS."""
    rows = [line.split() for line in matrix.splitlines() if line.startswith("GPU")]
    return {w for row in rows for w in row if w.startswith("NV") or w in ("PIX", "PXB", "PHB", "NODE", "SYS")}


def _communication() -> Iterator[Check]:
    if not dist.is_available():
        yield Check("distributed", PROBLEM, "torch was built without it", "install another build of torch")
        return
    gloo, nccl = dist.is_gloo_available(), dist.is_nccl_available()
    advice = "" if gloo else "install another build of torch"
    yield Check("gloo", ALL_OK if gloo else PROBLEM, "available" if gloo else "missing", advice)
    if torch.cuda.is_available():
        words = ".".join(map(str, torch.cuda.nccl.version())) if nccl else "missing"  # type: ignore[no-untyped-call]
        yield Check("nccl", ALL_OK if nccl else PROBLEM, words, "" if nccl else "install a torch build with NCCL")
    else:
        yield Check("nccl", ALL_OK, "not needed without GPUs")


def _handshake(handshake: Callable[[], None]) -> Check:
    begun = time.monotonic()
    try:
        handshake()
    except (AutoparError, RuntimeError, OSError) as error:
        words = " ".join(str(error).split())[-200:]
        advice = "set GLOO_SOCKET_IFNAME to an interface of this machine; check the host's name and firewall"
        return Check("two processes", PROBLEM, words, advice)
    return Check("two processes", ALL_OK, f"met and added over gloo in {time.monotonic() - begun:.1f} s")


def shared_memory(folder: Path) -> Check:
    """Check the size of the memory that processes share through files."""
    if not folder.is_dir():
        status = WARNING if sys.platform == "linux" else ALL_OK
        return Check("shared memory", status, f"no {folder}", "mount a tmpfs there" if status == WARNING else "")
    usage = shutil.disk_usage(folder)
    room = f"{bytes_text(usage.free)} of {bytes_text(usage.total)} free in {folder}"
    if usage.free < LEAST_SHARED_BYTES:
        return Check("shared memory", WARNING, room, "docker run --shm-size=8g or --ipc=host; remove old files from it")
    return Check("shared memory", ALL_OK, room)


def open_files(soft: int, hard: int) -> Check:
    """Check a process's limit of open files: the current one (soft), and the largest it may set (hard)."""
    if soft != resource.RLIM_INFINITY and soft < LEAST_FILES:
        can = hard == resource.RLIM_INFINITY or hard >= LEAST_FILES
        advice = f"ulimit -n {LEAST_FILES}" if can else "a higher hard limit in /etc/security/limits.conf"
        return Check("open files", WARNING, f"{soft} per process", advice)
    return Check("open files", ALL_OK, "no limit" if soft == resource.RLIM_INFINITY else f"{soft} per process")


def disk(folder: Path) -> Check:
    """Check the room in the folder, or in its nearest existing parent, and whether it can be written."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    room = f"{bytes_text(free)} free in {folder}"
    advice = "set XDG_CACHE_HOME to a folder of your own that has room"
    if not os.access(existing, os.W_OK):
        return Check("cache folder", WARNING, f"{folder} cannot be written", advice)
    return Check(
        "cache folder", WARNING if free < LEAST_FREE_BYTES else ALL_OK, room, advice * (free < LEAST_FREE_BYTES)
    )


def _clock() -> Iterator[Check]:
    drift = clock_drift(0.2)
    zone = time.strftime("%Z %z")
    if abs(drift) > 0.05:
        advice = "find what sets this machine's time: several nodes compare it in logs and when they meet"
        yield Check("clock", WARNING, f"wall and monotonic time differ by {drift:+.3f} s in 0.2 s, {zone}", advice)
    else:
        yield Check("clock", ALL_OK, f"wall and monotonic time agree, {zone}")
    synchronized = _output_of("timedatectl", "show", "--property=NTPSynchronized", "--value").strip()
    if synchronized == "no":
        yield Check("clock's server", WARNING, "the clock is not synchronized", "timedatectl set-ntp true, or chrony")
    else:
        words = "synchronized" if synchronized == "yes" else "unknown on this system"
        yield Check("clock's server", ALL_OK, words)


def clock_drift(seconds: float) -> float:
    """Return by how many seconds the wall clock ran ahead of the monotonic clock during a sleep."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(seconds)
    steady_after = time.monotonic()
    return (time.time() - wall) - (steady_after - steady)


def _compilers() -> Iterator[Check]:
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for kind in kinds:
        reason = why_unavailable(torch.device(kind))
        status = WARNING if reason else ALL_OK
        advice = f"install it, or keep backend=eager: {reason}" if reason else ""
        yield Check(f"inductor on {kind}", status, reason or "can compile", advice)
    has_triton = importlib.util.find_spec("triton") is not None
    if torch.cuda.is_available() and not has_triton:
        yield Check("triton", WARNING, "not installed", "pip install triton, for fused kernels; or --kernels off")
    else:
        yield Check("triton", ALL_OK, _version("triton") or ("available" if has_triton else "not needed without GPUs"))


def threads(environment: os._Environ[str] | dict[str, str]) -> Check:
    """Check OMP_NUM_THREADS. torchrun sets it to 1 where nobody did."""
    text, world = environment.get("OMP_NUM_THREADS", ""), environment.get("LOCAL_WORLD_SIZE", "")
    cores = available_cores()
    if not text:
        return Check("OMP_NUM_THREADS", ALL_OK, "not set: torchrun sets 1 for every rank")
    ranks = int(world) if world.isdecimal() and int(world) else 1
    if not text.isdecimal() or not int(text):
        return Check("OMP_NUM_THREADS", WARNING, text, "set it to a number of threads")
    if int(text) * ranks > max(cores, 1):
        wanted = max(int(cores / ranks), 1)
        load = f"{text} for each of {ranks} local ranks, on {cores:g} cores"
        return Check("OMP_NUM_THREADS", WARNING, load, f"OMP_NUM_THREADS={wanted}")
    return Check("OMP_NUM_THREADS", ALL_OK, text)


def _output_of(*words: str) -> str:
    """Return what a system command prints; "" where it is missing, fails or hangs."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
        return done.stdout if done.returncode == 0 else ""
    return ""
