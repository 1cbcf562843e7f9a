"""The time of one kernel: a roofline whose roofs are reached gradually.

S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model", CACM 52 (2009), with the
usual kernel overheads added. With T the ideal time at the nominal peak, the achieved fraction of the peak is

    efficiency(T) = e * T / (T + r)        (e, r of the device: asymptotic efficiency and ramp)

so that one roof costs (T + r) / e, and the kernel  launch + max(arithmetic roof, memory roof).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from cost_models.hardware import Device

Kind = Literal["matmul", "attention", "memory"]


@dataclass(frozen=True, slots=True)
class Work:
    """What one kernel does.

    kind: "matmul" (any contraction), "attention" (a fused one), "memory" (elementwise, reductions, copies).
    flops: floating-point operations, a multiply-add counted as two. num_bytes: read and written, each byte once.
    dtype: of the operands ("fp32", "bf16", ...; see Device.peak). shape: (m, n, k) of a matmul where known.
    Raises ValueError for an unknown kind, negative amounts, or a shape of another length than 0 or 3.
    """

    kind: Kind
    flops: float
    num_bytes: float
    dtype: str = "fp32"
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("matmul", "attention", "memory"):
            raise ValueError(f"unknown kind of work {self.kind!r}; known: matmul, attention, memory")
        # Written so that nan is refused as well.
        if not (self.flops >= 0 and self.num_bytes >= 0):
            raise ValueError(f"flops and num_bytes must be zero or more, got {self.flops} and {self.num_bytes}")
        if self.shape and (len(self.shape) != 3 or min(self.shape) < 1):
            raise ValueError(f"shape must be (m, n, k), each at least 1, got {self.shape}")


def seconds(work: Work, device: Device) -> float:
    """Time of `work` on `device`. Nothing to do costs nothing, not even a launch.

    "memory" work is priced at the fp32 rate of the vector units whatever its dtype: elementwise kernels compute in
    fp32 and never use matrix units. Raises ValueError for a dtype that the device cannot compute in.
    """
    if work.flops == 0 and work.num_bytes == 0:
        return 0.0
    memory_seconds = _roof(
        work.num_bytes / device.memory_bytes_per_second, device.memory_efficiency, device.memory_ramp_seconds
    )
    return device.kernel_launch_seconds + max(_arithmetic_seconds(work, device), memory_seconds)


def _arithmetic_seconds(work: Work, device: Device) -> float:
    if work.flops == 0:
        return 0.0
    if work.kind == "memory":
        return work.flops / device.peak("fp32")
    efficiency = device.matmul_efficiency if work.kind == "matmul" else device.attention_efficiency
    ideal_seconds = padding(work.shape, device.matmul_tile) * work.flops / device.peak(work.dtype)
    return _roof(ideal_seconds, efficiency, device.matmul_ramp_seconds)


def _roof(ideal_seconds: float, efficiency: float, ramp_seconds: float) -> float:
    return (ideal_seconds + ramp_seconds) / efficiency if ideal_seconds > 0 else 0.0


def padding(shape: tuple[int, ...], tile: int) -> float:
    """How many times the useful arithmetic is done when m and n are rounded up to whole tiles; 1 if unknown.

    NVIDIA, "Matrix Multiplication Background User's Guide" (DU-09799-001), section "Tile quantization".
    """
    if not shape:
        return 1.0
    m, n, _ = shape
    return (math.ceil(m / tile) * tile / m) * (math.ceil(n / tile) * tile / n)
