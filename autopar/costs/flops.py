"""The floating-point operations that a model's training step needs under any plan: the basis of MFU.

"Model FLOPs" of Chowdhery et al. (PaLM, 2022, appendix B): those of matrix products, attention and convolutions,
forward and backward, without recomputation. Attention counts only the pairs that the mask leaves.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.costs.contractions import contraction_flops
from autopar.ir.graph import Graph, base_name
from autopar.operators.traits import ADDED, ATTENTION, MATMULS
from autopar.sharding.call_options import Operator
from autopar.sharding.scopes import scopes_of
from cost_models.mixed_cluster import AnyCluster


def model_flops(graph: Graph, operators: Mapping[tuple[str, str], Operator]) -> float:
    """Return the FLOPs of one micro-batch over all ranks, forward and backward; a multiply-add counts as two.

    The backward of a product has as many again for each factor that has a gradient: three times the forward in all
    for trained weights, twice for frozen ones.
    """
    counts = {scope.name: scope.count for scope in scopes_of(graph)}
    return sum(
        counts[scope] * _with_backward(operator) for (scope, _), operator in operators.items() if _multiplies(operator)
    )


def model_flops_utilisation(flops: float, seconds: float, cluster: AnyCluster, dtype: str) -> float:
    """Return `flops` in `seconds` as a share of all devices' nominal peak in `dtype`."""
    peak = sum(group.num_devices * group.device.peak(dtype) for group in cluster.groups)
    return flops / (seconds * peak) if seconds else 0.0


def _multiplies(operator: Operator) -> bool:
    name = base_name(operator.node.op)
    return name in MATMULS or name in ATTENTION


def _with_backward(operator: Operator) -> float:
    name = base_name(operator.node.op)
    if name in ATTENTION:  # two products, each with two in backward
        backward = 2.0 * any(meta.requires_grad for meta in operator.inputs[:3])
    else:
        first = int(ADDED.get(name) == "self")  # others have the operands that they add behind their factors
        backward = float(sum(meta.requires_grad for meta in operator.inputs[first : first + 2]))
    return contraction_flops(operator) * (1.0 + backward)
