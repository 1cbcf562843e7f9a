"""Prices that were read off measured steps: attention's math path, unaligned products, batch norm in NCHW, captures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.compiled import CompiledProgram
from autopar.costs.captured_steps import NODE_GAP, STEP_SECONDS
from autopar.costs.host_calls import MATH, calls_of
from autopar.costs.layer_costs import HOST, LayerCost
from autopar.costs.stage_costs import late_seconds
from autopar.planning.predict import predicted
from autopar.report.notes import notes_of
from codegen.program import Call, TensorType, Var
from cost_models import compute
from cost_models.machine import Cluster
from examples.models import mlp

H100 = Cluster.parse("1 h100-sxm").device


class Biased(nn.Module):
    """Attention whose scores get a bias, trained or not."""

    def __init__(self, is_trained: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, 16, 512, 512), requires_grad=is_trained)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=self.bias).square().mean()


class Normed(nn.Module):
    """A convolution and its batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.convolution(x)).square().mean()


def step_of(model: nn.Module, *shape: int, **options: Any) -> CompiledProgram:
    """The model compiled for one H100, whose host takes no time."""
    device = replace(H100, host_call_seconds=0.0)
    cluster = replace(Cluster.parse("1 h100-sxm"), device=device)
    with torch.device("meta"):
        inputs = {"x": torch.empty(*shape, requires_grad=False)}
    options = {"precision": "bf16", "kernels": "on"} | options
    return autopar.compile(model, cluster, example_inputs=inputs, loss_fn=None, **options)


def attention_seconds(is_trained: bool) -> float:
    model = nn.Sequential(nn.Linear(64, 64), Biased(is_trained))
    found = step_of(_Returning(model), 8, 16, 512, 64).plan.prediction.seconds
    return found["forward compute"] + found["backward compute"]


class _Returning(nn.Module):
    """A model whose output is its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss = self.model(x)
        return loss, loss


def test_a_trained_mask_costs_the_math_path() -> None:
    """T5's on an H100: 1.33 ms for each of 24 calls at this size, 32 ms of a step's kernels."""
    more = attention_seconds(True) - attention_seconds(False)
    assert 1.0e-3 < more < 1.6e-3


@pytest.mark.parametrize(("is_trained", "is_math"), [(True, True), (False, False)])
def test_its_host_issues_every_call(is_trained: bool, is_math: bool) -> None:
    x = Var("x", TensorType((2, 4, 8, 8), "bfloat16", requires_grad=True))
    mask = Var("mask", TensorType((1, 4, 8, 8), "bfloat16", requires_grad=is_trained))
    call = Call("aten.scaled_dot_product_attention.default", (x, x, x), (("attn_mask", mask),), (x,))
    assert (calls_of(call) == MATH) == is_math


def test_unaligned_products_run_at_their_own_rate() -> None:
    """Bert's head: 8192 x 30522 x 1024 in 2.07 ms on average, 30528 columns at the rate of its layers."""
    m, n, k = 8192, 30522, 1024
    work = compute.Work("matmul", 2.0 * m * n * k, 0.0, "bf16", shape=(m, n, k), aligned=False)
    assert compute.seconds(work, H100) == pytest.approx(2.07e-3, rel=0.15)
    assert compute.seconds(replace(work, aligned=True), H100) < 0.5 * compute.seconds(work, H100)


def test_batch_norm_in_nchw_moves_a_fifth_of_the_bytes_per_second() -> None:
    fast, slow = (
        step_of(_Returning(Normed()), 32, 64, 56, 56, kernels=kernels).plan.prediction.seconds
        for kernels in ("on", "off")
    )
    bytes_moved = 8 * 32 * 64 * 56 * 56 * 2
    more = sum(slow[kind] - fast[kind] for kind in ("forward compute", "backward compute"))
    at_measured_rate, at_memory_rate = bytes_moved / 0.7e12, bytes_moved / 2.6e12
    conversions = 2 * 4 * 32 * 64 * 56 * 56 * 2 / 2.6e12
    assert more == pytest.approx(at_measured_rate - at_memory_rate + conversions, rel=0.2)


def test_a_captured_step_waits_for_no_host() -> None:
    example = mlp(layers=8)
    compiled = autopar.compile(
        example.model, "1 h100-sxm", example_inputs=example.inputs, loss_fn=example.loss_fn, kernels="off"
    )
    assert compiled.request is not None and compiled.plan.prediction.seconds[HOST] > 1e-3
    captured = predicted(replace(compiled.request, captures=True), compiled.best).plan.prediction
    device = sum(seconds for kind, seconds in captured.seconds.items() if kind != HOST)
    assert device + captured.seconds.get(HOST, 0.0) == pytest.approx(max(device, STEP_SECONDS))
    # The same kernels, a shorter gap before each.
    eager = sum(seconds for kind, seconds in compiled.plan.prediction.seconds.items() if kind != HOST)
    launches = (eager - device) / (H100.kernel_launch_seconds - NODE_GAP)
    assert launches == pytest.approx(round(launches), abs=1e-3) and launches > 8


def test_one_bound_of_the_host_per_step() -> None:
    unit = LayerCost(forward={"forward compute": 2e-5}, backward={"backward compute": 4e-5})
    assert late_seconds([unit], 0.0, True, is_captured=True).step == pytest.approx(STEP_SECONDS - 6e-5)
    assert late_seconds([unit] * 4, 0.0, True, is_captured=True).step == 0.0


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_the_report_says_whether_a_step_is_captured(kernels: str) -> None:
    """Programs without kernels are not captured (codegen/capture.py)."""
    example = mlp(layers=8)
    compiled = autopar.compile(
        example.model, "1 h100-sxm", example_inputs=example.inputs, loss_fn=example.loss_fn, kernels=kernels
    )
    assert ("CUDA graphs" in " ".join(notes_of(compiled))) == (kernels == "on")
    assert ("bound by the host" in " ".join(notes_of(compiled))) == (kernels == "off")
