"""Prices of steps that run as CUDA graphs: kernels, a gap per kernel, and one bound for the host.

A captured step is replayed (codegen/runtime/captured.py): the host launches three graphs, copies the batch into their
inputs and reads loss and norm. No call of a layer waits for it. Between two dependent nodes the device needs less time
than between two launches on a stream. codegen/capture.py says which programs are captured.
"""

from __future__ import annotations

from dataclasses import replace

from cost_models.machine import Cluster

NODE_GAP = 1e-6
"""Seconds between two dependent nodes of a graph: an assumption until it is measured. On a stream
`Device.kernel_launch_seconds` stands for it, 5 us."""
STEP_SECONDS = 0.2e-3
"""The host's seconds of a whole step: launches, copies of inputs, the read. An assumption likewise."""


def captured(cluster: Cluster) -> Cluster:
    """Return the cluster with the gaps of captured steps between kernels."""
    gap = min(NODE_GAP, cluster.device.kernel_launch_seconds)
    return replace(cluster, device=replace(cluster.device, kernel_launch_seconds=gap))
