"""Layers compiled by torch.compile with inductor, region by region; the one place that knows of torch.compile.

A layer class' forward is cut into regions (`regions.py`), each of which is compiled once and shared by all instances of
the class: regions get parameters as arguments, and guards see shapes and strides, never storages. All else runs as in
an eager program, outside of what is compiled:

- reshards and their backwards, in the same order on all ranks, since all cut the same text;
- dropout, fused kernels and put-off weight gradients, which are statements between regions;
- hooks of ZeRO, recomputation and offload, which act on modules, saved tensors and leaves. A region saves its arguments
  and what inductor chooses, and its backward is one node of autograd's graph.

A layer that recomputes selectively stays eager: what a compiled region keeps is inductor's choice, not the policy's.
The root, with its embedding and head, stays eager too. Shapes are fixed (dynamic=False): a region is compiled for
training, at the first step, and for evaluation, at the first evaluation.

Ranks compile on their own, in their first step. Inductor's cache on disk is safe to share, and the others wait for the
slowest in their collectives, which may then take COMPILE_SECONDS.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist

from .parameters import Module
from .regions import cut

BACKENDS = ("eager", "inductor", "async-tp")

COMPILE_SECONDS = 3600.0
"""How long collectives may take while ranks compile."""


def why_unavailable(device: torch.device) -> str:
    """Return what inductor lacks on this machine to compile for the device; "" if nothing."""
    from torch._dynamo.eval_frame import check_if_dynamo_supported

    try:
        check_if_dynamo_supported()
    except RuntimeError as error:
        return str(error)
    if device.type == "cpu":
        return _why_no_cpp()
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    return f"the GPU has compute capability {major}.{minor}, inductor needs 7.0" if major < 7 else ""


def _why_no_cpp() -> str:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "there is no C++ compiler (g++ or clang++ on the path, or the variable CXX)"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.exists() else f"Python's headers are not installed: {header} is missing"


def require(backend: str, device: torch.device) -> None:
    """Raises ValueError for a backend that does not exist, RuntimeError for one that cannot run here."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    reason = why_unavailable(device) if backend == "inductor" else ""
    if reason:
        raise RuntimeError(f"backend='inductor' cannot compile for {device.type} here: {reason}; use backend='eager'")


class CompiledLayers:
    """Layers that run compiled regions. Raises RuntimeError where inductor cannot compile for the device."""

    def __init__(self, device: torch.device) -> None:
        require("inductor", device)
        self._have_run: set[bool] = set()

    def attach(self, roots: Iterable[Module]) -> None:
        """Compile the layers of these root modules, each when it runs first; with recompute="selective" they stay."""
        forwards: dict[type[Module], Callable[..., Any]] = {}
        layers = (layer for root in roots for layer in root.units()[1:] if layer.recompute != "selective")
        for layer in layers:
            cls = type(layer)
            if cls not in forwards:
                forwards[cls] = self._compiled(cls)
            layer.forward = layer.wrapped(MethodType(forwards[cls], layer))

    def _compiled(self, cls: type[Module]) -> Callable[..., Any]:
        specs = {**cls.PARAMETERS, **cls.BUFFERS}
        stored = {tensor_name for name, spec in specs.items() for tensor_name in (name, *spec.aliases)}
        parts = cut(cls.forward, stored)
        return parts.compiled(partial(torch.compile, fullgraph=True, dynamic=False, backend="inductor"))

    @contextmanager
    def running(self, is_training: bool) -> Iterator[None]:
        """The context around a step or an evaluation; the first of each compiles."""
        if is_training in self._have_run:
            yield
            return
        with patience():
            yield
        self._have_run.add(is_training)


@contextmanager
def patience(seconds: float = COMPILE_SECONDS) -> Iterator[None]:
    """Collectives that start in this context wait so long for ranks that still compile, if not longer.

    Of all groups of this process. gloo's sends and receives keep the time that their group was made with.
    """
    before = [(backend, backend.options._timeout) for backend in _backends()]
    try:
        for backend, timeout in before:
            backend._set_default_timeout(max(timeout, timedelta(seconds=seconds)))
        yield
    finally:
        for backend, timeout in before:
            backend._set_default_timeout(timeout)


def _backends() -> list[Any]:
    """gloo's and NCCL's part of every process group of this process."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    groups: Iterable[Any] = dist.distributed_c10d._world.pg_map
    backends = (group._get_backend(device) for group in groups for device in group._device_types)
    return list({id(backend): backend for backend in backends if hasattr(backend, "_set_default_timeout")}.values())
