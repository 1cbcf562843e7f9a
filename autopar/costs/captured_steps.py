"""Prices of steps that run as CUDA graphs: kernels, a gap per kernel, and one bound for the host.

A captured step is replayed: the host launches two graphs (forward and backward; the update), copies the batch into
their inputs and reads the last step's loss. No call of a layer waits for it. Between two dependent nodes the device
needs less time than between two launches on a stream.

What cannot be captured (shared/design/gpu_steps.md): exchanges of experts' rows, whose sizes the host reads; an
optimizer or activations on the host; asynchronous tensor parallelism, which signals through shared memory.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.mesh import Mesh
from cost_models.machine import Cluster

NODE_GAP = 1e-6
"""Seconds between two dependent nodes of a graph: an assumption until it is measured. On a stream
`Device.kernel_launch_seconds` stands for it, 5 us."""
STEP_SECONDS = 0.2e-3
"""The host's seconds of a whole step: two launches, copies of inputs, the late read. An assumption likewise."""


def captured(cluster: Cluster) -> Cluster:
    """Return the cluster with the gaps of captured steps between kernels."""
    gap = min(NODE_GAP, cluster.device.kernel_launch_seconds)
    return replace(cluster, device=replace(cluster.device, kernel_launch_seconds=gap))


def uncaptured_reason(mesh: Mesh, offload: str, backend: str) -> str:
    """Return why a plan's steps cannot be captured; "" if they can. offload: of the plan's pipeline."""
    if dict(zip(mesh.axes, mesh.sizes, strict=True)).get("ep", 1) > 1:
        return "the host reads how many rows each expert gets"
    if offload:
        return f"the {offload} is on the host"
    return "asynchronous tensor parallelism signals through shared memory" if backend == "async-tp" else ""
