"""Recomputation of a layer's activations in backward, and the one place where it and offload wrap a layer's forward.

A layer whose mode is not "none" keeps, of what its forward makes, nothing ("full") or the results of matmuls and
attention ("selective"), besides its arguments; its forward runs again when its backward begins, as far as the last
tensor that backward needs. This is torch.utils.checkpoint, non-reentrant:

- Parameters: only `forward` runs again, not the module's hooks. Those of ZeRO-3 gather the parameters before the first
  node of the layer's backward, which is also before the recomputation; it cannot gather a neighbor.
- Collectives of the forward run again, on all ranks in one order, since all run the same graph. "selective" does not
  keep their results: those of a gather are larger than the matmul result that follows, those of a reduction as large as
  the one before, which is kept already. A reduction at the end of a layer is not repeated where only additions follow.
  One started with wait=False is finished by `Mesh.finish` like the first.
- Random numbers: dropout masks are functions of counters. The micro-batch is that of the first run, whatever runs by
  then; the optimizer step cannot have changed.
- Buffers that a forward writes (running statistics) are written by the first run alone.
- Kernels that an autograd function launches, rather than calls as an operator, are invisible to the policy and always
  run again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, get_args

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .parameters import Mode, Module

Context = AbstractContextManager[Any]

_KEPT = (
    "mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_addmm_activation", "_scaled_mm", "_grouped_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math",
    "_flash_attention_forward", "_efficient_attention_forward", "_cudnn_attention_forward",
)  # fmt: skip
"""aten operators whose results "selective" keeps; torch versions and devices differ in which they use."""

_KEPT_KERNELS = ("grouped_product",)
"""Kernels that are operators, whatever their namespace, whose results it keeps: those that multiply matrices."""


def mode(text: str) -> Mode:
    """The mode of that name, or ValueError with the legal ones."""
    for legal in get_args(Mode):
        if text == legal:
            checked: Mode = legal
            return checked
    raise ValueError(f"recompute must be one of {', '.join(get_args(Mode))}, got {text!r}")


class MemorySaving(Module):
    """Base of layer classes of which instances recompute their activations, or move them to the host.

    recompute: "none", "selective" or "full". offload_activations: whether what its forward saves moves to `offload`.
    """

    def choose_memory(self, recompute: str, offload_activations: bool) -> None:
        self.recompute, self.offload_activations = mode(recompute), offload_activations

    def wrapped(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        return partial(_run, self, forward)


def _run(layer: Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`forward(*args, **kwargs)` with the layer's recomputation and offload, where a backward of training follows."""
    if not (layer.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    if layer.recompute == "none" and not layer.offload_activations:
        return forward(*args, **kwargs)
    with _moving(layer) if layer.offload_activations else nullcontext():
        if layer.recompute == "none":
            return forward(*args, **kwargs)
        return _checkpointed(layer, forward, args, kwargs)


def _moving(layer: Module) -> Context:
    if layer.offload is None:
        raise ValueError(f"{layer.path} offloads its activations: the step needs offload=Offload(mesh.device)")
    return layer.offload.moving(layer, layer.rng.micro_batch)


def _checkpointed(layer: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rng, micro_batch, names = layer.rng, layer.rng.micro_batch, tuple(kwargs)

    def body(*values: Any) -> Any:
        count = len(values) - len(names)
        # Of a pipeline's schedule another micro-batch may have set it meanwhile.
        current, rng.micro_batch = rng.micro_batch, micro_batch
        try:
            return forward(*values[:count], **dict(zip(names, values[count:], strict=True)))
        finally:
            rng.micro_batch = current

    contexts = partial(_contexts, layer.written_buffers(), is_selective=layer.recompute == "selective")
    # Positional, since only such tensors are saved as autograd saves tensors, and so can be offloaded.
    values = (*args, *kwargs.values())
    return checkpoint(body, *values, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _contexts(buffers: list[torch.Tensor], is_selective: bool) -> tuple[Context, Context]:
    """Return the contexts of the first run of a forward and of its recomputation."""
    make: Callable[..., tuple[Context, Context]] = create_selective_checkpoint_contexts
    first, again = make(_policy) if is_selective else (nullcontext(), nullcontext())
    return first, _Unwritten(buffers, again)


class _Unwritten:
    """Leaves buffers as they were. Outside of `inner`, which in a second run knows only what the first one called."""

    def __init__(self, buffers: list[torch.Tensor], inner: Context) -> None:
        self.buffers, self.inner = buffers, inner
        self.kept: list[torch.Tensor] = []

    def __enter__(self) -> None:
        self.kept = [buffer.clone() for buffer in self.buffers]
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        for buffer, value in zip(self.buffers, self.kept, strict=True):
            buffer.data.copy_(value)  # not a change that backward, which keeps a reference, may see
        self.kept = []


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy that `create_selective_checkpoint_contexts` takes: results of matmuls and attention are kept."""
    namespace, _, name = operator._schema.name.partition("::")
    # With a given output (`out=`, as collectives have) the caller's tensor would stay empty.
    keeps = name in (_KEPT if namespace == "aten" else _KEPT_KERNELS) and not operator._schema.is_mutable
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
