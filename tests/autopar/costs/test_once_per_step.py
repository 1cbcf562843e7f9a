"""Work once per step: of the slowest pipeline rank, as long for choices as that of any other, and of updates in
a host's memory."""

from __future__ import annotations

import pytest
import torch

from autopar.costs.layer_costs import HOST, chosen_seconds, exposed
from autopar.costs.stage_costs import BUBBLE, _once
from autopar.ir.graph import TensorMeta
from autopar.ir.placement import R, Stored
from autopar.planning.request import pricer_for
from autopar.planning.solved_layers import named_mesh
from tests.autopar.requests import request_for


@pytest.mark.parametrize(
    ("tables", "bubble"),
    [
        ([{"optimizer": 2.0, HOST: 8.0}, {"optimizer": 9.0}], 4.0),  # 8 s as choices count them, less than 9
        ([{"optimizer": 9.0, HOST: 1.0}, {"optimizer": 9.0}], 0.0),
        ([{"optimizer": 0.0, HOST: 8.0}, {"optimizer": 8.0}], 8.0),  # all of the waiting
    ],
)
def test_no_other_rank_takes_longer_for_choices(tables: list[dict[str, float]], bubble: float) -> None:
    found = _once(tables, 0)
    assert found.get(BUBBLE, 0.0) == pytest.approx(bubble)
    assert exposed(found) == pytest.approx(exposed(tables[0]))
    assert chosen_seconds(found) >= max(map(chosen_seconds, tables)) * (1 - 1e-12)


@pytest.mark.parametrize("cluster", ["2 cpu", "4 cpu", "8 cpu"])
def test_an_update_in_a_cpus_memory_is_no_faster_for_being_called_offloaded(cluster: str) -> None:
    request, meta = request_for("gpt2", cluster), TensorMeta((64, 64), torch.float32, True)
    plain, offloaded = (
        pricer_for(request, named_mesh(2, 1), 1, offload).parameters.optimizer_seconds(meta, Stored((R,), 0), count=1)
        for offload in ("", "optimizer")
    )
    assert offloaded >= plain * (1 - 1e-9) > 0
