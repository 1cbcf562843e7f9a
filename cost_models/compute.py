"""Price one kernel by a roofline whose roofs are reached gradually.

S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model", CACM 52 (2009), with the
usual kernel overheads. With T the ideal time at the nominal peak, the achieved fraction of the peak is

    efficiency(T) = e * T / (T + r)        (e, r of the device: asymptotic efficiency and ramp)

so that one roof costs (T + r) / e, and the kernel costs launch + max(arithmetic roof, memory roof).

One core of a CPU cannot multiply while it waits for a weight outside its caches. A matmul there costs the sum of its
arithmetic roof and its bytes at the nominal bandwidth.

If the device states its number of processors, the arithmetic roof of a matmul of known shape is that of its tiles. A
product of m x n x k is cut into tiles of a x b, each computed by one processor; P processors compute P tiles per wave:

    waves * 2 a b k / (peak / P) / (e s) + x * output bytes / memory rate,    waves = ceil(ceil(m/a) ceil(n/b) / P)

The library takes the cheapest tile of TILES (NVIDIA, "Matrix Multiplication Background User's Guide", DU-09799-001,
sections "Tile quantization" and "Wave quantization"). s: the relative rate of a small tile, which has fewer products
per operand read. x (output_exposed of the device): processors that write their tile do not multiply, unless others of
the same wave do. So a product loses more the shorter its k. Few tiles with a long k are also cut along k, so that all
processors work (split-k).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from cost_models.hardware import Device

Kind = Literal["matmul", "attention", "memory"]

TILES = (
    (256, 128, 256 * 128),
    (128, 256, 128 * 256),
    (128, 128, 128 * 128),
    (128, 64, 128 * 64 / 0.8),
    (64, 64, 64 * 64 / 0.8**2),
)
"""Rows and columns of the available tiles, and their elements divided by their relative rate. Sizes: CUTLASS's
defaults for tensor cores, also listed in the guide above. Rates: 0.8 per halving, fitted to measured_ops.json
(benchmarks/operators.py)."""

SPLIT_TILE = 128
"""Rows and columns of the tiles that are cut along k."""

ATTENTION_BLOCK = 128
"""Queries, and keys, of one block of a flash kernel (T. Dao, "FlashAttention-2" (2023), section 3.3)."""

ATTENTION_RAMP = {False: 64.0, True: 256.0}
"""Keys that one block of queries could visit in the time of its start and end, forward and (True) backward. Fitted,
with CAUSAL_RATE, to FlashAttention-2 in J. Shah et al., "FlashAttention-3" (2024), figures 5 and 6."""

CAUSAL_RATE = 0.91
"""The fraction of the rate that remains with blocks of unequal length."""

UNALIGNED_RATE = 0.35
"""The relative rate of 16-bit matmuls with rows that do not begin at multiples of 16 bytes. These run older kernels
without bulk copies: 248 TFLOP/s for a vocabulary of 30522, 719 for the layers of the same step
(shared/data/gpu_h100_families.jsonl, bert-large on an H100)."""

WIDE = {"fp64": 8, "complex64": 8, "fp32": 4, "tf32": 4}
"""Bytes per element of a matmul's output, for dtypes where it is not 2."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one kernel.

    kind: "matmul" (any contraction), "attention" (a fused one), "memory" (elementwise, reductions, copies).
    flops: floating-point operations, a multiply-add counted as two; of attention with a causal mask only the half below
    the diagonal, and of its backward 2.5 times the forward's. num_bytes: read and written, each byte once.
    dtype: of the operands ("fp32", "bf16", ...; see Device.peak).
    aligned: of a matmul, whether the rows of all three matrices begin at multiples of 16 bytes.
    specials: exponentials, error functions, square roots and the like of a memory-bound kernel.
    shape: (m, n, k) of a matmul; `flops` may count a batch of them. For attention (batch x heads, queries, keys); ()
    where unknown. variant, backward, causal: for attention, the kernel (Device.attention_variants), the pass, and
    whether the kernel skips masked blocks.
    Raises ValueError for an unknown kind, negative amounts, or a shape whose length is neither 0 nor 3.
    """

    kind: Kind
    flops: float
    num_bytes: float
    dtype: str = "fp32"
    shape: tuple[int, ...] = ()
    variant: str = ""
    backward: bool = False
    causal: bool = False
    specials: float = 0.0
    aligned: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("matmul", "attention", "memory"):
            raise ValueError(f"unknown kind of work {self.kind!r}; known: matmul, attention, memory")
        # This form also rejects nan.
        if not (self.flops >= 0 and self.num_bytes >= 0):
            raise ValueError(f"flops and num_bytes must be zero or more, got {self.flops} and {self.num_bytes}")
        if self.shape and (len(self.shape) != 3 or min(self.shape) < 1):
            raise ValueError(f"shape must be (m, n, k) or (heads, queries, keys), each at least 1, got {self.shape}")


def seconds(work: Work, device: Device) -> float:
    """Return the time of `work` on `device`. Empty work costs nothing, not even a launch.

    "memory" work is priced at the fp32 rate of the vector units, whatever its dtype: elementwise kernels compute in
    fp32 and never use matrix units. Raises ValueError for a dtype that the device cannot compute in.
    """
    if work.flops == 0 and work.num_bytes == 0:
        return 0.0
    arithmetic = _arithmetic_seconds(work, device)
    if work.kind == "matmul" and device.is_cpu:
        return device.kernel_launch_seconds + arithmetic + work.num_bytes / device.memory_bytes_per_second
    return device.kernel_launch_seconds + max(arithmetic, _memory_seconds(work, device))


def _memory_seconds(work: Work, device: Device) -> float:
    ideal_seconds = work.num_bytes / device.memory_bytes_per_second
    if device.cache_bytes and work.kind == "memory":
        saved = 1 - device.memory_bytes_per_second / device.cache_bytes_per_second
        ideal_seconds *= 1 - saved * _cached(work.num_bytes, device)
    return _roof(ideal_seconds, device.memory_efficiency, device.memory_ramp_seconds)


def _cached(num_bytes: float, device: Device) -> float:
    """Return the share of a kernel's bytes in the last-level cache: all up to half its size, none from 1.5 times."""
    return min(1.0, max(0.0, 1.5 - num_bytes / device.cache_bytes))


def _arithmetic_seconds(work: Work, device: Device) -> float:
    if work.kind == "memory":
        return work.flops / device.peak("fp32") + work.specials * device.special_seconds
    if work.flops == 0:
        return 0.0
    peak = device.peak(work.dtype)
    if work.kind == "attention":
        return _attention_seconds(work, device, peak)
    if device.num_processors and work.shape:
        return _tiled_seconds(work, device, peak)
    ideal_seconds = padding(work.shape, device.matmul_tile) * work.flops / peak
    return _roof(ideal_seconds, device.matmul_efficiency, device.matmul_ramp_seconds)


def _tiled_seconds(work: Work, device: Device, peak: float) -> float:
    """Return the arithmetic roof of a matmul of known shape, or of a batch of them."""
    m, n, k = work.shape
    num_processors = device.num_processors
    count = work.flops / (2.0 * m * n * k)
    # One multiply-add of a full wave of one-element tiles.
    rate = peak * device.matmul_efficiency * (1.0 if work.aligned else UNALIGNED_RATE)
    unit = 2.0 * k * num_processors / rate
    elements = math.inf
    per_processor = count / num_processors
    for rows, columns, cost in TILES:
        waves = math.ceil(-(-m // rows) * -(-n // columns) * per_processor)
        if waves * cost < elements:
            elements = waves * cost
    memory_rate = device.memory_bytes_per_second * device.memory_efficiency
    written = m * n * count * WIDE.get(work.dtype, 2) * device.output_exposed / memory_rate
    tiles = -(-m // SPLIT_TILE) * -(-n // SPLIT_TILE) * count
    if tiles * 2 > num_processors:
        return elements * unit + written
    # Every split writes its sums in fp32 and the last one reads them: at most one tile per processor.
    parts = num_processors // max(math.ceil(tiles), 1)
    sums = 8.0 * SPLIT_TILE**2 * num_processors / memory_rate
    return min(elements * unit, SPLIT_TILE**2 / parts * unit + sums) + written


def _attention_seconds(work: Work, device: Device, peak: float) -> float:
    variants, variant = device.attention_variants, work.variant
    rate = variants.get(variant, device.attention_efficiency)
    if work.backward:
        rate = variants.get(f"{variant}.backward", rate)
    if not (device.num_processors and work.shape):
        # torch's CPU kernel also computes masked elements.
        flops = work.flops * (2 if work.causal and device.is_cpu else 1)
        return _roof(flops / peak, rate, device.matmul_ramp_seconds)
    heads, queries, keys = work.shape
    visited = keys / 2 if work.causal else keys
    excess = ATTENTION_RAMP[work.backward] / visited
    if work.causal:
        # The blocks on the diagonal are computed in full.
        excess += ATTENTION_BLOCK / keys
        rate *= CAUSAL_RATE
    ideal_seconds = work.flops / peak * (1 + excess)
    # Padded to full blocks of queries, and these to full waves.
    blocks = heads * -(-queries // ATTENTION_BLOCK)
    waves = -(-blocks // device.num_processors)
    return ideal_seconds / rate * waves * device.num_processors * ATTENTION_BLOCK / (heads * queries)


def _roof(ideal_seconds: float, efficiency: float, ramp_seconds: float) -> float:
    return (ideal_seconds + ramp_seconds) / efficiency if ideal_seconds > 0 else 0.0


def padding(shape: tuple[int, ...], tile: int) -> float:
    """Return the factor by which rounding m and n up to full tiles increases the arithmetic; 1 if the shape is
    unknown.

    NVIDIA, "Matrix Multiplication Background User's Guide" (DU-09799-001), section "Tile quantization".
    """
    if not shape:
        return 1.0
    m, n, _ = shape
    return (math.ceil(m / tile) * tile / m) * (math.ceil(n / tile) * tile / n)
