"""Flat buffers: parameters that are stored, gathered and reduced together.

Layout: the parameters of a bucket one after the other, as the program uses them (this rank's shards), padded at the end
to a multiple of the ranks of the ZeRO axis; rank r stores the r-th of equal ranges. Views are zero-copy. Three copies
of that line exist, as far as the stage needs them: `flat` in the compute dtype, `master` (this rank's range, what the
optimizer updates) and `gradient` (this rank's range).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import collectives
from .collectives import Work
from .mesh import Axis, Mesh
from .parameters import ZERO_AXES, Param, Slot, parse_placement
from .precision import used_dtype

_ALIGNMENT = 8
"""Elements of which ranges are multiples: every rank's range starts at 16 bytes even in bf16 and fp16."""


@dataclass(frozen=True, slots=True)
class Key:
    """The properties shared by parameters of a bucket. zero_axes: of ZeRO; others: more axes with partial gradients."""

    stage: int
    zero_axes: tuple[str, ...]
    others: tuple[str, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter in a bucket.

    used: the leaf that the program computes with. stored: what the optimizer sees of it on this rank, elements
    lo to hi of the flattened parameter (of the local shape if that is all of it, else flat); None if there are none.
    start: of the flattened parameter in the bucket. replicas: ranks of the world that store the same elements.
    """

    slot: Slot
    shape: tuple[int, ...]
    start: int
    numel: int
    lo: int
    hi: int
    replicas: int
    used: nn.Parameter
    stored: nn.Parameter | None


def key_of(spec: Param, mesh: Mesh) -> Key:
    """Return the key of a parameter's bucket. ZeRO axes of one rank mean stage 0."""
    lies = {axis.name: spec.placements.get(axis.name, "R") for axis in mesh.axes if axis.size > 1}
    partial = [name for name, text in lies.items() if text == "Rp" and spec.requires_grad]
    zero = spec.zero if spec.requires_grad or spec.zero == 3 else 0
    common = partial if spec.requires_grad else [name for name, text in lies.items() if text in ("R", "Rp")]
    zero_axes = tuple(name for name in common if name in ZERO_AXES) if zero else ()
    return Key(
        stage=zero if zero_axes else 0,
        zero_axes=zero_axes,
        others=tuple(name for name in partial if name not in zero_axes),
        dtype=spec.dtype,
        requires_grad=spec.requires_grad,
    )


class NotHere(Tensor):
    """The placeholder of a gradient that is on the device or on other ranks. Reading it is an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            "the gradients are not in host memory where an offloaded optimizer has its parameters, or not all on the "
            "rank that updates them whole: clip with max_grad_norm, and read step.grad_norm or step.gradients()"
        )


class Bucket:
    """The flat buffers of some parameters of equal key.

    compute_dtype: of floats; None: their own. master_dtype: fp32, or fp64 for fp64 parameters. whole_gradient: that of
    the whole line is kept, and reduced once per step (stages 0 and 1), rather than every micro-batch. attached: stored
    parameters with their gradients, or with what stands there.
    """

    def __init__(
        self,
        key: Key,
        slots: Sequence[Slot],
        mesh: Mesh,
        compute_dtype: torch.dtype | None,
        whole_gradient: bool,
    ) -> None:
        self.key = key
        self.mesh = mesh
        self.axis = mesh.joint(key.zero_axes) if key.stage else Axis("none")
        self.others = mesh.joint(key.others)
        self.is_complete = False
        self.compute_dtype = used_dtype(key.dtype, compute_dtype)
        self.master_dtype = torch.float32 if key.dtype.is_floating_point and key.dtype.itemsize < 4 else key.dtype
        shapes = [slot.spec.local_shape(mesh) for slot in slots]
        self.numel = sum(math.prod(shape) for shape in shapes)
        self.shard_numel = -(-self.numel // (self.axis.size * self.alignment)) * self.alignment
        self.offset = self.axis.rank * self.shard_numel
        self._allocate()
        self.entries = self._place(slots, shapes)
        self._allocate_gradients(whole_gradient)
        # A CPU best moves a gradient while it is in the cache; a GPU all at once, since each is a kernel.
        self.moves_at_once = self.whole_gradient is not None and mesh.device.type == "cpu"
        self._moved: set[int] = set()
        self._missing = len(self.entries)

    @property
    def alignment(self) -> int:
        """Elements of which a rank's range is a multiple."""
        return _ALIGNMENT

    def _allocate(self) -> None:
        self.flat = torch.zeros(self.axis.size * self.shard_numel, dtype=self.compute_dtype, device=self.mesh.device)
        # In full precision the masters are this rank's range of the parameters themselves.
        if self.compute_dtype == self.master_dtype:
            self.master = self.flat.narrow(0, self.offset, self.shard_numel)
        else:
            self.master = torch.zeros(self.shard_numel, dtype=self.master_dtype, device=self.mesh.device)

    def _place(self, slots: Sequence[Slot], shapes: Sequence[tuple[int, ...]]) -> tuple[Entry, ...]:
        entries, start = [], 0
        for slot, shape in zip(slots, shapes, strict=True):
            numel = math.prod(shape)
            lo = min(max(self.offset - start, 0), numel)
            hi = min(max(self.offset + self.shard_numel - start, 0), numel)
            # `.data` has a version counter of its own: gathers and optimizer steps write behind autograd's back.
            view = self.flat.data.narrow(0, start, numel).view(shape)
            used = nn.Parameter(view, requires_grad=slot.spec.requires_grad)
            stored = None
            if hi > lo:
                part = self.master.data.narrow(0, start + lo - self.offset, hi - lo)
                part = part.view(shape) if hi - lo == numel else part
                stored = nn.Parameter(part, requires_grad=slot.spec.requires_grad)
            kinds = ((axis, parse_placement(slot.spec.placements.get(axis.name, "R"))[0]) for axis in self.mesh.axes)
            num_parts = self.axis.size * math.prod(axis.size for axis, kind in kinds if kind == "S")
            entries.append(
                Entry(
                    slot=slot,
                    shape=shape,
                    start=start,
                    numel=numel,
                    lo=lo,
                    hi=hi,
                    replicas=self.mesh.world_size // num_parts,
                    used=used,
                    stored=stored,
                )
            )
            start += numel
            for owner, attribute in slot.places:
                owner._parameters[attribute] = used
        return tuple(entries)

    def _allocate_gradients(self, whole: bool) -> None:
        self.whole_gradient: Tensor | None = None
        self.attached: list[tuple[nn.Parameter, Tensor]] = []
        if not self.key.requires_grad:
            return
        device = self.mesh.device
        self.gradient = torch.zeros(self.shard_numel, dtype=self.master_dtype, device=device)
        if self.axis.size == 1:
            self.whole_gradient = self.gradient
        elif whole:
            self.whole_gradient = torch.zeros(len(self.flat), dtype=self.master_dtype, device=device)
        self.attached = self._attached()
        if self.whole_gradient is not None:
            self._whole_views = self._views(self.whole_gradient)

    def _attached(self) -> list[tuple[nn.Parameter, Tensor]]:
        return self.attach(self.gradient)

    def attach(self, gradient: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Make views of this line (of this rank's range) the stored parameters' gradients."""
        attached = []
        for entry in self.entries:
            if entry.stored is not None:
                first = entry.start + entry.lo - self.offset
                view = gradient.narrow(0, first, entry.hi - entry.lo).view_as(entry.stored)
                entry.stored.grad = view
                attached.append((entry.stored, view))
        return attached

    def _views(self, line: Tensor) -> list[Tensor]:
        parts = torch.split(line[: self.numel], [entry.numel for entry in self.entries])
        return [part.view(entry.shape) for part, entry in zip(parts, self.entries, strict=True)]

    # Parameters -------------------------------------------------------------------------------------------------------

    @property
    def own_copy(self) -> Tensor | None:
        """This rank's range of `flat`, where it stays and the master is another tensor of the device."""
        local = self.flat.narrow(0, self.offset, self.shard_numel)
        return None if local.data_ptr() == self.master.data_ptr() else local

    def start_publish(self, is_copied: bool = False) -> Work | None:
        """Bring new masters to every `flat`; the work to wait for, if any. is_copied: `own_copy` has them already."""
        local = self.flat.narrow(0, self.offset, self.shard_numel)
        if not is_copied and local.data_ptr() != self.master.data_ptr():
            local.copy_(self.master)
        return None if self.axis.size == 1 else collectives.all_gather(self.flat, local, self.axis.group, async_op=True)

    def abandon(self) -> None:
        """Forget what a backward that was cut short has left."""
        for entry in self.entries:
            entry.used.grad = None

    # Gradients --------------------------------------------------------------------------------------------------------

    @property
    def rounds_gradients(self) -> bool:
        """Whether gradients are rounded before they are summed over the ZeRO axis."""
        return False

    def start_reduce(self, target: Tensor, line: Tensor) -> Work | None:
        """Begin to sum everyone's `line` over the ZeRO axis, this rank's range of it into `target`."""
        return collectives.reduce_scatter(target, line, self.axis.group, async_op=True)

    def expect_gradients(self) -> None:
        """Prepare for a backward: no gradient has arrived."""
        self._missing = len(self.entries)
        self._moved.clear()
        self.is_complete = False

    def count_gradient(self, index: int, accumulate: bool) -> bool:
        """Count the gradient of one more entry. Return whether it is the last. accumulate: as in `collect`."""
        if self.moves_at_once:
            used = self.entries[index].used
            assert used.grad is not None
            view = self._whole_views[index]
            if accumulate:
                view.add_(used.grad)
            else:
                view.copy_(used.grad)
            used.grad = None
            self._moved.add(index)
        self._missing -= 1
        return self._missing == 0

    def collect(self, accumulate: bool) -> Tensor:
        """Move the parameters' gradients into one line, and free them; those that are absent count as zeros.

        accumulate: add to what the whole gradient holds (no effect where none is kept).
        """
        self.is_complete = True
        line = self.whole_gradient
        accumulate = accumulate and line is not None
        if line is None:
            line = self.flat.new_empty(self.axis.size * self.shard_numel, dtype=self.master_dtype)
            line[self.numel :].zero_()
            views = self._views(line)
        else:
            views = self._whole_views
        gradients = []
        for index, (entry, view) in enumerate(zip(self.entries, views, strict=True)):
            if index in self._moved:
                continue
            gradient, entry.used.grad = entry.used.grad, None
            if gradient is not None:
                gradients.append((view, gradient))
            elif not accumulate:
                view.zero_()
        if gradients:
            targets, sources = [view for view, _ in gradients], [gradient for _, gradient in gradients]
            if accumulate:
                torch._foreach_add_(targets, sources)
            else:
                torch._foreach_copy_(targets, sources)
        return line

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared gradient norm (0-dim): shares of all ranks of the world sum to the whole."""
        total = self.gradient.new_zeros(())
        for lo, hi, replicas in self.norm_segments():
            norm = torch.linalg.vector_norm(self.gradient[lo:hi])
            total += norm * norm / replicas
        return total

    def norm_segments(self) -> list[tuple[int, int, int]]:
        """(first, end, ranks of the world that have the same elements) of this rank's range, without padding."""
        segments: list[tuple[int, int, int]] = []
        for entry in self.entries:
            if entry.hi > entry.lo:
                lo, hi = entry.start + entry.lo - self.offset, entry.start + entry.hi - self.offset
                if segments and segments[-1][2] == entry.replicas:
                    lo = segments.pop()[0]
                segments.append((lo, hi, entry.replicas))
        return segments

    # Whole lines, for reading out -------------------------------------------------------------------------------------

    def whole(self, part: Tensor) -> list[Tensor]:
        """Each entry's tensor in its local shape, gathered from everyone's range (master or gradient). Collective."""
        part = part.to(self.mesh.device)
        line = part if self.axis.size == 1 else self.axis.gather_parts(part).view(-1)
        return self._views(line)

    def store(self, entry: Entry, local: Tensor) -> None:
        """Set the masters of one entry from its tensor in local shape; call `start_publish` after the last."""
        if entry.stored is not None:
            entry.stored.data.view(-1).copy_(local.reshape(-1)[entry.lo : entry.hi])

    def set_gradient(self, entry: Entry, local: Tensor) -> None:
        """Set this rank's range of one entry's gradient from its tensor in local shape."""
        if entry.hi > entry.lo:
            local_gradient = self.gradient.narrow(0, entry.start + entry.lo - self.offset, entry.hi - entry.lo)
            local_gradient.copy_(local.reshape(-1)[entry.lo : entry.hi])
