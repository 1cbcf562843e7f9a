"""Masks that are windows: proven from what computes them, against every element of the mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontend.rewrites.mask_windows import forms_of, window_of_form, window_of_values
from autopar.frontend.trace import trace
from autopar.ir.graph import WINDOW_ATTENTION, Node, Ref, TensorMeta
from codegen.runtime import windows
from codegen.runtime.windows import Window, window_attention

LENGTH = 12
P, S = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
LOWEST = torch.finfo(torch.float32).min

Masks = dict[str, tuple[Callable[[Tensor], Tensor], Window | None]]
MASKS: Masks = {
    "window": (lambda p: (p[None] <= p[:, None]) & (p[None] > p[:, None] - 5), Window(4, 0)),
    "tril": (lambda p: torch.ones(12, 12, dtype=torch.bool).tril() & ~torch.ones(12, 12).bool().tril(-4), Window(3, 0)),
    "triangles": (lambda p: torch.ones(12, 12, dtype=torch.bool).tril(2).triu(-3), Window(3, 2)),
    "chunks": (lambda p: (p[:, None] // 4 == p[None] // 4) & (p[None] <= p[:, None]), Window(None, 0, 4)),
    "both": (lambda p: (p[:, None] // 6 == p[None] // 6) & (p[:, None] - p[None] < 4), Window(3, None, 6)),
    "added": (lambda p: torch.where((p[:, None] - p[None] < 3) & (p[None] <= p[:, None]), 0.0, LOWEST), Window(2, 0)),
    "one side": (lambda p: p[:, None] - p[None] < 3, None),
    "causal": (lambda p: (p[None] <= p[:, None]) & (p[None] > p[:, None] - 50), Window(None, 0)),
    "prefix": (lambda p: (p[None] <= p[:, None]) | (p[None] < 3), None),
    "strided": (lambda p: 2 * p[None] <= p[:, None], None),
    "shifted chunks": (lambda p: (p + 1)[:, None] // 4 == (p + 1)[None] // 4, None),
    "unlike chunks": (lambda p: p[:, None] // 4 == p[None] // 3, None),
    "quotient": (lambda p: p[:, None] / 4 == p[None] / 4, Window(0, 0)),
    "bytes": (lambda p: p.to(torch.uint8)[:, None] - p.to(torch.uint8)[None] < 3, Window(2, 0)),  # 2 - 5 is 253
    "alibi": (lambda p: -(p[:, None] - p[None]).abs().float(), None),
}


class Masked(nn.Module):
    """Attention under a mask of the positions."""

    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mask, self.linear = mask, nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.linear(x).chunk(3, -1))
        mask = self.mask(torch.arange(x.shape[1]))[None, None].expand(x.shape[0], -1, -1, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum()


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", MASKS)
def test_calls_whose_mask_is_a_window_have_none(name: str) -> None:
    mask, window = MASKS[name]
    graph = trace(Masked(mask), {"x": torch.randn(2, LENGTH, 8)})
    nodes = [piece for piece in graph.body if isinstance(piece, Node)]
    (call,) = (node for node in nodes if "attention" in node.op)
    if window is None:
        assert isinstance(call.args[3], Ref)
    elif window == Window(after=0):
        assert call.args[3:6] == (None, 0.0, True)
    else:
        assert call.op == WINDOW_ATTENTION
        assert call.kwargs[:3] == (("before", window.before), ("after", window.after), ("chunk", window.chunk))
        found = mask(torch.arange(LENGTH))
        hidden = found != 0 if found.is_floating_point() else ~found
        assert torch.equal(window.mask(torch.arange(LENGTH), torch.arange(LENGTH)), ~hidden)


def node(name: str, op: str, shape: tuple[int, ...], dtype: torch.dtype, *args: object, **kwargs: object) -> Node:
    given = tuple(Ref(arg) if isinstance(arg, str) else arg for arg in args)
    outputs = (TensorMeta(shape, dtype, False),)
    return Node(name=name, op=op, args=given, kwargs=tuple(kwargs.items()), outputs=outputs)


def test_windows_of_sequences_too_long_to_evaluate() -> None:
    length, whole = 1 << 20, torch.int64
    nodes = [
        node("at", "aten.arange.default", (length,), whole, length),
        node("p", "aten.unsqueeze.default", (length, 1), whole, "at", 1),
        node("s", "aten.unsqueeze.default", (1, length), whole, "at", 0),
        node("far", "aten.sub.Tensor", (length, 1), whole, "p", 4096),
        node("near", "aten.gt.Tensor", (length, length), torch.bool, "s", "far"),
        node("past", "aten.le.Tensor", (length, length), torch.bool, "s", "p"),
        node("seen", "aten.__and__.Tensor", (length, length), torch.bool, "near", "past"),
        node("all", "aten.expand.default", (2, 1, length, length), torch.bool, "seen", (2, 1, length, length)),
    ]
    metas = {Ref(each.name): each.meta for each in nodes}
    assert window_of_form(forms_of(nodes, metas)[Ref("all")], length) == Window(4095, 0)


@pytest.mark.parametrize("window", [Window(2, 3), Window(None, 0, 5), Window(0, 0), Window(6, -1), Window(3, 2, 4)])
def test_windows_of_values(window: Window) -> None:
    mask = window.mask(torch.arange(LENGTH), torch.arange(LENGTH))
    found = window_of_values(mask.expand(2, 1, -1, -1))
    assert found is not None and torch.equal(found.mask(torch.arange(LENGTH), torch.arange(LENGTH)), mask)
    mask = mask.clone()
    mask[LENGTH - 1, 0] = ~mask[LENGTH - 1, 0]
    assert window_of_values(mask) is None


@pytest.mark.parametrize("rows", [1, 3, 128])
@pytest.mark.parametrize("window", [Window(2, 3), Window(None, 0, 5), Window(6, -1), Window(3, 2, 4), Window(None, 1)])
def test_tiles_are_the_attention_of_the_whole_mask(window: Window, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "MIN_ROWS", rows)
    q, k, v = (torch.randn(2, heads, 23, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    mask = window.mask(torch.arange(23), torch.arange(23))
    bounds = window.before, window.after, window.chunk
    found = window_attention(q, k, v, *bounds, enable_gqa=True)
    whole = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    torch.testing.assert_close(found, whole)
    grad = torch.randn_like(whole)
    for one, other in zip(*(torch.autograd.grad(out, (q, k, v), grad) for out in (found, whole)), strict=True):
        torch.testing.assert_close(one, other)
