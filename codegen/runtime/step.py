"""One training step of a generated program: micro-batches, gradient synchronisation, clipping, optimiser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from . import collectives
from .flat import Bucket, Entry
from .mesh import Mesh
from .parameters import Module, Param, RngState, shard, unshard
from .zero import ZeroUnits

Source = Mapping[str, Tensor] | Callable[[str], Tensor]
"""Whole tensors under original names: a state dict, or a function that makes one at a time."""


class Step:
    """A program made runnable on this rank: `loss = step(local_batch)` trains one step.

    model: the generated root class. optimizer_factory: takes the list of stored parameters (per original parameter one
    tensor: all of this rank's part, or under ZeRO a flat slice of it; fp32 for half-precision models) and returns a
    torch optimiser whose update is elementwise. precision: "bf16" computes in bf16 with fp32 masters and fp32 gradient
    reduction. max_grad_norm: clips by the global norm (inf: only computes it). All ranks must make the same calls.
    """

    def __init__(
        self,
        model: type[Module],
        mesh: Mesh,
        *,
        optimizer_factory: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        num_micro_batches: int = 1,
        precision: Literal["fp32", "bf16"] = "fp32",
        max_grad_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        if num_micro_batches < 1:
            raise ValueError(f"num_micro_batches must be at least 1, got {num_micro_batches}")
        if precision not in ("fp32", "bf16"):
            raise ValueError(f"precision must be 'fp32' or 'bf16', got {precision!r}")
        self.mesh = mesh
        self.num_micro_batches = num_micro_batches
        self.precision = precision
        self.max_grad_norm = max_grad_norm
        self.rng = RngState(seed=seed)
        self.model = model(mesh, self.rng)
        self.zero = ZeroUnits(self.model, mesh, precision, num_micro_batches)
        self.optimizer = optimizer_factory([p for p in self.stored_parameters().values() if p.requires_grad])
        self._input_shapes = {name: spec.local_shape(mesh) for name, spec in self.model.INPUTS.items()}
        self.num_samples = 0
        self.grad_norm: Tensor | None = None
        """Global gradient norm of the last step before clipping (0-dim), where max_grad_norm is given."""

    # Training ---------------------------------------------------------------------------------------------------------

    def __call__(self, local_batch: Mapping[str, Tensor]) -> Tensor:
        """One optimiser step on this rank's part of the global batch; the global mean loss (0-dim), equal on all ranks.

        local_batch: the inputs of `INPUTS`; dim 0 holds this rank's rows of each micro-batch in turn (`local_batch`
        makes it from a whole batch). Inputs that are not batched are as in `INPUTS`.
        """
        loss = self.forward_backward(local_batch)
        self.update()
        return loss

    def forward_backward(self, local_batch: Mapping[str, Tensor]) -> Tensor:
        """All micro-batches forward and backward, gradients reduced; no update. Returns the global mean loss."""
        batches, targets = self._prepare(local_batch)
        losses = []
        for index, inputs in enumerate(batches):
            self.rng.micro_batch = index
            self.zero.begin(accumulate=index > 0, is_last=index == len(batches) - 1)
            loss = self.model(**inputs, **targets)
            (loss if len(batches) == 1 else loss / len(batches)).backward()
            self.zero.end()
            losses.append(loss.detach())
        self.mesh.finish()
        return _mean(losses)

    def update(self) -> None:
        """Clip, let the optimiser step, bring the new parameters to all ranks."""
        if self.max_grad_norm is not None:
            self._clip(self.max_grad_norm)
        self.optimizer.step()
        self.zero.publish()
        self.rng.step += 1
        self.num_samples += self.num_micro_batches * self.rng.micro_batch_rows

    @torch.no_grad()
    def evaluate(self, local_batch: Mapping[str, Tensor]) -> Tensor:
        """The global mean loss (0-dim) in evaluation mode (`training` is False), without gradients."""
        self.model.eval()
        try:
            batches, targets = self._prepare(local_batch)
            losses = []
            for index, inputs in enumerate(batches):
                self.rng.micro_batch = index
                self.zero.begin(accumulate=False, is_last=True)
                losses.append(self.model(**inputs, **targets))
                self.zero.end(has_backward=False)
            self.mesh.finish()
            return _mean(losses)
        finally:
            self.model.train()

    def local_batch(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of a whole global batch (equal on all ranks), on the mesh's device."""
        parts = {}
        for name, spec in self.model.INPUTS.items():
            whole = batch[name].to(self.mesh.device)
            is_split = whole.ndim > 0 and whole.shape[0] == spec.shape[0] * self.num_micro_batches
            micro = whole.chunk(self.num_micro_batches) if is_split else (whole,)
            parts[name] = torch.cat([shard(part, spec, self.mesh) for part in micro]) if is_split else shard(
                whole, spec, self.mesh
            )
        return parts

    def _prepare(self, local_batch: Mapping[str, Tensor]) -> tuple[list[dict[str, Tensor]], dict[str, list[Tensor]]]:
        """The inputs of each micro-batch, and num_targets where the program takes it."""
        count = self.num_micro_batches
        batches: list[dict[str, Tensor]] = [{} for _ in range(count)]
        for name, spec in self.model.INPUTS.items():
            parts = self._micro_batches(name, spec, local_batch)
            for inputs, part in zip(batches, parts, strict=True):
                inputs[name] = part
        if not self.model.counts_targets:
            return batches, {}
        with torch.no_grad():
            counts = [self.model.count_targets(**inputs) for inputs in batches]
        if count == 1:
            return batches, {"num_targets": _Counts(counts[0], self.mesh)}
        self.mesh.finish()
        return batches, {"num_targets": [sum(each[1:], each[0]) / count for each in zip(*counts, strict=True)]}

    def _micro_batches(self, name: str, spec: Param, local_batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        if name not in local_batch:
            raise ValueError(f"the batch lacks {name!r}; the program takes {', '.join(self.model.INPUTS)}")
        value, count = local_batch[name].to(self.mesh.device, non_blocking=True), self.num_micro_batches
        if self.precision == "bf16" and value.is_floating_point():
            value = value.to(torch.bfloat16)
        expected = self._input_shapes[name]
        if expected and value.shape == (expected[0] * count, *expected[1:]):
            self.rng.micro_batch_rows = max(self.rng.micro_batch_rows, spec.shape[0])
            return torch.chunk(value, count)
        if value.shape == expected:
            return (value,) * count
        raise ValueError(
            f"{name} has shape {tuple(value.shape)} on this rank; the program was generated for {expected} per "
            f"micro-batch and {count} micro-batches (dim 0 {count} times as long), global {spec.shape}"
        )

    def _clip(self, max_norm: float) -> None:
        total = torch.zeros((), dtype=torch.float32, device=self.mesh.device)
        buckets = [bucket for bucket in self.zero.buckets if bucket.key.requires_grad]
        for bucket in buckets:
            total = total + bucket.squared_norm()
        if self.mesh.world_size > 1:
            collectives.all_reduce(total, self.mesh.world.group)
        self.grad_norm = total.sqrt()
        if max_norm < float("inf"):
            # As torch.nn.utils.clip_grad_norm_; multiplied always, since asking whether to would wait for the device.
            factor = (max_norm / (self.grad_norm + 1e-6)).clamp(max=1.0)
            for bucket in buckets:
                bucket.gradient.mul_(factor)

    # State ------------------------------------------------------------------------------------------------------------

    def load(self, source: Source) -> None:
        """Fill parameters and buffers from whole tensors under original names, equal on all ranks.

        A callable is asked for one name at a time, in the order of declaration (whatever the mesh and the stages), so
        that nothing but this rank's part stays in memory. A tied weight may come under any of its names. Raises
        KeyError for a missing name, ValueError for a wrong shape.
        """
        places = {entry.slot.name: (bucket, entry) for bucket, entry in self._entries()}
        for slot in self.model.slots():
            bucket, entry = places[slot.name]
            whole = _find(source, (slot.name, *slot.aliases), slot.spec)
            bucket.store(entry, shard(whole, slot.spec, self.mesh))
        for name, spec, value in self.model.buffer_slots():
            value.copy_(shard(_find(source, (name, *spec.aliases), spec), spec, self.mesh))
        self.zero.publish()

    def stored_parameters(self) -> dict[str, nn.Parameter]:
        """What this rank stores and the optimiser updates, by original name."""
        return {entry.slot.name: entry.stored for _, entry in self._entries() if entry.stored is not None}

    def gradients(self) -> dict[str, Tensor]:
        """The whole gradient of every trainable parameter, after `forward_backward`. Collective."""
        found = {}
        for bucket in self.zero.buckets:
            if bucket.key.requires_grad:
                for entry, local in zip(bucket.entries, bucket.whole(bucket.gradient), strict=True):
                    found[entry.slot.name] = unshard(local, entry.slot.spec, self.mesh).clone()
        return found

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """Whole tensors under original names, aliases included (as the same tensor), and persistent buffers.

        Collective. rank0_only: other ranks get an empty dict; rank 0's is in host memory, moved one at a time.
        """
        state: dict[str, Tensor] = {}
        keeps = self.mesh.rank == 0 or not rank0_only

        def keep(names: tuple[str, ...], whole: Tensor) -> None:
            if keeps:
                value = whole.detach().cpu() if rank0_only else whole.detach()
                # Never a view of what training changes.
                value = value.clone()
                state.update(dict.fromkeys(names, value))

        for bucket in self.zero.buckets:
            for entry, local in zip(bucket.entries, bucket.whole(bucket.master), strict=True):
                slot = entry.slot
                keep((slot.name, *slot.aliases), unshard(local, slot.spec, self.mesh))
        for name, spec, value in self.model.buffer_slots():
            if spec.persistent:
                keep((name,), unshard(value, spec, self.mesh))
        return state

    def _entries(self) -> list[tuple[Bucket, Entry]]:
        return [(bucket, entry) for bucket in self.zero.buckets for entry in bucket.entries]


class _Counts(list[Tensor]):
    """Sums over the ranks that may be under way (wait=False); whoever reads one waits for them."""

    def __init__(self, counts: list[Tensor], mesh: Mesh) -> None:
        super().__init__(counts)
        self.mesh = mesh

    def __getitem__(self, index: Any) -> Any:
        self.mesh.finish()
        return super().__getitem__(index)


def _mean(losses: list[Tensor]) -> Tensor:
    """In fp32 at least; the micro-batches' shares of the targets are in the losses already."""
    return _full(losses[0]) if len(losses) == 1 else torch.stack([_full(loss) for loss in losses]).mean()


def _full(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


def _find(source: Source, names: tuple[str, ...], spec: Param) -> Tensor:
    if callable(source):
        whole = source(names[0])
    else:
        held = [name for name in names if name in source]
        if not held:
            raise KeyError(f"no value for {' or '.join(names)}")
        whole = source[held[0]]
    if tuple(whole.shape) != spec.shape:
        raise ValueError(f"{names[0]} has shape {tuple(whole.shape)}, the program needs {spec.shape}")
    return whole.detach()
