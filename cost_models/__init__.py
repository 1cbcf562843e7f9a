"""Numbers to seconds and bytes: what a device, a link and a collective cost. numpy at most; no torch, no graph.

``machine`` describes clusters (data with sources in ``machines/*.toml``), ``compute`` prices one kernel,
``collective`` one collective operation on a group laid over the cluster, ``memory`` has the bytes of a parameter.
"""

from cost_models import collective, compute, memory
from cost_models.machine import Cluster, Device, Link

__all__ = ["Cluster", "Device", "Link", "collective", "compute", "memory"]
