"""What the host does beside kernels, in units of a kernel's launch (Device.kernel_launch_seconds).

Counted on CPUs only, where nothing runs meanwhile: a GPU's host is ahead of its kernels. From steps of a GPT-2 and a
Llama of four layers 16 wide, in which hardly anything else is left, on two processes of an EPYC (torch 2.13, launch
0.032 ms): a micro-batch took 7.7 and 11 ms of CPU, a step 3.1 ms beside its micro-batches, and a zero-bubble schedule
of 68 linear calls 22 ms more than 1F1B, of both ranks together. Factors are rounded from these by hand, not fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.machine import Cluster

VIEW = 0.25
"""A view, and the same again in its backward."""
GRADIENT = 0.4
"""Launches per micro-batch to add the gradient of one parameter to the buffer that is reduced."""
UPDATE = 2.0
"""Launches per step to update one parameter: its state looked up, its gradient put in its place."""
ACTION = 6.0
"""Launches for one forward or backward of a pipeline's stage: what it needs received, what it made sent."""
LOSS = (20.0, 10.0)
"""Small kernels of cross-entropy in programs, forward and backward: about as many as codegen/runtime/cross_entropy.py
calls, counted by reading."""
DEFERRED = 8.0
"""The gradients of one linear call that are deferred: its own autograd function, the queue, the sums by themselves."""


def launch_seconds(cluster: Cluster) -> float:
    """The unit; 0 where the host's work is not seen."""
    return cluster.device.kernel_launch_seconds if cluster.device.is_cpu else 0.0


@dataclass(frozen=True, slots=True)
class Host:
    """What pipeline ranks share. action_seconds: that an action takes beside what its stage does. core_share:
    Device.core_share; cores that a waiting pipeline rank leaves, others use. carries: whether cores that compute also
    move what is sent, so that a pipeline rank loses the time of what it receives."""

    action_seconds: float = 0.0
    core_share: float = 1.0
    carries: bool = False


OWN_CORES = Host()


def host_of(cluster: Cluster) -> Host:
    """What the host of a cluster's processes adds to a pipeline's actions."""
    return Host(ACTION * launch_seconds(cluster), cluster.device.core_share, cluster.device.is_cpu)
