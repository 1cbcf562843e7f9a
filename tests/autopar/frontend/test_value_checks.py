"""Checks of values that raise or warn are left out and told; other branches on values are refused with their line.

PYTEST_DONT_REWRITE: an assert is one of the checks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError
from autopar.frontend.trace import trace
from tests.autopar.interpret import assert_equals_eager

IDS = torch.arange(24).reshape(4, 6) % 16


class Checks(nn.Module):
    def __init__(self, check: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.embedding, self.linear, self.check = nn.Embedding(16, 8), nn.Linear(8, 16), check

    def forward(self, ids: Tensor) -> Tensor:
        found = self.check(ids)
        scale = found if isinstance(found, int) else 1
        return self.linear(self.embedding(ids) * scale).square().mean()  # type: ignore[no-any-return]


class OfWeights(Checks):
    """Asks values that depend on parameters, which no example says."""

    def forward(self, ids: Tensor) -> Tensor:
        found = self.check(ids + self.embedding(ids).detach().sum(-1).sign().long())
        scale = found if isinstance(found, int) else 1
        return self.linear(self.embedding(ids) * scale).square().mean()  # type: ignore[no-any-return]


def raising(ids: Tensor) -> None:
    if ids is not None and ids.max() >= 16:
        raise ValueError("ids")


def asserting(ids: Tensor) -> None:
    assert ids.min() >= 0 and not (ids > 15).any(), "ids"


def of_numbers(ids: Tensor) -> None:
    if not (ids.max().item() < 16 or ids.min() < 0):
        raise ValueError("ids")


def warning(ids: Tensor) -> None:
    if ids.max() > 14:
        warnings.warn("ids", stacklevel=1)


def checking(ids: Tensor) -> None:
    torch._check_tensor_all(ids < 16)


def branching(ids: Tensor) -> int:
    return 2 if ids.max() > 14 else 1


def choosing(ids: Tensor) -> int:
    if ids.max() > 14:
        return 2
    raise ValueError("ids")


def catching(ids: Tensor) -> int:
    try:
        raising(ids)
    except ValueError:
        return 2
    return 1


def warning_or(ids: Tensor) -> int:
    if ids.max() > 14:
        warnings.warn("ids", stacklevel=1)
    else:
        return 2
    return 1


def naming(ids: Tensor) -> int:
    if (large := bool(ids.max() > 15)) is None:
        raise ValueError("ids")
    return 2 if large else 1


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("check", [raising, asserting, of_numbers, warning, checking])
def test_a_check_is_left_out_and_told(check: Callable[[Tensor], object]) -> None:
    graph, plain = (trace(Checks(each), (IDS,)) for each in (check, lambda ids: None))
    assert graph.body == plain.body
    assert len(graph.unchecked) == 1
    assert graph.unchecked[0].startswith(f"{__file__}:{check.__code__.co_firstlineno + 1}: ")


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("check", [branching, choosing, catching, warning_or, naming])
def test_other_branches_on_values_are_refused(check: Callable[[Tensor], object]) -> None:
    with pytest.raises(TraceError) as caught:
        trace(OfWeights(check), (IDS,))
    assert __file__ in str(caught.value)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    ("check", "scale"), [(branching, 2), (choosing, 2), (catching, 1), (warning_or, 1), (naming, 1)]
)
def test_other_branches_on_the_batch_are_taken(check: Callable[[Tensor], object], scale: int) -> None:
    model = Checks(check)
    assert_equals_eager(trace(model, (IDS,)), model, {"ids": IDS}, model(IDS))
    assert check(IDS) == scale


def test_the_report_names_the_line() -> None:
    compiled = autopar.compile(Checks(raising), "2 cpu", example_inputs=(IDS,))
    assert "the program omits this check of values" in str(compiled.report())
