"""A graph worked out from another size's export and two recorded forwards must equal the one that is exported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.frontend.recorder import Record, Source
from autopar.frontend.trace import Cuts, find_cuts, trace
from autopar.ir.graph import Graph
from examples.models import EXAMPLES

QUICK = ("llama",)
WIDTH = 8


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each export that is made."""
    made: list[int] = []
    export = torch.export.export

    def counted(*args: Any, **kwargs: Any) -> torch.export.ExportedProgram:
        made.append(len(made))
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    yield made


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in sorted(EXAMPLES)]
)
def test_examples_are_exported_once(name: str, exports: list[int]) -> None:
    example = EXAMPLES[name](layers=4, dropout=0.1, batch_size=8)
    cuts = find_cuts(example.model, example.inputs, example.loss_fn)

    def traced(rows: int, shared: tuple[Any, ...]) -> Graph:
        return trace(
            example.model, example.inputs, example.loss_fn, batch_size=rows, param_dtype=torch.bfloat16, cuts=shared
        )

    found = traced(8, cuts), traced(6, cuts)
    assert len(exports) == 1
    assert found == (traced(8, tuple(cuts)), traced(6, tuple(cuts)))
    assert len(exports) == 3


class Model(nn.Module):
    def __init__(self, step: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(x @ self.weight, self.mean).square().mean()


def divided_by_rows(x: Tensor, mean: Tensor) -> Tensor:
    return x / x.shape[0] + 1 / x.shape[0]


def padded_to_twelve(x: Tensor, mean: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(12 - x.shape[0], WIDTH)])


def written_in_place(x: Tensor, mean: Tensor) -> Tensor:
    state = torch.zeros_like(x)
    state[: x.shape[0] // 2].add_(x[: x.shape[0] // 2])
    return state * x


def partly_detached(x: Tensor, mean: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.mean(0)
    return x * scale + torch.tensor(0.5)


def branches(x: Tensor, mean: Tensor) -> Tensor:
    return x.tanh() if x.shape[0] > 5 else x.relu()


def chunks(x: Tensor, mean: Tensor) -> Tensor:
    """As many operators as there are rows."""
    return sum((row.tanh() for row in x), torch.zeros(()))


def number_in_a_tensor(x: Tensor, mean: Tensor) -> Tensor:
    return x * torch.tensor(float(x.shape[0]))


def another_view(x: Tensor, mean: Tensor) -> Tensor:
    """The same operators on other tensors."""
    y, z = x.tanh(), x.exp()
    return y.sin() * z if x.shape[0] > 5 else z.sin() * y


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("step", "is_shared"),
    [
        (divided_by_rows, True),
        (padded_to_twelve, True),
        (written_in_place, True),
        (partly_detached, True),
        (branches, False),
        (chunks, False),
        (number_in_a_tensor, False),
        (another_view, False),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_sizes(step: Callable[[Tensor, Tensor], Tensor], is_shared: bool, exports: list[int]) -> None:
    model, x = Model(step), torch.randn(8, WIDTH)
    cuts = Cuts()
    found = trace(model, (x,), cuts=cuts), trace(model, (x,), batch_size=4, cuts=cuts)
    assert len(exports) == (1 if is_shared else 2)
    assert found == (trace(model, (x,), cuts=()), trace(model, (x,), batch_size=4, cuts=()))


def test_another_dtype_is_exported_anew(exports: list[int]) -> None:
    model, x = Model(divided_by_rows), torch.randn(8, WIDTH)
    cuts = Cuts()
    trace(model, (x,), cuts=cuts)
    found = trace(model, (x,), batch_size=4, cuts=cuts, param_dtype=torch.bfloat16)
    assert found == trace(model, (x,), batch_size=4, cuts=(), param_dtype=torch.bfloat16)
    assert len(exports) == 3


def exchanged(entry: Any, one: str, two: str) -> Any:
    """`entry` with two sources exchanged."""
    if isinstance(entry, Source):
        names = {("tensor", one): ("tensor", two), ("tensor", two): ("tensor", one)}
        return Source((entry[0], names.get(entry[1], entry[1])))
    if isinstance(entry, (tuple, list)):
        return type(entry)(exchanged(item, one, two) for item in entry)
    return entry


def test_a_record_that_is_wired_otherwise_is_not_believed(exports: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators, numbers and shapes are equal in it; two weights have changed places."""
    from autopar.frontend import trace as module

    def misread(*args: Any) -> Record:
        true = record(*args)
        return Record(exchanged(true.outside, "0.weight", "1.weight"), true.runs)

    record = module.record  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "record", misread)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), torch.randn(8, WIDTH)
    cuts = Cuts()
    loss_fn = nn.functional.mse_loss
    trace(model, (x, x), loss_fn, cuts=cuts)
    trace(model, (x, x), loss_fn, batch_size=4, cuts=cuts)
    assert len(exports) == 2
