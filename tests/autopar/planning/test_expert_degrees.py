"""Over how many ranks experts are tried to be shared out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autopar.cluster import as_cluster
from autopar.planning.equal_configs import expert_degrees
from autopar.settings.constraints import Constraints


@pytest.mark.parametrize(
    ("spec", "dp", "tensor", "degrees"),
    [
        ("8x8 h100-sxm", 64, 1, [1, 8, 16, 32, 64]),  # whole nodes
        ("8x8 h100-sxm", 32, 2, [1, 4, 8, 16, 32]),
        ("64 gb300", 64, 1, [1, 8, 16, 32, 64]),  # and equal parts of a rack, which is one
        ("2x72 gb300", 144, 1, [1, 8]),  # of which 128 experts allow few
        ("8 b200", 8, 1, [1, 2, 4, 8]),  # all of few devices
    ],
)
def test_degrees_fill_nodes_or_equal_parts_of_a_rack(
    spec: str, dp: int, tensor: int, degrees: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.planning.equal_configs.num_experts", lambda graph: 128)
    request: Any = SimpleNamespace(
        constraints=Constraints.parse({}), trace=lambda rows: None, global_batch_size=256, cluster=as_cluster(spec)
    )
    assert expert_degrees(request, dp, tensor) == degrees
