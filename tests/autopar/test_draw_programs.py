"""Programs of models that draw random numbers: equal to the model on one process, under every plan."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.verify import verify
from codegen.runtime import checkpoint
from codegen.runtime.reference import SameDropout
from tests.autopar.draw_models import EVALUATED, NAMES, WIDTH, Model, batch, model_and_loss
from tests.turns import by_turns

QUICK = ("row_mask", "gumbel", "slopes", "Diffusion", "Masked", "python_numbers", "beside_dropout")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def slow_but(names: tuple[str, ...], among: Iterable[str] = NAMES) -> list[Any]:
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in among]


def own_loss(model: nn.Module, loss_fn: Any, values: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**values) if loss_fn is None else loss_fn(model(values["x"]), values["target"])
    return loss


def compiled_of(model: nn.Module, loss_fn: Any, cluster: str = "1 cpu", **options: Any) -> Any:
    return autopar.compile(model, cluster, example_inputs=batch(), loss_fn=loss_fn, optimizer=sgd, **options)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", slow_but(QUICK))
def test_losses_of_three_steps_are_the_models(name: str) -> None:
    model, loss_fn = model_and_loss(name)
    step = compiled_of(model, loss_fn).build()
    reference = copy.deepcopy(model)
    optimizer = sgd(reference.parameters())
    losses = []
    for index in range(3):
        values = batch(index)
        losses.append(float(step(values)))
        optimizer.zero_grad()
        with SameDropout(0, index):
            loss = own_loss(reference, loss_fn, values)
        loss.backward()
        optimizer.step()
        assert losses[-1] == pytest.approx(float(loss.detach()), rel=1e-5)


PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "micro-batches": ("1 cpu", {"micro_batches": 4}),
    "dp": ("2 cpu", {"dp": 2, "micro_batches": 2}),
    "tp": ("2 cpu", {"tp": 2}),
    "pp": ("2 cpu", {"pp": 2, "micro_batches": 2}),
    "zero3": ("2 cpu", {"dp": 2, "zero": 3, "recompute": "full"}),
}
ONE_BLOCK = ("Autoencoder", "Masked", "Losses", "Recurrent")


def pairs() -> list[Any]:
    """Every model over ranks with micro-batches, and under one of the other plans, which take turns."""
    pairs = [(name, "dp") for name in NAMES] + by_turns(NAMES, [plan for plan in PLANS if plan != "dp"])
    pairs = [(name, "tp" if plan == "pp" and name in ONE_BLOCK else plan) for name, plan in pairs]
    return [pair if pair[0] == "row_mask" else pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs]


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "plan"), pairs())
def test_plans_draw_the_same_numbers(name: str, plan: str) -> None:
    model, loss_fn = model_and_loss(name)
    cluster, constraints = PLANS[plan]
    report = verify(
        model, cluster, example_inputs=batch(), loss_fn=loss_fn, constraints=constraints, steps=2, optimizer=sgd
    )
    assert report.ok(1e-5), report


@pytest.mark.parametrize("name", slow_but(("floored_mask",), EVALUATED))
def test_draws_of_training_are_off_in_evaluation(name: str) -> None:
    model, loss_fn = model_and_loss(name)
    step = compiled_of(model, loss_fn).build()
    reference = copy.deepcopy(model).eval()
    with torch.no_grad():
        expected = float(own_loss(reference, loss_fn, batch(3)))
    assert float(step.evaluate(batch(3))) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_recurrent_dropout_is_off_in_evaluation() -> None:
    model, loss_fn = model_and_loss("Recurrent")
    step, values = compiled_of(model, loss_fn).build(), batch(3)
    with torch.no_grad():
        expected = float(own_loss(copy.deepcopy(model).eval(), loss_fn, values))
    assert float(step.evaluate(values)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_draws_of_both_modes_are_those_of_the_step() -> None:
    """An evaluation between two steps draws what the next step will draw; twice, and it is the same."""
    model, loss_fn = model_and_loss("Autoencoder")
    step = compiled_of(model, loss_fn).build()
    first, other = batch(0), batch(1)
    step(first)
    with SameDropout(0, 0):
        loss = own_loss(model, loss_fn, first)
    loss.backward()
    sgd(model.parameters()).step()
    with SameDropout(0, 1), torch.no_grad():
        expected = float(own_loss(model.eval(), loss_fn, other))
    assert float(step.evaluate(other)) == pytest.approx(expected, rel=1e-5)
    assert float(step.evaluate(other)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_resumed_run_draws_what_the_first_would_have(tmp_path: Path) -> None:
    model, loss_fn = model_and_loss("feature_noise")
    compiled = compiled_of(model, loss_fn)
    first = compiled.build()
    first(batch(0)), first(batch(1))
    checkpoint.save(first, tmp_path / "checkpoint")
    expected = [float(first(batch(2))), float(first(batch(3)))]
    second = compiled.build()
    checkpoint.load(second, tmp_path / "checkpoint")
    assert [float(second(batch(2))), float(second(batch(3)))] == expected


def test_equal_layers_are_one_class_and_draw_other_numbers() -> None:
    model, loss_fn = model_and_loss("row_mask")
    text = compiled_of(model, loss_fn).files["model.py"]
    assert 'self.draw("bernoulli", p=0.6, call=0' in text
    assert "dropout_calls = 1" in text and "class Layer(DrawModule)" in text


def test_a_rank_draws_its_part_alone() -> None:
    """Numbers of rows and of features that a plan splits are drawn split."""
    model = Model(lambda module, x: x * torch.rand_like(x), layers=3)
    wide = {name: value.repeat(64, 8, 1) for name, value in batch().items()}
    compiled = autopar.compile(
        model, "2 cpu", example_inputs=wide, loss_fn=torch.nn.functional.mse_loss, constraints={"dp": 2}
    )
    assert re.search(rf'Layout\(\(\w+, \w+, {2 * WIDTH}\), dp="S\(0\)"\)', compiled.files["model.py"])
