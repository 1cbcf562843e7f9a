"""What forward writes to buffers and frozen parameters is what one process has after several steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError
from autopar.frontend.trace import trace
from autopar.ir.graph import UPDATE_BUFFER, LayerRun
from benchmarks.by_hand import is_exact
from tests.autopar.frontend.updated_models import MODELS, made


class _Written(nn.Module):
    """Buffers of several dtypes, and a frozen layer beside a trained one, that `update` writes to."""

    def __init__(self, update: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.layer, self.update = nn.Linear(4, 4), update
        self.kept = copy.deepcopy(self.layer).requires_grad_(False)
        self.register_buffer("rows", torch.zeros(3, 4))
        self.register_buffer("narrow", torch.zeros(4, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        before = self.rows.clone()
        with torch.no_grad():
            self.update(self, x)
        return F.mse_loss(self.layer(x - self.rows.mean(0) - self.narrow - before[0]), self.kept(x) * (1 + self.seen))


def _foreach(model: Any, x: Tensor) -> None:
    kept, own = list(model.kept.parameters()), list(model.layer.parameters())
    torch._foreach_mul_(kept, 0.9)
    torch._foreach_add_(kept, own, alpha=0.1)


def _shift(model: Any, x: Tensor) -> None:
    model.rows[:2] = model.rows[1:].clone()
    model.rows[2].copy_(x.mean(0))


def _any(model: Any, x: Tensor) -> None:
    model.seen |= (x > 1.5).any(0)


UPDATES: dict[str, Callable[[Any, Tensor], object]] = {
    "foreach": _foreach,
    "shifted rows": _shift,
    "a flag": _any,
    "a narrow buffer": lambda model, x: model.narrow.mul_(0.9).add_(x.mean(0), alpha=0.1),
}

SLOW = {"observed", "cumulative", "blocks", "contrast", "power"}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in MODELS])
def test_state_is_that_of_one_process(name: str) -> None:
    model, batch = made(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert is_exact(model, batch)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_layers_update_buffers_of_their_own() -> None:
    model, batch = made("blocks")
    graph = trace(model, batch)
    (run,) = (piece for piece in graph.body if isinstance(piece, LayerRun))
    assert len(run.instances) == 3  # the first one reads what has no gradient
    assert [node.op for node in run.layer.nodes].count(UPDATE_BUFFER) == 2


def test_evaluation_updates_nothing() -> None:
    model, batch = made("cumulative")
    step = autopar.compile(model, "1 cpu", example_inputs=batch).build()
    step(batch)
    before = step.full_state_dict()
    loss = step.evaluate(batch)
    after = step.full_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    model.load_state_dict(before)
    with torch.no_grad():
        assert float(loss) == pytest.approx(float(model.eval()(**batch)), rel=1e-5)


def test_a_skipped_step_leaves_buffers() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.5)
            return self.layer(x - self.mean).square().mean()

    step = autopar.compile(Mean(), "1 cpu", example_inputs={"x": torch.ones(4, 4)}).build(non_finite="skip")
    step({"x": torch.ones(4, 4)})
    step({"x": torch.full((4, 4), torch.nan)})
    assert step.full_state_dict()["mean"].tolist() == [0.5] * 4


def test_what_cannot_be_followed_says_why() -> None:
    class Pointed(nn.Module):
        """A place that is a Python number, and moves: a static program cannot have it."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("kept", torch.zeros(8, 4))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            at = int(self.pointer)
            self.kept[at : at + 2] = x[:2]
            self.pointer[0] = (at + 2) % 8
            return F.mse_loss(self.layer(x), x)

    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.layer.weight.data.clamp_(-0.1, 0.1)
            return F.mse_loss(self.layer(x), x)

    with pytest.raises(TraceError, match="buffer that forward writes decides"):
        trace(Pointed(), {"x": torch.ones(4, 4)})
    with pytest.raises(TraceError, match=r"trained parameter in place.*\n.*layer\.weight"):
        trace(Clamped(), {"x": torch.ones(4, 4)})


def test_half_precision_would_round_averages_of_parameters() -> None:
    model, batch = made("teacher")
    with pytest.raises(TraceError, match=r"half precision would round.*\n.*teacher\.0\.weight"):
        trace(model, batch, param_dtype=torch.bfloat16)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", UPDATES)
def test_writes_are_followed(name: str) -> None:
    torch.manual_seed(0)
    assert is_exact(_Written(UPDATES[name]), {"x": torch.randn(8, 4)})
