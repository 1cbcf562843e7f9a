"""Rows that a mask puts into a tensor: by their numbers where they are whole, with eager's values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.frontend.trace import trace
from autopar.ir.graph import Node
from autopar.sharding.call_options import Operator
from tests.autopar.interpret import assert_equals_eager


class Multimodal(nn.Module):
    """Features of images among those of words, as `put` does it."""

    def __init__(self, put: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.words, self.vision, self.head = nn.Embedding(11, 6), nn.Linear(4, 6), nn.Linear(6, 6)
        self.put = put

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        x = self.put(self.words(ids), ids == 3, self.vision(images))
        loss: Tensor = self.head(x).square().mean()
        return loss


def batch() -> dict[str, Tensor]:
    """Some rows have several places for images, and some none; there is an image more than places."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 11, (4, 8), generator=generator)
    ids[0, 2:5], ids[2, 7], ids[3, :3] = 3, 3, 3
    return {"ids": ids, "images": torch.randn(8, 1, 4, generator=generator)}


ROWS = {
    "broadcast": lambda x, at, y: x.masked_scatter(at.unsqueeze(-1), y),
    "expanded": lambda x, at, y: x.masked_scatter(at.unsqueeze(-1).expand_as(x).to(x.device), y.flatten(0, 1)),
    "in place": lambda x, at, y: x.clone().masked_scatter_(at[..., None].expand(-1, -1, 6), y),
}
LEFT = {
    "some elements": lambda x, at, y: x.masked_scatter(at.unsqueeze(-1) & (x > 0), y),
    "another width": lambda x, at, y: x.masked_scatter(at.unsqueeze(-1), y.reshape(-1)),
}


@pytest.mark.parametrize("name", [*ROWS, *LEFT])
def test_rows_are_put_where_eager_puts_them(name: str) -> None:
    torch.manual_seed(0)
    model = Multimodal((ROWS | LEFT)[name])
    graph = trace(model, batch())
    ops = {piece.op for piece in graph.body if isinstance(piece, Node)}
    assert ("aten.masked_scatter.default" in ops) == (name in LEFT)
    assert_equals_eager(graph, model, batch(), model(**batch()))


def linears(compiled: autopar.CompiledProgram) -> list[tuple[tuple[str, str], Operator]]:
    return [(key, op) for key, op in compiled.best.operators.items() if op.node.op == "aten.linear.default"]


@pytest.mark.distributed
def test_what_follows_is_cut_along_the_batch() -> None:
    torch.manual_seed(0)
    model = Multimodal(ROWS["expanded"])
    compiled = autopar.compile(model, "2 cpu", example_inputs=batch(), constraints={"dp": 2})
    labels = {op.inputs[0].shape: compiled.best.assignment.operators[key].labels for key, op in linears(compiled)}
    assert labels[4, 8, 6] == ("b.0",)
    report = autopar.verify(model, "2 cpu", example_inputs=batch(), constraints={"dp": 2})
    assert report.gradients and report.ok(1e-5), str(report)
