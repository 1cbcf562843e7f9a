"""The end of a step: the gradients' norm, clipping, the optimizer's update, and its parameters on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from . import collectives
from .flat import Bucket
from .mesh import Mesh
from .optimizers import Factory, GlobalParameter, whole_optimizer
from .parameters import Module, declared
from .stage_module import Part

if TYPE_CHECKING:
    # Only programs with kernels, those that offload the optimizer, and those that try one have these beside them.
    from .fused_update import FusedUpdate
    from .host_optimizer import HostOptimizer
    from .whole_updates import WholeUpdates


class Update:
    """The update of the parameters that one rank stores.

    host: updates in its place where the optimizer's state is in host memory. wholes: what it updates whole. kernels:
    take the norm, and the update of a `FusedAdamW`, where they can run.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        mesh: Mesh,
        optimizer: torch.optim.Optimizer,
        *,
        host: HostOptimizer | None,
        wholes: WholeUpdates | None,
        max_grad_norm: float | None,
        kernels: FusedUpdate | None,
    ) -> None:
        self.parts, self.mesh, self.optimizer, self.host = parts, mesh, optimizer, host
        self.wholes, self.max_grad_norm = wholes, max_grad_norm
        self.kernels = kernels
        if kernels is not None:
            kernels.attach(parts, optimizer, is_offloaded=host is not None)

    def global_norm(self) -> Tensor:
        """The norm of all gradients, equal on all ranks (0-dim). Collective."""
        total = torch.zeros((), dtype=torch.float32, device=self.mesh.device)
        if self.kernels is not None and self.kernels.norm is not None:
            total = total + self.kernels.norm.squared()
        else:
            for bucket in (bucket for part in self.parts for bucket in part.trainable()):
                total = total + bucket.squared_norm()
        if self.mesh.everyone.size > 1:
            # In fp64 on all ranks: those of a pipeline may have parameters of another dtype, or none that are trained.
            whole = total.double()
            collectives.all_reduce(whole, self.mesh.everyone.group)
            total = whole.to(total.dtype)
        return total.sqrt()

    @torch.no_grad()
    def perturb(self, rho: float) -> list[tuple[Bucket, Tensor]]:
        """Move the parameters by rho along their gradients, divided by the norm of all; what they were. Collective."""
        trained = [bucket for bucket in buckets_of(self.parts) if bucket.key.requires_grad]
        before = [(bucket, bucket.master.clone()) for bucket in trained]
        scale = rho / (self.global_norm() + 1e-12)  # as in SAM's usual implementations
        for bucket in trained:
            bucket.master.add_(bucket.gradient * scale)
        self._publish()
        return before

    @torch.no_grad()
    def restore(self, before: list[tuple[Bucket, Tensor]]) -> None:
        """Undo `perturb`. Collective."""
        for bucket, value in before:
            bucket.master.copy_(value)
        self._publish()

    def _publish(self) -> None:
        for part in self.parts:
            part.zero.publish()

    def apply(self, grad_norm: Tensor | None) -> None:
        """Clip by the norm, which is known where there is a `max_grad_norm`, and update."""
        clip_factor = None if self.max_grad_norm is None else _clip_factor(self.max_grad_norm, grad_norm)
        fused_optimizer = None if self.kernels is None else self.kernels.optimizer
        if fused_optimizer is not None:
            fused_optimizer.clip_factor = clip_factor
        elif clip_factor is not None:
            for bucket in buckets_of(self.parts):
                if bucket.key.requires_grad:
                    bucket.gradient.mul_(clip_factor)
        if self.host is not None:
            self.host.update()
            return
        if self.wholes is not None:
            self.wholes.gather()
        self.optimizer.step()
        if self.wholes is not None:
            self.wholes.send_back()
        for part in self.parts:
            part.zero.publish(is_copied=fused_optimizer is not None)


def _clip_factor(max_norm: float, grad_norm: Tensor | None) -> Tensor | None:
    """Return the factor for all gradients (0-dim)."""
    assert grad_norm is not None
    # As torch.nn.utils.clip_grad_norm_; multiplied always, since asking whether to would wait for the device.
    return (max_norm / (grad_norm + 1e-6)).clamp(max=1.0) if max_norm < float("inf") else None


def buckets_of(parts: Sequence[Part]) -> list[Bucket]:
    """The buckets of all parts."""
    return [bucket for part in parts for bucket in part.zero.buckets]


def require_finite(buckets: Sequence[Bucket], mesh: Mesh) -> None:
    """Raises FloatingPointError on all ranks if a parameter is inf or nan on one. Collective."""
    spoiled = torch.zeros((), dtype=torch.float32, device=mesh.device)
    for bucket in buckets:
        if bucket.master.is_floating_point() and bucket.master.numel():
            spoiled += (~torch.isfinite(torch.linalg.vector_norm(bucket.master, float("inf")))).to(spoiled)
    if mesh.everyone.size > 1:
        collectives.all_reduce(spoiled, mesh.everyone.group)
    if spoiled.item():
        raise FloatingPointError("some parameters are inf or nan")


# The optimizer --------------------------------------------------------------------------------------------------------


def rank_optimizer(
    factory: Factory,
    parameters: Sequence[GlobalParameter],
    parts: Sequence[Part],
    device: torch.device | str,
    *,
    wholes: WholeUpdates | None = None,
) -> torch.optim.Optimizer:
    """The factory's optimizer with this rank's tensors in their places; of tied stages' copies all."""
    stored_parts: dict[str, list[nn.Parameter]] = {}
    for part in parts:
        for _, entry in part.entries():
            tensor = entry.stored if wholes is None else wholes.updated(entry)
            if tensor is not None and tensor.requires_grad:
                for name in part.names(entry.slot):
                    stored_parts.setdefault(name, []).append(tensor)
    return whole_optimizer(factory, parameters, device).replace(stored_parts)


def stored_whole(parts: Sequence[Part]) -> dict[str, bool]:
    """Whether this rank stores a parameter whole, for each of which it stores anything, under all names."""
    return {
        name: not entry.slot.spec.padding and entry.stored.shape == entry.slot.spec.shape
        for part in parts
        for _, entry in part.entries()
        if entry.stored is not None
        for name in part.names(entry.slot)
    }


def parameters_of_programs(roots: Iterable[type[Module]]) -> Iterator[GlobalParameter]:
    """The trainable parameters that root classes declare, each once."""
    specs = {name: spec for root in roots for name, spec, _ in declared(root) if spec.requires_grad}
    for name, spec in specs.items():
        yield GlobalParameter(name, spec.shape, str(spec.dtype).removeprefix("torch."))
