"""The check in the first step: it finds wrong programs, leaves training as it is, and refuses no right one."""

from __future__ import annotations

import contextlib
import logging
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Trainer, TrainerConfig
from autopar.compiled import CompiledProgram
from autopar.errors import ConstraintError, TrainingError
from autopar.frontend.inputs import name_inputs
from autopar.launch import run_ranks
from autopar.running import build, first_step
from autopar.running.first_step import _Model, why_not
from codegen.runtime.reference import SameDropout

ROWS = 8


class Net(nn.Module):
    """Linear layers with a norm, by default one that has running statistics, and dropout."""

    def __init__(self, seed: int = 3, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.last = nn.Linear(4, 8), norm(8), nn.Linear(8, 1)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.last(self.dropout(self.norm(self.first(x)).relu())) - y).square().mean()


class Cancelling(nn.Module):
    """Its loss is the small difference of large numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + 1e4).mean() - 1e4


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 4, generator=generator)
    return {"x": x, "y": x.sum(1, keepdim=True).sin()}


def compiled(model: nn.Module, inputs: dict[str, Tensor] | None = None, **options: Any) -> CompiledProgram:
    return autopar.compile(model, "1 cpu", example_inputs=inputs or batch(), **options)


def trainer(model: nn.Module, constraints: dict[str, Any], **config: Any) -> Trainer:
    """Of three steps on two ranks."""
    settings: dict[str, Any] = {"steps": 3, "learning_rate": 0.05, "log_every": 0, "cluster": "2 cpu"}
    settings |= {"constraints": constraints, **config}
    return Trainer(model, TrainerConfig(**settings), [batch()])


def first_loss(step: Any, inputs: dict[str, Tensor] | None = None) -> float:
    return float(step(step.local_batch(inputs or batch())))


class WrongBias:
    """Where values come from, with a mistake."""

    def __init__(self, model: nn.Module, *args: Any) -> None:
        self.model = model

    def __call__(self, name: str) -> Tensor:
        return self.model.state_dict()[name] + (0.5 if name == "last.bias" else 0.0)


# One rank -------------------------------------------------------------------------------------------------------------


def _draws(*_: Any) -> None:
    """Draw numbers that are none of the model's: a program counts the model's own draws."""
    torch.rand(1, generator=torch.default_generator), random.getrandbits(1), np.random.bytes(1)


NORMS = [("fp32", nn.BatchNorm1d), ("bf16", nn.LayerNorm)]
"""Precisions with norms that torch computes in them on a CPU."""


@pytest.mark.parametrize(("precision", "norm"), NORMS)
def test_the_first_loss_is_compared_with_the_models(
    precision: str, norm: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model = Net(norm=norm)
    program = compiled(model, precision=precision)
    states = {name: value.clone() for name, value in model.state_dict().items()}
    model.register_forward_pre_hook(_draws)  # where the copy is run
    step = program.build(seed=5)
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index]
    with caplog.at_level(logging.INFO, "autopar"):
        losses = [first_loss(step), first_loss(step)]
    assert torch.equal(torch.get_rng_state(), drawn[0]) and random.getstate() == drawn[1]
    assert (np.random.get_state()[1] == drawn[2]).all()  # type: ignore[index]
    assert all(torch.equal(value, states[name]) for name, value in model.state_dict().items())
    matches = re.findall(r"loss (\S+), of the model itself (\S+)", caplog.text)
    same = Net(norm=norm)
    with SameDropout(5, 0):
        expected = float(same(**batch()).detach())
    close = 1e-5 if precision == "fp32" else 0.01
    assert len(matches) == 1 and [float(number) for number in matches[0]] == pytest.approx([expected] * 2, rel=close)
    without = program.build(seed=5, first_step_check=False)
    assert losses == [first_loss(without), first_loss(without)]


@pytest.mark.parametrize(("precision", "norm"), NORMS)
def test_a_step_with_a_wrong_parameter_is_refused_before_the_update(
    precision: str, norm: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiled(Net(norm=norm), precision=precision)
    monkeypatch.setattr(build, "ValueSource", WrongBias)
    step = program.build()
    before = step.full_state_dict()["last.weight"]
    with pytest.raises(TrainingError, match="is not the model's own") as caught:
        first_loss(step)
    assert torch.equal(step.full_state_dict()["last.weight"], before) and step.rng.step == 0
    assert "autopar verify" in str(caught.value) and "first_step_check=False" in str(caught.value)
    values = caught.value.values
    assert isinstance(values, dict)
    same = Net(norm=norm)
    with SameDropout(0, 0):
        right = float(same(**batch()).detach())
    assert float(values["the model on one process"]) == pytest.approx(right, rel=0.01)
    wrong = first_loss(program.build(first_step_check=False))
    assert float(values["the program on rank 0"]) == pytest.approx(wrong)


def _loads_step(model: Net, step: Any) -> None:
    step.load(Net(seed=4).state_dict())


def _loads_model(model: Net, step: Any) -> None:
    model.load_state_dict(Net(seed=4).state_dict())


def _writes_buffer(model: Net, step: Any) -> None:
    with torch.no_grad():
        step.model.norm.running_mean.add_(1.0)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("change", [_loads_step, _loads_model, _writes_buffer])
@pytest.mark.parametrize("wanted", [None, True])
def test_what_was_changed_since_is_no_error(
    change: Callable[[Net, Any], None], wanted: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    step = compiled(model).build(first_step_check=wanted)
    change(model, step)
    with caplog.at_level(logging.INFO, "autopar"):
        first_loss(step)
    assert first_step.CHANGED in caplog.text


def test_batches_that_wait_and_those_that_are_evaluated_are_not_the_first(caplog: pytest.LogCaptureFixture) -> None:
    step = compiled(Net()).build(first_step_check=True)
    others = [{name: value + number for name, value in batch().items()} for number in range(1, 40)]
    for later in others[:20]:
        step.evaluate(step.local_batch(later))
    waiting = [step.local_batch(later) for later in others]
    with caplog.at_level(logging.INFO, "autopar"):
        step(waiting[0])
    assert "of the model itself" in caplog.text
    assert step.first_check is None  # and with it all batches


def test_a_batch_of_other_values_than_it_was_made_of_is_not_compared() -> None:
    step = compiled(Net()).build(first_step_check=True)
    whole = batch()
    part = step.local_batch(whole)
    whole["x"] = whole["x"] + 1  # a loader that reuses its memory
    with pytest.raises(ConstraintError, match="was changed after"):
        step(part)


def test_rounding_and_random_numbers_of_the_models_own_are_no_error() -> None:
    inputs = {"x": torch.randn(64, 4)}
    program = compiled(Cancelling(), inputs)
    first_loss(program.build(first_step_check=True), inputs)
    reference = _Model(program, name_inputs(program.model, inputs, None), torch.device("cpu"), 0, 0)
    assert reference.compute() == ""
    rounding = abs(reference._loss(is_wider=True) - reference.loss)
    assert 3.9 * rounding > first_step.UNIT * abs(reference.loss)  # more than fp32 explains without asking the model
    assert reference.error_of(reference.loss + 3.9 * rounding) is None
    assert reference.error_of(reference.loss + 4.1 * rounding) is not None
    assert reference.error_of(float("nan")) is not None
    reference.loss = float("nan")
    assert reference.error_of(float("inf")) is None and reference.error_of(1.0) is not None
    reference.compute()
    program.model.register_forward_hook(lambda module, args, output: output + 1.0 + random.random())
    assert reference.error_of(reference.loss + 0.5) is None


def test_where_it_does_not_fit_or_takes_long_it_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = compiled(Net())
    assert why_not(program) == ""
    request = program.request
    assert request is not None
    peak = int(program.plan.prediction.peak_bytes)
    needed = int(first_step.needed_bytes(program))
    model_bytes = sum(tensor.numel() * 4 for tensor in (*Net().parameters(), *Net().norm.buffers()))
    assert needed > model_bytes
    for memory, fits in ((peak + needed - 1, False), (peak + needed, True), (peak // 2, False)):
        limited = replace(request, constraints=replace(request.constraints, memory_bytes=memory))
        assert (why_not(replace(program, request=limited)) == "") == fits
        cluster = program.cluster.with_memory(memory)
        assert (why_not(replace(program, request=None, cluster=cluster)) == "") == fits
        assert why_not(replace(program, request=limited), is_wanted=True) == ""
    monkeypatch.setattr(first_step, "LONGEST_SECONDS", 0.0)
    assert "would wait" in why_not(program)
    step = program.build()
    with caplog.at_level(logging.INFO, "autopar"):
        first_loss(step)
    assert "the first step is not checked: the other ranks would wait" in caplog.text


def test_a_model_on_meta_is_left_out_and_refused_where_it_is_asked_for() -> None:
    program = compiled(Net().to("meta"))
    for wanted in (None, True):
        step = program.build(init=lambda name, shape, dtype: torch.ones(shape, dtype=dtype), first_step_check=wanted)
        with pytest.raises(ConstraintError, match="cannot be checked") if wanted else contextlib.nullcontext():
            first_loss(step)


def test_a_forward_that_fails_alone_does_not_stop_training(caplog: pytest.LogCaptureFixture) -> None:
    program = compiled(Net())
    program.model.register_forward_pre_hook(lambda *_: torch.zeros(2) @ torch.zeros(3))
    step = program.build()
    with caplog.at_level(logging.INFO, "autopar"):
        first_loss(step)
    assert "own forward failed: RuntimeError" in caplog.text


def test_the_setting_is_true_false_or_null() -> None:
    with pytest.raises(ConstraintError, match="first_step_check"):
        compiled(Net()).build(first_step_check="maybe")  # type: ignore[arg-type]
    with pytest.raises(ConstraintError, match="first_step_check"):
        TrainerConfig(first_step_check="maybe")  # type: ignore[arg-type]
    assert TrainerConfig.from_mapping({"first_step_check": False}).dump()["first_step_check"] is False


# Two ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
def test_training_is_bit_for_bit_what_it_is_without() -> None:
    """With dropout, running statistics and sharded parameters."""
    outcomes = []
    for wanted in (True, False):
        model = Net()
        result = trainer(model, {"dp": 2, "zero": 3}, first_step_check=wanted).fit()
        outcomes.append((result.losses, {name: value.clone() for name, value in model.state_dict().items()}))
    (with_it, after), (without, other) = outcomes
    assert with_it == without and len(with_it) == 3
    assert all(torch.equal(value, other[name]) for name, value in after.items())


class WrongOnRank1(WrongBias):
    def __call__(self, name: str) -> Tensor:
        right = self.model.state_dict()[name]
        return super().__call__(name) if torch.distributed.get_rank() == 1 else right


@pytest.mark.distributed
def test_one_wrong_number_of_one_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank holds all parameters and computes the whole loss, so that only rank 1 shows it."""
    monkeypatch.setattr(build, "ValueSource", WrongOnRank1)
    with pytest.raises(TrainingError, match="the program on rank 1"):
        trainer(Net(), {"tp": 2}).fit()
    trainer(Net(), {"tp": 2}, first_step_check=False, steps=1).fit()


class Ignoring(Net):
    """Takes something that its loss does not depend on."""

    def forward(self, x: Tensor, y: Tensor, z: Tensor | None = None) -> Tensor:
        return super().forward(x, y)


def own_loop(program: CompiledProgram, ignoring: CompiledProgram | None) -> list[str]:
    """Return the errors of the first step with batches of several kinds, on each rank."""
    errors = []
    rank = torch.distributed.get_rank()
    other = {name: value + rank for name, value in batch().items()}
    tried: list[tuple[CompiledProgram, Callable[[Any], dict[str, Tensor]]]] = [
        (program, lambda step: step.local_batch(batch())),
        (program, lambda step: program.local_batch(batch())),
        (program, lambda step: program.local_batch(other)),  # each reads its own rows, which is as good
        (program, lambda step: dict(step.local_batch(batch())) if rank else step.local_batch(batch())),
    ]
    if ignoring is not None:
        unknown = {"unknown": torch.zeros(2)} if rank else {}
        tried.append((program, lambda step: {**step.local_batch(batch()), **unknown}))
        tried.append((ignoring, lambda step: program.local_batch(batch())))
    for compiled, part in tried:
        step = compiled.build(first_step_check=True)
        try:
            float(step(part(step)))
            errors.append("")
        except (ConstraintError, TrainingError, ValueError) as error:
            errors.append(str(error))
    return errors


@pytest.mark.slow
@pytest.mark.distributed
def test_all_ranks_of_a_loop_of_ones_own_find_the_same() -> None:
    program, with_more = (
        autopar.compile(model, "2 cpu", example_inputs=inputs, constraints={"dp": 2})
        for model, inputs in ((Net(), batch()), (Ignoring(), {**batch(), "z": torch.zeros(ROWS, 1)}))
    )
    one, other = run_ranks(own_loop, (program, with_more), 2)
    assert one[:4] == other[:4] == [""] * 4, "parts of the loop's own are put together and compared"
    assert "rank 1: the batch has unknown" in one[4] and "the batch has unknown" in other[4]
    assert one[5] == other[5] and "no part has all of z" in one[5]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_wrong_number_is_found_however_batches_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "ValueSource", WrongOnRank1)
    program = autopar.compile(Net(), "2 cpu", example_inputs=batch(), constraints={"dp": 2, "zero": 0})
    one, other = run_ranks(own_loop, (program, None), 2)
    assert one == other and len(one) == 4 and all("is not the model's own" in text for text in one)


@pytest.mark.distributed
def test_a_wrong_line_of_a_program_is_found() -> None:
    """A partial sum that is not added up."""
    shards = {"first.*": {"tp": "S(0)"}, "last.weight": {"tp": "S(1)"}}
    faulty = trainer(Net(norm=nn.LayerNorm), {"tp": 2, "parameters": shards}, steps=1)
    program = faulty.compile()
    assert len(faulty.fit().losses) == 1
    right = program.files["model.py"]
    wrong = re.sub(r"tp\.all_reduce\((\w+)[^)]*\)", r"\1", right, count=1)
    assert wrong != right, right
    faulty._program = replace(program, files={**program.files, "model.py": wrong})
    with pytest.raises(TrainingError, match="is not the model's own"):
        faulty.fit()


@pytest.mark.distributed
def test_a_run_that_goes_on_is_not_checked(tmp_path: Path) -> None:
    """The model that it is started with again has other values than the checkpoint."""
    settings = {"checkpoint_directory": str(tmp_path / "run"), "first_step_check": True}
    trainer(Net(seed=3), {"dp": 2}, steps=1, **settings).fit()
    result = trainer(Net(seed=4), {"dp": 2}, **settings).fit()
    assert result.first_step == 1 and len(result.losses) == 2
