"""The GPUs that this process sees, known by the names that their driver gives them."""

from __future__ import annotations

import os
import re

import torch

from autopar.errors import ClusterError
from cost_models import catalog
from cost_models.machine import Cluster

GPU_NAMES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (r"(NVIDIA )?(Tesla )?V100-SXM\d(-.*)?", ("v100-16g", "v100-32g"), ""),
    (r"(NVIDIA )?A100-SXM4-\d+GB", ("a100-40g", "a100-80g"), ""),
    (r"(NVIDIA )?A100(-PCIE-\d+GB| \d+GB PCIe)", ("a100-40g", "a100-80g"), "pcie4"),
    (r"(NVIDIA )?A800-SXM4-80GB", ("a800-80g",), ""),
    (r"(NVIDIA )?H100( SXM5)?( 80GB HBM3)?", ("h100-sxm",), ""),
    (r"(NVIDIA )?H800", ("h800-sxm",), ""),
    (r"(NVIDIA )?H20", ("h20",), ""),
    (r"(NVIDIA )?H200( SXM)?", ("h200-sxm",), ""),
    (r"(NVIDIA )?B200", ("b200",), ""),
    (r"(NVIDIA )?B300( SXM6( AC)?)?", ("b300",), ""),
    (r"(NVIDIA )?GB200", ("gb200",), ""),
    (r"(NVIDIA )?GB300", ("gb300",), ""),
    (r"(AMD )?Instinct MI300X( OAM)?", ("mi300x",), ""),
    (r"(NVIDIA )?(GeForce )?RTX 3090", ("rtx3090",), ""),
    (r"(NVIDIA )?(GeForce )?RTX 4090", ("rtx4090",), ""),
    (r"(NVIDIA )?L4", ("l4",), ""),
    (r"(NVIDIA )?A10G", ("a10g",), ""),
    (r"(NVIDIA )?L40S", ("l40s",), ""),
)
"""A pattern for the driver's whole name of a GPU, the built-in devices of that name by memory, and the link inside a
node if it differs from the device's usual link. Slices (MIG), PCIe and NVL variants of other chips are other devices
and do not match. Names as NVML gives them: "NVIDIA GB200", "NVIDIA GB300" (ray-project/ray, pull request 65009),
"NVIDIA B300 SXM6 AC" (NVIDIA/cosmos-framework, pull request 114)."""

RACKS = {"gb200": 72, "gb300": 72}
"""Devices that NVLink joins beyond a launcher's node, which is one tray of a rack."""


def detect_gpus(num_devices: int | None) -> Cluster:
    """Return the visible GPUs, or num_devices of them, as a cluster of a built-in device. Raises ClusterError."""
    require_one(num_devices)
    visible = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = sorted({gpu.name for gpu in visible})
    if len(names) != 1:
        raise ClusterError(
            "all visible GPUs must be equal",
            values=", ".join(names) or "no visible GPU",
            alternatives="CUDA_VISIBLE_DEVICES with GPUs of one kind",
        )
    num_nodes, per_node = _gpu_counts(len(visible), num_devices)
    # Plans must fit the GPU with least memory.
    memory_bytes = min(gpu.total_memory for gpu in visible)
    for pattern, family, link in GPU_NAMES:
        if re.fullmatch(pattern, names[0]):
            nearest = min(family, key=lambda name: abs(catalog.device(name).memory_bytes - memory_bytes))
            num_nodes, per_node = _of_racks(num_nodes, per_node, RACKS.get(nearest, per_node))
            words = [f"{num_nodes}x{per_node}", nearest, *([link] if link else [])]
            return Cluster.parse(" ".join(words)).with_memory(memory_bytes)
    raise ClusterError(
        "autopar has no built-in entry for this GPU",
        values=names[0],
        alternatives=[
            "a TOML file with the figures of the device and its links, as cluster",
            f"a built-in device that is close enough: {', '.join(catalog.devices())}",
        ],
    )


def _of_racks(num_nodes: int, per_node: int, most: int) -> tuple[int, int]:
    """Return whole trays as nodes of at most `most` devices, as few and as even as possible.

    torch does not know which trays share a rack; schedulers fill a rack before the next one."""
    trays = max(n for n in range(1, num_nodes + 1) if num_nodes % n == 0 and (n == 1 or n * per_node <= most))
    return num_nodes // trays, trays * per_node


def _gpu_counts(num_visible: int, num_devices: int | None) -> tuple[int, int]:
    """Return (nodes, devices per node). A launcher may show each process only its own GPU, so one GPU is not
    checked."""
    world, local = from_launcher("WORLD_SIZE"), from_launcher("LOCAL_WORLD_SIZE")
    if world is None:
        if (num_devices or num_visible) > num_visible:
            raise ClusterError(
                "num_devices exceeds the visible GPUs",
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


def from_launcher(name: str) -> int | None:
    """Return a positive number that a launcher such as torchrun left in the environment, or None."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) > 0 else None


def require_one(num_devices: int | None) -> None:
    """Raise ClusterError for a number of devices below one."""
    if num_devices is not None and num_devices < 1:
        raise ClusterError(
            "a cluster needs at least one device", values={"num_devices": num_devices}, alternatives="1 or more"
        )
