"""What a `Step` has beyond a plain one, by the words that plans use for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from codegen.runtime.compressed import Compression
from codegen.runtime.deferred import DeferredGradients
from codegen.runtime.fused_update import FusedUpdate
from codegen.runtime.host_memory import HostMemory
from codegen.runtime.host_optimizer import HostOptimizer
from codegen.runtime.mesh import Mesh
from codegen.runtime.offload import Offload
from codegen.runtime.pipeline_executor import PipelineExecutor
from codegen.runtime.sharded_units import ShardedUnits


def features(
    mesh: Mesh,
    offload_optimizer: str = "",
    offload_parameters: bool = False,
    compression: Mapping[str, str] | None = None,
    kernels: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Arguments of `Step`; options are handed on."""
    host = HostMemory(offload_optimizer, mesh.device, offload_parameters) if offload_optimizer else None
    return {
        **options,
        "offload": Offload(mesh.device, None if host is None else host.traffic),
        "offload_optimizer": None if host is None else HostOptimizer(host),
        "units": sharded(host, Compression(compression) if compression else None),
        "kernels": FusedUpdate() if kernels else None,
    }


def sharded(host: HostMemory | None = None, compression: Compression | None = None) -> Any:
    """The `units` of a step of any ZeRO stage."""
    return partial(ShardedUnits, host=host, compression=compression)


def staged(schedule: Sequence[str]) -> Any:
    """The `executor` of a Pipeline with these lines of actions."""
    return partial(PipelineExecutor, schedule=schedule, deferred=DeferredGradients)
