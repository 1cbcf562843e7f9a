"""Base rates of all prices: collectives, reshards, memory-bound and attention kernels on one mesh of one cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from autopar.ir.compression import Compression
from autopar.ir.graph import TensorMeta
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements
from autopar.sharding.call_options import num_local
from autopar.sharding.reshard import Step, steps
from cost_models import collective, compute
from cost_models.machine import Cluster

ADAM_BYTES = 28.0
"""Bytes that one AdamW update moves per element: weight, both moments read and written, gradient read (fp32)."""

FLASH = "fa2"
"""The algorithm of torch's fused attention on GPUs (T. Dao, "FlashAttention-2" (2023))."""

TIE = 1e-9
"""Share by which a reshard of a dim in sections counts as slower: of equally fast choices, the one that moves a dim
in one piece wins. Rows are gathered before a view flattens them, where the gather can be joined with a product."""


@dataclass(frozen=True, slots=True)
class Training:
    """The settings of a training step that affect costs.

    state_bytes: optimizer state per parameter. update_bytes: temporaries of its update per element, of all
    parameters at once or (updates_together: no) of one after the other. update_traffic: bytes that it moves per
    element. writes_copies: whether, in programs with kernels, it also writes the compute tensors. compute_bytes,
    master_bytes: of a weight as computed with, and of a separate fp32 copy (0 if the weight itself is fp32).
    gradient_bytes: as accumulated and reduced. whole_share: the share of the trained elements that one rank each
    updates whole for all (codegen/runtime/whole_updates.py). update_flops: of matrix products per such element, in
    update_dtype. offload: "optimizer": state and separate masters are in host memory, and the host updates them;
    "parameters": under ZeRO-3 the shards of the parameters too. compression: of ZeRO's collectives
    (quantised_collectives.py). has_first_pass: whether the forwards of all micro-batches run twice, first without
    gradients.
    """

    num_micro_batches: int = 1
    state_bytes: float = 8.0
    compute_bytes: int = 4
    master_bytes: int = 0
    gradient_bytes: int = 4
    offload: str = ""
    update_bytes: float = 0.0
    updates_together: bool = False
    update_traffic: float = ADAM_BYTES
    whole_share: float = 0.0
    update_flops: float = 0.0
    update_dtype: str = "fp32"
    writes_copies: bool = False
    compression: Compression = Compression()
    has_first_pass: bool = False


def is_cpu(cluster: Cluster) -> bool:
    """Return whether ranks are processes on a CPU."""
    return cluster.device.is_cpu


def _cache() -> Any:
    """Return a field that starts empty in every object, also where `replace` copies one."""
    return field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True)
class Rates:
    """Costs on one mesh of one cluster. Caches collective times; stores no decision.

    hidden_fraction: share of gradient and parameter traffic that overlaps compute. fragmentation: the allocator's
    reserve beyond activations and transients, as a fraction of them. overlap_share: the share of weight gradients'
    seconds in which a reshard's sum runs (overlap.py); 0 if programs do not overlap them. host_call_seconds: of the
    host for one call (host_calls.py); 0 if not visible, as on CPUs, whose kernels' launches include it. is_compiled:
    whether layers run as compiled graphs. is_captured: whether the step runs as CUDA graphs (captured_steps.py); calls
    then take no host seconds.
    """

    mesh: Mesh
    cluster: Cluster
    training: Training
    hidden_fraction: float = 0.0
    fragmentation: float = 0.0
    overlap_share: float = 0.0
    host_call_seconds: float = 0.0
    is_compiled: bool = False
    is_captured: bool = False
    _times: dict[tuple[collective.Kind, tuple[int, ...], float], float] = _cache()
    _memory_times: dict[float, float] = _cache()
    _reshards: dict[tuple[Placements, Placements, int, bool], float] = _cache()
    _matrices: dict[tuple[tuple[Placements, ...], tuple[Placements, ...], int, bool], np.ndarray] = _cache()

    @cached_property
    def groups(self) -> tuple[collective.Group, ...]:
        """Return the process group of each axis on the cluster."""
        return tuple(
            collective.Group(size, self.mesh.stride(axis))
            for axis, size in zip(self.mesh.axes, self.mesh.sizes, strict=True)
        )

    def group(self, axes: tuple[int, ...]) -> collective.Group:
        """Return the process group of neighboring axes, flattened."""
        return collective.Group(math.prod(self.mesh.sizes[axis] for axis in axes), self.groups[axes[-1]].stride)

    def collective_seconds(self, kind: collective.Kind, axis: int, num_bytes: float) -> float:
        """Price one collective on one axis; num_bytes as cost_models.collective defines it."""
        return self.joint_seconds(kind, (axis,), num_bytes)

    def joint_seconds(self, kind: collective.Kind, axes: tuple[int, ...], num_bytes: float) -> float:
        """Price one collective on neighboring axes, flattened."""
        key = (kind, axes, num_bytes)
        if key not in self._times:
            self._times[key] = collective.seconds(kind, num_bytes, self.group(axes), self.cluster)
        return self._times[key]

    # --- resharding -------------------------------------------------------------------------------------------

    def step_seconds(self, step: Step, meta: TensorMeta) -> tuple[float, float]:
        """Return the seconds (forward, backward) of one reshard step of the whole tensor `meta`: collective plus
        local copies."""
        num_bytes = meta.num_bytes * step.fraction
        forward = self.collective_seconds(step.forward, step.axis, num_bytes) if step.forward else 0.0
        backward = (
            self.collective_seconds(step.backward, step.axis, num_bytes)
            if step.backward and meta.requires_grad
            else 0.0
        )
        copies = self.memory_seconds(2 * num_bytes) if (step.source.kind, step.target.kind) != ("R", "Rp") else 0.0
        return forward + copies, backward + (copies if meta.requires_grad else 0.0)

    def reshard_seconds(self, source: Placements, target: Placements, meta: TensorMeta) -> float:
        """Price the forward (of the first pass, too) and conjugate backward of a reshard, once. inf if there is no
        path."""
        if source == target:
            return 0.0
        key = (source, target, meta.num_bytes, meta.requires_grad)
        if key not in self._reshards:
            path = steps(source, target, self.mesh.sizes)
            both = [self.step_seconds(step, meta) for step in path or ()]
            seconds = sum(self.num_forwards * forward + backward for forward, backward in both)
            self._reshards[key] = math.inf if path is None else seconds
        return self._reshards[key]

    @property
    def num_forwards(self) -> int:
        """Return how often the forward of a micro-batch runs in a step, without recomputation."""
        return 2 if self.training.has_first_pass else 1

    def reshard_matrix(
        self, sources: tuple[Placements, ...], targets: tuple[Placements, ...], meta: TensorMeta
    ) -> np.ndarray:
        """Return [len(sources), len(targets)] seconds of one forward and backward for choosing: sections add TIE."""
        key = (sources, targets, meta.num_bytes, meta.requires_grad)
        if key not in self._matrices:
            unique_s, index_s = _unique(sources)
            unique_t, index_t = _unique(targets)
            small = np.array([[self.reshard_seconds(s, t, meta) for t in unique_t] for s in unique_s])
            cut = np.logical_or.outer([_has_sections(s) for s in unique_s], [_has_sections(t) for t in unique_t])
            self._matrices[key] = (small * np.where(cut, 1 + TIE, 1.0))[np.ix_(index_s, index_t)]
        return self._matrices[key]

    def hidden_seconds(self, last: Step, meta: TensorMeta, covering_seconds: float) -> float:
        """Return the part of a reshard's seconds in which the sum over ranks of its backward overlaps weight gradients,
        which take `covering_seconds`.

        last: its last step. This alone produces what the layers read, and so alone sums their gradients.
        """
        if not meta.requires_grad or last.target.kind != "Rp" or last.backward is None:
            return 0.0
        seconds = self.collective_seconds(last.backward, last.axis, meta.num_bytes * last.fraction)
        return min(seconds, self.overlap_share * covering_seconds)

    def memory_seconds(self, num_bytes: float) -> float:
        """Price a memory-bound kernel that moves num_bytes."""
        if num_bytes not in self._memory_times:
            work = compute.Work("memory", 0.0, num_bytes)
            self._memory_times[num_bytes] = compute.seconds(work, self.cluster.device)
        return self._memory_times[num_bytes]

    def flash_seconds(
        self,
        flops: float,
        num_bytes: float,
        dtype: str,
        shape: tuple[int, int, int],
        causal: bool,
        variant: str = FLASH,
    ) -> tuple[float, float]:
        """Price forward and backward of one attention kernel; shape: heads, queries, keys."""
        device = self.cluster.device
        forward = compute.Work(
            "attention", flops, num_bytes, dtype, shape=shape, variant=variant, backward=False, causal=causal
        )
        backward = replace(forward, flops=2.5 * flops, num_bytes=2 * num_bytes, backward=True)
        return compute.seconds(forward, device), compute.seconds(backward, device)


def are_aligned(dtype: str, *row_lengths: int) -> bool:
    """Return whether rows of these lengths all begin at multiples of 16 bytes. Only 16-bit products ask."""
    return dtype not in ("bf16", "fp16") or not any(length % 8 for length in row_lengths)


def dtype_name(meta: TensorMeta) -> str:
    """Return the dtype of contractions with this result."""
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
    return names.get(str(meta.dtype).removeprefix("torch."), "fp32")


def num_local_bytes(meta: TensorMeta, placements: Placements, mesh: Mesh) -> float:
    """Return the bytes of one rank's part of a tensor."""
    return float(num_local(meta, placements, mesh) * meta.dtype.itemsize)


def num_local_dim(meta: TensorMeta, placements: Placements, mesh: Mesh, dim: int = -1) -> int:
    """Return the local size of a dim, counted from the last."""
    if not meta.shape:
        return 1
    number = len(meta.shape) + dim
    ways = math.prod(n for p, n in zip(placements, mesh.sizes, strict=True) if p.is_shard and p.dim == number)
    return max(meta.shape[dim] // ways, 1)


def _has_sections(placements: Placements) -> bool:
    """Return whether the tensor is sharded in sections on some axis."""
    return any(placement.sections > 1 for placement in placements)


def _unique(items: tuple[Placements, ...]) -> tuple[list[Placements], list[int]]:
    index: Mapping[Placements, int] = {item: i for i, item in enumerate(dict.fromkeys(items))}
    return list(index), [index[item] for item in items]
