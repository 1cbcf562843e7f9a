"""One root module made runnable on this rank: the whole program, or one stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from .boxes import pieces_of
from .flat import Bucket, Entry
from .mesh import Mesh
from .parameters import Module, Param, Slot, is_apart, shard, unshard
from .precision import compute_dtype
from .zero import ZeroUnits

if TYPE_CHECKING:
    # Only programs that offload or compute in fp16 have these beside them.
    from .loss_scale import LossScaling
    from .offload import Offload

Source = Mapping[str, Tensor] | Callable[[str], Tensor]
"""Whole tensors under original names: a state dict, or a function that makes one at a time.

Where the function has a method `stored(name) -> InFile | None` too, each rank reads its own part of what that gives.
"""


class InFile(Protocol):
    """A tensor that can be read in parts (`weight_files.StoredTensor`)."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def fill(self, offsets: tuple[int, ...], target: Tensor) -> None:
        """Copy the box of target's shape at `offsets` into target."""
        ...


Batches = tuple[list[dict[str, Tensor]], dict[str, list[Tensor]]]
"""The inputs of each micro-batch, and num_targets and sums where the program takes them."""


@dataclass(frozen=True, slots=True)
class Tied:
    """Parameters of this module that other stages hold too.

    aliases: further names that any of the stages gives it, for each. copies: those of which an earlier stage has the
    copy that counts (in the gradient's norm, when saving), and such buffers.
    """

    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    copies: frozenset[str] = frozenset()


What = Literal["gradients", "state", "all"]
"""Kinds of values that are read out whole: gradients, a state dict, or that and the buffers that a step changes."""


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole tensor that can be read out, and all its names."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class PartOptions:
    """Options of a program's parts; None: not offloaded, not scaled.

    units: allocates the parameters of a module, as `ZeroUnits` does.
    """

    units: Callable[..., ZeroUnits] = ZeroUnits
    precision: str = "fp32"
    num_micro_batches: int = 1
    offload: Offload | None = None
    loss_scaling: LossScaling | None = None


class Part:
    """A root module with its parameters, gradients and share of the batch."""

    def __init__(self, model: Module, options: PartOptions, *, tied: Tied | None = None) -> None:
        self.model = model
        self.mesh: Mesh = model.mesh
        self.tied = tied
        self.compute_dtype, self.num_micro_batches = compute_dtype(options.precision), options.num_micro_batches
        for module in model.units():
            module.offload = options.offload
        settings = self.mesh, self.compute_dtype, options.num_micro_batches
        self.zero = options.units(model, *settings, alone=() if tied is None else tied.aliases)
        self._counters = [(value, spec.increment) for _, spec, value in model.buffer_slots() if spec.increment]
        # UpdatingModules, of whichever program's run time.
        self._updating: list[Any] = [module for module in model.units() if hasattr(module, "write_buffers")]
        self._input_shapes = {name: spec.local_shape(self.mesh) for name, spec in model.INPUTS.items()}

    # The batch --------------------------------------------------------------------------------------------------------

    def local_batch(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of a global batch: the inputs of this module that the batch has."""
        parts = {}
        for name, spec in self.model.INPUTS.items():
            if name not in batch:
                continue
            whole = batch[name]  # cut on its own device, so that the mesh's device needs room for the part only
            is_split = whole.ndim > 0 and whole.shape[0] == spec.shape[0] * self.num_micro_batches
            micro = whole.chunk(self.num_micro_batches) if is_split else (whole,)
            shards = [shard(rows, spec, self.mesh) for rows in micro]
            parts[name] = (torch.cat(shards) if is_split else shards[0]).to(self.mesh.device)
        return parts

    def prepare(self, local_batch: Mapping[str, Tensor]) -> Batches:
        """Return the arguments of each micro-batch's forward."""
        count = self.num_micro_batches
        batches: list[dict[str, Tensor]] = [{} for _ in range(count)]
        for name, spec in self.model.INPUTS.items():
            parts = self._micro_batches(name, spec, local_batch)
            for inputs, part in zip(batches, parts, strict=True):
                inputs[self.model.ARGUMENTS.get(name, name)] = part
        extra_inputs: dict[str, list[Tensor]] = {}
        if self.model.takes_sums:
            with torch.no_grad():
                sums = self._of_each(self.model.whole_sums, batches)
            self.mesh.finish()
            extra_inputs["sums"] = [_added(values) for values in zip(*sums, strict=True)]
        if not self.model.counts_targets:
            return batches, extra_inputs
        with torch.no_grad():
            counts = self._of_each(self.model.count_targets, batches)
        if count == 1:
            return batches, extra_inputs | {"num_targets": _Counts(counts[0], self.mesh)}
        self.mesh.finish()
        extra_inputs["num_targets"] = [sum(values[1:], values[0]) / count for values in zip(*counts, strict=True)]
        return batches, extra_inputs

    def _of_each(
        self, method: Callable[..., list[Tensor]], batches: Sequence[Mapping[str, Tensor]]
    ) -> list[list[Tensor]]:
        """Return what a method of the model gives for each micro-batch, in which draws are that micro-batch's."""
        results = []
        for index, inputs in enumerate(batches):
            self.model.rng.micro_batch = index
            results.append(method(**inputs))
        return results

    def _micro_batches(self, name: str, spec: Param, local_batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """One for each, of an input that is as `BatchCheck` wants it: of all micro-batches, or the same for each."""
        value, count = local_batch[name].to(self.mesh.device, non_blocking=True), self.num_micro_batches
        if self.compute_dtype is not None and value.is_floating_point():
            value = value.to(spec.dtype)
        expected = self._input_shapes[name]
        if not expected or value.shape != (expected[0] * count, *expected[1:]):
            return (value,) * count
        rng = self.model.rng
        rng.micro_batch_rows = max(rng.micro_batch_rows, spec.shape[0])
        return torch.chunk(value, count)

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """The context of forwards of all micro-batches that only find the sums over these (`whole_sums.py`)."""
        summing: list[Any] = [module for module in self.model.units() if module.needs_first_pass]
        written = self.written_buffers()
        before = [value.clone() for value in written]
        for module in summing:
            module.begin_first_pass()
        with torch.no_grad():
            try:
                yield
            finally:
                for value, kept in zip(written, before, strict=True):
                    value.copy_(kept)
                for module in summing:
                    module.end_first_pass()

    def write_buffers(self) -> None:
        """Write what a step's forward makes of buffers: counters go on by one forward, of the whole batch."""
        for value, increment in self._counters:
            value.add_(increment)
        for module in self._updating:
            module.write_buffers()

    # State ------------------------------------------------------------------------------------------------------------

    def entries(self) -> list[tuple[Bucket, Entry]]:
        """All parameters, in the order of their buckets."""
        return [(bucket, entry) for bucket in self.zero.buckets for entry in bucket.entries]

    def written_buffers(self) -> list[Tensor]:
        """This rank's parts of the buffers that a step changes."""
        written = [value for module in self.model.units() for value in module.written_buffers()]
        written += [value for module in self._updating for value in module.updated_buffers()]
        return written + [value for value, _ in self._counters]

    def trainable(self) -> list[Bucket]:
        """Buckets with gradients, without the copies of what an earlier stage counts."""
        buckets = [bucket for bucket in self.zero.buckets if bucket.key.requires_grad]
        return [bucket for bucket in buckets if bucket.entries[0].slot.name not in self.copies]

    def load(self, source: Source) -> None:
        """Load values as `Step.load` does, without sending them to other ranks."""
        places = {entry.slot.name: (bucket, entry) for bucket, entry in self.entries()}
        slots = {slot.name: slot for slot in self.model.slots()}
        # Those that only another program of the step reads may be missing.
        more = {name: place[1].slot for name, place in places.items() if name not in slots}
        for slot in (*slots.values(), *(slot for slot in more.values() if _has(source, self.names(slot)))):
            bucket, entry = places[slot.name]
            stored = _in_file(source, slot.name, slot.spec)
            if stored is not None:
                self._read(entry, stored)
                continue
            whole = _find(source, self.names(slot), slot.spec)
            bucket.store(entry, shard(whole, slot.spec, self.mesh))
        self.load_buffers(source)

    def load_buffers(self, source: Source, loaded: Collection[int] = ()) -> None:
        """Load the buffers, except those that are loaded already. loaded: their ids."""
        for name, spec, value in self.model.buffer_slots():
            if id(value) not in loaded:
                value.copy_(shard(_find(source, (name, *spec.aliases), spec), spec, self.mesh))

    def _read(self, entry: Entry, source: InFile) -> None:
        """Fill what this rank stores of a parameter, without the rest of it in memory; padding is zeros."""
        if entry.stored is None:
            return
        values = entry.stored.data.view(-1)
        if entry.slot.spec.padding:
            values.zero_()
        for piece in pieces_of(entry.slot.name, entry.slot.spec, self.mesh, values, entry.lo):
            source.fill(piece.offsets, piece.value)

    def describe(self, what: What) -> list[Whole]:
        """Return names, shapes and dtypes of the tensors of `read`, without communication."""
        described = []
        for bucket in self._read_buckets(what):
            for entry in bucket.entries:
                slot = entry.slot
                names = (slot.name,) if what == "gradients" else self.names(slot)
                described.append(Whole(names, slot.spec.shape, bucket.master_dtype))
        described += [
            Whole((name, *spec.aliases), spec.shape, spec.dtype) for name, spec, _ in self._read_buffers(what)
        ]
        return described

    def read(self, what: What) -> Iterator[Tensor]:
        """Whole tensors, one at a time (they may be views of what training changes). Collective over the mesh."""
        for bucket in self._read_buckets(what):
            parts = bucket.whole(bucket.gradient if what == "gradients" else bucket.master)
            for entry, local in zip(bucket.entries, parts, strict=True):
                yield unshard(local, entry.slot.spec, self.mesh).detach()
        for _, spec, value in self._read_buffers(what):
            yield unshard(value, spec, self.mesh).detach()

    def reads_others(self, what: What) -> bool:
        """Whether other ranks have parts of what `read` gives."""
        buckets = self._read_buckets(what)
        specs = [entry.slot.spec for bucket in buckets for entry in bucket.entries]
        specs += [spec for _, spec, _ in self._read_buffers(what)]
        return any(bucket.axis.size > 1 for bucket in buckets) or any(is_apart(spec, self.mesh) for spec in specs)

    def _read_buffers(self, what: What) -> list[tuple[str, Param, Tensor]]:
        """The buffers of a state dict; of "all" also those beside it that a step changes."""
        written = {id(value) for value in self.written_buffers()} if what == "all" else set[int]()
        slots = self.model.buffer_slots() if what != "gradients" else ()
        return [slot for slot in slots if slot[1].persistent or id(slot[2]) in written]

    def _read_buckets(self, what: What) -> list[Bucket]:
        if what == "gradients":
            return self.trainable()
        buckets = self.zero.buckets
        return [bucket for bucket in buckets if bucket.entries[0].slot.name not in self.copies]

    def names(self, slot: Slot) -> tuple[str, ...]:
        """All names of a parameter, its own first."""
        tied_names = () if self.tied is None else self.tied.aliases.get(slot.name, ())
        return tuple(dict.fromkeys((slot.name, *slot.aliases, *tied_names)))

    @property
    def copies(self) -> frozenset[str]:
        """Names of what an earlier stage has too, and counts."""
        return frozenset() if self.tied is None else self.tied.copies


class _Counts(list[Tensor]):
    """Sums over the ranks that may still run (wait=False). Reading one waits for all."""

    def __init__(self, counts: list[Tensor], mesh: Mesh) -> None:
        super().__init__(counts)
        self.mesh = mesh

    def __getitem__(self, index: Any) -> Any:
        self.mesh.finish()
        return super().__getitem__(index)


def _added(parts: Sequence[Tensor]) -> Tensor:
    """The sum over the micro-batches. A number of fp16 becomes one of fp32, as losses are: m of them would overflow m
    times before the mean does. With tensors that have dims it computes in their dtype all the same."""
    first = parts[0].float() if parts[0].dtype == torch.float16 and not parts[0].ndim else parts[0]
    return sum(parts[1:], first)


def mean_loss(losses: list[Tensor]) -> Tensor:
    """The mean of the losses, in fp32 at least; the micro-batches' shares of the targets are in them already."""
    return _full(losses[0]) if len(losses) == 1 else torch.stack([_full(loss) for loss in losses]).mean()


def loss_gradient(loss: Tensor, num_micro_batches: int, *, loss_scaling: LossScaling | None = None) -> Tensor:
    """Return the gradient of a micro-batch's loss: its share of the mean, times the loss scale if there is one.

    inf where the loss is in fp16 itself and its range ends, as the scale's rule has it: that step has overflowed.
    """
    wide = torch.promote_types(loss.dtype, torch.float32)
    if loss_scaling is not None and loss_scaling.on_device is not None:
        return (loss_scaling.on_device[0] / num_micro_batches).to(wide).to(loss.dtype).expand_as(loss)
    share = (1.0 if loss_scaling is None else loss_scaling.value) / num_micro_batches
    return torch.full_like(loss, share, dtype=wide).to(loss.dtype)


def _full(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


def _has(source: Source, names: tuple[str, ...]) -> bool:
    return callable(source) or any(name in source for name in names)


def _find(source: Source, names: tuple[str, ...], spec: Param) -> Tensor:
    if callable(source):
        whole = source(names[0])
    else:
        names_held = [name for name in names if name in source]
        if not names_held:
            raise KeyError(f"no value for {' or '.join(names)}")
        whole = source[names_held[0]]
    _require_shape(names[0], tuple(whole.shape), spec)
    return whole.detach()


def _in_file(source: Source, name: str, spec: Param) -> InFile | None:
    """Return the place of a tensor in the source that is read in parts, if any. Raises ValueError for a wrong shape."""
    find: Callable[[str], InFile | None] | None = getattr(source, "stored", None)
    stored = None if find is None else find(name)
    if stored is not None:
        _require_shape(name, stored.shape, spec)
    return stored


def _require_shape(name: str, shape: tuple[int, ...], spec: Param) -> None:
    if shape != spec.shape:
        raise ValueError(f"{name} has shape {shape}, the program needs {spec.shape}")
