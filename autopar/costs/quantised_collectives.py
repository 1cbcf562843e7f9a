"""Compressed collectives of parameters: bytes on the wire, and memory traffic to quantize and dequantize.

The steps follow codegen/runtime/compressed.py. A buffer has e elements over n ranks, with c and g bytes of an element
as computed and as reduced. A code with its share of a scale has w = 1 + 4 / BLOCK_SIZE bytes:

    gather   all_gather of e w    each rank quantises its range, e / n (c + w), and dequantises all, e (w + c)
    reduce   all_to_all of e w    each rank quantises all, e (g + w), and adds up its range: e w read, e / n g written

Triton's kernels (GPUs that have e4m3: `codegen/kernels/quantize.py`) take one pass each. Other GPUs run the torch
reference, whose operators read and write their fp32 intermediates: REFERENCE_BYTES more per element. A CPU does so too,
but in its cache: CPU_BYTES. Only parameters stored with ZeRO over several ranks, with an fp32 master, are compressed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.compression import Compression
from autopar.ir.graph import TensorMeta
from codegen.runtime.codes import BLOCK_SIZE
from cost_models.hardware import Device

CODE_BYTES = 1 + 4 / BLOCK_SIZE
"""Bytes per element of a code and its share of the scale."""
REFERENCE_BYTES: Mapping[str, float] = {"quantise": 58.0, "sum": 25.0, "e4m3": 4.0}
"""Bytes per element that the reference moves beyond a kernel. quantise: zeros 4, their copy 4, abs 8, amax 4,
quotient 8, rounding 8, clamping 8, removal of NaN 8, conversion 4, copy 2. sum: conversion 5, product 8, sum 12.
e4m3: written and read in bf16."""
CPU_BYTES: Mapping[str, float] = {"quantise": 35.0, "sum": 15.0, "e4m3": 100.0}
"""Bytes per element whose copy takes as long as coding on a CPU: one thread quantized 2**22 elements in 2.3 to 2.7
ns each and summed them in 0.9 to 1.3, where a copy of fp32 took 0.44 to 0.56; torch converts e4m3 one by one."""


@dataclass(frozen=True, slots=True)
class SentBytes:
    """Bytes per element of a parameter's buffer on the wire of a gather and of a reduction; codes: "" if exact."""

    gather: float
    reduce: float
    gather_code: str = ""
    reduce_code: str = ""


def can_compress(meta: TensorMeta) -> bool:
    """Return whether the parameter's master is in fp32."""
    return meta.dtype.is_floating_point and meta.dtype.itemsize <= 4


def sent_bytes_of(
    compression: Compression, meta: TensorMeta, size: int, compute_bytes: float, gradient_bytes: float
) -> SentBytes:
    """Return the bytes sent per element of a parameter with state sharded over `size` ranks."""
    if size == 1 or not can_compress(meta):
        return SentBytes(compute_bytes, gradient_bytes)
    gather, reduce = compression.gather, compression.reduce
    return SentBytes(CODE_BYTES if gather else compute_bytes, CODE_BYTES if reduce else gradient_bytes, gather, reduce)


def quantising_bytes(
    sent: SentBytes, size: int, compute_bytes: float, gradient_bytes: float, device: Device
) -> tuple[float, float]:
    """Return the bytes that one rank moves per element to code and decode one gather, and one reduction."""
    beyond = CPU_BYTES if device.is_cpu else REFERENCE_BYTES
    has_kernels = "fp8" in device.peak_flops_per_second
    quantise, add = (0.0, 0.0) if has_kernels else (beyond["quantise"], beyond["sum"])
    gather = reduce = 0.0
    if sent.gather_code:
        coded = compute_bytes + sent.gather + quantise
        gather = coded / size + sent.gather + compute_bytes + (beyond["e4m3"] if sent.gather_code == "fp8" else 0.0)
    if sent.reduce_code:
        reduce = gradient_bytes + 2 * sent.reduce + gradient_bytes / size + quantise + add
    return gather, reduce
