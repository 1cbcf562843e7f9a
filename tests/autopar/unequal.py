"""Planning problems of clusters whose positions are not alike, that several test files share: models on meta."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from autopar.costs.rates import Training
from autopar.frontend.rebatch import BatchedTrace
from autopar.frontend.trace import trace
from autopar.ir.graph import Graph
from autopar.planning.request import Request
from autopar.settings.constraints import Constraints
from cost_models import mixed_cluster
from cost_models.mixed_cluster import AnyCluster, MixedCluster
from examples.models import EXAMPLES
from tests.autopar.requests import hostless

ROWS = 8
TWO_AND_ONE = "2 a100-80g + 1 v100-32g"
EQUAL = "2 a100-80g + 2 a100-80g"
UNLIKE = "2 h100-sxm + 2 v100-32g"


@cache
def traced(name: str, layers: int = 3, width: int = 512) -> BatchedTrace:
    """A model on meta, traced once for all tests."""
    with torch.device("meta"):
        sizes = {"batch_size": ROWS, "seq_len": 128, "vocab_size": 1024}
        example = EXAMPLES[name](layers=layers, width=width, **sizes)

    @cache
    def at(rows: int) -> Graph:
        return trace(example.model, example.inputs, example.loss_fn, batch_size=rows)

    return BatchedTrace(at)


def request_for(
    cluster: AnyCluster | str, name: str = "llama", layers: int = 3, width: int = 512, **constraints: Any
) -> Request:
    """On hosts that take no time, as `requests.request_for`."""
    whole = mixed_cluster.parse(cluster) if isinstance(cluster, str) else cluster
    if isinstance(whole, MixedCluster):
        whole = replace(whole, groups=tuple(map(hostless, whole.groups)))
    else:
        whole = hostless(whole)
    limits, groups = Constraints.parse(constraints), whole.groups
    own = whole if isinstance(whole, MixedCluster) else None
    return Request(traced(name, layers, width), groups[0], ROWS, "fp32", Training(), limits, own)
