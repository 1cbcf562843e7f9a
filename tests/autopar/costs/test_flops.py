"""The model's FLOPs: against torch's own counter forward and backward, and against the field's closed form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.costs.flops import model_flops, model_flops_utilisation
from autopar.frontend.trace import trace
from autopar.models.loading import load_model
from autopar.report.figures import figures_of
from autopar.sharding.call_options import operators_of
from cost_models.machine import Cluster
from cost_models.mixed_cluster import MixedCluster


class Products(nn.Module):
    """Products of several kinds, one with a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(6, 10), nn.Linear(10, 4, bias=False), nn.Linear(4, 8)
        self.frozen.weight.requires_grad_(False)
        self.table = nn.Parameter(torch.randn(8, 3))
        self.convolution = nn.Conv1d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        y = self.frozen(self.second(self.first(y).relu()))
        return torch.matmul(y, self.table).square().mean()


def test_as_many_as_torch_counts() -> None:
    model, x = Products(), torch.randn(4, 5, 6)
    with FlopCounterMode(display=False) as counter:
        model(x).backward()
    graph = trace(model, {"x": x})
    assert model_flops(graph, operators_of(graph)) == counter.get_total_flops()


def test_six_per_weight_and_token() -> None:
    """6 N per token (PaLM, appendix B) for N weights of products, and 12 B L^2 H / 2 for causal attention per layer."""
    sizes = {"layers": 3, "width": 64, "num_heads": 4, "seq_len": 16, "batch_size": 4, "vocab_size": 128}
    loaded = load_model("examples.models:gpt2", meta=True, **sizes)
    program = autopar.compile(loaded.model, "2 cpu", example_inputs=loaded.inputs, loss_fn=loaded.loss_fn)
    matrices = sum(
        p.numel() for n, p in loaded.model.named_parameters() if p.ndim == 2 and "wte" not in n and "wpe" not in n
    )
    matrices += 128 * 64  # the LM head, which shares the table of embeddings
    own = figures_of(program)
    assert own.tokens == 4 * 16
    assert own.flops == 6 * matrices * own.tokens + 3 * 12 * 4 * 16 * 16 * 64 / 2
    assert own.tokens_per_second_per_device == pytest.approx(own.tokens / own.step_seconds / 2)
    peak = 2 * program.cluster.device.peak("fp32")
    assert own.mfu == pytest.approx(own.flops / own.step_seconds / peak)


def test_peak_of_unlike_nodes() -> None:
    one, other = Cluster.parse("8 h100-sxm"), Cluster.parse("4 v100-32g")
    peak = 8 * one.device.peak("bf16") + 4 * other.device.peak("bf16")
    assert model_flops_utilisation(peak, 2.0, MixedCluster.of((one, other)), "bf16") == pytest.approx(0.5)
