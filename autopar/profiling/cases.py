"""The measured cases as plain data, by device and level."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from autopar.profiling.blocks import TINY
from cost_models.compute import Work

Family = Literal["matmul", "memory", "attention", "overhead", "block", "optimizer", "collective", "overlap", "transfer"]
Level = Literal["brief", "quick", "full"]
"""brief: the level of `detect`, which takes less than a minute before planning."""

ROUNDS: Mapping[Level, int] = {"brief": 3, "quick": 3, "full": 5}
ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
ADAM_BYTES = 28
"""Bytes that an AdamW update in fp32 moves per element: it reads and writes weight and moments, and reads the
gradient."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")


@dataclass(frozen=True, slots=True)
class Case:
    """One call to time. name: unique. work: the work of a kernel, as the cost model counts it.

    parameters: arguments of the function that runs it (kernels.py, collectives.py, transfers.py).
    """

    family: Family
    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    work: Work | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the case as plain values for a file."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Case:
        """Restore a case from `to_json`'s value after a round through JSON."""
        work = value["work"]
        kernel_work = Work(**{**work, "shape": tuple(work["shape"])}) if work else None
        return Case(value["family"], value["name"], value["parameters"], kernel_work)


@dataclass(frozen=True, slots=True)
class Topology:
    """The location of the measuring processes: num_nodes of devices_per_node, numbered node by node."""

    num_nodes: int
    devices_per_node: int
    on_gpu: bool = False

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def groups(self, level: Level) -> tuple[tuple[int, int], ...]:
        """Return (size, stride) of the process groups to measure. All groups of a shape run at once.

        The groups are runs of 2, 4, ... neighbors inside a node (brief and quick: only the smallest), one device of
        every node, and all devices.
        """
        per_node = self.devices_per_node
        inside = [n for n in range(2, per_node) if per_node % n == 0 and n & (n - 1) == 0]
        shapes = [(n, 1) for n in (inside[:1] if level != "full" else inside)]
        shapes += [(per_node, 1)] if per_node > 1 else []
        if self.num_nodes > 1:
            shapes.append((self.num_nodes, per_node))
            shapes += [(self.num_devices, 1)] if per_node > 1 else []
        return tuple(dict.fromkeys(shapes))


def cases(topology: Topology, level: Level) -> list[Case]:
    """Return every case to measure, in order."""
    measured = [
        *_matmuls(topology.on_gpu, level),
        *_memory(topology.on_gpu, level),
        *_attention(topology.on_gpu, level),
    ]
    measured += [Case("overhead", "block forward", TINY), Case("overhead", "block forward and backward", TINY)]
    measured += [] if topology.on_gpu else _blocks(level)
    measured.append(_optimizer(2**24 if topology.on_gpu else 2**20))
    measured += [*_collectives(topology, level), *_overlaps(topology)]
    return measured if level == "brief" else [*measured, *_transfers(topology.on_gpu, level)]


def linear(rows: int, columns: int, depth: int, dtype: str) -> Case:
    """Return the case of [rows, depth] times the transpose of [columns, depth]."""
    size = ITEM_BYTES[dtype]
    num_bytes = float(size * (rows * depth + columns * depth + rows * columns))
    work = Work(
        kind="matmul",
        flops=2.0 * rows * columns * depth,
        num_bytes=num_bytes,
        dtype=dtype,
        shape=(rows, columns, depth),
    )
    name = f"linear {dtype} {rows}x{columns}x{depth}"
    return Case("matmul", name, {"rows": rows, "columns": columns, "depth": depth, "dtype": dtype}, work)


def _matmuls(on_gpu: bool, level: Level) -> Iterator[Case]:
    if not on_gpu:
        shapes = [
            (16, 64, 64), (64, 64, 64), (128, 256, 256), (512, 256, 256), (512, 512, 512), (1024, 1024, 256),
            (8, 512, 512), (512, 16, 512),
        ]  # fmt: skip
        if level == "full":
            # Projections and their gradients of small transformers, unsharded and sharded over two and four ranks.
            shapes += [(256, 768, 256), (256, 1024, 256), (256, 256, 1024), (256, 512, 256), (256, 256, 128)]
            shapes += [(768, 256, 256), (64, 256, 256), (2048, 256, 256)]
        yield from (linear(*shape, "fp32") for shape in shapes)
        yield linear(256, 512, 512, "bf16")
        yield linear(256, 512, 512, "fp64")
        return
    # Rows: tokens of a micro-batch. Columns and depth: projections of hidden sizes 1024 to 8192, unsharded and sharded
    # by tensor parallelism, and the gradients' shapes (depth = tokens).
    widths = [(4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (4096, 512), (1024, 1024), (8192, 8192)]
    rows = (256, 1024, 4096, 16384) if level == "full" else (1024, 4096)
    for dtype in ("bf16", "fp16", "fp32") if level == "full" else ("bf16", "fp32"):
        for columns, depth in widths if dtype == "bf16" else widths[:2]:
            yield from (linear(n, columns, depth, dtype) for n in rows)
        yield linear(4096, 4096, 16384, dtype)
        yield linear(200, 4096, 4096, dtype)
    if level == "full":
        yield linear(4096, 32000, 4096, "bf16")


def _memory(on_gpu: bool, level: Level) -> Iterator[Case]:
    width = 4096 if on_gpu else 512
    rows = (128, 2048, 16384) if on_gpu else (16, 128, 1024, 8192)
    tensors = {"add": 3, "gelu": 2, "layer_norm": 2, "gelu backward": 3, "layer_norm backward": 3}
    specials = {"add": 0.0, "gelu": 1.0, "layer_norm": 1.0, "gelu backward": 2.0, "layer_norm backward": 1.0}
    names = ("add", "gelu", "layer_norm") if level == "brief" else tuple(tensors)
    for operation in names:
        for n in rows if operation == "add" else rows[-3:]:
            work = Work("memory", 0.0, 4.0 * n * width * tensors[operation], specials=n * width * specials[operation])
            yield Case("memory", f"{operation} {n}x{width}", {"operation": operation, "rows": n, "width": width}, work)


def _attention(on_gpu: bool, level: Level) -> Iterator[Case]:
    sizes = [(4, 16, 2048, 128), (1, 16, 8192, 128)] if on_gpu else [(1, 4, 256, 64), (8, 4, 64, 64)]
    dtype = "bf16" if on_gpu else "fp32"
    for batch, heads, length, width in sizes[: 1 if level == "brief" else None]:
        for causal in (False, True):
            for is_backward in (False, True) if level != "brief" else (False,):
                elements = batch * heads * length * width
                flops = 4.0 * elements * length * (0.5 if causal else 1.0) * (2.5 if is_backward else 1.0)
                num_bytes = 4.0 * ITEM_BYTES[dtype] * elements * (2 if is_backward else 1)
                words = ["attention", f"{batch}x{heads}x{length}x{width}"]
                words += ["causal"] * causal + ["backward"] * is_backward
                parameters = {
                    "shape": [batch, heads, length, width],
                    "causal": causal,
                    "backward": is_backward,
                    "dtype": dtype,
                }
                work = Work(
                    kind="attention",
                    flops=flops,
                    num_bytes=num_bytes,
                    dtype=dtype,
                    shape=(batch * heads, length, length),
                    backward=is_backward,
                    causal=causal,
                )
                yield Case("attention", " ".join(words), parameters, work)


def _blocks(level: Level) -> Iterator[Case]:
    for batch, length, width in ((4, 64, 256), (2, 64, 256), (8, 32, 384))[: 3 if level == "full" else 1]:
        sizes = {"batch": batch, "length": length, "width": width, "heads": 4}
        yield Case("block", f"block {batch}x{length}x{width}", sizes)


def _optimizer(elements: int) -> Case:
    work = Work("memory", 0.0, float(ADAM_BYTES * elements))
    return Case("optimizer", f"adamw {elements}", {"elements": elements}, work)


def _collectives(topology: Topology, level: Level) -> Iterator[Case]:
    if topology.on_gpu:
        exponents = tuple(range(10, 31, 2)) if level == "full" else (10, 16, 20, 24, 28)
    else:
        exponents = (10, 14, 16, 18, 20, 22, 24) if level == "full" else (10, 18, 22)
    for size, stride in topology.groups(level):
        for kind in KINDS:
            for num_bytes in (2**exponent for exponent in exponents):
                parameters = {"kind": kind, "num_bytes": num_bytes, "group_size": size, "stride": stride}
                yield Case("collective", f"{kind} {num_bytes} group {size} stride {stride}", parameters)


def _overlaps(topology: Topology) -> Iterator[Case]:
    """Yield the collectives that ZeRO overlaps with compute: over all ranks of a node. GPUs run them in other
    streams."""
    if topology.on_gpu or topology.devices_per_node == 1:
        return
    for kind in ("all_gather", "reduce_scatter"):
        parameters = {"kind": kind, "num_bytes": 2**22, "group_size": topology.devices_per_node, "stride": 1}
        yield Case("overlap", f"{kind} beside work", parameters)


def _transfers(on_gpu: bool, level: Level) -> Iterator[Case]:
    copied = 2**28 if on_gpu else 2**25
    on_disk = 2**28 if level == "full" else 2**26
    for name, num_bytes in (
        ("copy to host", copied),
        ("copy to device", copied),
        ("host update", ADAM_BYTES * 2**20),
        ("disk write", on_disk),
        ("disk read", on_disk),
    ):
        yield Case("transfer", name, {"operation": name, "num_bytes": num_bytes})
