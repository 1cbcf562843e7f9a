"""Peak of one rank's activations, live gradients and gathered parameters in a stage.

A stage runs its units in order and back. While a unit runs, everything that earlier units keep is alive. While it
runs backward, the tensors of later units are gone. Their gradients may still wait in buckets for the rest of these
(`codegen/runtime/zero.py`: a bucket is reduced once its last gradient exists).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.costs.liveness import Liveness
from autopar.costs.price import Pricer
from autopar.costs.rates import is_cpu
from autopar.ir.graph import TensorMeta
from autopar.ir.placement import Stored
from autopar.sharding.call_options import num_local
from codegen.runtime.zero import BUCKET_BYTES

IN_FLIGHT = 2
"""The number of reductions in flight with buffers that stay allocated (zero.py `_MAX_IN_FLIGHT`)."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A trained parameter's buffers on one rank.

    key: parameters of equal keys share buckets. num_bytes: by which buckets are cut. gradient: as autograd computes
    it; waiting: the same while it waits for the rest of its bucket; line: in the buffer that is then reduced;
    arriving: where the sum arrives, if it is added later; gathered: of the whole parameter under ZeRO-3. updated:
    temporaries of the optimizer, of all parameters together or of one at a time; taken: other ranks' shards that it
    receives, of all together. last_reader: the last unit that uses the parameter. sent: of the buffer while it is
    summed, if that is not `line`.
    """

    key: tuple[object, ...]
    num_bytes: float
    gradient: float
    waiting: float
    line: float
    arriving: float
    gathered: float
    updated: float = 0.0
    taken: float = 0.0
    is_updated_together: bool = False
    last_reader: str = ""
    sent: float | None = None

    @property
    def under_way(self) -> float:
        """Return the bytes of the reduction in flight."""
        return (self.line if self.sent is None else self.sent) + self.arriving


def slot_of(pricer: Pricer, meta: TensorMeta, stored: Stored, last_reader: str) -> Slot:
    """Return the buffers of a trained parameter, as codegen/runtime/flat.py and zero.py allocate them."""
    training, mesh = pricer.training, pricer.mesh
    local = num_local(meta, stored.placements, mesh)
    size, scale = pricer.parameters.zero_size(stored), 1.0 + pricer.rates.fragmentation
    is_whole = size == 1 or (stored.zero == 1 and training.num_micro_batches > 1)
    is_moved_at_once = is_whole and is_cpu(pricer.cluster)
    line = local * training.gradient_bytes
    partial_sum = line / size if training.num_micro_batches > 1 else 0.0
    gradient = local * meta.dtype.itemsize * scale
    sent = pricer.parameters.sent(meta, stored)
    # A compressed message is written next to the buffer, which is then free; another one arrives.
    message = local * sent.reduce * scale if sent.reduce_code else 0.0
    shards = tuple(axis for axis, p in zip(mesh.axes, stored.placements, strict=True) if p.kind == "Rp")
    return Slot(
        key=(stored.zero, shards, meta.dtype),
        num_bytes=local * max(4, meta.dtype.itemsize),
        gradient=gradient,
        waiting=0.0 if is_moved_at_once else gradient,
        line=message if is_whole else line * scale + message,
        arriving=0.0 if is_whole else partial_sum * scale,
        gathered=local * training.compute_bytes * scale if stored.zero == 3 else 0.0,
        updated=pricer.parameters.update_temporary_bytes(meta, stored),
        taken=pricer.parameters.taken_bytes(meta, stored),
        is_updated_together=training.updates_together,
        last_reader=last_reader,
        sent=2 * message if message else None,
    )


@dataclass(frozen=True, slots=True)
class Life:
    """One unit of a stage: per micro-batch its kept bytes and other live bytes; its parameters. is_layer: whether it
    is a layer, and not calls between layers."""

    name: str
    kept: float
    live: Liveness
    slots: tuple[Slot, ...] = ()
    is_layer: bool = True


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes at the peak of one forward, one backward, and one in two halves: the first leaves `deferred` until the
    second, whose extra peak is `weight`. updated: temporaries of the optimizer, for all parameters that are
    updated together or for the largest."""

    kept: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    deferring: float = 0.0
    deferred: float = 0.0
    weight: float = 0.0
    updated: float = 0.0


@dataclass(slots=True)
class _Bucket:
    """Gradients that are reduced together. missing: units with gradients still to come."""

    waiting: dict[int, float] = field(default_factory=dict)
    line: float = 0.0
    under_way: float = 0.0
    num_bytes: float = 0.0


def peaks(units: Sequence[Life], received_bytes: float = 0.0, sent_bytes: float = 0.0) -> Peaks:
    """Return the peaks of a stage with these units in order. received_bytes, sent_bytes: across its boundaries per
    micro-batch. While an action runs, the next one's input is in flight."""
    gathered = [sum(slot.gathered for slot in life.slots) if life.is_layer else 0.0 for life in units]
    root = sum(slot.gathered for life in units if not life.is_layer for slot in life.slots)
    forward = before = loose = 0.0
    for index, life in enumerate(units):
        ahead = sum(gathered[index : index + 2])
        forward = max(forward, before + loose + life.live.forward + ahead + root)
        before += life.kept
        loose += 0.0 if life.is_layer else life.live.loose
    forward = max(forward, before + loose + root)
    forward += sent_bytes
    accumulated = _accumulated_gradients(units)
    reductions = _reductions(units)
    backward = deferring = 0.0
    for index in reversed(range(len(units))):
        life = units[index]
        before -= life.kept
        beside = before + accumulated[index] + root + sum(gathered[max(index - 1, 0) : index + 1])
        if index and not life.is_layer:
            beside = before + accumulated[index] + root + gathered[index - 1]
        during, after, waits = reductions[index]
        entering = life.live.waiting if waits else life.live.backward
        backward = max(backward, beside + entering + during, beside + life.live.entering + after)
        deferred = sum(later.live.deferred for later in units[index + 1 :])
        deferring = max(
            deferring, beside + life.live.deferring + deferred + during, beside + life.live.entering + after + deferred
        )
    slots = [slot for life in units for slot in life.slots]
    return Peaks(
        kept=sum(life.kept for life in units) + sent_bytes,
        forward=forward,
        backward=backward + received_bytes,
        deferring=deferring + received_bytes,
        deferred=sum(life.live.deferred for life in units),
        weight=max((life.live.weight for life in units), default=0.0),
        updated=sum(slot.taken + (slot.updated if slot.is_updated_together else 0.0) for slot in slots)
        + max((slot.updated for slot in slots if not slot.is_updated_together), default=0.0),
    )


def _accumulated_gradients(units: Sequence[Life]) -> list[float]:
    """Return for each unit the gradient bytes of parameters that a later unit uses too; autograd adds these up
    first."""
    gradients = [0.0] * len(units)
    for first, life in enumerate(units):
        for slot in life.slots:
            later = [i for i, other in enumerate(units) if other.name == slot.last_reader and i > first]
            for index in range(first, later[-1] if later and slot.last_reader != life.name else first):
                gradients[index] += slot.gradient
    return gradients


def _reductions(units: Sequence[Life]) -> list[tuple[float, float, bool]]:
    """Return for each unit the bytes of waiting gradients and of buffers in flight while it runs backward and at its
    end, and whether its gradients wait."""
    buckets = _buckets(units)
    lines: list[float] = []
    peaks_of_units: list[tuple[float, float, bool]] = []
    for index in reversed(range(len(units))):
        earlier = sum(size for b in buckets for unit, size in b.waiting.items() if unit > index)
        waiting_bytes = sum(b.waiting.get(index, 0.0) for b in buckets)
        during = earlier + sum(lines)
        after = during + waiting_bytes
        for bucket in [b for b in buckets if min(b.waiting, default=index) >= index]:
            after = max(after, earlier + waiting_bytes + sum(lines) + bucket.line)
            earlier -= sum(size for unit, size in bucket.waiting.items() if unit > index)
            waiting_bytes -= bucket.waiting.get(index, 0.0)
            lines = [*lines, bucket.under_way][-IN_FLIGHT:] if bucket.line else lines
            after = max(after, earlier + waiting_bytes + sum(lines))
            buckets.remove(bucket)
        peaks_of_units.append((during, after, any(slot.waiting for slot in units[index].slots)))
    return peaks_of_units[::-1]


def _buckets(units: Sequence[Life]) -> list[_Bucket]:
    """Return the buckets as zero.py forms them: from the last layer to the first, then the rest; under ZeRO-3 per
    layer."""
    layers = [i for i in reversed(range(len(units))) if units[i].is_layer]
    tops = [i for i in range(len(units)) if not units[i].is_layer]
    done: list[_Bucket] = []
    open_: dict[tuple[object, ...], _Bucket] = {}
    for index in (*layers, *tops):
        for slot in units[index].slots:
            is_unit = slot.gathered > 0
            key = (*slot.key, index if units[index].is_layer else -1) if is_unit else slot.key
            bucket = open_.setdefault(key, _Bucket())
            bucket.waiting[index] = bucket.waiting.get(index, 0.0) + slot.waiting
            bucket.line += slot.line
            bucket.under_way += slot.under_way
            bucket.num_bytes += slot.num_bytes
            if bucket.num_bytes >= BUCKET_BYTES and not is_unit:
                done.append(open_.pop(key))
    return [bucket for bucket in (*done, *open_.values()) if any(bucket.waiting.values())]


Holding = tuple[str, int, tuple[tuple[int, int, int], ...]]
"""(kind of an action, its stage, (stage, micro-batches in flight, deferred) of the pipeline rank's stages) while it
runs."""


def at_peak(states: Sequence[Holding], stages: Mapping[int, Peaks]) -> tuple[float, float]:
    """Return (bytes that micro-batches in flight keep, all bytes) of a pipeline rank at its peak."""
    most, best = 0.0, -1.0
    # W: autograd copies the incoming gradient.
    running = {
        s: {
            "F": stage_peaks.forward,
            "B": stage_peaks.backward,
            "I": stage_peaks.deferring,
            "W": 2 * stage_peaks.weight,
        }
        for s, stage_peaks in stages.items()
    }
    waiting = {s: (stage_peaks.kept, stage_peaks.deferred) for s, stage_peaks in stages.items()}
    for kind, stage, counts in states:
        others = 0.0
        for s, num_kept, num_deferred in counts:
            kept, deferred = waiting[s]
            others += kept * num_kept + deferred * num_deferred
        total = others + running[stage][kind]
        if total > best:
            # W's micro-batch is counted among those deferred.
            most, best = others + (0.0 if kind == "W" else waiting[stage][0]), total
    return min(most, best), best
