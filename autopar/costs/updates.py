"""Kept, temporary and moved bytes of the optimizer's update, counted operator by operator on small parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from autopar.costs.live_bytes import LiveBytes
from autopar.costs.rates import Training
from codegen.runtime.optimizer_probe import Needs
from codegen.runtime.optimizers import GlobalParameter, whole_optimizer
from cost_models import memory

PROBE_ELEMENTS, PROBE_ROWS = 1024, 32

OptimizerFactory = Callable[..., torch.optim.Optimizer]
"""`params -> optimizer` or `named_parameters -> optimizer` (codegen/runtime/optimizers.py)."""


@dataclass(frozen=True, slots=True)
class DefaultAdamW:
    """The default optimizer: torch's fused AdamW, which moves a third of the bytes of torch's default.

    In programs with kernels a GPU runs codegen/runtime/fused_adamw.py instead. It differs by round-off only, and
    writes the compute tensors in the same pass: with c bytes of these, 28 + c per element instead of 28, and 4 + c
    for a copy (parameter_prices.py). Clipping is requested after planning and not priced: 4 bytes for the norm, and
    without kernels 8 for the product.
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
    needs: Needs | None = None,
) -> Training:
    """Return how optimizer and precision affect memory and time, from one watched update of small parameters.

    parameters: the model's; the small ones are updated like the group with most elements. needs: parameters that
    must be updated whole. These and the rest are then watched separately, weighted by their elements.
    """
    whole = frozenset[str]() if needs is None or needs.is_coupled else needs.whole
    mine, others = ([p for p in parameters if (p.name in whole) == is_whole] for is_whole in (True, False))
    share = _numel(mine) / max(_numel(parameters), 1)
    parts = [(weight, part) for weight, part in ((share, mine), (1.0 - share, others)) if part]
    ones = [(weight, _Probe(factory, parameters, part, 1, on_gpu)) for weight, part in parts]
    one = max(ones, key=lambda pair: pair[0])[1]
    eight = _Probe(factory, parameters, max(parts, key=lambda pair: pair[0])[1], 8, on_gpu)
    widths = memory.precision(precision)
    return Training(
        state_bytes=sum(weight * probe.state_bytes for weight, probe in ones) / PROBE_ELEMENTS,
        compute_bytes=widths.compute_bytes,
        master_bytes=widths.master_bytes,
        gradient_bytes=widths.gradient_bytes,
        update_bytes=one.temporary_bytes / PROBE_ELEMENTS,
        updates_together=eight.temporary_bytes >= 4 * one.temporary_bytes > 0,
        update_traffic=sum(weight * probe.moved_bytes for weight, probe in ones) / PROBE_ELEMENTS,
        whole_share=share,
        update_flops=ones[0][1].flops / PROBE_ELEMENTS / PROBE_ROWS * _mean_rows(mine),
        update_dtype=ones[0][1].product_dtype,
        writes_copies=isinstance(factory, DefaultAdamW),
    )


def _numel(parameters: Iterable[GlobalParameter]) -> int:
    return sum(math.prod(parameter.shape) for parameter in parameters)


def _mean_rows(parameters: Sequence[GlobalParameter]) -> float:
    """Return the smaller dim of the matrices in the parameters or their stacks, averaged over elements. A product of
    a matrix with another of its shape takes so many multiplications per element."""
    rows = sum(math.prod(p.shape) * min(p.shape[-2:]) for p in parameters if len(p.shape) > 1)
    return rows / max(_numel(parameters), 1)


class _Probe:
    """An optimizer's second update of `count` parameters: bytes of its state and temporaries, moved bytes, and FLOPs of
    products. given: the model's parameters; watched: those that the small ones imitate. Zeros if the optimizer has
    none of these.

    On a GPU torch's optimizers update all parameters with one call per operation (foreach) by default.
    """

    def __init__(
        self,
        factory: OptimizerFactory,
        parameters_given: Sequence[GlobalParameter],
        watched: Sequence[GlobalParameter],
        count: int,
        on_gpu: bool,
    ) -> None:
        optimizer_built = whole_optimizer(factory, parameters_given)
        self.state_bytes = self.temporary_bytes = self.moved_bytes = self.flops = 0
        self.product_dtype = "fp32"
        watched_names = {parameter.name for parameter in watched}
        held_names = [name for names in optimizer_built.groups for name in names if name in watched_names]
        if not held_names:
            return
        # Most elements are in the group with the largest parameter; this has at least two dims if that one does.
        largest = max(held_names, key=lambda name: optimizer_built.stand_ins[name].numel())
        dims, matrix = optimizer_built.stand_ins[largest].ndim, (PROBE_ROWS, PROBE_ELEMENTS // PROBE_ROWS)
        shape = (*(1 for _ in range(dims - 2)), *matrix) if dims > 1 else (PROBE_ELEMENTS,)
        parameters = [nn.Parameter(torch.zeros(shape, device="cpu")) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer = optimizer_built.replace({largest: parameters})
        for group in optimizer.param_groups:
            if on_gpu and group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = True
        optimizer.step()
        live, moved = LiveBytes(), MovedBytes()
        with live:
            optimizer.step()
        with moved:
            optimizer.step()
        self.flops, self.product_dtype = moved.flops, moved.product_dtype
        gradients = sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)
        tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        self.state_bytes = sum(value.nbytes for value in tensors if value.numel() > 1)
        self.temporary_bytes = live.peak_bytes
        # Fused kernels could unscale gradients in place, and say so; here they do not.
        self.moved_bytes = moved.num_bytes - (gradients if moved.names_gradients else 0)


class MovedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class hook
    """`with MovedBytes() as moved:` counts bytes that operators read and write, each tensor once per operator; views
    are free.

    names_gradients: whether a fused update was among them. product_dtype: of the last matrix product. flops: of
    matrix products. torch's FlopCounterMode would hook all modules of the process, those of other threads included.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = self.flops = 0
        self.names_gradients = False
        self.product_dtype = "fp32"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
            self.product_dtype = "bf16" if result.dtype == torch.bfloat16 else "fp32"
        self.names_gradients |= str(func.overloadpacket.__name__).startswith("_fused_")
        named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs or {})
        read = {id(t): t.nbytes for t in tree_leaves(named) if isinstance(t, torch.Tensor)}
        if schema.is_mutable:
            changed = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            leaves = tree_leaves([named.get(name) for name in changed])
            written = {id(t): t.nbytes for t in leaves if isinstance(t, torch.Tensor)}
        else:
            storages = {t.untyped_storage().data_ptr() for t in tree_leaves(named) if isinstance(t, torch.Tensor)}
            results = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            if any(t.untyped_storage().data_ptr() in storages for t in results):
                return result
            written = {id(t): t.nbytes for t in results}
        self.num_bytes += sum(read.values()) + sum(written.values())
        return result
