"""Bytes on one device: gradients, optimiser state, and what no tensor can use.

The counts per parameter follow S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter
models" (SC 2020), section 3: mixed precision with Adam holds 2 bytes of weights, gradients, and K = 12 bytes of fp32
master copy and moments. ZeRO shards the three separately, so each has its own degree here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cost_models.hardware import Device

FRAGMENTATION = 0.15
"""Extra memory that a caching allocator holds, as a fraction of what comes and goes (activations, transients).

C. Guo et al., "GMLake: efficient and transparent GPU memory defragmentation" (ASPLOS 2024), abstract: 15 % on average
(up to 33 %) of what PyTorch's caching allocator holds is fragmentation that GMLake removes, over eight language models
on A100-80GB. Weights, gradients and optimiser state are allocated once, so it is not applied to them.
"""


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """An optimiser's state, in bytes per parameter, without any fp32 master copy (see Precision)."""

    name: str
    state_bytes_per_parameter: float


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per parameter of the weight computed with, the stored gradient, and a separate fp32 master (0: none)."""

    name: str
    compute_bytes: int
    gradient_bytes: int
    master_bytes: int


OPTIMIZERS: Mapping[str, OptimizerMemory] = MappingProxyType(
    {
        name: OptimizerMemory(name, num_bytes)
        for name, num_bytes in {
            "sgd": 0.0,
            "sgd-momentum": 4.0,  # one fp32 buffer
            "rmsprop": 4.0,  # squared gradients
            "adagrad": 4.0,  # summed squares
            "lion": 4.0,  # one fp32 momentum
            "adam": 8.0,  # two fp32 moments
            "adamw": 8.0,
        }.items()
    }
)

PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "fp32": Precision("fp32", compute_bytes=4, gradient_bytes=4, master_bytes=0),
        # Gradients of micro-batches are accumulated and reduced in fp32: a bf16 sum (8 bits of mantissa) drops every
        # addend below 1/256 of it. ZeRO's table counts 2 bytes here, for gradients that are never accumulated.
        "bf16": Precision("bf16", compute_bytes=2, gradient_bytes=4, master_bytes=4),
    }
)


def optimizer(name: str) -> OptimizerMemory:
    """The optimiser called `name`. Raises ValueError that lists the known ones."""
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}; known: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def precision(name: str) -> Precision:
    """The precision called `name`. Raises ValueError that lists the known ones."""
    if name not in PRECISIONS:
        raise ValueError(f"unknown precision {name!r}; known: {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def gradient_bytes(num_parameters: float, precision: Precision, degree: int = 1) -> float:
    """Bytes per device of stored gradients, over `degree` devices (ZeRO-2 and ZeRO-3: the data-parallel size)."""
    return num_parameters * precision.gradient_bytes / _checked(degree)


def optimizer_bytes(num_parameters: float, optimizer: OptimizerMemory, precision: Precision, degree: int = 1) -> float:
    """Bytes per device of optimiser state and fp32 master copy, over `degree` devices (ZeRO-1 and up)."""
    return num_parameters * (optimizer.state_bytes_per_parameter + precision.master_bytes) / _checked(degree)


def workspace_bytes(device: Device) -> int:
    """Bytes that no tensor of the model can use: driver context, library workspaces, communication buffers."""
    return device.reserved_bytes


def _checked(degree: int) -> int:
    if degree < 1:
        raise ValueError(f"a sharding degree must be at least 1, got {degree}")
    return degree
