"""torch's operators on symmetric memory, on CPUs: all but the copies between GPUs, which gloo makes here.

`reference` has torch's own fallbacks, `decomposed` torch's CUDA operators with the two functions replaced that copy
between ranks while they multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as memory
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from codegen.runtime import collectives

GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
KINDS = ("reference", "decomposed")


class Emulation:
    """From now on, for this process. calls: how often each operator ran."""

    def __init__(self, kind: str) -> None:
        self.calls = {GATHER: 0, SCATTER: 0}
        self.library = torch.library.Library("symm_mem", "IMPL")
        suffix = "_fallback" if kind == "reference" else ""
        for name in self.calls:
            self.library.impl(name, self._counted(name, getattr(memory, f"_{name}{suffix}")), "CPU")
        if kind == "decomposed":
            memory._pipelined_multi_all_gather_and_consume = _gather_and_consume
            memory._pipelined_produce_and_all2all = _produce_and_exchange

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return function(*args, **kwargs)

        return run

    @staticmethod
    def shared(axis: Any) -> Any:
        """The axis as it is after `set_up`."""
        return replace(axis, symmetric=axis.group.group_name)


def _gather_and_consume(
    parts: list[Tensor], consume: Callable[[list[Tensor], int], None], wholes: list[Tensor], name: str, needed: bool
) -> None:
    group = _resolve_process_group(name)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    for part, whole in zip(parts, wholes, strict=True):
        assert part.is_contiguous() and whole.is_contiguous() and part.shape[0] * size == whole.shape[0]
        collectives.all_gather(whole, part, group)
    for step in range(size):
        source = (rank + step) % size
        consume([whole.chunk(size)[source] for whole in wholes], source)


def _produce_and_exchange(
    produce: Callable[[int, Tensor], None], output: Tensor, name: str, out_chunk_dim: int = 0
) -> None:
    group = _resolve_process_group(name)
    assert out_chunk_dim == 0
    made = torch.empty_like(output)
    for target, chunk in enumerate(made.chunk(dist.get_world_size(group))):
        produce(target, chunk)
    collectives.all_to_all(output, made, group)
