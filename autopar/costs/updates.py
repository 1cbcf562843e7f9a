"""What the optimiser's update keeps, allocates and moves, counted operator by operator on small parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.costs.live_bytes import LiveBytes
from autopar.costs.rates import Training
from codegen.runtime.optimizers import GlobalParameter, whole_optimizer
from cost_models import memory

PROBE_ELEMENTS = 1024

OptimizerFactory = Callable[..., torch.optim.Optimizer]
"""`params -> optimizer` or `named_parameters -> optimizer` (codegen/runtime/optimizers.py)."""


@dataclass(frozen=True, slots=True)
class DefaultAdamW:
    """The optimiser where none is given: torch's fused AdamW, which moves a third of what torch's default moves.

    In programs with kernels a GPU runs codegen/runtime/fused_adamw.py instead, which differs by round-off only, and
    writes what the model computes with in the same pass: with c bytes of that, 28 + c per element instead of 28, and
    4 + c for a copy (parameter_prices.py). Clipping is asked for after planning and priced nowhere: 4 bytes for the
    norm, and without kernels 8 for the product.
    """

    lr: float = 1e-3
    weight_decay: float = 1e-2

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.lr, weight_decay=self.weight_decay, fused=True)


adamw: OptimizerFactory = DefaultAdamW()


def training_of(
    factory: OptimizerFactory,
    precision: str,
    on_gpu: bool = False,
    parameters: Sequence[GlobalParameter] = (GlobalParameter("weight", (PROBE_ELEMENTS,)),),
) -> Training:
    """How the optimiser and the precision bear on memory and time; one update of small parameters is watched.

    parameters: the model's; the small ones are updated as most of their elements are.
    """
    one = _Probe(factory, parameters, 1, on_gpu)
    eight = _Probe(factory, parameters, 8, on_gpu)
    widths = memory.precision(precision)
    return Training(
        state_bytes=one.state_bytes / PROBE_ELEMENTS,
        compute_bytes=widths.compute_bytes,
        master_bytes=widths.master_bytes,
        gradient_bytes=widths.gradient_bytes,
        update_bytes=one.temporary_bytes / PROBE_ELEMENTS,
        updates_together=eight.temporary_bytes >= 4 * one.temporary_bytes > 0,
        update_traffic=one.moved_bytes / PROBE_ELEMENTS,
        writes_copies=isinstance(factory, DefaultAdamW),
    )


class _Probe:
    """An optimiser's second update of `count` parameters: bytes of its state, temporaries, and what it moves.

    On a GPU torch's optimisers update all parameters with one call per operation (foreach) unless told otherwise.
    """

    def __init__(self, factory: OptimizerFactory, given: Sequence[GlobalParameter], count: int, on_gpu: bool) -> None:
        made = whole_optimizer(factory, given)
        # Most elements are in the group with the largest parameter, which is a matrix or more if that is.
        largest = max((n for names in made.groups for n in names), key=lambda n: made.stand_ins[n].numel())
        dims = made.stand_ins[largest].ndim
        shape = (32, PROBE_ELEMENTS // 32, *(1 for _ in range(dims - 2))) if dims > 1 else (PROBE_ELEMENTS,)
        parameters = [nn.Parameter(torch.zeros(shape, device="cpu")) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer = made.replace({largest: parameters})
        for group in optimizer.param_groups:
            if on_gpu and group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = True
        optimizer.step()
        live, moved = LiveBytes(), MovedBytes()
        with live:
            optimizer.step()
        with moved:
            optimizer.step()
        gradients = sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)
        tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        self.state_bytes = sum(value.nbytes for value in tensors if value.numel() > 1)
        self.temporary_bytes = live.peak_bytes
        # Fused kernels could unscale gradients in place, and say so; they do not here.
        self.moved_bytes = moved.num_bytes - (gradients if moved.names_gradients else 0)


class MovedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class hook
    """`with MovedBytes() as moved:` counts what operators read and write, each tensor once per operator; views are
    free. names_gradients: whether a fused update was among them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self.names_gradients = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        self.names_gradients |= str(func.overloadpacket.__name__).startswith("_fused_")
        named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs or {})
        read = {id(t): t.nbytes for t in tree_leaves(named) if isinstance(t, torch.Tensor)}
        if schema.is_mutable:
            changed = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            leaves = tree_leaves([named.get(name) for name in changed])
            written = {id(t): t.nbytes for t in leaves if isinstance(t, torch.Tensor)}
        else:
            storages = {t.untyped_storage().data_ptr() for t in tree_leaves(named) if isinstance(t, torch.Tensor)}
            made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            if any(t.untyped_storage().data_ptr() in storages for t in made):
                return result
            written = {id(t): t.nbytes for t in made}
        self.num_bytes += sum(read.values()) + sum(written.values())
        return result
