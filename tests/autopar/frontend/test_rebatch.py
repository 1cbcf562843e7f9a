"""A graph computed for another batch size must equal the one that is traced with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.frontend.inputs import name_inputs
from autopar.frontend.rebatch import BatchedTrace, NotAffineError, at_rows
from autopar.frontend.trace import trace
from autopar.ir.graph import Graph
from examples.models import EXAMPLES

QUICK = ("gpt2",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in sorted(EXAMPLES)]
)
def test_computed_graph_equals_the_traced_one(name: str) -> None:
    example = EXAMPLES[name](dropout=0.1, batch_size=8)
    batch = name_inputs(example.model, example.inputs, example.loss_fn)

    def traced(rows: int) -> Graph:
        return trace(example.model, batch, example.loss_fn, batch_size=rows)

    batched = BatchedTrace(traced)
    batched(8), batched(4)
    assert batched(6) == traced(6)


def test_two_traces_serve_all_sizes_but_one_row() -> None:
    calls = []

    def traced(rows: int) -> tuple[int, tuple[int, str]]:
        calls.append(rows)
        return rows * 3, (7, "x")

    batched = BatchedTrace(traced)  # type: ignore[arg-type]
    assert [batched(rows) for rows in (8, 4, 2, 64, 1, 8)] == [(r * 3, (7, "x")) for r in (8, 4, 2, 64, 1, 8)]
    assert calls == [8, 4, 1]


@pytest.mark.parametrize(
    ("low", "high"), [((1, 2.0), (1, 3.0)), (("a",), ("b",)), ((1,), (1, 1)), ((True,), (False,)), ((1,), (2,))]
)
def test_other_differences_are_refused(low: tuple[object, ...], high: tuple[object, ...]) -> None:
    with pytest.raises(NotAffineError):
        at_rows(low, 2, high, 4, 3)


class Weighed(nn.Module):
    """Has a table whose values, and no sizes, depend on the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 64)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * torch.tensor([k / len(x) for k in range(64)])).mean()


def test_tables_of_other_values_are_traced_anew() -> None:
    model = Weighed()
    batched = BatchedTrace(lambda rows: trace(model, (torch.ones(rows, 4),)))
    for rows in (2, 4, 8):
        (table,) = [each.value for each in batched(rows).parameters if each.value is not None]
        torch.testing.assert_close(table, torch.arange(64) / rows)
