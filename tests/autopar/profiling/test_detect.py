"""Detection: GPUs by name on simulated properties, and this machine's CPU against a second measurement of it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.errors import ClusterError
from autopar.profiling import detect as detect_module
from autopar.profiling import processes
from autopar.profiling.cases import Case
from autopar.profiling.clock import Timing
from autopar.profiling.detect import Machine, detect
from autopar.profiling.machine import host_memory_bytes
from autopar.profiling.processes import run_processes
from autopar.profiling.profile import Profile, fitted
from autopar.profiling.samples import Provenance, Sample, Samples
from cost_models import catalog, compute
from cost_models.machine import Cluster

GIB = 2**30
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher, and a cache of one's own."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


# --- GPUs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`gpus(name, memory_bytes, ...)` makes torch report GPUs of those (name, memory) pairs."""

    def install(*found: tuple[str, int]) -> None:
        properties = [SimpleNamespace(name=name, total_memory=memory) for name, memory in found]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])

    return install


@pytest.mark.parametrize(
    ("name", "memory", "device", "link"),
    [
        ("NVIDIA H100 80GB HBM3", 79 * GIB, "h100-sxm", "nvlink4"),
        ("NVIDIA H200", 139 * GIB, "h200-sxm", "nvlink4"),
        ("NVIDIA A100-SXM4-40GB", 39 * GIB, "a100-40g", "nvlink3"),
        ("NVIDIA A100-SXM4-80GB", 79 * GIB, "a100-80g", "nvlink3"),
        ("NVIDIA A100 80GB PCIe", 79 * GIB, "a100-80g", "pcie4"),
        ("NVIDIA A100-PCIE-40GB", 39 * GIB, "a100-40g", "pcie4"),
        ("Tesla V100-SXM2-16GB", 15 * GIB, "v100-16g", "nvlink2"),
        ("Tesla V100-SXM2-32GB", 31 * GIB, "v100-32g", "nvlink2"),
        ("NVIDIA B200", 178 * GIB, "b200", "nvlink5"),
        ("NVIDIA B300 SXM6 AC", 268 * GIB, "b300", "nvlink5"),
        ("NVIDIA B300", 268 * GIB, "b300", "nvlink5"),
        ("NVIDIA GB200", 185 * GIB, "gb200", "nvlink5"),
        ("NVIDIA GB300", 277 * GIB, "gb300", "nvlink5"),
        ("NVIDIA H20", 95 * GIB, "h20", "nvlink4"),
        ("NVIDIA H800", 79 * GIB, "h800-sxm", "nvlink4-h800"),
        ("NVIDIA A800-SXM4-80GB", 79 * GIB, "a800-80g", "nvlink3-a800"),
        ("AMD Instinct MI300X", 191 * GIB, "mi300x", "infinity-fabric"),
        ("NVIDIA L4", 22 * GIB, "l4", None),
        ("NVIDIA A10G", 22 * GIB, "a10g", None),
        ("NVIDIA L40S", 44 * GIB, "l40s", None),
        ("NVIDIA GeForce RTX 3090", 23 * GIB, "rtx3090", None),
        ("NVIDIA GeForce RTX 4090", 23 * GIB, "rtx4090", None),
    ],
)
def test_gpus_are_known_by_name_and_memory(
    gpus: Callable[..., None], name: str, memory: int, device: str, link: str | None
) -> None:
    gpus(*[(name, memory)] * 4)
    cluster = detect()
    assert (cluster.num_nodes, cluster.devices_per_node) == (1, 4)
    assert cluster.device.name == device and cluster.device.memory_bytes == memory
    assert cluster.device.peak("fp16") == catalog.device(device).peak("fp16")
    assert cluster.intra_node.name == (link or catalog.device(device).intra_link)
    assert Cluster.from_toml_text(cluster.to_toml()) == cluster


@pytest.mark.parametrize(
    "name",
    [
        *(
            "NVIDIA H100 PCIe",
            "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            "NVIDIA L40",
            "NVIDIA A10",
            "NVIDIA GeForce RTX 4090 D",
        ),
        *("NVIDIA H800 PCIe", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA H20-3e", "NVIDIA B300 MIG 34GB"),
    ],
)
def test_an_unknown_gpu_says_what_to_do(gpus: Callable[..., None], name: str) -> None:
    gpus((name, 24 * GIB))
    with pytest.raises(ClusterError) as error:
        detect()
    assert name in str(error.value) and "TOML" in str(error.value) and "h100-sxm" in str(error.value)


def test_the_smallest_memory_counts_and_kinds_do_not_mix(gpus: Callable[..., None]) -> None:
    gpus(("NVIDIA L4", 22 * GIB), ("NVIDIA L4", 20 * GIB))
    assert detect().device.memory_bytes == 20 * GIB
    gpus(("NVIDIA L4", 22 * GIB), ("NVIDIA A10G", 22 * GIB))
    with pytest.raises(ClusterError, match="must be equal"):
        detect()


def test_fewer_gpus_can_be_taken_but_not_more(gpus: Callable[..., None]) -> None:
    gpus(*[("NVIDIA L4", 22 * GIB)] * 4)
    assert detect(2).num_devices == 2
    with pytest.raises(ClusterError, match="num_devices exceeds the visible GPUs"):
        detect(8)
    with pytest.raises(ClusterError, match="at least one"):
        detect(0)


@pytest.mark.parametrize(
    ("visible", "world", "local", "shape"),
    [
        (8, "16", "8", (2, 8)),
        (4, "4", "4", (1, 4)),
        (8, "4", "2", (2, 2)),
        (1, "16", "8", (2, 8)),
        (4, "8", None, (2, 4)),
    ],
)
def test_nodes_come_from_torchrun(
    gpus: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    visible: int,
    world: str,
    local: str | None,
    shape: tuple[int, int],
) -> None:
    gpus(*[("NVIDIA H100 80GB HBM3", 79 * GIB)] * visible)
    monkeypatch.setenv("WORLD_SIZE", world)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    cluster = detect()
    assert (cluster.num_nodes, cluster.devices_per_node) == shape


@pytest.mark.parametrize(
    ("world", "shape"),
    [("4", (1, 4)), ("16", (1, 16)), ("72", (1, 72)), ("144", (2, 72)), ("128", (2, 64)), ("80", (2, 40))],
)
def test_trays_of_a_rack_are_one_node(
    gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch, world: str, shape: tuple[int, int]
) -> None:
    """NVLink joins up to 72 GPUs of trays with four, as many of which a launcher takes for a node."""
    gpus(*[("NVIDIA GB200", 185 * GIB)] * 4)
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    cluster = detect()
    assert (cluster.num_nodes, cluster.devices_per_node) == shape


@pytest.mark.parametrize(("world", "local", "num_devices"), [("6", "4", None), ("8", "8", None), ("4", "4", 2)])
def test_a_launch_that_does_not_fit_the_gpus_is_refused(
    gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch, world: str, local: str, num_devices: int | None
) -> None:
    gpus(*[("NVIDIA L4", 22 * GIB)] * 4)
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    with pytest.raises(ClusterError, match="one per GPU"):
        detect(num_devices)


# --- CPU --------------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
def test_a_process_that_dies_ends_the_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start = processes._command

    def command(task: Mapping[str, Any]) -> list[str]:
        return start(task) if task["rank"] == 0 else [sys.executable, "-c", "import sys; sys.exit('out of luck')"]

    monkeypatch.setattr(processes, "_command", command)
    with pytest.raises(ClusterError, match="out of luck"):
        run_processes(2, tmp_path / "samples.jsonl", "brief")


def test_processes_that_hang_are_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        processes, "_command", lambda task: [sys.executable, "-S", "-c", "import time; time.sleep(900)"]
    )
    begin = time.monotonic()
    with pytest.raises(ClusterError, match="did not finish in time"):
        run_processes(2, tmp_path / "samples.jsonl", "brief", timeout_seconds=0.5)
    assert time.monotonic() - begin < 600  # the processes themselves would sleep for longer


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def share() -> list[float]:
    """The share of its cores that the next made-up measurement had."""
    return [1.0]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, share: list[float]) -> list[int]:
    """The calls of a `measure` that returns made-up times at once, without CUDA."""
    calls: list[int] = []

    def fake(num_processes: int) -> Profile:
        calls.append(num_processes)
        samples = Samples(_provenance(num_processes))
        works = [
            compute.Work("matmul", 1e9, 1e6, "fp32", (512, 512, 2000)),
            compute.Work("memory", 0.0, 1e8),
            compute.Work("attention", 1e9, 1e6),
        ]
        times = {Case(work.kind, work.kind, {}, work): 0.02 * len(calls) for work in works}
        times |= {Case("overhead", "block forward"): 1e-4, Case("overhead", "block forward and backward"): 3.8e-4}
        for num_bytes in (2**10, 2**20, 2**24) if num_processes > 1 else ():
            parameters = {"kind": "all_reduce", "num_bytes": num_bytes, "group_size": num_processes, "stride": 1}
            times[Case("collective", f"all_reduce {num_bytes}", parameters)] = 1e-3 + num_bytes / 1e9
        for case, seconds in times.items():
            samples.add(Sample(case, 0, Timing(seconds, 1, share[0])))
        return fitted(samples)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(detect_module, "measure", fake)
    return calls


def _provenance(num_processes: int) -> Provenance:
    memory = host_memory_bytes() // num_processes
    return Provenance("2026", "here", "CPU", "2.13", "", "", "gloo", 1, num_processes, 2.0, memory, 2**28)


def test_a_measurement_is_kept_until_refreshed(counted: list[int]) -> None:
    first = detect(2)
    assert detect(2) == first and counted == [2]
    assert detect(2, refresh=True).device.peak("fp32") < first.device.peak("fp32")
    assert counted == [2, 2]


def test_the_cache_tells_counts_and_machines_apart(counted: list[int]) -> None:
    detect(2)
    detect(3)
    assert counted == [2, 3]
    paths = {Machine(cpu, cores, "2.13").cache_path(n) for cpu in "ab" for cores in (2, 4) for n in (2, 4)}
    assert len(paths) == 8


def test_a_busy_machine_is_warned_of_and_soon_measured_again(counted: list[int], share: list[float]) -> None:
    share[0] = 0.5
    with pytest.warns(UserWarning, match="other programs took 50% of the cores"):
        busy = detect(2)
    share[0] = 1.0
    assert detect(2) == busy and counted == [2]
    path = Machine.here().cache_path(2)
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 3600))
    assert "other programs" not in detect(2).device.source and counted == [2, 2]
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 3600))
    detect(2)
    assert counted == [2, 2]


def test_a_damaged_cache_is_measured_again(counted: list[int]) -> None:
    first = detect(2)
    Machine.here().cache_path(2).write_text("num_nodes = 'many'")
    assert detect(2).num_devices == first.num_devices and counted == [2, 2]


def test_a_cache_that_cannot_be_written_is_no_error(counted: list[int], tmp_path: Path) -> None:
    (tmp_path / "autopar").write_text("a file where the folder should be")
    assert detect(2).num_devices == 2


def test_the_default_count_is_the_launchers_or_four(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert detect().num_devices == 4
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert detect().num_devices == 3


def test_one_process_has_the_builtin_loopback(counted: list[int]) -> None:
    assert detect(1).intra_node == catalog.link("loopback")
