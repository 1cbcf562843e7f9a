"""Masks that integers decide: dropped where all elements are the same, kept where one may differ, numbers unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontend.trace import trace
from autopar.ir.graph import Graph, base_name
from autopar.sharding.scopes import scopes_of
from examples.zoo import ZOO
from tests.autopar.interpret import assert_equals_eager

ROWS, EXPERTS, WIDTH, CHOICES = 8, 5, 6, 2
Mask = Callable[[Tensor, Tensor], Tensor]
"""(scores [N, E], integers of the batch [N]) -> a mask, [N] or [N, C]."""


def _top(scores: Tensor) -> Tensor:
    return scores.topk(CHOICES).indices


CONSTANT: dict[str, Mask] = {
    "topk": lambda scores, _: _top(scores) >= EXPERTS,
    "sort": lambda scores, _: scores.sort(-1).indices > EXPERTS - 1,
    "argmax": lambda scores, _: scores.argmax(-1) < EXPERTS,
    "argmin of all": lambda scores, _: scores[:3].argmin().expand(ROWS) >= 3 * EXPERTS,
    "max": lambda scores, _: scores.max(-1).indices != EXPERTS,
    "argsort": lambda scores, _: scores.argsort(-1) < 0,
    "first dim": lambda scores, _: scores.t().topk(2, 0).indices.flatten()[:ROWS] == EXPERTS,
    "views": lambda scores, _: _top(scores).t().reshape(-1).view(ROWS, CHOICES)[:, 1:] >= EXPERTS,
    "sorted": lambda scores, _: _top(scores).view(-1).sort().values.view(ROWS, CHOICES) >= EXPERTS,
    "parts": lambda scores, _: _top(scores).chunk(2, 1)[1] >= EXPERTS,
    "gathered": lambda scores, ids: _top(scores)[ids] >= EXPERTS,
    "joined": lambda scores, _: torch.cat([_top(scores), scores.argmin(-1, True)], 1) > EXPERTS,
    "cast": lambda scores, _: _top(scores).to(torch.int8).to(torch.int32) >= EXPERTS,
    "clamped": lambda scores, _: _top(scores).clamp(min=2) < 2,
    "not": lambda scores, _: ~(_top(scores) < EXPERTS),
    "and": lambda scores, ids: (_top(scores) >= EXPERTS) & (ids[:, None] > 1),
    "or": lambda scores, ids: (ids[:, None] > 1) | (_top(scores) >= 0),
}

VARYING: dict[str, Mask] = {
    "last index": lambda scores, _: _top(scores) >= EXPERTS - 1,
    "first index": lambda scores, _: _top(scores) != 0,
    "of the batch": lambda _, ids: ids >= EXPERTS,
    "values": lambda scores, _: scores.topk(CHOICES).values >= EXPERTS,
    "greater of two": lambda scores, ids: torch.max(scores.argmax(-1), ids) >= EXPERTS,
    "sums": lambda scores, _: _top(scores) + 1 >= EXPERTS,
    "gathered by": lambda scores, ids: ids[scores.argmax(-1)] >= EXPERTS,
    "wrapped": lambda scores, _: (scores.repeat(200, 1).view(200, ROWS, EXPERTS).argmax(0) + 0).to(torch.int8) < 0,
    "clamped": lambda scores, _: _top(scores).clamp(max=2) < 2,
    "positions of runs": lambda scores, ids: _runs(scores, ids),
    "other bits": lambda scores, _: _top(scores).clamp(min=1).view(torch.int32)[:, :1] < 1,
    "fractions": lambda scores, _: _top(scores).clamp(min=0.5).long() < 0.5,
    "another dim": lambda scores, _: scores.argmax(0)[:4].view(2, 2).repeat(4, 1) >= EXPERTS,
    "and": lambda scores, ids: (_top(scores) < EXPERTS) & (ids[:, None] > 1),
}


class Masked(nn.Module):
    """`plain`: the operand of `where` that is not trained, 0 or 1; None: both are."""

    def __init__(self, mask: Mask, fills: bool, plain: int | None = None) -> None:
        super().__init__()
        self.plain = plain
        self.layer, self.head, self.mask, self.fills = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 3), mask, fills

    def forward(self, x: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        mask = self.mask(self.layer(x), ids)
        rows, weak = self.layer(x)[:, None, 1:2] * x[:, None, :], self.layer(x)[:, None, :1].expand(-1, 1, WIDTH)
        mask = mask.reshape(ROWS, -1).narrow(1, 0, 1).unsqueeze(-1)
        both = self.head(rows), self.head(weak)
        if self.fills:
            y = both[0].masked_fill(mask, 0.0) + both[1]
        elif self.plain is None:
            y = torch.where(mask, *both)
        else:
            half = x[:, None, :3] / 2
            y = torch.where(mask, *((half, both[0]) if self.plain == 0 else (both[0], half))) + both[1]
        return F.cross_entropy(y[:, 0], labels)


def _batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    ids, labels = (torch.randint(number, (ROWS,), generator=generator) for number in (ROWS, 3))
    return {"x": x, "ids": ids, "labels": labels}


def _calls(graph: Graph, *names: str) -> list[str]:
    return [node.op for scope in scopes_of(graph) for node in scope.nodes if base_name(node.op) in names]


@pytest.mark.parametrize(
    ("mask", "is_constant"),
    [
        *(pytest.param(mask, True, id=f"constant: {name}") for name, mask in CONSTANT.items()),
        *(pytest.param(mask, False, id=f"varying: {name}") for name, mask in VARYING.items()),
    ],
)
def test_only_constant_masks_are_dropped(mask: Mask, is_constant: bool) -> None:
    torch.manual_seed(0)
    batch = _batch()
    values = mask(Masked(mask, fills=False).layer(batch["x"]), batch["ids"]).unique()
    assert not is_constant or len(values) == 1
    model = Masked(mask, fills=False, plain=int(values[0]))
    graph = trace(model, batch)
    assert (not _calls(graph, "where")) == is_constant
    assert_equals_eager(graph, model, batch, model(**batch))


def test_what_is_trained_is_never_dropped() -> None:
    """Its gradient is zero, and weight decay still moves it."""
    model, batch = Masked(CONSTANT["topk"], fills=False), _batch()
    assert _calls(trace(model, batch), "where")


def _runs(scores: Tensor, _: Tensor) -> Tensor:
    """Positions of runs of length one: 0 to N - 1, not the lengths."""
    lengths = scores.argmax(-1).clamp(1, 1)
    return torch.repeat_interleave(lengths, output_size=ROWS) > 3


@pytest.mark.parametrize("name", ["topk", "argmax"])
def test_a_fill_is_dropped_where_its_mask_is_false(name: str) -> None:
    """A mask that is true everywhere is kept: nothing else has the result."""
    model, batch = Masked(CONSTANT[name], fills=True), _batch()
    graph = trace(model, batch)
    assert len(_calls(graph, "masked_fill")) == (name == "argmax")
    assert_equals_eager(graph, model, batch, model(**batch))


@pytest.mark.parametrize(
    "name",
    ["gpt_oss", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_moe", "mixtral", "deepseek_v3"))],
)
def test_rows_of_experts_on_other_ranks_are_masked_nowhere(name: str) -> None:
    """Models with transformers' masks for expert parallelism have the graph of those without."""
    example = ZOO[name].build()
    graphs = []
    for is_parallel in (False, True):
        layers = [module for module in example.model.modules() if hasattr(module, "_is_expert_parallel")]
        assert layers
        for layer in layers:
            layer._is_expert_parallel = is_parallel
        graph = trace(example.model, example.inputs, example.loss_fn)
        graphs.append([node.op for scope in scopes_of(graph) for node in scope.nodes])
    assert graphs[0] == graphs[1]
