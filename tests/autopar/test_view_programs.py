"""Models whose views need strides that a plan changes: equal to one process, and executed before they are accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import InternalError
from autopar.lowering import assembly
from tests.autopar.test_verify import TOLERANCE

IDEAL = str(Path(__file__).resolve().parents[2] / "examples" / "clusters" / "ideal.toml")
HEADS, SIZE, WIDTH = 4, 8, 32


class Permuted(nn.Module):
    """Attention by hand: the three parts in one view, the heads brought back by permute, contiguous, view."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = (q @ k.transpose(-2, -1) * SIZE**-0.5).softmax(-1) @ v
        return x + self.out(mixed.permute(0, 2, 1, 3).contiguous().view(rows, length, width))


class Windows(nn.Module):
    """Windows of four positions as rows of their own, taken across them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(4 * WIDTH, 4 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        y = self.norm(x).view(rows, 4, length // 4, width).transpose(1, 2).contiguous().view(-1, 4 * width)
        y = torch.tanh(self.mix(y)).view(rows, length // 4, 4, width)
        return x + y.transpose(1, 2).contiguous().view(rows, length, width)


class Expanded(nn.Module):
    """Grouped keys, repeated by expand and a view of the copy."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q = self.q(x).view(rows, length, HEADS, SIZE).transpose(1, 2)
        kv = self.kv(x).view(rows, length, 2, 2, SIZE).permute(2, 0, 3, 1, 4)[:, :, :, None]
        k, v = kv.expand(2, rows, 2, 2, length, SIZE).contiguous().view(2, rows, HEADS, length, SIZE)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).contiguous().view(rows, length, width))


class Products(nn.Module):
    """Products of tensors whose operands torch permutes and copies."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(HEADS, SIZE, HEADS, SIZE) / 8)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        h = self.first(x).view(rows, length, HEADS, SIZE)
        one = torch.tensordot(h, self.weight, dims=((3, 2), (1, 0))).reshape(rows, length, width)
        return x + one + torch.einsum("bthi,hiac->btac", h, self.weight).flatten(2)


class Channels(nn.Module):
    """Channels in another memory order, then shuffled across their groups."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix = nn.Conv1d(16, 16, 3, padding=1, groups=2), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows, channels, length = x.shape
        y = self.mix(self.conv(x).transpose(1, 2).contiguous().view(-1, channels)).view(rows, length, channels)
        y = y.transpose(1, 2).contiguous().view(rows, 2, channels // 2, length).transpose(1, 2)
        return x + y.contiguous().view(rows, channels, length)


KINDS = (Permuted, Windows, Expanded, Products, Channels)


def request(kind: type[nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(3)
    shape = (8, 16, WIDTH)
    batch = {"input": torch.randn(shape), "target": torch.randn(shape)}
    return nn.Sequential(*(kind() for _ in range(2))), batch


def planned(kind: type[nn.Module], cluster: str = IDEAL, **options: Any) -> Any:
    model, batch = request(kind)
    return autopar.compile(model, cluster, example_inputs=batch, loss_fn=F.mse_loss, **options)


@pytest.mark.parametrize("kind", [Products, *(pytest.param(k, marks=pytest.mark.slow) for k in (Windows, Channels))])
def test_one_rank_trains_as_one_process(kind: type[nn.Module]) -> None:
    model, batch = request(kind)
    step = planned(kind, "1 cpu").build()
    loss = F.mse_loss(model(batch["input"]), batch["target"])
    torch.testing.assert_close(step(step.local_batch(batch)), loss.detach(), rtol=1e-5, atol=1e-6)


def test_a_program_whose_views_fail_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "with_strides", lambda program: program)
    with pytest.raises(InternalError, match=r"model.py, line \d+: RuntimeError: view size is not compatible"):
        planned(Expanded, constraints={"tp": 2, "dp": 2})


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_views_are_equal_to_one_process(kind: type[nn.Module]) -> None:
    model, batch = request(kind)
    pins = {"dp": 2, "tp": 2}
    report = autopar.verify(model, IDEAL, example_inputs=batch, loss_fn=F.mse_loss, constraints=pins)
    assert report.ok(TOLERANCE), report


PLANS: tuple[tuple[str, dict[str, Any]], ...] = (
    (IDEAL, {"constraints": {"tp": 4}, "kernels": "on"}),
    (IDEAL, {"constraints": {"dp": 2, "cp": 2}}),
    (IDEAL, {"constraints": {"pp": 2}}),
    (IDEAL, {"constraints": {"dp": 4, "zero": 3}, "precision": "bf16"}),
    ("8 a100-80g", {"precision": "bf16"}),
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_plan_runs_dry(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """`compile` raises InternalError where one does not."""
    ran: list[Callable[..., None]] = []
    real = assembly.dry_run
    monkeypatch.setattr(assembly, "dry_run", lambda *args: (ran.append(real), real(*args)))
    for cluster, options in PLANS:
        planned(kind, cluster, **options)
    assert len(ran) == len(PLANS)
