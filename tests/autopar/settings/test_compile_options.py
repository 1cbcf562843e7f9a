"""The options are declared once, and every door takes all of them."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import ConstraintError, PlanError, TraceError
from autopar.settings.compile_options import CompileOptions, PlanOptions, VerifyOptions


@pytest.mark.parametrize(("door", "options"), [(autopar.compile, CompileOptions), (autopar.verify, VerifyOptions)])
def test_signatures_show_every_option(door: Any, options: type) -> None:
    parameters = inspect.signature(door).parameters
    assert list(parameters)[:2] == ["model", "cluster_spec"]
    assert set(list(parameters)[2:]) == {field.name for field in fields(options)}
    assert all(parameters[field.name].kind is inspect.Parameter.KEYWORD_ONLY for field in fields(options))


@pytest.mark.parametrize(("door", "options"), [(autopar.compile, CompileOptions), (autopar.verify, VerifyOptions)])
def test_help_explains_every_option(door: Any, options: type) -> None:
    text = inspect.getdoc(door) or ""
    for field in fields(options):
        (explained,) = re.findall(rf"^{field.name}\n    (\S.*(?:\n    .*)*)", text, re.MULTILINE)
        assert len(explained.split()) >= 5 and explained.endswith(".")


def test_an_option_is_checked_before_anything_is_traced() -> None:
    for wrong in ({"constraints": {"tpp": 4}}, {"constraints": ["tp"]}, {"compression": {"gather": "int3"}}):
        with pytest.raises(ConstraintError):
            autopar.TrainerConfig(steps=3, **wrong)


def test_a_number_that_is_too_small_is_answered_with_the_least_that_is_legal() -> None:
    for name in ("tp", "dp", "pp", "micro_batches", "chunks"):
        with pytest.raises(ConstraintError, match="instead: 1 or more"):
            PlanOptions(constraints={name: 0})


def test_a_trainer_takes_all_that_bears_on_a_plan() -> None:
    changed = {"global_batch_size": 8, "precision": "bf16", "kernels": "on", "fp8": True, "backend": "inductor"}
    changed |= {"constraints": {"tp": 2}, "compression": {"gather": "int8"}, "plan": "plan.yaml"}
    assert set(changed) == {field.name for field in fields(PlanOptions)}
    config = autopar.TrainerConfig(steps=3, **changed)
    assert config.common == changed
    assert replace(config, steps=4).common == changed


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"kernels": "sometimes"}, ConstraintError),
        ({"precision": "fp17"}, ConstraintError),
        ({"fp8": "yes"}, ConstraintError),
        ({"backend": "jit"}, ConstraintError),
        ({"global_batch_size": 0}, ConstraintError),
        ({"plan": 3}, PlanError),
    ],
)
def test_every_door_refuses_alike(wrong: dict[str, Any], error: type[Exception]) -> None:
    model, batch = torch.nn.Linear(2, 2), {"x": torch.ones(2, 2)}
    said = []
    for door in (
        lambda: autopar.compile(model, "2 cpu", example_inputs=batch, **wrong),
        lambda: autopar.verify(model, "2 cpu", example_inputs=batch, **wrong),
        lambda: PlanOptions(**wrong),
    ):
        with pytest.raises(error) as caught:
            door()
        said.append(str(caught.value))
    assert len(set(said)) == 1


def test_what_is_no_option_or_no_batch() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"autopar.compile: .*'colour'; pass options by keyword .*global_batch_size"):
        autopar.compile(model, "2 cpu", example_inputs=(torch.ones(2, 2),), colour="red")
    with pytest.raises(TypeError, match=r"autopar.compile: missing a required argument: 'example_inputs'"):
        autopar.compile(model, "2 cpu")
    with pytest.raises(TypeError, match=r"autopar.verify: too many positional arguments; .*steps"):
        autopar.verify(model, "2 cpu", (torch.ones(2, 2),), example_inputs=(torch.ones(2, 2),))
    with pytest.raises(TraceError, match="not a batch"):
        autopar.compile(model, "2 cpu", example_inputs=3)


class Clipped(torch.optim.SGD):
    """Couples all parameters: their gradients have one norm."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


def coupled(parameters: Any) -> torch.optim.Optimizer:
    return Clipped(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compression": {"gather": "int8"}, "constraints": {"dp": 2, "zero": 0}}, "compression changes nothing"),
        ({"optimizer": coupled}, "the search considers only such plans"),
        ({"fp8": True}, "fp8 changes nothing"),
        ({}, "ignores the gradients of 0.weight"),
    ],
)
def test_warnings_name_the_callers_line(options: dict[str, Any], text: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model[0].weight.grad = torch.ones(4, 4)
    batch = (torch.ones(8, 4),)
    with pytest.warns(UserWarning) as caught:
        autopar.compile(model, "2 cpu", example_inputs=batch, loss_fn=lambda y: y.square().mean(), **options)
    found = [each for each in caught if text in str(each.message)]
    assert found and all(each.filename == __file__ for each in found)
