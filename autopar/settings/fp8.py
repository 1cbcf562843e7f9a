"""The switch `fp8`: linear layers of repeated layers multiplied in e4m3 (codegen/fp8.py), where a user asks for it.

What it does to numbers. A number of three bits after the leading one is off by at most u = 2 ** -4 of itself; in the
mean square, of numbers whose logarithms are evenly distributed, by u sqrt(1 / (8 ln 2)) = 0.42 u. A product has two
such operands, whose roundings are independent, and so is off by 0.6 u = 3.8 % in norm. Forward and backward of n layers
add up to 0.6 u sqrt(2 n), if none makes an error grow or shrink by much. `tolerance` is u sqrt(2 n): an estimate with
some room, and no bound. (The bound, codegen/kernels/fp8.py, is 13 % of the sum of |x| |w| per product.)
"""

from __future__ import annotations

import math

import torch

from autopar.costs.rates import is_cpu
from autopar.errors import ConstraintError
from codegen.fp8 import MULTIPLE, count_calls
from codegen.program import PipelineProgram, Program
from cost_models.mixed import AnyCluster

UNIT = 2.0**-4
EXACT = 1e-5
"""The tolerance of programs that round nothing on purpose."""

OFF = "fp8=False"
NOTHING_IN_FP8 = (
    "fp8 changes nothing: no repeated layer has a linear layer whose part on a rank is a matrix of multiples of "
    f"{MULTIPLE}"
)


def check_fp8(cluster: AnyCluster, precision: str) -> None:
    """Raises ConstraintError for a cluster whose devices have no fp8 products, for fp16, and for GPUs in fp32."""
    if precision == "fp16":
        raise ConstraintError(
            "fp8 is combined with bf16: scales of losses and of rows would be tuned against each other",
            values="precision='fp16' with fp8=True",
            alternatives=["precision='bf16'", OFF],
        )
    for group in cluster.groups:
        if is_cpu(group):
            continue
        device = group.device
        if "fp8" not in device.peak_flops_per_second:
            raise ConstraintError(
                "fp8 needs GPUs that multiply in fp8 (compute capability 8.9)", values=device.name, alternatives=OFF
            )
        if precision != "bf16":
            raise ConstraintError(
                "products in fp8 have bf16 results", values=f"precision={precision!r}", alternatives="precision='bf16'"
            )


def require_fp8(program: Program | PipelineProgram, device: torch.device) -> None:
    """Raises ConstraintError if the program is in fp8 and the device cannot run it."""
    if not program.any.fp8:
        return
    from codegen.runtime.fp8 import why_unavailable  # heavy: triton comes with it

    reason = why_unavailable(device)
    if reason:
        raise ConstraintError("this machine cannot multiply in fp8", values=reason, alternatives=OFF)


def tolerance(program: Program | PipelineProgram) -> float:
    """The largest relative error that verification lets pass (module's docstring)."""
    return max(EXACT, UNIT * math.sqrt(2 * count_calls(program)))
