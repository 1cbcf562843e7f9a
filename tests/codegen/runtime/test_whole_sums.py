"""Sums over micro-batches that a first pass finds, in a program that also writes to a buffer and draws a mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from codegen.runtime.dropout_module import DropoutModule
from codegen.runtime.layout import Layout
from codegen.runtime.mesh import Mesh
from codegen.runtime.parameters import Param
from codegen.runtime.reference import SameDropout
from codegen.runtime.step import Step
from codegen.runtime.whole_sums import SummingModule

ROWS, WIDTH = 8, 3


def loss_of(mean: Tensor, load: Tensor) -> Tensor:
    return (mean.square() * (1 + load)).sum().log() + mean.exp().sum()


def step_of(count: int) -> Step:
    """A step of `count` micro-batches; its loss is nonlinear in a mean with a gradient, and in one without."""
    layout = Layout((ROWS // count, WIDTH))

    class Root(DropoutModule, SummingModule):
        PARAMETERS = {"weight": Param((WIDTH, WIDTH), dtype="float64")}
        BUFFERS = {"seen": Param((1,), dtype="float64")}
        WRITTEN_BUFFERS = ("seen",)
        INPUTS = {"x": Param((ROWS // count, WIDTH), dtype="float64", requires_grad=False)}

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.seen.add_(x.sum())
            y = self.same_dropout(torch.tanh(x @ self.weight), 0.25, call=0, layout=layout)
            mean = self.whole_sum(y.sum(0) / ROWS, 0)
            load = self.whole_sum((y > 0).sum(0), 1)
            return loss_of(mean, load / ROWS)

    factory = lambda parameters: torch.optim.SGD(parameters, lr=0.5)  # noqa: E731
    step = Step(Root, Mesh.create((), ()), optimizer_factory=factory, num_micro_batches=count)
    weight = torch.linspace(-1, 1, WIDTH * WIDTH, dtype=torch.float64).view(WIDTH, WIDTH)
    step.load({"weight": weight, "seen": torch.zeros(1, dtype=torch.float64)})
    return step


@pytest.mark.parametrize("count", [1, 2, 4])
def test_loss_gradients_and_buffers_are_those_of_one_pass_over_the_batch(count: int) -> None:
    step, seen = step_of(count), 0.0
    generator = torch.Generator().manual_seed(0)
    for index in range(3):
        x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        weight = step.full_state_dict()["weight"].clone().requires_grad_()
        y = torch.tanh(x @ weight)
        whole = loss_of(y.mean(0), (y > 0).double().mean(0))
        assert float(step.evaluate({"x": x})) == pytest.approx(whole.item(), rel=1e-12)
        with SameDropout(0, index):
            y = torch.nn.functional.dropout(y, 0.25)
        whole = loss_of(y.mean(0), (y > 0).double().mean(0))
        (expected,) = torch.autograd.grad(whole, weight)
        assert float(step.forward_backward({"x": x})) == pytest.approx(whole.item(), rel=1e-12)
        torch.testing.assert_close(step.gradients()["weight"], expected, rtol=1e-12, atol=1e-14)
        step.update()
        seen += float(x.sum())
        assert float(step.full_state_dict()["seen"]) == pytest.approx(seen, rel=1e-12)
