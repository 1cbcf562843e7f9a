"""The switch `fp8`: the linear layers of repeated layers in e4m3 (codegen/passes/fp8.py), on the user's request.

The error. A number with three bits after the leading one is off by at most u = 2 ** -4 of itself; in the mean square,
for numbers with evenly distributed logarithms, by u sqrt(1 / (8 ln 2)) = 0.42 u. A product has two such operands with
independent rounding, and so is off by 0.6 u = 3.8 % in norm. Forward and backward of n layers add up to 0.6 u sqrt(2
n), if no layer makes an error grow or shrink by much. `tolerance` is u sqrt(2 n): an estimate with some room, not a
bound. (The bound, in codegen/kernels/fp8.py, is 13 % of the sum of |x| |w| per product.)
"""

from __future__ import annotations

import math

import torch

from autopar.costs.rates import is_cpu
from autopar.errors import ConstraintError
from codegen.passes.fp8 import MULTIPLE, count_calls
from codegen.program import PipelineProgram, Program
from cost_models.mixed_cluster import AnyCluster

UNIT = 2.0**-4
EXACT = 1e-5
"""The tolerance of programs that round nothing on purpose."""

OFF = "fp8=False"
NOTHING_IN_FP8 = (
    "fp8 changes nothing: no repeated layer has a linear layer whose shard on a rank is a matrix with dims that are "
    f"multiples of {MULTIPLE}"
)


def check_fp8(cluster: AnyCluster, precision: str) -> None:
    """Raise ConstraintError for devices without fp8 products, for fp16, and for GPUs in fp32."""
    if precision == "fp16":
        raise ConstraintError(
            "fp8 does not work with fp16: loss scaling and the scales of rows would interfere",
            values="precision='fp16' with fp8=True",
            alternatives=["precision='bf16'", OFF],
        )
    for group in cluster.groups:
        if is_cpu(group):
            continue
        device = group.device
        if "fp8" not in device.peak_flops_per_second:
            raise ConstraintError(
                "fp8 needs GPUs of compute capability 8.9 or more", values=device.name, alternatives=OFF
            )
        if precision != "bf16":
            raise ConstraintError(
                "fp8 needs bf16 on GPUs",
                values=f"precision={precision!r}",
                alternatives=["precision='bf16'", OFF],
            )


def require_fp8(program: Program | PipelineProgram, device: torch.device) -> None:
    """Raise ConstraintError if the program uses fp8 and the device cannot."""
    if not program.any.fp8:
        return
    from codegen.runtime.fp8 import why_unavailable  # slow: imports triton

    reason = why_unavailable(device)
    if reason:
        raise ConstraintError("this machine cannot compute in fp8", values=reason, alternatives=OFF)


def tolerance(program: Program | PipelineProgram) -> float:
    """Return the largest relative error that verification accepts (derived in the module's docstring)."""
    return max(EXACT, UNIT * math.sqrt(2 * count_calls(program)))
