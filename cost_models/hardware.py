"""Frozen descriptions of one device and one link. Figures and their sources are in ``machines/*.toml``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

DTYPE_FALLBACKS: Mapping[str, tuple[str, ...]] = {
    "fp32": (),
    "tf32": ("fp32",),
    "bf16": ("fp32",),
    "fp16": ("fp32",),
    "fp8": ("fp16", "bf16", "fp32"),
    "mxfp8": (),
    "nvfp4": (),
    "fp64": (),
    "complex64": ("fp32",),
    "bool": ("fp32",),
    "uint8": ("fp32",),
    "int8": ("fp32",),
    "int16": ("fp32",),
    "int32": ("fp32",),
    "int64": ("fp32",),
}
"""The dtypes that replace a dtype the device has no units for: the first available one that represents its values
exactly (so bf16 never runs as fp16, whose range is smaller). Integers and complex numbers are priced as fp32. Formats
with a scale for every 32 (mxfp8) or 16 values (nvfp4) have no fallback."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p")
"""The kinds that `collective` prices and that a link may have factors for."""


def _require_positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{owner}: {name} must be positive and finite, got {value!r}")


def _require_not_negative(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{owner}: {name} must be zero or more and finite, got {value!r}")


def _require_fraction(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 < value <= 1:
            raise ValueError(f"{owner}: {name} must be in (0, 1], got {value!r}")


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or CPU process).

    memory_bytes: available to one process, before `reserved_bytes`.
    memory_bytes_per_second: nominal. peak_flops_per_second: nominal dense peak by dtype; "fp32" is required and means
    true fp32 (PyTorch does not use tf32 for fp32 matmuls by default).
    kernel_launch_seconds: fixed cost of one kernel.
    host_call_seconds: on a GPU, the host's time to issue one small call of PyTorch with its autograd and launch,
    measured in training steps, not in a loop of one call.
    matmul_efficiency, attention_efficiency, memory_efficiency: the fraction of the peak that large kernels reach.
    matmul_ramp_seconds, memory_ramp_seconds: ideal time at which a kernel reaches half of that fraction.
    matmul_tile: rows and columns of an output tile; smaller matrices are padded to it.
    num_processors: streaming multiprocessors of a GPU. Matmuls of known shape are then priced as waves of tiles and
    attention as waves of blocks (compute.py), and matmul_tile and matmul_ramp_seconds serve only other shapes; 0: not
    modeled.
    special_seconds: of one exponential, error function, square root or the like of one element, where that takes
    longer than its bytes (CPUs).
    core_share: of a CPU process, its share of a core while all processes compute; below 1 where processes outnumber
    cores, and rates are scaled by it.
    output_exposed: the share of the time to write a matmul's output in which its processors do not multiply.
    attention_variants: the fraction of the peak that a named kernel reaches forward on long sequences without a mask
    ("fa2", "fa3", "cudnn", ...), and with the suffix ".backward" in its backward.
    cache_bytes, cache_bytes_per_second: of the last-level cache, where kernels that fit in it are measurably faster.
    reserved_bytes: driver context, library workspaces and communication buffers.
    host_link_bytes_per_second: achieved by copies to or from host memory, one direction. host_memory_bytes_per_second:
    the device's share of the host's own memory bandwidth (for the update of an offloaded optimizer).
    disk_bytes_per_second: the device's share of the bandwidth of the host's disks.
    intra_link, inter_link: names of the usual links inside and between nodes ("" if none is usual).
    source: the origin of the figures.

    The mapping is copied and must not be changed afterwards. Raises ValueError for figures out of range.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_second: float
    peak_flops_per_second: Mapping[str, float] = field(hash=False)
    kernel_launch_seconds: float
    matmul_efficiency: float
    memory_efficiency: float
    source: str
    attention_efficiency: float = 0.5
    matmul_ramp_seconds: float = 0.0
    memory_ramp_seconds: float = 0.0
    matmul_tile: int = 1
    num_processors: int = 0
    special_seconds: float = 0.0
    core_share: float = 1.0
    output_exposed: float = 0.0
    attention_variants: Mapping[str, float] = field(default_factory=dict, hash=False)
    cache_bytes: int = 0
    cache_bytes_per_second: float = 0.0
    reserved_bytes: int = 0
    host_link_bytes_per_second: float = 12e9
    host_memory_bytes_per_second: float = 12e9
    disk_bytes_per_second: float = 1e9
    intra_link: str = ""
    inter_link: str = ""
    host_call_seconds: float = 20e-6

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flops_per_second", dict(self.peak_flops_per_second))
        object.__setattr__(self, "attention_variants", dict(self.attention_variants))
        if "fp32" not in self.peak_flops_per_second:
            raise ValueError(f"device {self.name}: peak_flops_per_second needs an entry for fp32")
        owner = f"device {self.name}"
        _require_positive(
            owner,
            memory_bytes=self.memory_bytes,
            memory_bytes_per_second=self.memory_bytes_per_second,
            matmul_tile=self.matmul_tile,
            host_link_bytes_per_second=self.host_link_bytes_per_second,
            host_memory_bytes_per_second=self.host_memory_bytes_per_second,
            disk_bytes_per_second=self.disk_bytes_per_second,
            **{f"peak_flops_per_second.{dtype}": peak for dtype, peak in self.peak_flops_per_second.items()},
        )
        _require_not_negative(
            owner,
            kernel_launch_seconds=self.kernel_launch_seconds,
            host_call_seconds=self.host_call_seconds,
            matmul_ramp_seconds=self.matmul_ramp_seconds,
            memory_ramp_seconds=self.memory_ramp_seconds,
            num_processors=self.num_processors,
            special_seconds=self.special_seconds,
            output_exposed=self.output_exposed,
            cache_bytes=self.cache_bytes,
            cache_bytes_per_second=self.cache_bytes_per_second,
            reserved_bytes=self.reserved_bytes,
        )
        _require_fraction(
            owner,
            matmul_efficiency=self.matmul_efficiency,
            attention_efficiency=self.attention_efficiency,
            memory_efficiency=self.memory_efficiency,
            **{f"attention_variants.{name}": rate for name, rate in self.attention_variants.items()},
        )
        if (self.cache_bytes > 0) != (self.cache_bytes_per_second > 0):
            raise ValueError(f"{owner}: cache_bytes and cache_bytes_per_second go together")
        if 0 < self.cache_bytes_per_second < self.memory_bytes_per_second:
            raise ValueError(f"{owner}: cache_bytes_per_second is less than memory_bytes_per_second")

    @property
    def is_cpu(self) -> bool:
        """Whether this is a process on a CPU; its name then begins with "cpu"."""
        return self.name.startswith("cpu")

    def peak(self, dtype: str) -> float:
        """Return the nominal peak FLOP/s of contractions in `dtype`, by DTYPE_FALLBACKS if the device lacks the dtype.

        Raises ValueError if the device lists neither the dtype nor any of its fallbacks.
        """
        for candidate in (dtype, *DTYPE_FALLBACKS.get(dtype, ())):
            if candidate in self.peak_flops_per_second:
                return self.peak_flops_per_second[candidate]
        dtypes = ", ".join(sorted({*DTYPE_FALLBACKS, *self.peak_flops_per_second}))
        raise ValueError(f"device {self.name} has no peak for dtype {dtype!r}; known dtypes: {dtypes}")


@dataclass(frozen=True, slots=True)
class Link:
    """One kind of connection between devices.

    bytes_per_second: nominal, one direction, per device; per node if `shared_by_node`.
    efficiency: the fraction that large messages reach. latency_seconds: of one hop of one message.
    startup_seconds: fixed cost of one collective.
    contention_per_doubling: c of g = 1 + c log2(nodes), which divides rates and multiplies hops, for fabrics that slow
    down as more nodes communicate at once.
    in_network_reduction: the switch sums, so that an all_reduce moves every byte once up and once down (NVLink SHARP).
    shared_by_node: the devices of a node share the link.
    latency_factors, rate_factors: factors by kind of collective ("all_reduce", ...; default 1) on its startup and
    hops, and on its rate. For libraries whose algorithm differs from the one that `collective` prices: gloo runs a
    reduce_scatter as an all_reduce.
    hidden_share: the measured share of a collective's time that does not delay a rank's concurrent computation.
    source: the origin of the figures.

    The mappings are copied and must not be changed afterwards. Raises ValueError for figures out of range.
    """

    name: str
    bytes_per_second: float
    latency_seconds: float
    source: str
    efficiency: float = 1.0
    startup_seconds: float = 0.0
    contention_per_doubling: float = 0.0
    in_network_reduction: bool = False
    shared_by_node: bool = False
    latency_factors: Mapping[str, float] = field(default_factory=dict, hash=False)
    rate_factors: Mapping[str, float] = field(default_factory=dict, hash=False)
    hidden_share: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "latency_factors", dict(self.latency_factors))
        object.__setattr__(self, "rate_factors", dict(self.rate_factors))
        owner = f"link {self.name}"
        if surplus := sorted({*self.latency_factors, *self.rate_factors} - set(COLLECTIVES)):
            raise ValueError(f"{owner}: factors for unknown collectives {surplus}; known: {', '.join(COLLECTIVES)}")
        _require_positive(
            owner,
            bytes_per_second=self.bytes_per_second,
            **{f"latency_factors.{kind}": factor for kind, factor in self.latency_factors.items()},
            **{f"rate_factors.{kind}": factor for kind, factor in self.rate_factors.items()},
        )
        _require_not_negative(
            owner,
            latency_seconds=self.latency_seconds,
            startup_seconds=self.startup_seconds,
            contention_per_doubling=self.contention_per_doubling,
        )
        _require_fraction(owner, efficiency=self.efficiency)
        if not 0 <= self.hidden_share < 1:
            raise ValueError(f"{owner}: hidden_share must be 0 or more and below 1, got {self.hidden_share}")

    @property
    def achievable_bytes_per_second(self) -> float:
        """Return the rate of large messages: bytes_per_second x efficiency."""
        return self.bytes_per_second * self.efficiency
