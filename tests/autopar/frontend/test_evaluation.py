"""`Step.evaluate` against `model.eval()`, and buffers that forward writes against those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.frontend.evaluation import why_no_evaluation
from autopar.launch import run_ranks
from codegen.runtime.reference import SameDropout
from examples.models import EXAMPLES

ROWS, STEPS = 8, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.linear(x)))


class Net(nn.Module):
    """Batch norm with and without running statistics, alone and in repeated layers, and dropout of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.first_norm = nn.BatchNorm1d(12, track_running_stats=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(12, 5)
        self.register_buffer("unused", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first_norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(F.dropout(self.dropout(x), 0.2, self.training))


class Branches(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.training else 2 * x)


class AlwaysDrops(Net):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, training=True)


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(ROWS, 12, generator=generator),
        "target": torch.randint(5, (ROWS,), generator=generator),
    }


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def reference(model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    """Evaluation losses before each step and after the last, and the state then."""
    model = copy.deepcopy(model)
    optimizer = sgd(model.parameters())
    evaluated = []
    for index in range(STEPS + 1):
        model.eval()
        with torch.no_grad():
            given = batch(100 + index)
            evaluated.append(float(F.cross_entropy(model(given["x"]), given["target"])))
        if index == STEPS:
            break
        model.train()
        optimizer.zero_grad()
        with SameDropout(0, index):
            given = batch(index)
            F.cross_entropy(model(given["x"]), given["target"]).backward()
        optimizer.step()
    return evaluated, model.state_dict()


def train_and_evaluate(compiled: Any) -> tuple[list[float], dict[str, Any]]:
    step = compiled.build()
    evaluated = []
    for index in range(STEPS + 1):
        before = {name: value.clone() for name, value in step.full_state_dict().items()}
        counters = (step.rng.step, step.rng.micro_batch, step.num_samples)
        evaluated.append(float(step.evaluate(step.local_batch(batch(100 + index)))))
        after = step.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert counters == (step.rng.step, step.rng.micro_batch, step.num_samples)
        if index < STEPS:
            step(step.local_batch(batch(index)))
    return evaluated, {name: value.numpy() for name, value in step.full_state_dict().items()}


def slow(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "constraints",
    [{"dp": 2}, slow({"tp": 2}), slow({"pp": 2, "micro_batches": 1}), slow({"dp": 2, "zero": 3, "recompute": "full"})],
)
def test_evaluation_and_buffers_are_those_of_one_process(constraints: dict[str, Any]) -> None:
    """Losses in evaluation mode, running statistics, `num_batches_tracked`, and a buffer that nothing reads."""
    torch.manual_seed(0)
    model = Net()
    compiled = autopar.compile(
        model, "2 cpu", example_inputs=batch(0), loss_fn=F.cross_entropy, optimizer=sgd, constraints=constraints
    )
    expected, state = reference(model)
    evaluated, found = run_ranks(train_and_evaluate, (compiled,), 2)[0]
    assert evaluated == pytest.approx(expected, rel=1e-5)
    assert found.keys() == state.keys()
    for name, value in state.items():
        torch.testing.assert_close(torch.as_tensor(found[name]), value, rtol=1e-5, atol=1e-6, msg=name)
    assert int(found["blocks.3.norm.num_batches_tracked"]) == STEPS


def test_a_model_that_branches_on_its_mode_is_not_evaluated() -> None:
    for kind, reason in ((Branches, "aten.mul.Tensor"), (AlwaysDrops, "aten.dropout.default in evaluation mode")):
        compiled = autopar.compile(kind(), "1 cpu", example_inputs=batch(0), loss_fn=F.cross_entropy)
        step = compiled.build()
        assert torch.isfinite(step(step.local_batch(batch(0))))
        with pytest.raises(RuntimeError, match=f"no evaluation mode.*{reason}"):
            step.evaluate(step.local_batch(batch(0)))


@pytest.mark.parametrize("name", ["gpt2", "t5", slow("bert"), slow("vit"), slow("transformer_encoder")])
def test_known_models_evaluate(name: str) -> None:
    example = EXAMPLES[name](dropout=0.1)
    assert why_no_evaluation(example.model, example.inputs, example.loss_fn) == ""


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["off", "on"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_dropout_of_attention_and_of_kernels_is_off(name: str, kernels: str) -> None:
    example = EXAMPLES[name](dropout=0.3)
    compiled = autopar.compile(
        example.model, "1 cpu", example_inputs=example.inputs, loss_fn=example.loss_fn, kernels=kernels
    )
    step = compiled.build()
    found = float(step.evaluate(step.local_batch(example.inputs)))
    model = copy.deepcopy(example.model).eval()
    with torch.no_grad():
        expected = _loss(model, example.loss_fn, example.inputs)
    assert found == pytest.approx(expected, rel=1e-5)


def _loss(model: nn.Module, loss_fn: Callable[..., Tensor] | None, inputs: Any) -> float:
    from autopar.frontend.loss_module import LossModule

    return float(LossModule(model, loss_fn, inputs)(**inputs))
