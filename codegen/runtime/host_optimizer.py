"""Optimizer state, masters and (under ZeRO-3) parameter shards off the device, and the optimizer step on the host.

Where an optimizer is offloaded, a trainable bucket's master lives in host memory, the user's own optimizer updates it
there, and the device holds what it computes with: the flat buffer, or under ZeRO-3 this rank's range of it in the
compute dtype (not even that with offloaded parameters: it is brought for every gather). Per step and bucket the
gradient goes out and the new parameters come in. Buckets follow one another through three places: while one is updated,
the next one's gradient leaves and the last one's parameters come in and are gathered.

All values are equal to the ones without offload, bit for bit where the optimizer's update is elementwise and the device
rounds as the host does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .host_memory import HostMemory

if TYPE_CHECKING:
    from .sharded_units import ShardedBucket


class HostOptimizer:
    """Steps the user's optimizer on the host, bucket by bucket.

    Optimizers of torch leave alone parameters without a gradient, and keep their state per parameter, so each may be
    called once per bucket, with the gradients of one bucket attached. Others might count calls: they are called once.
    """

    def __init__(self, host: HostMemory) -> None:
        self.host = host

    def attach(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Any]) -> None:
        """From now on step this optimizer, of the stored parameters of these buckets (`ShardedBucket`)."""
        self.optimizer = optimizer
        self._buckets: list[ShardedBucket] = [bucket for bucket in buckets if bucket.key.requires_grad]
        is_torchs = type(optimizer).__module__.startswith("torch.optim")
        self._calls = [[bucket] for bucket in self._buckets] if is_torchs else [self._buckets]
        num_bytes = [sum(_num_bytes(bucket) for bucket in call) for call in self._calls]
        # Two calls' gradients are on the host at a time.
        self._lines = [
            self.host.staging(max(num_bytes, default=0), torch.uint8) for _ in range(min(2, len(self._calls)))
        ]
        self._mapped: dict[tuple[int, str], Tensor] = {}

    def update(self) -> None:
        """One optimizer step from the buckets' gradients; the parameters of all ranks follow. Collective."""
        works = []
        for bucket in self._buckets:
            bucket.detach()
        leaving = self._send(0) if self._calls else []
        for index, call in enumerate(self._calls):
            gradients = leaving
            if index + 1 < len(self._calls):
                leaving = self._send(index + 1)
            for bucket, (line, left) in zip(call, gradients, strict=True):
                if left is not None:
                    left.synchronize()
                bucket.attach(line)
            self.optimizer.step()
            for bucket in call:
                bucket.detach()
                if self.host.is_mapped:
                    self._map_state(bucket)
                works.append(bucket.start_publish())
        for work in works:
            if work is not None:
                work.wait()

    def _send(self, index: int) -> list[tuple[Tensor, Any]]:
        """Begin to copy the gradients of a call out: each bucket's line on the host, and the event of its arrival."""
        copies, line = [], self._lines[index % 2]
        for bucket in self._calls[index]:
            part = line[: _num_bytes(bucket)].view(bucket.gradient.dtype)
            line = line[_num_bytes(bucket) :]
            copies.append((part, self.host.copy_out(bucket.gradient, part)))
        return copies

    def _map_state(self, bucket: ShardedBucket) -> None:
        """Move state that the optimizer has made (in its first step, or after a checkpoint was loaded) to files."""
        for entry in bucket.entries:
            state = self.optimizer.state.get(entry.stored, {}) if entry.stored is not None else {}
            for key, value in state.items():
                if not isinstance(value, Tensor) or key == "step" or value.numel() != entry.hi - entry.lo:
                    continue
                line = self._mapped.get((id(bucket), key))
                if line is None:
                    line = self.host.zeros(bucket.shard_numel, value.dtype, key)
                    self._mapped[id(bucket), key] = line
                part = line.narrow(0, entry.start + entry.lo - bucket.offset, entry.hi - entry.lo).view(value.shape)
                if value.data_ptr() != part.data_ptr():
                    state[key] = part.copy_(value)


def _num_bytes(bucket: ShardedBucket) -> int:
    return math.prod(bucket.gradient.shape) * bucket.gradient.element_size()
