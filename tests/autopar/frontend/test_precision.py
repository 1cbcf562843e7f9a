"""precision="bf16" and "fp16" compute what torch.autocast computes with fp32 masters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.compiled import CompiledProgram
from autopar.frontend.trace import trace

ROWS = 16


class _Net(nn.Module):
    """Two linear layers, whose outputs are around `offset`."""

    def __init__(self, outputs: int = 1, offset: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, outputs)
        with torch.no_grad():
            self.second.bias.fill_(offset)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def _near(offset: float, columns: int = 1) -> Tensor:
    return offset + 0.1 * torch.randn(ROWS, columns)


def _hand_written_kl(output: Tensor, target: Tensor) -> Tensor:
    return (target * (target.log() - torch.log(torch.softmax(output, -1)))).sum(-1).mean()


LOSSES: dict[str, tuple[int, float, Callable[..., Tensor], Callable[[], Tensor]]] = {
    "mse": (1, 1000.0, F.mse_loss, lambda: _near(1001.5)),
    "l1": (1, 1000.0, F.l1_loss, lambda: _near(1001.7)),
    "smooth_l1": (1, 1000.0, F.smooth_l1_loss, lambda: _near(1001.3)),
    "huber": (1, 1000.0, nn.HuberLoss(delta=2.0), lambda: _near(1001.3)),
    "margin_ranking": (
        1,
        1000.0,
        lambda output, target: F.margin_ranking_loss(output, target, torch.ones(ROWS, 1), margin=0.5),
        lambda: _near(1001.3),
    ),
    "bce_with_logits": (1, 3.0, F.binary_cross_entropy_with_logits, lambda: torch.rand(ROWS, 1)),
    "kl_div": (
        5,
        0.0,
        lambda output, target: F.kl_div(F.log_softmax(output, -1), target, reduction="batchmean"),
        lambda: torch.softmax(torch.randn(ROWS, 5), -1),
    ),
    "class_probabilities": (5, 0.0, F.cross_entropy, lambda: torch.softmax(torch.randn(ROWS, 5), -1)),
    "class_weights": (5, 0.0, nn.CrossEntropyLoss(weight=torch.rand(5)), lambda: torch.randint(0, 5, (ROWS,))),
    "cosine_embedding": (
        6,
        0.0,
        lambda output, target: F.cosine_embedding_loss(output, target, torch.ones(ROWS)),
        lambda: torch.randn(ROWS, 6),
    ),
    "poisson": (1, 3.0, nn.PoissonNLLLoss(), lambda: _near(20.3)),
    "by_hand": (1, 1000.0, lambda output, target: ((output - target) ** 2).mean(), lambda: _near(1001.5)),
    "by_hand_kl": (5, 0.0, _hand_written_kl, lambda: torch.softmax(torch.randn(ROWS, 5), -1)),
    "products": (
        3,
        10.0,
        lambda output, target: (output.prod(-1) - target.prod(-1)).abs().mean(),
        lambda: _near(10.3, 3),
    ),
}
SLOW = {"huber", "smooth_l1", "poisson", "class_weights", "by_hand_kl", "kl_div"}


def _autocast(model: nn.Module, batch: dict[str, Tensor], loss_fn: Any, dtype: torch.dtype) -> tuple[float, Tensor]:
    """The loss and the gradient of the first weight, with fp32 masters in torch.autocast."""
    model, inputs = copy.deepcopy(model), dict(batch)
    targets = [inputs.pop("target")] if "target" in inputs else []
    with torch.autocast("cpu", dtype):
        output = model(**inputs)
        loss = output if loss_fn is None else loss_fn(output, *targets)
    loss.backward()
    gradient = next(iter(model.parameters())).grad
    assert gradient is not None
    return float(loss.detach()), gradient


def _compiled(model: nn.Module, batch: dict[str, Tensor], loss_fn: Any, precision: str = "bf16") -> CompiledProgram:
    return autopar.compile(model, "1 cpu", example_inputs=batch, loss_fn=loss_fn, precision=precision)


def _run(program: CompiledProgram, batch: dict[str, Tensor]) -> tuple[float, Tensor]:
    step = program.build()
    loss = float(step.forward_backward(step.local_batch(batch)))
    return loss, next(iter(step.gradients().values()))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in LOSSES])
def test_losses_are_those_of_autocast(name: str) -> None:
    torch.manual_seed(0)
    outputs, offset, loss_fn, target = LOSSES[name]
    model, batch = _Net(outputs, offset), {"x": torch.randn(ROWS, 8), "target": target()}
    expected, gradient = _autocast(model, batch, loss_fn, torch.bfloat16)
    loss, own = _run(_compiled(model, batch, loss_fn), batch)
    # The model's output is rounded in both; a rounded target alone would move each of these by 2 % to 300 %.
    assert loss == pytest.approx(expected, rel=2e-3)
    assert (own - gradient).norm() <= 2e-2 * gradient.norm()


class _Timed(nn.Module):
    """Timesteps in a sinusoidal embedding, whose waves bf16 could not tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.inner, self.outer = nn.Linear(32, 32), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        waves = t[:, None] * torch.exp(-6 * torch.arange(16) / 16)
        waves = torch.cat([waves.sin(), waves.cos()], -1)
        return self.outer(F.silu(self.time(waves) + self.inner(x)))


class _Located(nn.Module):
    """Coordinates in Fourier features with a table of frequencies that stays fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 3))
        self.register_buffer("frequencies", 2.0 ** torch.arange(8))

    def forward(self, x: Tensor) -> Tensor:
        waves = (x[..., None] * self.frequencies).flatten(-2)
        return self.layers(torch.cat([waves.sin(), waves.cos()], -1))


class _Within(nn.Module):
    """A loss inside of forward, of raw features around 1,000 that a norm takes first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 1), nn.BatchNorm1d(8)
        with torch.no_grad():
            self.layer.bias.fill_(1000.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.layer(self.norm(x))
        return F.mse_loss(output, y) + 1e-3 * output.pow(2).mean() / 1000 + F.l1_loss(output, y)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.attention(x, x, x)[0])


def _waves() -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, 8), "t": torch.rand(ROWS) * 1000, "target": torch.randn(ROWS, 8)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]], Any, dict[str, str]]] = {
    "timesteps": (_Timed, _waves, F.mse_loss, {"x": "bfloat16", "t": "float32", "target": "float32"}),
    "coordinates": (
        _Located,
        lambda: {"x": 3 * torch.rand(ROWS, 3), "target": torch.randn(ROWS, 3)},
        F.mse_loss,
        {"x": "float32", "target": "float32"},
    ),
    "loss_within": (
        _Within,
        lambda: {"x": 1000 + torch.randn(ROWS, 8), "y": _near(1001.5)},
        None,
        {"x": "float32", "y": "float32"},
    ),
    "recurrent": (
        _Recurrent,
        lambda: {"x": torch.randn(ROWS, 6, 8), "target": torch.randn(ROWS, 4)},
        F.mse_loss,
        {"x": "bfloat16", "target": "float32"},
    ),
    "attention": (
        _Attending,
        lambda: {"x": torch.randn(ROWS, 6, 8), "target": torch.randn(ROWS, 6, 8)},
        F.mse_loss,
        {"x": "float32", "target": "float32"},
    ),
}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", MODELS)
def test_inputs_keep_their_dtype_until_a_product_takes_them(name: str) -> None:
    torch.manual_seed(0)
    make, inputs, loss_fn, dtypes = MODELS[name]
    model, batch = make(), inputs()
    expected, gradient = _autocast(model, batch, loss_fn, torch.bfloat16)
    program = _compiled(model, batch, loss_fn)
    assert {key: spec.dtype for key, spec in program.program.inputs.items()} == dtypes
    loss, own = _run(program, batch)
    assert loss == pytest.approx(expected, rel=2e-3)
    assert (own - gradient).norm() <= 5e-2 * gradient.norm()


def test_fp16_keeps_losses_wide() -> None:
    torch.manual_seed(0)
    model, batch = _Net(1, 1000.0), {"x": torch.randn(ROWS, 8), "target": torch.full((ROWS, 1), 1000.3)}
    with torch.no_grad():
        model.second.weight.zero_()
    loss, _ = _run(_compiled(model, batch, F.mse_loss, "fp16"), batch)
    assert loss == pytest.approx(0.09, rel=1e-3)  # 1000.3 is 1000.5 in fp16


def test_activations_of_a_model_do_not_widen() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            x = x + self.norm(x).pow(3) * torch.softmax(x, -1).sum(-1, keepdim=True)
            return self.layer(x).float().mean()

    graph = trace(Layer(), {"x": torch.randn(4, 8)}, param_dtype=torch.bfloat16)
    wide = [node for node in graph.body if node.outputs[0].dtype == torch.float32 and node.outputs[0].shape]
    assert [node.op for node in wide] == ["aten.to.dtype"]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("pins", [{"dp": 2, "micro_batches": 2}, {"tp": 2}, {"pp": 2, "micro_batches": 2}])
def test_plans_compute_what_one_process_does(pins: dict[str, int]) -> None:
    torch.manual_seed(0)
    report = autopar.verify(
        _Timed(), "2 cpu", example_inputs=_waves(), loss_fn=F.smooth_l1_loss, precision="bf16", constraints=pins
    )
    assert report.ok(), str(report)
