"""`step.evaluate(batch, logits=True)` against the model's own logits in one process, under plans of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.launch import run_ranks
from examples.models import llama

ROWS = 8


class Net(nn.Module):
    """Dropout, and classes of a number that no degree divides, which a program pads."""

    def __init__(self, classes: int = 6) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(x))
        return logits


class Apart(Net):
    """The loss is of other numbers than those that it returns."""

    def forward(self, x: Tensor, target: Tensor) -> Any:  # type: ignore[override]
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits, target), "logits": logits * 2}


class Other(Net):
    """The logits are others in evaluation mode, the loss is not."""

    def forward(self, x: Tensor, target: Tensor) -> Any:  # type: ignore[override]
        logits = super().forward(x)
        loss = F.cross_entropy(logits, target)
        return {"loss": loss, "logits": logits if self.training else logits.softmax(-1)}


class Rebound(Net):
    """Its output is an intermediate value of its loss."""

    def forward(self, x: Tensor, target: Tensor) -> Any:  # type: ignore[override]
        logits = super().forward(x)
        return F.cross_entropy(logits.view(4, -1, 7).view(-1, 7) * 0.5, target), logits


def batch(seed: int = 0, classes: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(ROWS, 12, generator=generator),
        "target": torch.randint(classes, (ROWS,), generator=generator),
    }


def evaluated(compiled: Any, data: dict[str, Tensor]) -> tuple[float, float, Any, float]:
    """The loss alone, the loss and the logits, and the loss of a step that follows."""
    step = compiled.build()
    local = step.local_batch(data)
    alone = float(step.evaluate(local))
    loss, logits = step.evaluate(local, logits=True)
    return alone, float(loss), logits.float().numpy(), float(step(local))


def llama_logits() -> tuple[Any, float, Tensor]:
    example = llama(layers=2)
    with torch.no_grad():
        output = example.model.eval()(**example.inputs)
    example.model.train()
    return example, float(output.loss), output.logits


def slow(**constraints: Any) -> Any:
    return pytest.param(constraints, marks=pytest.mark.slow)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "constraints",
    [
        slow(dp=2, zero=3, micro_batches=2),
        slow(dp=2, tp=2),
        slow(pp=2, tp=2, micro_batches=2),
        slow(cp=2),
    ],
    ids=str,
)
def test_logits_of_a_language_model_are_those_of_one_process(constraints: dict[str, Any]) -> None:
    example, loss, logits = llama_logits()
    ranks = 4 if "tp" in constraints else 2
    compiled = autopar.compile(example.model, f"{ranks} cpu", example_inputs=example.inputs, constraints=constraints)
    for alone, beside, computed, trained in run_ranks(evaluated, (compiled, example.inputs), ranks):
        assert (alone, beside, trained) == pytest.approx((loss,) * 3, rel=1e-5)
        torch.testing.assert_close(torch.as_tensor(computed), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("constraints", [{"tp": 2}, slow(pp=2, micro_batches=4)], ids=str)
def test_logits_of_a_model_with_a_loss_function(constraints: dict[str, Any]) -> None:
    model, data = Net(7), batch(classes=7)
    compiled = autopar.compile(model, "2 cpu", example_inputs=data, loss_fn=F.cross_entropy, constraints=constraints)
    with torch.no_grad():
        logits = model.eval()(data["x"])
    loss = float(F.cross_entropy(logits, data["target"]))
    for alone, beside, computed, _ in run_ranks(evaluated, (compiled, data), 2):
        assert (alone, beside) == pytest.approx((loss,) * 2, rel=1e-5)
        assert computed.shape == (ROWS, 7)
        torch.testing.assert_close(torch.as_tensor(computed), logits, rtol=1e-5, atol=1e-6)


def test_logits_that_a_fused_loss_never_makes() -> None:
    """They are computed beside it, in an evaluation that asks for them."""
    example, loss, logits = llama_logits()
    compiled = autopar.compile(example.model, "1 cpu", example_inputs=example.inputs, kernels="on")
    assert "linear_cross_entropy(" in compiled.source
    alone, beside, computed, _ = evaluated(compiled, example.inputs)
    assert (alone, beside) == pytest.approx((loss, loss), rel=1e-5)
    torch.testing.assert_close(torch.as_tensor(computed), logits, rtol=1e-4, atol=1e-5)


def test_logits_that_the_program_calls_otherwise_afterwards() -> None:
    """In bf16, and through a view and a product under the same name."""
    model, data = Rebound(7), batch(classes=7)
    compiled = autopar.compile(model, "1 cpu", example_inputs=data, precision="bf16")
    with torch.no_grad():
        loss, logits = model.eval()(**data)
    alone, beside, computed, _ = evaluated(compiled, data)
    assert alone == beside == pytest.approx(float(loss), rel=1e-2)
    torch.testing.assert_close(torch.as_tensor(computed), logits, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", [Apart, Other])
def test_numbers_that_the_loss_does_not_come_from_are_no_logits(kind: type[nn.Module]) -> None:
    data = batch()
    compiled = autopar.compile(kind(), "1 cpu", example_inputs=data)
    assert compiled.program.any.logits is None and "give_logits" not in compiled.source
    step = compiled.build()
    local = step.local_batch(data)
    assert torch.isfinite(step.evaluate(local))
    with pytest.raises(RuntimeError, match="no logits"):
        step.evaluate(local, logits=True)
