"""What an optimiser's update moves, against the operators of its formula counted by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from autopar.costs.price import Pricer
from autopar.costs.rates import Training
from autopar.costs.updates import adamw, training_of
from autopar.graph import TensorMeta
from autopar.mesh import Mesh
from autopar.placement import R, Rp, Stored
from cost_models.machine import Cluster


@pytest.mark.parametrize(
    ("factory", "traffic"),
    [
        # Read weight, gradient and two moments; write all but the gradient.
        (adamw, 4 * 4 + 3 * 4),
        # Decay 8, lerp 12, beta 8, addcmul 12, square root 8, correction 8, epsilon 8, addcdiv 16.
        (torch.optim.AdamW, 80),
        # Momentum: scaled 8, gradient added 12, weight updated 12.
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 32),
        (partial(torch.optim.SGD, lr=0.1), 12),
    ],
)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_traffic_is_that_of_the_operators(factory: Any, traffic: float, on_gpu: bool) -> None:
    assert training_of(factory, "fp32", on_gpu).update_traffic == pytest.approx(traffic, abs=0.1)


@pytest.mark.parametrize(("zero", "per_element"), [(0, 4 + 4 + 0.75 * 4), (3, 4 + 4 + 0.75 * 3 * 4 / 4)])
def test_gradients_are_moved_and_added_up(zero: int, per_element: float) -> None:
    """Of four micro-batches three add to what is there, under ZeRO-3 to a quarter of it."""
    cluster, mesh = Cluster.parse("4 a100-80g"), Mesh(("dp",), (4,))
    pricer = Pricer(mesh, cluster, Training(num_micro_batches=4))
    meta = TensorMeta((1024, 1024), torch.float32, True)
    rate = cluster.device.memory_bytes_per_second * cluster.device.memory_efficiency
    found = pricer.accumulation_seconds(meta, Stored((Rp,), zero))
    assert found == pytest.approx(meta.numel * per_element / rate)
    assert pricer.accumulation_seconds(TensorMeta((8,), torch.float32, False), Stored((R,), 0)) == 0.0
