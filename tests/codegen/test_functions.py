"""Custom autograd.Functions: one call of the graph, cut where that is proven, and trained as they are alone."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError
from autopar.frontend.trace import trace
from autopar.ir.graph import Graph
from autopar.rules.registry import rule_for
from autopar.sharding.call_options import scopes_of
from codegen.source import expressions

BATCH = (torch.randn(4, 6, 8), torch.randn(4, 6, 8))


class Tripled(torch.autograd.Function):
    """Its backward is not that of its forward, so that tracing through it would be seen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return factor * torch.tanh(x) * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return 3 * gradient * weight, ctx.factor * (gradient * torch.tanh(x)).flatten(0, -2).sum(0), None


class Configured(torch.autograd.Function):
    """Takes plain data in containers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: dict[str, Any], bounds: tuple[float, None]) -> Tensor:
        ctx.factor = settings["factors"][1]
        return ctx.factor * x.clamp(min=bounds[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 3 * ctx.factor * gradient, None, None


class OverBatch(torch.autograd.Function):
    """Normalises over the batch, which no part of it shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = x.mean(0)
        return x - mean, mean

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, to_mean: Tensor) -> Tensor:
        return 2 * (gradient - gradient.mean(0)) + to_mean / len(gradient)


class Clipped(torch.autograd.Function):
    """The sign of a gradient is not linear: sums of parts of it must not enter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.01, 0.01)


class ByLargest(torch.autograd.Function):
    """Asks for the largest number of the batch, which random numbers do not reach."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = torch.where(x.abs().max() > 5000, 3.0, 1.0)
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.factor


class CountsRows(torch.autograd.Function):
    """What it computes depends on the number of rows: a rank has fewer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.tensor(1 / len(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class OneRow(torch.autograd.Function):
    """Another computation for one row, which no half of the batch is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x if len(x) > 1 else 3 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Softmax(torch.autograd.Function):
    """Its backward takes what its forward made, and another Function's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.softmax(x, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = torch.softmax(x, -1) if ctx.needs_input_grad[0] else x
        return torch.autograd.grad(y, x, gradient)[0]


class Masked(torch.autograd.Function):
    """Zeros of its own join the gradient's parts."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clamp(min=0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output > 0)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.where(*ctx.saved_tensors, gradient, torch.zeros_like(gradient))


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Nested(torch.autograd.Function):
    """Applies one that alone would be refused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Writes.apply(x.clone())  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, int]:
        return 2 * x, len(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> Tensor:
        return 2 * gradient


class Applies(nn.Module):
    """Linear layers around a function of tensors."""

    def __init__(self, *functions: Any) -> None:
        super().__init__()
        self.functions = functions
        self.up, self.down, self.scale = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        for function in self.functions:
            if function is Tripled:
                x = function.apply(x, self.scale, 0.5)
            elif function is Configured:
                x = function.apply(x, {"factors": [1, 0.5], "name": "it's"}, (-1.0, None))
            elif function is OverBatch:
                x, mean = function.apply(x)
                x = x + mean**2
            else:
                x = function.apply(1 * x)
                x = x[0] if isinstance(x, tuple) else x
        return self.down(x)


def graph_of(*functions: Any) -> Graph:
    return trace(Applies(*functions), BATCH, nn.functional.mse_loss)


def factors(graph: Graph) -> list[str]:
    """The factors that may be cut."""
    (scope,) = scopes_of(graph)
    node = next(node for node in scope.nodes if node.op.startswith("autograd_function."))
    rule = rule_for(node, tuple(scope.metas[ref] for ref in node.inputs))
    return [] if rule is None else sorted(set(rule.sizes) - rule.blocked)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("function", "cut"),
    [
        (Tripled, ["d0", "d1", "d2"]),
        (Configured, ["d0", "d1", "d2"]),
        (OverBatch, ["d1", "d2"]),
        (Clipped, []),
        (ByLargest, []),
        (CountsRows, ["d1", "d2"]),
        (OneRow, ["d1", "d2"]),
        (Softmax, ["d0", "d1"]),
        (Masked, ["d0", "d1", "d2"]),
        (Nested, ["d0", "d1", "d2"]),
    ],
)
def test_dims_are_cut_where_the_calls_of_the_parts_are_those_of_the_whole(function: Any, cut: list[str]) -> None:
    assert factors(graph_of(function)) == cut


def test_the_report_names_what_is_cut() -> None:
    compiled = autopar.compile(Applies(Tripled), "2 cpu", example_inputs=BATCH, loss_fn=nn.functional.mse_loss)
    assert "sharded by the operators that they call: Tripled" in " ".join(str(compiled.report()).split())


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (Noisy, "draws random numbers"),
        (Writes, "writes to its operands"),
        (Counts, "returns a value that is not a tensor"),
    ],
)
def test_what_no_program_could_repeat_is_refused(function: Any, reason: str) -> None:
    with pytest.raises(TraceError, match=reason) as caught:
        graph_of(function)
    assert function.__name__ in str(caught.value)


def test_a_function_without_an_import_path_is_refused() -> None:
    local = type("Local", (Tripled,), {"__qualname__": "test.<locals>.Local"})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return local.apply(self.linear(x), self.linear.bias, 1.0).mean()  # type: ignore[attr-defined,no-any-return]

    with pytest.raises(TraceError, match="cannot be imported"):
        trace(Model(), (torch.randn(4, 8),))


def test_a_write_to_what_a_function_took_is_refused() -> None:
    """Clipped returns a view of it, so that the write would show in its result."""

    class Model(Applies):
        def forward(self, x: Tensor) -> Tensor:
            y = 2 * self.up(x)
            z = Clipped.apply(y)
            y.add_(1)
            return self.down(z + self.scale)

    with pytest.raises(TraceError, match="passing it to a custom"):
        trace(Model(), (torch.randn(4, 8), torch.randn(4, 8)), nn.functional.mse_loss)


def test_a_rank_that_does_not_know_a_function_has_the_programs_text(monkeypatch: Any, tmp_path: Path) -> None:
    """Operators are made by tracing: processes that only get the program, of a pipeline too, have none of them."""
    options = {"example_inputs": BATCH, "loss_fn": nn.functional.mse_loss, "constraints": {"pp": 2}}
    compiled = autopar.compile(Applies(Masked), "2 cpu", **options)
    monkeypatch.setattr(expressions, "schema_of", lambda target: None)
    stages = (pickle.loads(pickle.dumps(compiled)).save(tmp_path / "program")).glob("stage_*.py")
    assert sum("Masked.apply(" in stage.read_text() for stage in stages) == 1


@pytest.mark.by_turns(2)
@pytest.mark.distributed
@pytest.mark.parametrize(
    "functions",
    [(Tripled, OverBatch), pytest.param((Clipped, Tripled), marks=pytest.mark.slow), (Softmax, Masked, Configured)],
)
@pytest.mark.parametrize("constraints", [{"dp": 2}, {"tp": 2}])
def test_programs_train_as_one_process_does(functions: Any, constraints: dict[str, int]) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(4, 6, 8), torch.randn(4, 6, 8))
    options = {"example_inputs": batch, "loss_fn": nn.functional.mse_loss, "constraints": constraints, "steps": 2}
    report = autopar.verify(Applies(*functions), "2 cpu", **options)
    assert report.ok(), str(report)
    assert len(report.gradients) == 5
