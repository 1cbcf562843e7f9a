"""Convert numbers to seconds and bytes: the cost of devices, links and collectives. numpy at most; no torch, no graph.

``machine`` describes clusters (data with sources in ``machines/*.toml``). ``compute`` prices one kernel,
``collective`` one collective operation on a group of a cluster's ranks, and ``memory`` counts the bytes of a parameter.
"""

from cost_models import collective, compute, memory
from cost_models.machine import Cluster, Device, Link

__all__ = ["Cluster", "Device", "Link", "collective", "compute", "memory"]
