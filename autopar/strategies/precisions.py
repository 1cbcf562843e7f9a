"""The precisions of predictions: how the model is traced, and the dtype of its matmuls."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import ConstraintError
from cost_models.hardware import DTYPE_FALLBACKS
from cost_models.mixed_cluster import AnyCluster

PRECISIONS: Mapping[str, tuple[str, str]] = {
    "fp32": ("fp32", "fp32"),
    "tf32": ("fp32", "tf32"),
    "bf16": ("bf16", "bf16"),
    "fp16": ("bf16", "fp16"),
    "fp8": ("bf16", "fp8"),
    "mxfp8": ("bf16", "mxfp8"),
    "nvfp4": ("bf16", "nvfp4"),
}
"""Precision -> (how the model is traced, dtype of the matmuls). The last three are for linear layers only."""


def matmul_dtype(precision: str, cluster: AnyCluster) -> str:
    """Return the dtype of matmuls. Raises ConstraintError where a device has no units for it, nor others for it."""
    dtype = PRECISIONS[precision][1]
    for group in cluster.groups:
        peaks = group.device.peak_flops_per_second
        if dtype not in peaks and not DTYPE_FALLBACKS[dtype]:
            raise ConstraintError(
                "the device has no units for this precision",
                values=f"{precision} on {group.device.name}",
                alternatives=", ".join(name for name, (_, peak) in PRECISIONS.items() if peak in peaks),
            )
    return dtype


def traced_as(precision: str) -> str:
    """Return the precision of the traced model. Raises ConstraintError if the devices or the framework do not support
    it."""
    if precision not in PRECISIONS:
        raise ConstraintError("precision is not supported", values=repr(precision), alternatives=", ".join(PRECISIONS))
    return PRECISIONS[precision][0]
