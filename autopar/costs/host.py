"""Host work around kernels, in units of a kernel's launch (Device.kernel_launch_seconds).

Counted on CPUs only, where nothing overlaps it: a GPU's host runs ahead of its kernels. Rounded by hand, not fitted,
from steps of a GPT-2 and a Llama of four layers 16 wide, in which hardly anything else is left. On two processes of
an EPYC (torch 2.13, launch 0.032 ms) a micro-batch took 7.7 and 11 ms of CPU. A step took 3.1 ms besides its
micro-batches, and a zero-bubble schedule of 68 linear calls 22 ms more than 1F1B, of both ranks together.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.machine import Cluster

VIEW = 0.25
"""A view, and the same again in its backward."""
GRADIENT = 0.4
"""Launches per micro-batch to add the gradient of one parameter to the buffer that is reduced."""
UPDATE = 2.0
"""Launches per step to update one parameter: look up its state, store its gradient."""
ACTION = 6.0
"""Launches for one forward or backward of a pipeline stage: receive its inputs, send its results."""
LOSS = (20.0, 10.0)
"""Small kernels of cross-entropy in programs, forward and backward: about as many as
codegen/runtime/cross_entropy.py calls, counted by reading."""
DEFERRED = 8.0
"""The deferred gradients of one linear call: a separate autograd function, the queue, separate sums."""


def launch_seconds(cluster: Cluster) -> float:
    """Return the unit; 0 where the host's work is not visible."""
    return cluster.device.kernel_launch_seconds if cluster.device.is_cpu else 0.0


@dataclass(frozen=True, slots=True)
class Host:
    """Host effects shared by pipeline ranks. action_seconds: of an action besides its stage's work. core_share:
    Device.core_share; other ranks use the cores that a waiting pipeline rank leaves. carries: whether compute
    cores also move messages, so that a pipeline rank loses the time of what it receives."""

    action_seconds: float = 0.0
    core_share: float = 1.0
    carries: bool = False


OWN_CORES = Host()


def host_of(cluster: Cluster) -> Host:
    """Return what the host of a cluster's processes adds to a pipeline's actions."""
    return Host(ACTION * launch_seconds(cluster), cluster.device.core_share, cluster.device.is_cpu)
