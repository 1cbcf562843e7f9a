"""Attention with a sink that models write out: one call where it is proven, in fp64 against what was
written; else left."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.frontend.trace import trace
from autopar.ir.graph import SINK_ATTENTION, Node
from autopar.ir.operators import arguments_of
from tests.autopar.interpret import run_graph, tensors_of

BATCH, HEADS, SHARED, LENGTH, WIDTH = 2, 4, 2, 6, 8
INF = torch.inf
Parts = dict[str, Any]


def repeated(x: Tensor) -> Tensor:
    batch, groups, length, width = x.shape
    return x[:, :, None].expand(batch, groups, SHARED, length, width).reshape(batch, HEADS, length, width)


class WrittenOut(nn.Module):
    """Attention with sinks, some part of it as `parts` says."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        self.parts = parts
        self.q, self.kv = nn.Linear(WIDTH, HEADS * WIDTH), nn.Linear(WIDTH, HEADS * WIDTH)
        self.sinks = nn.Parameter(torch.randn(parts.get("shape", (HEADS,))))
        self.bias = nn.Parameter(torch.randn(LENGTH, LENGTH))

    def part(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        found: Callable[..., Any] = self.parts.get(name, default)
        return found

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        k, v = (t.unflatten(-1, (HEADS // SHARED, WIDTH)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        k, v = self.part("repeat", lambda x: tuple(map(repeated, x)))((k, v))
        scores = self.part("scores", lambda q, k: q @ k.transpose(2, 3) * 0.3)(q, k)
        scores = self.part("mask", causal)(scores, torch.arange(x.shape[1]), self)
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[1], -1)
        probabilities = self.part("softmax", shifted)(scores, sinks)
        probabilities = self.part("drop", lambda p: p)(probabilities)
        y = (probabilities @ v).transpose(1, 2)
        return y.square().mean() + self.part("read", lambda *_: 0.0)(scores, probabilities)


def causal(scores: Tensor, at: Tensor, model: WrittenOut) -> Tensor:
    mask = torch.where(at[None] <= at[:, None], 0.0, torch.finfo(torch.float32).min)
    return scores + mask[None, None].to(scores.dtype).expand(scores.shape[0], 1, -1, -1)


def shifted(scores: Tensor, sinks: Tensor) -> Tensor:
    joined = torch.cat((scores, sinks), -1)
    joined = joined - joined.max(-1, keepdim=True).values
    return joined.softmax(-1, dtype=joined.dtype)[..., :-1]


CAUSAL = {"is_causal": True, "before": None, "after": None, "chunk": None, "scale": 0.3, "enable_gqa": True}
FULL = CAUSAL | {"is_causal": False}
FOUND: dict[str, tuple[Parts, dict[str, Any]]] = {
    "gpt-oss": ({}, CAUSAL),
    "unshifted": ({"softmax": lambda s, c: torch.softmax(torch.cat((s, c), 3), 3)[..., :-1]}, CAUSAL),
    "sinks first": ({"softmax": lambda s, c: torch.softmax(torch.cat((c, s), -1), -1)[:, :, :, 1:]}, CAUSAL),
    "detached": (
        {
            "softmax": lambda s, c: (lambda j: (j - j.detach().amax(-1, True)).softmax(-1)[..., :-1])(
                torch.cat((s, c), -1)
            )
        },
        CAUSAL,
    ),
    "window": (
        {"mask": lambda s, p, m: s.masked_fill(~((p[None] <= p[:, None]) & (p[None] > p[:, None] - 3)), -INF)},
        FULL | {"before": 2, "after": 0},
    ),
    "triangle": ({"mask": lambda s, p, m: s.masked_fill(torch.ones(LENGTH, LENGTH).bool().triu(1), -INF)}, CAUSAL),
    "where": ({"mask": lambda s, p, m: torch.where(p[None] <= p[:, None], s, -INF)}, CAUSAL),
    "no mask": ({"mask": lambda s, p, m: s}, FULL),
    "divided": ({"scores": lambda q, k: torch.matmul(q, k.mT) / math.sqrt(WIDTH)}, CAUSAL | {"scale": WIDTH**-0.5}),
    "turned": (
        {"scores": lambda q, k: (q * 0.3) @ k.permute(0, 1, 3, 2)},
        CAUSAL | {"scale": 1.0, "enable_gqa": False},
    ),
    "keys by columns": (
        {"scores": lambda q, k: q @ k.reshape(*k.shape[:2], WIDTH, LENGTH)},
        CAUSAL | {"scale": 1.0, "enable_gqa": False},
    ),
    "interleaved": ({"repeat": lambda x: tuple(t.repeat_interleave(SHARED, 1) for t in x)}, CAUSAL),
    "other order": ({"repeat": lambda x: tuple(t.repeat(1, SHARED, 1, 1) for t in x)}, CAUSAL | {"enable_gqa": False}),
    "4-dim sinks": ({"shape": (1, HEADS, 1, 1)}, CAUSAL),
}


def softmax_less(largest: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a softmax of scores and sinks less the largest of what `largest` makes of these."""
    return lambda s, c: (torch.cat((s, c), -1) - largest(s, c).amax(-1, True)).softmax(-1)[..., :-1]


LEFT: dict[str, Parts] = {
    "scores are read": {"read": lambda s, p: s.clamp(-1, 1).mean()},
    "probabilities are read": {"read": lambda s, p: p.square().mean()},
    "dropped": {"drop": lambda p: nn.functional.dropout(p, 0.1)},
    "learned bias": {"mask": lambda s, p, m: s + m.bias},
    "prefix": {"mask": lambda s, p, m: s.masked_fill((p[None] > p[:, None]) & (p[None] > 2), -INF)},
    "own key hidden": {"mask": lambda s, p, m: s.masked_fill(p[None] >= p[:, None], -INF)},
    "scaled mask": {"mask": lambda s, p, m: causal(s, p, m) * 0.5},
    "weak mask": {"mask": lambda s, p, m: torch.where(p[None] <= p[:, None], s, -5.0)},
    "another shift": {"softmax": lambda s, c: (torch.cat((s, c), -1) - s.amax(-1, True)).softmax(-1)[..., :-1]},
    "a sink per row": {"softmax": lambda s, c: torch.softmax(torch.cat((s, s.mean(-1, True)), -1), -1)[..., :-1]},
    "a key is left out": {"softmax": lambda s, c: torch.softmax(torch.cat((s, c), -1), -1)[..., 1:]},
    "other dim": {"softmax": lambda s, c: torch.softmax(torch.cat((s, c), -1), -2)[..., :-1]},
    "constant weights": {"drop": lambda p: p.detach()},
    **{
        f"the largest of {name}": {"mask": lambda s, p, m: s, "softmax": softmax_less(largest)}
        for name, largest in {
            "other scores": lambda s, c: torch.cat((s * 0.3, c), -1),
            "divided scores": lambda s, c: torch.cat((s / 2, c), -1),
            "masked scores": lambda s, c: torch.cat((s + torch.full((LENGTH, LENGTH), -INF).triu(1), c), -1),
            "another order": lambda s, c: torch.cat((c, s), -1),
        }.items()
    },
}  # fmt: skip


def compared(model: WrittenOut) -> list[Node]:
    """The calls of a model that compute what it does, gradients too."""
    batch = {"x": torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)}
    graph = trace(model, batch)
    if "drop" not in model.parts:
        expected, tensors = model(**batch), [p for p in model.parameters() if p is not model.bias]
        found = run_graph(graph, tensors_of(model), batch)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        grads = (torch.autograd.grad(loss, tensors, allow_unused=True) for loss in (found, expected))
        for one, other in zip(*grads, strict=True):
            assert (one is None) == (other is None)
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14) if one is not None else None
    return [piece for piece in graph.body if isinstance(piece, Node)]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", FOUND)
def test_written_out_attention_is_one_call(name: str) -> None:
    parts, expected = FOUND[name]
    nodes = compared(WrittenOut(**parts).double())
    (call,) = (node for node in nodes if node.op == SINK_ATTENTION)
    arguments = arguments_of(call)
    assert {key: arguments[key] for key in expected} == pytest.approx(expected)
    assert not any(meta.shape[-2:] == (LENGTH, LENGTH) for node in nodes for meta in node.outputs)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", LEFT)
def test_what_is_another_thing_is_left(name: str) -> None:
    nodes = compared(WrittenOut(**LEFT[name]).double())
    assert not any(node.op == SINK_ATTENTION for node in nodes)


def attends(model: WrittenOut, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(q.shape[2])
    window = (at[None] <= at[:, None]) & (at[None] > at[:, None] - 3)
    mask = {"window": window, "learned": model.bias}.get(model.parts["own"])
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


class Attends(WrittenOut):
    """Repeated keys and values without sinks."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        k, v = (t.unflatten(-1, (HEADS // SHARED, WIDTH)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        y = attends(self, q, *self.part("repeat", lambda x: tuple(map(repeated, x)))((k, v)))
        return y.square().mean()


@pytest.mark.parametrize(("own", "dtype", "is_shared"), [
    ("window", torch.float32, True), ("causal", torch.bfloat16, True), ("causal", torch.float32, False),
    ("learned", torch.bfloat16, False),
])  # fmt: skip
def test_keys_are_not_repeated_where_kernels_share_them(own: str, dtype: torch.dtype, is_shared: bool) -> None:
    torch.manual_seed(0)
    model = Attends(own=own)
    graph = trace(model, {"x": torch.randn(BATCH, LENGTH, WIDTH)}, param_dtype=dtype)
    model, batch = model.to(dtype), {"x": torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype)}
    (call,) = (piece for piece in graph.body if isinstance(piece, Node) and "attention" in piece.op)
    assert arguments_of(call)["enable_gqa"] == is_shared
    expected, found = model(**batch), run_graph(graph, tensors_of(model), batch)
    torch.testing.assert_close(found, expected)
    pairs = (torch.autograd.grad(loss, model.kv.weight)[0] for loss in (found, expected))
    torch.testing.assert_close(*pairs, rtol=0.05, atol=2e-4)
