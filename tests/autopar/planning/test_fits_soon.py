"""What is soon found to fit has a plan, at budgets above and below the least that any plan needs."""

from __future__ import annotations

import pytest

from autopar.errors import InfeasibleError
from autopar.planning.layer_pool import LayerPool
from autopar.planning.planner import fits_soon, search_plans
from tests.autopar.requests import request_for


@pytest.mark.parametrize("pins", [{"pp": 1, "tp": 1}, pytest.param({}, marks=pytest.mark.slow)])
def test_what_soon_fits_has_a_plan(pins: dict[str, int]) -> None:
    with pytest.raises(InfeasibleError) as raised:
        search_plans(request_for("llama", "4 a100-80g", memory=1, **pins))
    least = raised.value.needed_bytes
    assert least is not None
    pool, found = LayerPool(), []
    for share in (0.95, 1.1, 3.0):
        request = request_for("llama", "4 a100-80g", memory=int(share * least), **pins)
        found.append(fits_soon(request, pool))
        if found[-1]:
            assert search_plans(request).best.plan.prediction.peak_bytes <= share * least
        elif share < 1:
            with pytest.raises(InfeasibleError):
                search_plans(request)
    assert not found[0] and found[-1]
