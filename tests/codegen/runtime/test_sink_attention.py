"""Attention with sinks against a softmax with one more column, whatever the window, the heads and the dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codegen.runtime import attention_blocks
from codegen.runtime.attention_blocks import WindowedKeys
from codegen.runtime.sink_attention import sink_attention
from codegen.runtime.windows import Positions, Window

SIDES = st.none() | st.integers(0, 9)


def written_out(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, seen: Tensor, scale: float) -> Tensor:
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ keys.mT * scale).masked_fill(~seen, -torch.inf)
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ values


@settings(max_examples=25, deadline=None)
@given(
    before=SIDES, after=SIDES, chunk=st.none() | st.integers(1, 9), is_causal=st.booleans(),
    shared=st.sampled_from((1, 2, 4)), length=st.integers(1, 12), width=st.sampled_from((4, 6)),
    scale=st.sampled_from((None, 0.3)), seed=st.integers(0, 99),
)  # fmt: skip
def test_result_and_gradients(
    before: int | None, after: int | None, chunk: int | None, is_causal: bool, shared: int, length: int, width: int,
    scale: float | None, seed: int,
) -> None:  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    shapes = (2, 4, length, 4), (2, 4 // shared, length, 4), (2, 4 // shared, length, width), (4,)
    tensors = [torch.randn(s, generator=draw, dtype=torch.float64).mul_(2).requires_grad_() for s in shapes]
    at = torch.arange(length)
    bounds = (None, 0, None) if is_causal else (before, after, chunk)
    seen = Window(*bounds).mask(at, at)
    own = (True,) if is_causal else (False, *bounds)
    found = sink_attention(*tensors, *own, scale=scale, enable_gqa=True)
    expected = written_out(*tensors, seen, 0.5 if scale is None else scale)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    grad = torch.randn(found.shape, generator=draw, dtype=torch.float64)
    for one, other in zip(*(torch.autograd.grad(x, tensors, grad) for x in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_gradcheck() -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((1, 2, 5, 3), *((1, 1, 5, 3),) * 2, (2,))
    ]
    assert torch.autograd.gradcheck(lambda *each: sink_attention(*each, before=2, after=0, enable_gqa=True), tensors)


def test_half_precision_is_rounded_once() -> None:
    """The result of bf16 tensors is that of the same numbers in fp64 up to a rounding of bf16; gradients to some."""
    torch.manual_seed(0)
    halves = [torch.randn(s).bfloat16().requires_grad_() for s in ((2, 4, 64, 8), *((2, 2, 64, 8),) * 2, (4,))]
    wide = [x.detach().double().requires_grad_() for x in halves]
    one, other = (sink_attention(*x, is_causal=True, enable_gqa=True) for x in (halves, wide))
    torch.testing.assert_close(one.double(), other, rtol=2**-7, atol=2**-8)
    grad = torch.randn_like(one)
    found, expected = torch.autograd.grad(one, halves, grad), torch.autograd.grad(other, wide, grad.double())
    for x, y in zip(found, expected, strict=True):
        assert (x.double() - y).norm() < 0.01 * y.norm()


def test_windows_of_the_gpu_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel is told of a window, by torch's own account of its shapes: no GPU is needed for that."""
    monkeypatch.setattr(attention_blocks, "_kernel", lambda *_: "gpu")
    q, k = (torch.empty(2, heads, 16, 8, device="meta", dtype=torch.bfloat16) for heads in (4, 2))
    whole = Positions(0, 16)
    keys = WindowedKeys(Window(3, 0), whole, whole, 16)
    assert keys._sides() == {"window_size_left": 3, "window_size_right": 0}
    out, lse = keys.attention(q, k, k, None)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:-1], torch.float32)
    grads = keys.gradients(out, q, k, k, (out, lse), None)
    assert [x.shape for x in grads] == [q.shape, k.shape, k.shape]
    for window, own in ((Window(None, 0, 4), whole), (Window(-1, 3), whole), (Window(3, 0), Positions(4, 12))):
        assert not WindowedKeys(window, own, whole, 16)._has_kernel(q, k, k)
