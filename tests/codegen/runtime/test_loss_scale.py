"""The loss scale of fp16 against torch.amp.GradScaler, and what a step does with it on one process."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from codegen.runtime import checkpoint
from codegen.runtime.loss_scale import LossScale
from codegen.runtime.mesh import Mesh
from codegen.runtime.non_finite import MOST_SKIPS, Guard
from codegen.runtime.stage_module import loss_gradient
from codegen.runtime.step import Step
from tests.codegen.runtime.mlp_program import make_optimizer, make_program, whole_batch, whole_state

ROWS = 8

rules = st.builds(
    LossScale,
    init_scale=st.floats(2.0**-100, 2.0**120, width=32),
    growth_factor=st.floats(1.0, 1e3, exclude_min=True),
    backoff_factor=st.floats(1e-3, 1.0, exclude_max=True),
    growth_interval=st.integers(1, 5),
)


class Torchs:
    """torch's own scaler of the same rule, with one parameter whose gradient overflows or does not."""

    def __init__(self, rule: LossScale) -> None:
        options = {name: getattr(rule, name) for name in ("init_scale", "growth_factor", "backoff_factor")}
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=rule.growth_interval, **options)
        self.parameter = torch.nn.Parameter(torch.zeros(3))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)
        self.scaler.scale(torch.ones(()))

    def update(self, has_overflowed: bool) -> None:
        self.parameter.grad = torch.tensor([1.0, math.inf if has_overflowed else 2.0, 3.0])
        self.scaler.step(self.optimizer)
        self.scaler.update()

    @property
    def now(self) -> tuple[float, int]:
        return float(self.scaler.get_scale()), int(self.scaler.state_dict()["_growth_tracker"])


@example(LossScale(growth_interval=2), [False] * 9 + [True] * 3 + [False] * 5)
@example(LossScale(init_scale=2.0**127, growth_interval=1), [False, False, True, False, False])
@given(rules, st.lists(st.booleans(), max_size=40))
def test_the_scale_changes_as_torchs_does(rule: LossScale, overflows: list[bool]) -> None:
    """Scale and tracker are equal bit for bit after every step, at fp32's end too."""
    ours, torchs = rule.begin(), Torchs(rule)
    assert (ours.value, ours.num_good) == torchs.now
    for has_overflowed in overflows:
        ours.update(has_overflowed)
        torchs.update(has_overflowed)
        assert (ours.value, ours.num_good) == torchs.now


def test_the_default_rule_is_torchs() -> None:
    ours, theirs = LossScale(), torch.amp.GradScaler("cpu").state_dict()
    assert (ours.init_scale, ours.growth_factor) == (theirs["scale"], theirs["growth_factor"])
    assert (ours.backoff_factor, ours.growth_interval) == (theirs["backoff_factor"], theirs["growth_interval"])


@given(st.floats(2.0**-20, 2.0**40, width=32), st.integers(0, 9))
def test_gradients_are_unscaled_as_by_torch(scale: float, seed: int) -> None:
    gradient = torch.randn(50, generator=torch.Generator().manual_seed(seed)) * scale
    torchs = Torchs(LossScale(init_scale=scale))
    parameter = torch.nn.Parameter(torch.zeros(50))
    parameter.grad = gradient.clone()
    torchs.scaler.unscale_(torch.optim.SGD([parameter], lr=1.0))
    LossScale(init_scale=scale).begin().unscale([gradient])
    assert torch.equal(gradient, parameter.grad)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"init_scale": 0.0}, "init_scale .* above 0"),
        ({"init_scale": 1e39}, "number of fp32"),
        ({"init_scale": "big"}, "init_scale .* finite number"),
        ({"growth_factor": 1.0}, "growth_factor .* above 1"),
        ({"backoff_factor": 1.0}, "backoff_factor .* between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval .* whole number"),
        ({"growth_interval": 2.0}, "growth_interval .* whole number"),
    ],
)
def test_wrong_numbers_are_named(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LossScale(**wrong)


def test_a_backward_starts_from_the_scale_and_overflows_where_the_loss_is_in_fp16() -> None:
    """An fp16 loss takes 32768, as torch's scaler finds too; an fp32 one any scale."""
    scaling = LossScale().begin()
    assert loss_gradient(torch.zeros(()), 4, loss_scaling=scaling).item() == 16384.0
    assert loss_gradient(torch.zeros(()), 4).item() == 0.25
    assert loss_gradient(torch.zeros((), dtype=torch.float16), 1, loss_scaling=scaling).isinf()
    scaling.update(True)
    assert loss_gradient(torch.zeros((), dtype=torch.float16), 1, loss_scaling=scaling).item() == 32768.0
    assert loss_gradient(torch.zeros((), dtype=torch.float64), 3).item() == 1 / 3


# The guard ------------------------------------------------------------------------------------------------------------


def passes(guard: Guard, loss: float, norm: float) -> bool:
    guard.after_backward(torch.tensor(loss))
    return guard.lets_pass(torch.tensor(norm))


@pytest.mark.parametrize("non_finite", ["skip", "stop", "ignore"])
def test_overflows_are_skipped_without_counting_until_the_scale_is_one(non_finite: Any) -> None:
    scaling = LossScale(init_scale=2.0**20).begin()
    guard = Guard(non_finite, [], loss_scaling=scaling)
    for _ in range(20):
        assert not passes(guard, 1.0, math.inf)
    assert scaling.value == 1.0 and guard.num_skipped == 20
    if non_finite == "stop":
        with pytest.raises(FloatingPointError, match="with a loss scale of 1"):
            passes(guard, 1.0, math.inf)
        return
    for _ in range(MOST_SKIPS):
        assert not passes(guard, 1.0, math.nan)
    if non_finite == "skip":
        with pytest.raises(FloatingPointError, match="10 steps before this one"):
            passes(guard, 1.0, math.inf)
    else:
        assert not passes(guard, 1.0, math.inf)
        assert passes(guard, math.inf, 1.0)


def test_a_loss_that_is_not_finite_counts_at_any_scale() -> None:
    guard = Guard("skip", [], loss_scaling=LossScale().begin())
    for _ in range(MOST_SKIPS):
        assert not passes(guard, math.nan, math.nan)
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        passes(guard, math.nan, math.nan)
    with pytest.raises(FloatingPointError, match="non_finite='stop'"):
        passes(Guard("stop", [], loss_scaling=LossScale().begin()), math.nan, 1.0)


# A step on one process ------------------------------------------------------------------------------------------------


def make_step(zero: int = 1, micro: int = 1, **options: Any) -> Step:
    program = make_program(zero, ROWS // micro, "float32")
    given: dict[str, Any] = {"precision": "fp16", "loss_scaling": LossScale()} | options
    factory = partial(make_optimizer, "adamw")
    step = Step(program, Mesh.create(("dp",), (1,)), optimizer_factory=factory, num_micro_batches=micro, **given)
    step.load(whole_state(torch.float32))
    return step


def batch_of(step: Step, seed: int) -> dict[str, Tensor]:
    return step.local_batch(whole_batch(ROWS, seed))


@pytest.mark.parametrize("micro", [1, 4])
def test_powers_of_two_scale_exactly(micro: int) -> None:
    """Where nothing underflows, loss, gradients, norm and parameters do not depend on the scale."""
    steps = [make_step(micro=micro, loss_scaling=LossScale(init_scale=2.0**k), max_grad_norm=0.5) for k in (8, 12)]
    for seed in range(3):
        for step in steps:
            step.forward_backward(batch_of(step, seed))
        one, other = (step.gradients() for step in steps)
        for name, gradient in one.items():
            assert torch.allclose(gradient, other[name], rtol=1e-3, atol=1e-6), name
        for step in steps:
            step.update()
        norms = [step.grad_norm for step in steps]
        assert norms[0] is not None and norms[1] is not None
        assert norms[0].item() == pytest.approx(norms[1].item(), rel=1e-3)
        assert norms[0].item() == pytest.approx(math.sqrt(sum(g.square().sum().item() for g in one.values())))


def test_a_step_that_overflows_changes_nothing_but_the_scale() -> None:
    step = make_step(loss_scaling=LossScale(init_scale=2.0**40))
    before = step.full_state_dict()
    loss = step(batch_of(step, 0))
    assert math.isfinite(loss) and step.guard.num_skipped == 1 and step.loss_scale == 2.0**39
    assert step.grad_norm is not None and not step.grad_norm.isfinite()
    assert all(torch.equal(value, before[name]) for name, value in step.full_state_dict().items())
    assert not step.optimizer.state and step.rng.step == 1
    while step.guard.num_skipped == step.rng.step:
        step(batch_of(step, 0))
    assert 2.0**10 < step.loss_scale < 2.0**30 and step.optimizer.state


def test_a_step_needs_a_scale_in_fp16_only() -> None:
    with pytest.raises(ValueError, match="precision 'fp16' needs loss_scaling"):
        make_step(loss_scaling=None)
    with pytest.raises(ValueError, match="precision 'bf16' has no loss_scaling"):
        make_step(precision="bf16")
    with pytest.raises(ValueError, match="one of 'fp32', 'bf16', 'fp16', got 'fp8'"):
        make_step(precision="fp8")
    assert make_step(precision="bf16", loss_scaling=None).loss_scale == 1.0


# Checkpoints ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_the_scale_and_what_it_has_counted(tmp_path: Path) -> None:
    """Resumed training continues as if there had been no end; other precisions pass the scale over."""
    rule = LossScale(init_scale=2.0**24, growth_interval=3)
    step = make_step(loss_scaling=rule)
    for seed in range(14):
        step(batch_of(step, seed))
    assert step.loss_scaling is not None and step.loss_scaling.num_good > 0
    checkpoint.save(step, tmp_path / "fp16")
    other = make_step(loss_scaling=rule)
    checkpoint.load(other, tmp_path / "fp16")
    assert other.loss_scaling is not None and other.loss_scaling.state() == step.loss_scaling.state()
    for seed in range(14, 20):
        assert torch.equal(step(batch_of(step, seed)), other(batch_of(other, seed)))
        assert other.loss_scale == step.loss_scale
    state = step.full_state_dict()
    assert all(torch.equal(value, state[name]) for name, value in other.full_state_dict().items())

    wide = make_step(precision="fp32", loss_scaling=None)
    checkpoint.load(wide, tmp_path / "fp16")
    assert wide.rng.step == 14
    checkpoint.save(wide, tmp_path / "fp32")
    checkpoint.load(other, tmp_path / "fp32")
    assert other.loss_scaling.state() == {"value": 2.0**24, "num_good": 0}
