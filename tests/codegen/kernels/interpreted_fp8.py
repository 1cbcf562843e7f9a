"""Row-scaled e4m3 kernels in Triton's interpreter, against the reference bit by bit and the error bounds in fp64.

Run by test_kernels_isolated.py with TRITON_INTERPRET=1 in a process of its own.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from codegen.kernels.tile import Tile

module = importlib.import_module("codegen.kernels.fp8")
pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.usefixtures("exact_e4m3")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    """The torch reference may not stand in for a kernel."""

    def refuse(*_):
        raise AssertionError("the reference ran, not the kernel")

    originals = module.quantize_rows_reference, module.dequantize_rows_reference
    monkeypatch.setattr(module, "quantize_rows_reference", refuse)
    monkeypatch.setattr(module, "dequantize_rows_reference", refuse)
    return originals


def check(x, originals):
    q, scale = module.quantize_rows(x)
    q_wanted, scale_wanted = originals[0](x)
    assert q.dtype == torch.float8_e4m3fn and q.shape == x.shape and scale.shape == (*x.shape[:-1], 1)
    assert torch.equal(scale, scale_wanted)
    assert torch.equal(q.view(torch.uint8), q_wanted.view(torch.uint8))
    back = module.dequantize_rows(q, scale, torch.float32)
    assert torch.equal(back, originals[1](q, scale, torch.float32))
    # The bound of the module's docstring, with its fp32 roundings.
    error = (back.double() - x.double()).abs()
    bound = torch.maximum(2**-4 * x.double().abs(), 2**-10 * scale.double()) + 2**-22 * x.double().abs()
    assert (error <= bound).all()
    for dtype in (torch.bfloat16, torch.float16):
        rounded = module.dequantize_rows(q, scale, dtype)
        assert rounded.dtype == dtype
        torch.testing.assert_close(rounded.double(), back.to(dtype).double(), rtol=2**-7, atol=2**-24)


def set_blocks(monkeypatch, largest):
    for name in ("QUANTIZE_TILES", "DEQUANTIZE_TILES"):
        monkeypatch.setattr(module, name, (Tile(largest),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 3, 65), (5, 256)])
def test_is_the_reference(shape, dtype, kernels_only):
    torch.manual_seed(0)
    # From subnormals to the row's largest: every exponent of e4m3 occurs.
    check((torch.randn(shape) * torch.exp2(-torch.randint(12, shape).float())).to(dtype), kernels_only)


@pytest.mark.parametrize("num_cols", [16, 17, 100])
def test_rows_longer_than_a_block(num_cols, monkeypatch, kernels_only):
    set_blocks(monkeypatch, 16)
    torch.manual_seed(1)
    check(torch.randn(3, num_cols), kernels_only)


def test_strided_input_surrounded_by_nan(kernels_only):
    buffer = torch.full((8, 40), float("nan"))
    check(buffer[::2, 3:36].copy_(torch.randn(4, 33)), kernels_only)
    check(torch.randn(33, 6).t(), kernels_only)


def test_zeros_and_the_smallest_numbers(kernels_only):
    check(torch.tensor([[0.0, 0.0], [1e-44, -1e-44], [2.0**-100, 2.0**-103], [3e38, -3e38]]), kernels_only)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("max_block", [16, 64])
def test_a_row_that_is_not_finite_is_nan(value, max_block, monkeypatch, kernels_only):
    set_blocks(monkeypatch, max_block)
    x = torch.randn(3, 40)
    x[1, 37] = value
    for quantize, dequantize in ((module.quantize_rows, module.dequantize_rows), kernels_only):
        back = dequantize(*quantize(x), torch.float32)
        assert back[1].isnan().all() and back[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_is_the_product_of_dequantised_rows(dtype, assert_near, kernels_only):
    torch.manual_seed(2)
    x, weight = torch.randn(2, 5, 24).to(dtype).requires_grad_(), torch.randn(16, 24).to(dtype).requires_grad_()
    y = module.fp8_linear(x, weight, fp8_grad_weight=True)
    dy = torch.randn(y.shape).to(dtype)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)

    def rounded(tensor):
        return kernels_only[1](*kernels_only[0](tensor.detach()), torch.float32).double()

    x_2d, dy_2d = x.reshape(10, 24), dy.reshape(10, 16)
    assert_near(y, (rounded(x_2d) @ rounded(weight).t()).view(2, 5, 16), dtype)
    assert_near(dx, (rounded(dy_2d) @ rounded(weight.t()).t()).view(2, 5, 24), dtype)
    assert_near(dw, rounded(dy_2d.t()) @ rounded(x_2d.t()).t(), dtype)
