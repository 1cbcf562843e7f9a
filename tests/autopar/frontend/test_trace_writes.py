"""What a forward does beside calls is in its traced Graph: writes in place, no_grad, detach, constants."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.frontend.trace import trace
from autopar.ir.graph import Node
from tests.autopar.interpret import assert_equals_eager, run_graph, tensors_of

LEFT = torch.linspace(-1, 1, 12).reshape(3, 4)


class Frozen(nn.Module):
    """A no_grad region, a detach, an in-place write, a frozen parameter, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.linspace(1, 2, 4), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.first(x).sigmoid()
        hidden = self.second(x * scale)
        hidden.mul_(self.frozen).add_(1.0)
        return (F.relu(hidden, inplace=True) * hidden.detach()).mean()


def test_no_grad_detach_and_in_place() -> None:
    model = Frozen()
    parameters = [p for p in model.parameters() if p.requires_grad]
    graph = trace(model, (LEFT,))
    expected = torch.autograd.grad(model(LEFT), parameters, allow_unused=True)
    found = torch.autograd.grad(run_graph(graph, tensors_of(model), {"x": LEFT}), parameters, allow_unused=True)
    assert [g is None for g in expected] == [True, True, True, False, False]
    for want, have in zip(expected, found, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-8)


class Writes(nn.Module):
    """Writes a linear's result into a tensor, as `write` says, and uses all of it."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.base = nn.Linear(4, 6)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return (self.write(self.base(x), self.linear(x)) * torch.arange(1.0, 7.0)).square().mean()


def into_slice(base: Tensor, y: Tensor) -> Tensor:
    base[:, 1:3] = y[:, :2]
    return base


def into_zeros(base: Tensor, y: Tensor) -> Tensor:
    shifted = torch.zeros_like(base)
    shifted[..., 1:] = y[..., :-1]
    shifted[..., 0] = base[..., -1]
    return shifted


def into_row_of_slice(base: Tensor, y: Tensor) -> Tensor:
    base[1:, 2:][-1, :] += y[0, :4]
    return base


def into_transposed_view(base: Tensor, y: Tensor) -> Tensor:
    base.view(3, 2, 3).transpose(1, 2)[:, 0].mul_(y[:, :2])
    return base


def seen_by_older_view(base: Tensor, y: Tensor) -> Tensor:
    older = base.view(3, 2, 3)[:, 1]
    base.add_(y)
    base[:, 4] = 0.0
    return torch.cat([older, base[:, :3]], 1)


def twice_the_same_slice(base: Tensor, y: Tensor) -> Tensor:
    part = base[:, :3]
    part.mul_(y[:, :3])
    part.add_(y[:, 3:])
    return base + torch.cat([part, part], 1)


def written_before_detach(base: Tensor, y: Tensor) -> Tensor:
    base[:, 0] = y[:, 0]
    return base * base.detach()


def casts_on_copy(base: Tensor, y: Tensor) -> Tensor:
    counts = torch.zeros(3, 6, dtype=torch.long)
    counts[:, 1:] = (y[:, 1:] * 10).detach()
    return base * counts


def overlapping(base: Tensor, y: Tensor) -> Tensor:
    base[:, 1:3] = y[:, :2]
    base[:, 2:5] = y[:, 3:]
    return torch.cat([base[:, 1:5], base[:, :2]], 1)


def part_by_part(base: Tensor, y: Tensor) -> Tensor:
    whole = base.new_empty(3, 6)
    for i in range(6):
        whole[:, i] = y[:, i] * (whole[:, i - 1].clone() if i else 1.0)
    return whole


def through_swapped_axes(base: Tensor, y: Tensor) -> Tensor:
    base.swapaxes(0, 1).mul_(y[0].sum())
    return base


def through_a_part(base: Tensor, y: Tensor) -> Tensor:
    base.tensor_split(2, 1)[0].mul_(y.sum())
    return base


def through_dropout_of_nothing(base: Tensor, y: Tensor) -> Tensor:
    F.dropout(base, 0.0, training=True).add_(y.sum())
    return base


def into_strided(base: Tensor, y: Tensor) -> Tensor:
    base[:, ::2] = y[:, :3]
    return base


def interleaved(base: Tensor, y: Tensor) -> Tensor:
    """As of rotary frequencies of several axes (Qwen3-VL)."""
    both = torch.stack([base, y, base * y])
    first = both[0]
    for offset in (1, 2):
        first[..., slice(offset, 5, 3)] = both[offset, ..., slice(offset, 5, 3)]
    return first + both.sum(0)


WRITES = [
    into_slice, into_zeros, into_row_of_slice, into_transposed_view, seen_by_older_view, twice_the_same_slice,
    written_before_detach, casts_on_copy, overlapping, part_by_part, through_swapped_axes, through_a_part,
    through_dropout_of_nothing, into_strided, interleaved,
]  # fmt: skip


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("write", WRITES)
def test_writes_reach_what_shares_memory(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = Writes(write)
    graph = trace(model, (LEFT,))
    assert_equals_eager(graph, model, {"x": LEFT}, model(LEFT))


def test_a_tensor_written_part_by_part_is_what_joins_the_parts() -> None:
    graph = trace(Writes(part_by_part), (LEFT,))
    nodes = [node for node in graph.body if isinstance(node, Node)]
    (join,) = (node for node in nodes if node.op == "aten.cat.default")
    assert len(join.inputs) == 6
    assert not any(node.op.startswith("aten.new_empty") for node in nodes)


def joined_under_no_grad(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        both = torch.cat([a, b], 1)
    return both[:, :4] * b


def cut_under_no_grad(a: Tensor, b: Tensor) -> Tensor:
    both = torch.cat([a, b], 1)
    with torch.no_grad():
        first = both[:, :4]
    return first * b + both[:, 4:]


def nested_under_no_grad(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        both = torch.cat([a, b], 1)
    return torch.cat([both, b], 1)


def left_out(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b], 1)[:, 4:]


def selected(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b], 1)[:, 5] + b[:, 0]


def viewed_under_no_grad(a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        same = a.view(3, 4)
    return same * b


def constructed(a: Tensor, b: Tensor) -> Tensor:
    return b * torch.ones_like(a) + a.new_zeros(3, 1)


class Joins(nn.Module):
    """What `join` makes of two linear layers."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.join = nn.Linear(4, 4), nn.Linear(4, 4), join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self.a(x), self.b(x)).square().mean()


JOINS = [
    joined_under_no_grad,
    cut_under_no_grad,
    nested_under_no_grad,
    left_out,
    selected,
    viewed_under_no_grad,
    constructed,
]


@pytest.mark.parametrize("join", JOINS)
def test_joins_and_views_give_gradients_to_what_eager_gives_them(join: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Zeros are not None: an optimiser with weight decay tells them apart."""
    model = Joins(join)
    names, parameters = zip(*model.named_parameters(), strict=True)
    expected = torch.autograd.grad(model(LEFT), parameters, allow_unused=True)
    graph = trace(model, (LEFT,))
    found = torch.autograd.grad(run_graph(graph, tensors_of(model), {"x": LEFT}), parameters, allow_unused=True)
    assert [g is None for g in found] == [g is None for g in expected]
    trained = {parameter.name for parameter in graph.parameters if parameter.meta.requires_grad}
    assert trained == {name for name, g in zip(names, expected, strict=True) if g is not None}
    torch.testing.assert_close([g for g in found if g is not None], [g for g in expected if g is not None])


def into_windows(base: Tensor, y: Tensor) -> Tensor:
    base.unfold(1, 2, 2).mul_(y.sum())
    return base


def test_write_that_cannot_be_carried_over_is_refused() -> None:
    with pytest.raises(TraceError, match="writes in place to a view"):
        trace(Writes(into_windows), (LEFT,))


class Constants(nn.Module):
    """Blocks that use scalar constants made in forward, and one that is a plain attribute."""

    def __init__(self, attribute: Tensor) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.attribute = attribute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.maximum(block(x) * self.attribute, torch.tensor(-0.1))
        return x.mean()


def test_uniform_constants_are_written_out() -> None:
    model = Constants(torch.full((4,), 1.5))
    graph = trace(model, (LEFT,))
    assert_equals_eager(graph, model, {"x": LEFT}, model(LEFT))
    assert {p.name for p in graph.parameters} == set(dict(model.named_parameters()))
    values = [piece.args[1] for piece in graph.body if isinstance(piece, Node) and piece.op == "aten.full.default"]
    assert sorted(values) == pytest.approx([-0.1, 1.5])


@pytest.mark.parametrize("values", [[0.5, 0.5, -0.0, 0.0], [1.0, math.nan, math.inf, 1.0]])
def test_other_constants_are_made_of_runs_of_equal_values(values: list[float]) -> None:
    """Literals of forward or of the loss, such as quantiles or weights of classes. 1 / x tells zeros apart."""
    model = Quotients(torch.tensor(values).view(2, 2))
    graph = trace(model, (LEFT,))
    found, loss = run_graph(graph, dict(model.named_parameters()), {"x": LEFT}), model(LEFT)
    torch.testing.assert_close(found, loss, equal_nan=True)
    assert all(isinstance(piece, Node) for piece in graph.body)


class Quotients(nn.Module):
    def __init__(self, divisors: Tensor) -> None:
        super().__init__()
        self.linear, self.divisors = nn.Linear(4, 1), divisors

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).exp() / self.divisors.flatten()).sum(0).nan_to_num(3.0, 5.0, -5.0).sum()


def test_constants_of_many_values_are_buffers() -> None:
    (table,) = (each for each in trace(Quotients(torch.arange(40.0)), (LEFT,)).parameters if each.is_buffer)
    assert table.name == "divisors" and table.value is not None and table.value.tolist() == list(range(40))


class TwoViews(nn.Module):
    """A batch norm that is called for each of two views of the batch: its counter goes on by two."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return (self.norm(x) * self.norm(x + 1)).mean()


def test_a_counter_goes_on_by_all_that_is_added_to_it() -> None:
    graph = trace(TwoViews(), (LEFT,))
    counters = {p.name: p.increment for p in graph.parameters if p.increment}
    assert counters == {"norm.num_batches_tracked": 2, "count": 1}


class Drops(nn.Module):
    """A dropout between two linears, whose operand is used again."""

    def __init__(self, p: float, inplace: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)
        self.dropout = nn.Dropout(p, inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        dropped = self.dropout(hidden)
        return (self.second(dropped) + hidden.mean()).square().mean()


def test_a_dropout_in_place_is_one_whose_operand_is_dropped_too() -> None:
    """At p = 0 nothing is left of it; at p = 0.5 the graph is that of `hidden = dropout(hidden)`."""
    model = Drops(0.0, inplace=True)
    assert_equals_eager(trace(model, (LEFT,)), model, {"x": LEFT}, model(LEFT))
    written, functional = (trace(Drops(0.5, inplace), (LEFT,)) for inplace in (True, False))
    calls = [piece for piece in written.body if isinstance(piece, Node)]
    assert [node.op for node in calls] == [node.op for node in functional.body if isinstance(node, Node)]
    (dropout,) = (node for node in calls if node.op == "aten.dropout.default")
    users = [node.op for node in calls if dropout.name in {ref.node for ref in node.inputs}]
    assert users == ["aten.linear.default", "aten.mean.default"]


def test_a_write_to_a_cast_makes_nothing_else_differentiable() -> None:
    """The mask that is cast stays a constant: what it alone decides gets no gradient."""

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            mask = x > 0
            scale = mask.to(torch.float32)
            scale.mul_(self.first(x))
            return (self.second(x) * mask.to(torch.float32) * scale).mean()

    model = Casts()
    graph = trace(model, (LEFT,))
    assert_equals_eager(graph, model, {"x": LEFT}, model(LEFT))
    nodes = [node for node in graph.body if isinstance(node, Node)]
    assert not any(node.meta.requires_grad for node in nodes if node.op.split(".")[1] in ("gt", "to"))


class Recurrence(nn.Module):
    """Row after row of a lower triangle is made of all rows before it, or after it, and written in place."""

    def __init__(self, backwards: bool) -> None:
        super().__init__()
        self.linear, self.backwards = nn.Linear(4, 12), backwards

    def forward(self, x: Tensor) -> Tensor:
        rows = self.linear(x).unsqueeze(1).repeat(1, 12, 1).tril().clone()
        for i in range(1, 12):
            i, before = (11 - i, slice(12 - i, None)) if self.backwards else (i, slice(i))
            row = rows[:, i].clone()
            rows[:, i] = row + (row[:, before, None] * rows[:, before].clone()).sum(1)
        return rows.square().mean()


@pytest.mark.parametrize("backwards", [False, True])
def test_rows_of_an_unrolled_loop_are_read_by_the_next_turn_alone(backwards: bool) -> None:
    model = Recurrence(backwards)
    graph = trace(model, (LEFT,))
    assert_equals_eager(graph, model, {"x": LEFT}, model(LEFT))
    joins = [len(node.inputs) for node in graph.body if isinstance(node, Node) and node.op == "aten.cat.default"]
    assert len(joins) >= 10 and max(joins) <= 3
