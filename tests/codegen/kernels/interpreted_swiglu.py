"""SwiGLU kernels in Triton's interpreter, against the formula and its gradient in fp64.

Run by test_kernels_isolated.py with TRITON_INTERPRET=1 in a process of its own.
"""

from __future__ import annotations

import pytest
import torch

from codegen.kernels import gated
from codegen.kernels.geglu import geglu
from codegen.kernels.swiglu import swiglu
from codegen.kernels.tile import Tile

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def expected(gate, up, dy):
    """(y, dgate, dup) in fp64, by torch's autograd on the formula."""
    gate, up, dy = (tensor.detach().double() for tensor in (gate, up, dy))
    gate.requires_grad_()
    up.requires_grad_()
    y = gate / (1 + torch.exp(-gate)) * up
    return y.detach(), *torch.autograd.grad(y, (gate, up), dy)


def check(gate, up, dy, assert_near):
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    y = swiglu(gate, up)
    assert type(y.grad_fn).__name__ == "_SwiGluBackward", "the reference ran, not the kernel"
    assert y.dtype == gate.dtype and y.shape == gate.shape
    grads = torch.autograd.grad(y, (gate, up), dy)
    for actual, wanted in zip((y, *grads), expected(gate, up, dy), strict=True):
        assert_near(actual, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1, 1), (3, 7), (2, 3, 65), (3, 2000)])
def test_matches_fp64(shape, dtype, assert_near):
    torch.manual_seed(0)
    gate, up, dy = (torch.randn(shape).to(dtype) for _ in range(3))
    check(gate * 3, up, dy, assert_near)


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_blocks_per_row(dtype, monkeypatch, assert_near):
    monkeypatch.setattr(gated, "TILES", (Tile(16),))
    torch.manual_seed(1)
    # Strided gate: rows stay rows, each of 3 blocks, the last ragged. Contiguous: one long row.
    gate, up = torch.randn(4, 2 * 37).to(dtype).chunk(2, dim=-1)
    check(gate, up, torch.randn(4, 37).to(dtype), assert_near)
    check(gate.contiguous(), up.contiguous(), torch.randn(4, 37).to(dtype), assert_near)


def test_halves_of_a_fused_projection_surrounded_by_nan(assert_near):
    """A read outside the given elements would turn the result into nan."""
    torch.manual_seed(2)
    buffer = torch.full((2, 3, 2 * 21 + 4), float("nan"))
    buffer[..., 2:-2] = torch.randn(2, 3, 42)
    gate, up = buffer[..., 2:-2].chunk(2, dim=-1)
    check(gate, up, torch.randn(2, 3, 21), assert_near)


@pytest.mark.parametrize("activation", [swiglu, geglu])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2,), (1, 6), (3, 14), (2, 3, 42)])
def test_halves_in_one_tensor(shape, dtype, activation, monkeypatch):
    """Equal to the bit to the halves as two tensors, whose gradients are joined; also with several blocks per row."""
    torch.manual_seed(4)
    monkeypatch.setattr(gated, "TILES", (Tile(4),))
    buffer = torch.full((*shape[:-1], shape[-1] + 3), float("nan"), dtype=dtype)
    both = buffer[..., 1:-2].copy_(torch.randn(shape)).detach().requires_grad_()
    results = []
    for operands in ((both,), both.chunk(2, -1)):
        y = activation(*operands)
        results.append((y, torch.autograd.grad(y, both, torch.linspace(-1, 1, y.numel()).view(y.shape).to(dtype))[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_one_tensor_has_two_halves():
    with pytest.raises(ValueError, match=r"two halves; got \(3, 5\)"):
        swiglu(torch.randn(3, 5))


def test_other_strides(assert_near):
    torch.manual_seed(3)
    # Transposed gate, expanded up (zero strides), expanded gradient, as `y.sum().backward()` makes it.
    check(torch.randn(9, 5).t(), torch.randn(1, 9).expand(5, 9), torch.ones(()).expand(5, 9), assert_near)


def test_saturates_without_nan():
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], requires_grad=True)
    up = torch.full((5,), 2.0, requires_grad=True)
    y = swiglu(gate, up)
    dgate, dup = torch.autograd.grad(y.sum(), (gate, up))
    torch.testing.assert_close(y.detach(), torch.tensor([0.0, 0.0, 0.0, 200.0, 2e4]))
    # silu'(-inf) = 0, silu'(0) = 1/2, silu'(inf) = 1; each times up.
    torch.testing.assert_close(dgate, torch.tensor([0.0, 0.0, 1.0, 2.0, 2.0]))
    torch.testing.assert_close(dup, torch.tensor([0.0, 0.0, 0.0, 100.0, 1e4]))


def test_saves_only_its_inputs():
    saved = []
    gate, up = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda t: t):
        swiglu(gate, up)
    assert sorted(saved) == sorted([gate.data_ptr(), up.data_ptr()])
