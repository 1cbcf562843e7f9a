"""Saved activations in host memory between forward and backward.

While a layer's forward runs under `Offload.moving`, what autograd saves is copied to the host and the device's copy is
left to die. In backward the first saved tensor that a layer asks for brings back all of that layer, and starts to
bring back the layer before it, so that copies run while the layer computes.

What moves is the storage behind a saved tensor, once, however many views of it are saved and by however many layers
(the tensor saved by three projections, tables of rotary embeddings): its bytes are the memory that a saved view holds.
Parameters and buffers stay, being there anyway; so do storages under `MIN_BYTES`, whose copies would cost more in
latency than they free.

With recomputation only the arguments of the layer are saved, so these move; the matmul results that "selective" keeps
are not saved tensors of autograd, and stay on the device.

On CUDA host buffers are pinned and copies run on two streams of their own. Elsewhere the same code copies to other
tensors of the same memory: values and traffic are the same, nothing is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .traffic import Traffic

MIN_BYTES = 64 * 2**10
"""Storages below it are not moved: at 25 GB/s of PCIe 4 its copy takes 3 us, about what starting the copy takes."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Moved:
    """A storage on the host. on_device: its copy, from when it is fetched until nothing in the graph needs it.

    arrived: CUDA event after which on_device may be read.
    """

    host: Tensor
    on_device: Tensor | None = None
    arrived: Any = None


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Region:
    """One call of a layer. previous: the call before it, whose backward comes next."""

    previous: weakref.ref[_Region] | None
    kept_storages: frozenset[int]
    moved: list[weakref.ref[_Moved]] = field(default_factory=list)
    is_in_backward: bool = False


@dataclass(frozen=True, slots=True)
class _Packed:
    """The stand-in that autograd keeps instead of a tensor."""

    region: _Region
    moved: _Moved
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: Any
    """An int (torch types it as one or a symbol)."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A storage that was moved and is still alive, at that version of its content."""

    alive: weakref.ref[torch.UntypedStorage]
    version: int
    moved: weakref.ref[_Moved]


class Offload:
    """Moves the saved activations of all layers of this rank; `traffic` counts what went over the bus."""

    def __init__(self, device: torch.device, traffic: Traffic | None = None) -> None:
        self.device = device
        self.traffic = traffic or Traffic()
        self._sources: dict[int, _Source] = {}
        self._latest: dict[int, weakref.ref[_Region]] = {}
        self._streams: tuple[Any, Any] | None = None
        self._leaving: list[tuple[Any, list[Tensor]]] = []

    @contextmanager
    def moving(self, layer: Any, micro_batch: int) -> Iterator[None]:
        """Context manager in which saved tensors of autograd are moved. layer: an nn.Module, whose own tensors stay."""
        layer_tensors = (*layer.parameters(), *layer.buffers())
        kept = frozenset(tensor.untyped_storage()._cdata for tensor in layer_tensors)
        region = _Region(self._latest.get(micro_batch), kept)
        self._latest[micro_batch] = weakref.ref(region)
        stash: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor | _Packed:
            return self._pack(tensor, region, stash)

        with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
            yield
        if stash and self.device.type == "cuda":
            # The copies of the call before this one have had this call's time to end; computation waits for the rest.
            self._let_go(keep=1)
            self._leaving.append((self._side_streams()[0].record_event(), stash))

    def _pack(self, tensor: Tensor, region: _Region, stash: list[Tensor]) -> Tensor | _Packed:
        if not self._moves(tensor, region):
            # Not the tensor itself: a result that is saved by the function which made it would hold itself alive.
            return tensor.detach()
        storage = tensor.untyped_storage()
        source = self._sources.get(id(storage))
        moved = source.moved() if source is not None and source.version == tensor._version else None
        if moved is None:
            moved = self._copy_out(storage, stash)
            self._remember(storage, tensor._version, moved)
        if all(moved_ref() is not moved for moved_ref in region.moved):
            region.moved.append(weakref.ref(moved))
        return _Packed(
            region=region,
            moved=moved,
            dtype=tensor.dtype,
            shape=tensor.shape,
            stride=tensor.stride(),
            offset=tensor.storage_offset(),
        )

    def _moves(self, tensor: Tensor, region: _Region) -> bool:
        if tensor.device.type != self.device.type or tensor.layout != torch.strided:
            return False
        if type(tensor) is not Tensor or isinstance(tensor._base, nn.Parameter) or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= MIN_BYTES and storage._cdata not in region.kept_storages

    def _remember(self, storage: torch.UntypedStorage, version: int, moved: _Moved) -> None:
        key, sources = id(storage), self._sources

        def forget(dead: weakref.ref[torch.UntypedStorage]) -> None:
            if key in sources and sources[key].alive is dead:
                del sources[key]

        sources[key] = _Source(weakref.ref(storage, forget), version, weakref.ref(moved))

    def _unpack(self, packed: Tensor | _Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        region = packed.region
        if not region.is_in_backward:
            region.is_in_backward = True
            self._let_go(keep=0)
            self._fetch_all(region)
            previous = region.previous() if region.previous is not None else None
            if previous is not None:
                self._fetch_all(previous)
        moved = packed.moved
        self._fetch(moved)
        if moved.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(moved.arrived)
        assert moved.on_device is not None
        empty = torch.empty(0, dtype=packed.dtype, device=self.device)
        return empty.set_(moved.on_device.untyped_storage(), packed.offset, packed.shape, packed.stride)

    def _fetch_all(self, region: _Region) -> None:
        for reference in region.moved:
            moved = reference()
            if moved is not None:
                self._fetch(moved)

    # Copies -----------------------------------------------------------------------------------------------------------

    def _copy_out(self, storage: torch.UntypedStorage, stash: list[Tensor]) -> _Moved:
        num_bytes = storage.nbytes()
        source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, 0, (num_bytes,), (1,))
        self.traffic.activations_out += num_bytes
        if self.device.type != "cuda":
            return _Moved(source.clone())
        out = self._side_streams()[0]
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(out):
            host.copy_(source, non_blocking=True)
        stash.append(source)
        return _Moved(host)

    def _fetch(self, moved: _Moved) -> None:
        if moved.on_device is not None:
            return
        self.traffic.activations_in += moved.host.numel()
        if self.device.type != "cuda":
            moved.on_device = moved.host.clone()
            return
        # Memory of the stream that computes, so that it may be freed there without further ado; the copy waits for
        # what that stream did with it before.
        moved.on_device = torch.empty(moved.host.numel(), dtype=torch.uint8, device=self.device)
        out, back = self._side_streams()
        back.wait_stream(torch.cuda.current_stream(self.device))
        back.wait_stream(out)
        with torch.cuda.stream(back):
            moved.on_device.copy_(moved.host, non_blocking=True)
            moved.arrived = back.record_event()
        # It may be freed unread, where a backward stops early.
        moved.on_device.record_stream(back)

    def _let_go(self, keep: int) -> None:
        """Free the device's copies of all calls but the last `keep`, after they have left."""
        while len(self._leaving) > keep:
            event, _ = self._leaving.pop(0)
            torch.cuda.current_stream(self.device).wait_event(event)

    def _side_streams(self) -> tuple[Any, Any]:
        if self._streams is None:
            stream: Any = torch.cuda.Stream
            self._streams = stream(self.device), stream(self.device)
        return self._streams
