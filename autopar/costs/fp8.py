"""Prices where linear layers multiply in e4m3 (`fp8=` of autopar.compile; codegen/fp8.py says which).

With i bytes of an element of x (N x K), w (M x K) and y (N x M), on one rank

    forward        fp8 product + casts of x, w          casts move  (i + 1) (NK + MK)
    gradient of x  fp8 product + casts of dy, w^T                   (i + 1) NM + (3 i + 1) MK
    gradient of w  as without

where products run at the device's fp8 peak and read one byte per element; w^T is copied before it is cast. A device
without that peak (a CPU) multiplies what it reads back from the codes in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.costs.contractions import DEFERRABLE
from autopar.costs.kernels import KernelPricer
from autopar.costs.price import Pricer
from autopar.graph import base_name
from autopar.placement import local_shape
from autopar.sharding.strategies import Operator, Option, num_local
from codegen.fp8 import MULTIPLE


@dataclass
class Fp8Pricer(Pricer):
    """Prices without other fused kernels."""

    def _matmul_seconds(
        self, operator: Operator, option: Option, flops: float, num_bytes: float, dtype: str
    ) -> tuple[float, float, float]:
        """Forward, gradient with respect to the input, and to the weight."""
        plain = super()._matmul_seconds(operator, option, flops, num_bytes, dtype)
        if not self.is_fp8(operator, option):
            return plain
        position = DEFERRABLE[base_name(operator.node.op)]
        metas = (operator.inputs[position - 1], operator.inputs[position], operator.node.outputs[0])
        places = (option.inputs[position - 1], option.inputs[position], option.outputs[0])
        x, weight, y = (num_local(meta, lies, self.mesh) for meta, lies in zip(metas, places, strict=True))
        width = operator.node.outputs[0].dtype.itemsize
        forward, wrt_input, _ = super()._matmul_seconds(operator, option, flops, x + weight + width * y, "fp8")
        forward += self.memory_seconds((width + 1) * x) + self.memory_seconds((width + 1) * weight)
        wrt_input += self.memory_seconds((width + 1) * y) + self.memory_seconds((3 * width + 1) * weight)
        return forward, wrt_input, plain[2]

    def is_fp8(self, operator: Operator, option: Option) -> bool:
        """Whether programs multiply this call in e4m3."""
        position = DEFERRABLE.get(base_name(operator.node.op))
        if position is None or not operator.scope:
            return False
        shape = local_shape(operator.inputs[position].shape, option.inputs[position], self.mesh.sizes)
        return len(shape) == 2 and all(size % MULTIPLE == 0 for size in shape)

    def weight_seconds(self, operator: Operator, option: Option, whole_seconds: float) -> float:
        """None: the gradients of such weights are not put off."""
        return 0.0 if self.is_fp8(operator, option) else super().weight_seconds(operator, option, whole_seconds)


@dataclass
class Fp8KernelPricer(Fp8Pricer, KernelPricer):
    """Prices with them."""
