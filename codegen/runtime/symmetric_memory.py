"""torch's symmetric memory: products that run while what they need is fetched from other ranks' memory.

All private interface of torch for it is behind this module (torch.distributed._symmetric_memory, torch.ops.symm_mem).
`torch.ops.symm_mem.fused_all_gather_matmul` multiplies every rank's part as soon as it has been copied from that rank,
`fused_matmul_reduce_scatter` sends each rank its chunk of the result as soon as it is multiplied, both on two streams,
so that one's copies run beside the other's products (the decomposition of S. Wang et al., "Overlap Communication with
Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023; torch calls it asynchronous tensor
parallelism). The caller's stream waits for both before they return to it: no result is awaited.

They want GPUs that read one another's memory, on one node, each with its own process. `usable` finds out whether the
ranks of an axis are such, by doing it, and gives all of them one answer.
"""

from __future__ import annotations

import hashlib
import socket
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from .mesh import Axis, Mesh

DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_PROBE_SIZE: Final = 16
"""Rows of each rank, and width, of the products that `usable` tries."""


def set_up(mesh: Mesh, name: str) -> None:
    """Makes products run beside the transfers on the axis of that name from now on, if its ranks can.

    Collective over the axis: every rank must call it, before the axis is used. Warns where GPUs cannot.
    """
    axis = mesh.axis(name)
    if axis.size == 1:
        return
    if usable(axis, mesh.device):
        mesh.put(replace(axis, symmetric=_group_name(axis)))
    elif mesh.device.type == "cuda" and axis.rank == 0:
        warnings.warn(
            f"the ranks of the axis {name} cannot use symmetric memory (one node, GPUs that reach one another's "
            "memory): its products wait for their collectives",
            stacklevel=2,
        )


def usable(axis: Axis, device: torch.device) -> bool:
    """Whether the ranks of an axis can share memory and compute with it: the same answer on all of them.

    Collective: every rank of the axis must call it. Whatever goes wrong in a probe is a no; only the exchange of the
    answers themselves can raise, as any collective can. Ranks answer after each probe, so that none goes on to wait in
    the next one for a rank that failed.
    """
    for probe in (_has_operators, _reaches_peers, _has_workspace, _multiplies):
        if not _all_agree(axis, device, probe):
            return False
    return True


def fits(axis: Axis, dim: int, *tensors: Tensor) -> bool:
    """Whether products with operands like these run beside transfers: of an axis that was set up, matrices or more, of
    one dtype, cut along rows. Equal on all ranks, whose operands have equal shapes."""
    x, dtypes = tensors[0], {tensor.dtype for tensor in tensors}
    is_float = len(dtypes) == 1 and x.dtype in DTYPES
    return bool(axis.symmetric) and is_float and 0 <= dim < x.ndim - 1 and x.numel() > 0


def all_gather_matmul(part: Tensor, matrices: Sequence[Tensor], dim: int, axis: Axis) -> tuple[Tensor, list[Tensor]]:
    """(x, x @ matrix for each): x [..., k] is the ranks' parts in rank order along `dim`, matrices [k, m] each.

    Results lie in memory with `dim` outermost.
    """
    operator = torch.ops.symm_mem.fused_all_gather_matmul
    x, products = operator(outermost(part, dim), list(matrices), dim, axis.symmetric)
    return x, products


def matmul_reduce_scatter(x: Tensor, matrix: Tensor, dim: int, axis: Axis) -> Tensor:
    """This rank's part along `dim` of the sum over ranks of x @ matrix, contiguous; x [..., k], matrix [k, m]."""
    operator = torch.ops.symm_mem.fused_matmul_reduce_scatter
    result: Tensor = operator(outermost(x, dim), matrix, "sum", dim, axis.symmetric)
    return result.contiguous()


def outermost(x: Tensor, dim: int) -> Tensor:
    """x with `dim` outermost in memory, as the operators take it without a copy (and assert, of what is gathered)."""
    return x.movedim(dim, 0).contiguous().movedim(0, dim)


# --- probes -----------------------------------------------------------------------------------------------------------


def _all_agree(axis: Axis, device: torch.device, probe: Callable[[Axis, torch.device], bool]) -> bool:
    try:
        is_fine = probe(axis, device)
    except Exception:  # whatever torch raises where it cannot
        is_fine = False
    num_failed = axis.sum_over(torch.tensor([0.0 if is_fine else 1.0], device=device))
    return num_failed.item() == 0


def _has_operators(axis: Axis, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    import torch.distributed._symmetric_memory  # noqa: F401 (defines the operators)

    operators = (torch.ops.symm_mem.fused_all_gather_matmul, torch.ops.symm_mem.fused_matmul_reduce_scatter)
    return all(callable(operator) for operator in operators) and bool(_group_name(axis))


def _reaches_peers(axis: Axis, device: torch.device) -> bool:
    """Whether all ranks are on this node, with GPUs of their own that this rank's can read."""
    index = torch.cuda.current_device()
    place = torch.tensor([_node(), index], device=device)
    nodes, devices = zip(*axis.gather_parts(place).tolist(), strict=True)
    if len(set(nodes)) > 1 or len(set(devices)) < axis.size:
        return False
    peers = [peer for rank, peer in enumerate(devices) if rank != axis.rank]
    return all(torch.cuda.can_device_access_peer(index, peer) for peer in peers)


def _node() -> int:
    """A number of this node (63 bits of a hash of its name and of when it was started)."""
    started = Path("/proc/sys/kernel/random/boot_id")
    text = socket.gethostname() + (started.read_text() if started.exists() else "")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _has_workspace(axis: Axis, device: torch.device) -> bool:
    """Whether the ranks can map memory of one another."""
    from torch.distributed import _symmetric_memory as torch_memory

    name = _group_name(axis)
    with warnings.catch_warnings(), suppress(AttributeError):
        # Needed by older versions of torch, deprecated in newer ones.
        warnings.simplefilter("ignore")
        torch_memory.enable_symm_mem_for_group(name)
    return torch_memory.get_symm_mem_workspace(name, min_size=1 << 20) is not None


def _multiplies(axis: Axis, device: torch.device) -> bool:
    """Whether both operators give what plain products and collectives do; of small whole numbers, so exactly."""
    with_memory = replace(axis, symmetric=_group_name(axis))
    steps = torch.arange(_PROBE_SIZE * _PROBE_SIZE, device=device, dtype=torch.float32).view(_PROBE_SIZE, _PROBE_SIZE)
    part, matrix = (steps + axis.rank) % 5, (steps % 3).t()
    whole, (product,) = all_gather_matmul(part, [matrix], 0, with_memory)
    wanted = torch.cat([(steps + rank) % 5 for rank in range(axis.size)])
    summed = matmul_reduce_scatter(wanted + axis.rank, matrix, 0, with_memory)
    total = sum((wanted + rank) @ matrix for rank in range(axis.size))
    assert isinstance(total, Tensor)
    equal = torch.equal(whole, wanted), torch.equal(product, wanted @ matrix)
    return all(equal) and torch.equal(summed, total.chunk(axis.size)[axis.rank])


def _group_name(axis: Axis) -> Any:
    """A string, of a type of its own in newer versions of torch."""
    return axis.group.group_name
