"""The search prices parameters as the prediction does."""

from __future__ import annotations

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (registers the product of experts)
from torch import Tensor, nn

from autopar.costs.layer_costs import exposed
from autopar.costs.stored_costs import StoredParameters, stored_costs
from autopar.frontend.trace import trace
from autopar.ir.chain import homes_of
from autopar.ir.mesh import Mesh
from autopar.planning.request import pricer_for
from autopar.planning.search_space import build_search_space
from autopar.sharding.call_options import operators_of
from autopar.sharding.scopes import scopes_of
from tests.autopar.requests import request_for


class Experts(nn.Module):
    """A dense layer and two layers of experts. The batch chooses the experts."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.dense, self.num_experts = nn.Linear(16, 16), num_experts
        self.up, self.down = (nn.Parameter(torch.empty(num_experts, 16, 16)) for _ in range(2))

    def forward(self, x: Tensor, choices: Tensor) -> Tensor:
        sorted_ids, order = torch.sort(choices.reshape(-1))
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        counts = torch.histc(sorted_ids.float(), self.num_experts, 0, self.num_experts - 1)
        rows, ends = self.dense(x).view(-1, 16)[order], counts.cumsum(0, dtype=torch.int32)
        for weight in (self.up, self.down):
            rows = torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)
        return rows[inverse].sum()


@pytest.mark.parametrize(("num_experts", "placement"), [(8, "S(0)"), (6, "Rp")])
@pytest.mark.parametrize("zero", [0, 3])
def test_experts_cost_in_the_search_what_they_cost_in_the_plan(num_experts: int, placement: str, zero: int) -> None:
    """Of 8 experts, four ranks shard 2 each; 6 experts are replicated, and share buffers with dense parameters."""
    with torch.device("meta"):
        inputs = {"x": torch.empty(8, 4, 16), "choices": torch.empty(8, 4, dtype=torch.int64)}
        graph = trace(Experts(num_experts), inputs, None, batch_size=8)
    request = request_for("mixtral", "8 a100-80g")
    pricer = pricer_for(request, Mesh.parse("ep4"), 1)
    space = build_search_space(graph, operators_of(graph), pricer, request.constraints)
    searched, chosen = 0.0, {}
    for variable, costs in zip(space.variables, (v.costs for v in space.problem.variables), strict=True):
        kind, scope, name, _ = variable.key
        if kind == "parameter":
            option = max(range(len(costs)), key=lambda i: variable.options[i].zero == zero)
            chosen[scope, name], searched = variable.options[option], searched + costs[option]
    assert {str(*chosen["", name].placements) for name in ("up", "down")} == {placement}
    stored = StoredParameters.of(chosen, homes_of(graph), scopes_of(graph), pricer.mesh.axes)
    units = stored_costs(graph, pricer, stored).values()
    assert searched == pytest.approx(sum(exposed(unit.per_micro) + exposed(unit.per_step) for unit in units), rel=1e-9)
