"""The check in the first step is of the batch as the program takes it: by name, however it was given or cut."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.compiled import CompiledProgram
from autopar.launch import run_ranks

ROWS = 4


class Doubling(nn.Module):
    """Its inputs decide what it computes; `weight` is read by no program."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor, doubles: bool = False, weight: Tensor | None = None) -> Tensor:
        hidden = x * (2 if doubles else 1) * (3 if weight is None else 1)
        for linear in self.linears:
            hidden = linear(hidden).tanh()
        return F.mse_loss(hidden, y)


class Nested(Doubling):
    """Takes its tensors in a dict and a tuple."""

    def forward(self, given: Any, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(given["x"] + given["more"][0], y)


class Whole(Doubling):
    """Takes a batch as one dict."""

    def forward(self, batch: Any) -> Tensor:  # type: ignore[override]
        return super().forward(batch["x"], batch["y"])


class Targets(Doubling):
    """Takes its tensors by their places, of which the last stage takes the first."""

    def forward(self, *tensors: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tensors[1], tensors[0])


class Output(Doubling):
    """Has its loss from a function of two targets."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.linears[1](self.linears[0](x).tanh())  # type: ignore[no-any-return]


def weighted(output: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return ((output - y) ** 2 * weight).mean()


X, Y, WEIGHT = (torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
NAMES = {"x": X, "y": Y, "given_x": X, "given_more_0": Y, "batch_x": X, "batch_y": Y, "arg0": X, "arg1": Y}
NAMES |= {"weight": WEIGHT}


def said_of(step: Any, part: Mapping[str, Tensor]) -> list[str]:
    """Return the first step's log lines, or its error."""
    messages: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("autopar")
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with contextlib.suppress(RuntimeError):
        step(part)
    logger.removeHandler(handler)
    return messages


def by_hand(program: CompiledProgram) -> list[str]:
    """A loop that cuts its batch itself, in another order than the example's."""
    step = program.build()
    part = step.local_batch({name: NAMES[name].clone() for name in program.program.inputs})
    return said_of(step, dict(reversed(part.items())))


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Doubling, {"x": X, "y": Y, "doubles": True, "weight": None}),
        (Nested, {"given": {"x": X, "more": (Y,)}, "y": Y}),
        (Whole, {"x": X, "y": Y}),
        (Targets, (X, Y)),
    ],
)
def test_parts_cut_by_hand_are_compared_whatever_form_the_example_has(
    model: Callable[[], nn.Module], inputs: Any, ranks: int
) -> None:
    constraints = {"pp": ranks} if model is Targets else {"dp": ranks}
    program = autopar.compile(model(), f"{ranks} cpu", example_inputs=inputs, constraints=constraints)
    (said,) = run_ranks(by_hand, (program,), ranks)[0]
    assert said.startswith("first step: loss"), said


def test_the_order_of_a_batch_is_the_examples() -> None:
    inputs = {"x": X, "y": Y, "weight": WEIGHT}
    program = autopar.compile(Output(), "1 cpu", example_inputs=inputs, loss_fn=weighted)
    expected = weighted(program.model(X), Y, WEIGHT).item()
    step = program.build()
    loss = step(step.local_batch({"weight": WEIGHT, "y": Y, "x": X}))
    assert loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("is_cut_by_hand", [False, True])
def test_what_the_program_was_made_with_may_be_left_out(is_cut_by_hand: bool) -> None:
    compiled = autopar.compile(Doubling(), "1 cpu", example_inputs={"x": X, "y": Y, "doubles": True, "weight": WEIGHT})
    for values, expected in (
        ({"weight": WEIGHT}, "first step: loss"),
        ({}, "the first step is not checked: the batch"),
    ):
        step = compiled.build()
        whole = {"x": X, "y": Y, **values}
        (said,) = said_of(step, whole if is_cut_by_hand else step.local_batch(whole))
        assert said.startswith(expected), said


def emptied(program: CompiledProgram, rank_alone: int) -> list[str]:
    """One rank empties its batch once it has its part."""
    step, whole = program.build(), {"x": X.clone(), "y": Y.clone(), "weight": WEIGHT}
    part = step.local_batch(whole)
    if step.mesh.everyone.rank == rank_alone:
        whole.clear()
    return said_of(step, part)


@pytest.mark.parametrize("rank_alone", [0, 1])
def test_a_batch_that_is_emptied_ends_no_training(rank_alone: int) -> None:
    inputs = {"x": X, "y": Y, "weight": WEIGHT}
    program = autopar.compile(Doubling(), "2 cpu", example_inputs=inputs, constraints={"dp": 2})
    for said in run_ranks(emptied, (program, rank_alone), 2):
        assert said == ["the first step is not checked: the batch was changed after step.local_batch"]
