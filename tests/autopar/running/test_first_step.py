"""The check before the first step: it finds wrong programs, leaves training as it is, and costs nothing elsewhere."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import Trainer, TrainerConfig
from autopar.compiled import CompiledProgram
from autopar.errors import ConstraintError, TrainingError
from autopar.frontend.inputs import name_inputs
from autopar.running import first_step
from autopar.running.first_step import _Model, check_first_step, why_not
from autopar.training import learners

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


class TwoFaced(Net):
    """Its evaluation is another computation, which its program lacks."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        return loss if self.training else loss.sqrt()


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


def check(program: CompiledProgram, step: Any, inputs: dict[str, Tensor] | None = None, **options: Any) -> Any:
    named = name_inputs(program.model, inputs or batch(), program.loss_fn)
    return check_first_step(program, step, named, lambda: float(step.evaluate(step.local_batch(named))), **options)


# One rank -------------------------------------------------------------------------------------------------------------


NORMS = [("fp32", nn.BatchNorm1d), ("bf16", nn.LayerNorm)]
"""Precisions with norms that torch evaluates in them on a CPU."""


@pytest.mark.parametrize(("precision", "norm"), NORMS)
def test_a_step_is_built_where_its_loss_is_the_models(
    precision: str, norm: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model = Net(norm=norm)
    program = compiled(model, precision=precision)
    states = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    with caplog.at_level(logging.INFO, "autopar"):
        step = program.build(first_batch=batch())
    assert torch.equal(torch.get_rng_state(), states[0]) and model.training
    assert all(torch.equal(value, states[1][name]) for name, value in model.state_dict().items())
    found = re.search(r"loss (\S+), of the model itself (\S+)", caplog.text)
    assert found is not None
    with torch.no_grad():
        expected = float(Net(norm=norm).eval()(**batch()))
    assert float(found[1]) == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 0.01)
    assert float(found[2]) == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 0.01)
    assert step.rng.step == 0 and not step.num_samples
    model.register_forward_pre_hook(lambda *_: torch.rand(1) and None)  # draws where the copy is run
    assert check(program, step, wanted=True) is None and torch.equal(torch.get_rng_state(), states[0])


@pytest.mark.parametrize(("precision", "norm"), NORMS)
def test_a_step_with_a_wrong_parameter_is_refused(precision: str, norm: type[nn.Module]) -> None:
    program = compiled(Net(norm=norm), precision=precision)
    step = program.build()
    with torch.no_grad():
        step.load(lambda name: program.model.state_dict()[name] + (0.5 if name == "last.bias" else 0.0))
    right = float(Net(norm=norm).eval()(**batch()).detach())
    with pytest.raises(TrainingError, match="is not the model's own") as caught:
        check(program, step)
    assert "autopar verify" in str(caught.value) and "first_step_check=False" in str(caught.value)
    values = caught.value.values
    assert isinstance(values, dict)
    wrong = float(step.evaluate(step.local_batch(batch())))
    assert float(values["the program on rank 0"]) == pytest.approx(wrong)
    assert float(values["the model on one process"]) == pytest.approx(right, rel=0.01)
    assert check(program, step, wanted=False) is None


def test_a_program_without_evaluation_is_checked_by_its_first_loss() -> None:
    program = compiled(TwoFaced())
    with pytest.raises(ConstraintError, match="without an evaluation mode"):
        program.build(first_batch=batch())
    step = program.build(seed=5)
    after = check(program, step, seed=5)
    loss = float(step(step.local_batch(batch())))
    after(loss)  # with dropout
    with pytest.raises(TrainingError, match="training mode"):
        after(loss * 1.001)
    with pytest.raises(TrainingError):
        check(program, program.build(seed=5), seed=6)(loss)  # other masks


def test_rounding_of_the_models_own_is_no_error() -> None:
    inputs = {"x": torch.randn(64, 4)}
    program = compiled(Cancelling(), inputs)
    program.build(first_batch=inputs)
    own = _Model(program, name_inputs(program.model, inputs, None), torch.device("cpu"), None)
    assert own.compute() == ""
    rounding = abs(own._loss(is_wider=True) - own.loss)
    assert 3.9 * rounding > first_step.UNIT * abs(own.loss)  # more than fp32 explains without asking the model
    assert own.error_of(own.loss + 3.9 * rounding) is None
    assert own.error_of(own.loss + 4.1 * rounding) is not None
    assert own.error_of(float("nan")) is not None
    own.loss = float("nan")
    assert own.error_of(float("inf")) is None and own.error_of(1.0) is not None


def test_where_it_does_not_fit_or_takes_long_it_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = compiled(Net())
    assert why_not(program) == ""
    request = program.request
    assert request is not None
    peak = int(program.plan.prediction.peak_bytes)
    needed = int(first_step.needed_bytes(program))
    held = sum(each.numel() * 4 for each in (*Net().parameters(), *Net().norm.buffers()))
    assert needed > held
    for memory, fits in ((peak + needed - 1, False), (peak + needed, True), (peak // 2, False)):
        limited = replace(request, constraints=replace(request.constraints, memory_bytes=memory))
        assert (why_not(replace(program, request=limited)) == "") == fits
        cluster = program.cluster.with_memory(memory)
        assert (why_not(replace(program, request=None, cluster=cluster)) == "") == fits
        assert why_not(replace(program, request=limited), is_wanted=True) == ""
    slow = program.program.map(lambda each: replace(each, backend="inductor"))
    assert "evaluation would be compiled" in why_not(replace(program, program=slow))
    monkeypatch.setattr(first_step, "LONGEST_SECONDS", 0.0)
    assert "would wait" in why_not(program)
    step = program.build()
    with caplog.at_level(logging.INFO, "autopar"):
        assert check(program, step) is None
    assert "the first step is not checked: the other ranks would wait" in caplog.text


def test_a_model_on_meta_is_left_out_and_refused_where_it_is_asked_for() -> None:
    program = compiled(Net().to("meta"))
    step = program.build(init=lambda name, shape, dtype: torch.ones(shape, dtype=dtype))
    assert check(program, step) is None
    with pytest.raises(ConstraintError, match="cannot be checked"):
        check(program, step, wanted=True)


def test_a_forward_that_fails_alone_does_not_stop_training(caplog: pytest.LogCaptureFixture) -> None:
    program = compiled(Net())
    step = program.build()
    program.model.first = nn.Linear(3, 8)
    with caplog.at_level(logging.INFO, "autopar"):
        assert check(program, step) is None
    assert "own forward failed: RuntimeError" in caplog.text


def test_the_setting_is_true_false_or_null() -> None:
    with pytest.raises(ConstraintError, match="first_step_check"):
        TrainerConfig(first_step_check="maybe")  # type: ignore[arg-type]
    assert TrainerConfig.from_mapping({"first_step_check": False}).dump()["first_step_check"] is False


# Two ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
def test_training_is_bit_for_bit_what_it_is_without() -> None:
    """With dropout, running statistics and sharded parameters."""
    found = []
    for wanted in (True, False):
        model = Net()
        result = trainer(model, {"dp": 2, "zero": 3}, first_step_check=wanted).fit()
        found.append((result.losses, {name: value.clone() for name, value in model.state_dict().items()}))
    (with_it, after), (without, other) = found
    assert with_it == without and len(with_it) == 3
    assert all(torch.equal(value, other[name]) for name, value in after.items())


def _corrupting_rank_1(program: CompiledProgram, step: Any, *rest: Any, **options: Any) -> Any:
    if torch.distributed.get_rank() == 1:
        with torch.no_grad():
            step.parts[0].model.get_parameter("first.weight").flatten()[0] += 1.0
    return check_first_step(program, step, *rest, **options)


@pytest.mark.distributed
def test_one_wrong_number_of_one_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank holds all parameters and computes the whole loss, so that only rank 1 shows it."""
    monkeypatch.setattr(learners, "check_first_step", _corrupting_rank_1)
    with pytest.raises(TrainingError, match="the program on rank 1"):
        trainer(Net(), {"tp": 2}).fit()
    trainer(Net(), {"tp": 2}, first_step_check=False, steps=1).fit()


@pytest.mark.distributed
def test_a_wrong_line_of_a_program_is_found() -> None:
    """A partial sum that is not added up."""
    shards = {"first.*": {"tp": "S(0)"}, "last.weight": {"tp": "S(1)"}}
    own = trainer(Net(norm=nn.LayerNorm), {"tp": 2, "parameters": shards}, steps=1)
    program = own.compile()
    assert len(own.fit().losses) == 1
    right = program.files["model.py"]
    wrong = re.sub(r"tp\.all_reduce\((\w+)[^)]*\)", r"\1", right, count=1)
    assert wrong != right, right
    own._program = replace(program, files={**program.files, "model.py": wrong})
    with pytest.raises(TrainingError, match="is not the model's own"):
        own.fit()


@pytest.mark.distributed
def test_a_run_that_goes_on_is_not_checked(tmp_path: Path) -> None:
    """The model that it is started with again has other values than the checkpoint."""
    settings = {"checkpoint_directory": str(tmp_path / "run"), "first_step_check": True}
    trainer(Net(seed=3), {"dp": 2}, steps=1, **settings).fit()
    result = trainer(Net(seed=4), {"dp": 2}, **settings).fit()
    assert result.first_step == 1 and len(result.losses) == 2
