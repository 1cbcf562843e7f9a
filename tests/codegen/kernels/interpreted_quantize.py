"""Block-wise 8-bit kernels in Triton's interpreter, against the reference bit by bit and the error bounds in fp64.

Run by test_kernels_isolated.py with TRITON_INTERPRET=1 in a process of its own.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from codegen.kernels.tile import Tile

module = importlib.import_module("codegen.kernels.quantize")
pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.usefixtures("exact_e4m3")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CODES = [torch.int8, torch.float8_e4m3fn]
BLOCK = 16


@pytest.fixture(autouse=True)
def kernels_only(monkeypatch):
    """The torch reference may not stand in for a kernel."""

    def refuse(*_):
        raise AssertionError("the reference ran, not the kernel")

    originals = module.quantize_blocks_reference, module.dequantize_sum_reference
    monkeypatch.setattr(module, "quantize_blocks_reference", refuse)
    monkeypatch.setattr(module, "dequantize_sum_reference", refuse)
    return originals


def bound(x, scales, code_dtype, block_size, stochastic=False):
    """Of each element's error, as the module's docstring has it."""
    s = scales.double().repeat_interleave(block_size)[: x.numel()].view(x.shape)
    if code_dtype == torch.int8:
        return s * ((1.0 if stochastic else 0.5) + 2**-16)
    return torch.maximum(2**-4 * x.double().abs(), 2**-10 * s) + 2**-22 * x.double().abs()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code_dtype", CODES)
@pytest.mark.parametrize(("shape", "block_size", "tile"), [((1,), 16, 64), ((7, 33), 16, 64), ((500,), 128, 64)])
def test_is_the_reference_within_the_bound(shape, block_size, tile, code_dtype, dtype, monkeypatch, kernels_only):
    monkeypatch.setattr(module, "TILES", (Tile(8192, least=tile),))
    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.exp2(-torch.randint(12, shape).float())).to(dtype)
    codes, scales = module.quantize_blocks(x, block_size, code_dtype)
    wanted, scales_wanted = kernels_only[0](x, block_size, code_dtype)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8)) and torch.equal(scales, scales_wanted)
    back = module.dequantize_blocks(codes, scales, x.shape, torch.float32)
    assert torch.equal(back, kernels_only[1](codes[None], scales[None], x.shape, torch.float32))
    assert ((back.double() - x.double()).abs() <= bound(x, scales, code_dtype, block_size)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code_dtype", CODES)
def test_sum_of_parts_in_messages(code_dtype, dtype, monkeypatch):
    """Messages of several ranks that lie one after the other, as an all-to-all leaves them."""
    monkeypatch.setattr(module, "TILES", (Tile(8192, least=64),))
    torch.manual_seed(1)
    num_parts, shape = 3, (7, 11)
    parts = torch.randn(num_parts, *shape) * torch.tensor([1.0, 100.0, 1e-3])[:, None, None]
    messages = torch.zeros(num_parts, module.message_num_bytes(77, BLOCK), dtype=torch.uint8)
    limit = torch.zeros(shape, dtype=torch.float64)
    for part, message in zip(parts, messages, strict=True):
        views = module.message_views(message, 77, BLOCK, code_dtype)
        codes, scales = module.quantize_blocks(part, BLOCK, code_dtype, out=views)
        assert codes.data_ptr() == message.data_ptr()
        limit += bound(part, scales, code_dtype, BLOCK)
    total = module.dequantize_sum(*module.message_views(messages, 77, BLOCK, code_dtype), shape, dtype)
    assert total.dtype == dtype
    exact = parts.double().sum(0)
    rounding = {torch.float32: 2**-22, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype] * (exact.abs() + limit)
    assert ((total.double() - exact).abs() <= limit + rounding).all()


def test_stochastic_rounding_is_unbiased_and_repeatable(monkeypatch):
    """Three blocks, 300 times over: equal numbers and scales, other random numbers."""
    torch.manual_seed(2)
    x = torch.randn(3 * BLOCK)
    many = x.repeat(300)
    codes, scales = module.quantize_blocks(many, BLOCK, seed=7)
    back = module.dequantize_blocks(codes, scales, many.shape, torch.float32).double()
    assert torch.equal(scales, module.quantize_blocks(x, BLOCK)[1].repeat(300))
    assert ((back - many.double()).abs() < bound(many, scales, torch.int8, BLOCK, stochastic=True)).all()
    s = scales[:3].double().repeat_interleave(BLOCK)
    deviations = (back.view(300, -1).mean(0) - x.double()).abs() / s
    # The mean of 300 has a standard deviation of at most s / 2 / sqrt(300) = 0.029 s; of 48 none is five off.
    assert deviations.max() < 0.145
    nearest = module.dequantize_blocks(*module.quantize_blocks(x, BLOCK), x.shape, torch.float32).double()
    assert ((nearest - x).abs() / s).max() > 0.4, "rounding to nearest is biased by up to half a step"
    assert not torch.equal(module.quantize_blocks(x, BLOCK, seed=8)[0], codes[:3])
    # An element's random number is its own, however the blocks are dealt to programs.
    monkeypatch.setattr(module, "TILES", (Tile(8192, least=BLOCK),))
    assert torch.equal(module.quantize_blocks(x, BLOCK, seed=7)[0], codes[:3])


def test_integers_come_back_and_ties_go_to_even():
    x = torch.arange(-127.0, 128.0)
    codes, scales = module.quantize_blocks(x, 256)
    assert scales.item() == 1.0 and torch.equal(codes[0, :255].float(), x)
    halves = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 127.0])
    assert module.quantize_blocks(halves, BLOCK)[0][0, :6].tolist() == [0, 2, 2, 0, -2, 127]


@pytest.mark.parametrize("code_dtype", CODES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_block_that_is_not_finite_is_nan(value, code_dtype, kernels_only):
    x = torch.ones(40)
    x[20] = value
    for codes, scales in (module.quantize_blocks(x, BLOCK, code_dtype), kernels_only[0](x, BLOCK, code_dtype)):
        back = module.dequantize_blocks(codes, scales, x.shape, torch.float32)
        assert back[16:32].isnan().all() and back[:16].isfinite().all() and back[32:].isfinite().all()
    if code_dtype == torch.int8:
        codes, scales = module.quantize_blocks(x, BLOCK, seed=1)
        assert codes[1].eq(0).all() and scales[1].isnan()


@pytest.mark.parametrize("code_dtype", CODES)
def test_zeros_and_the_smallest_numbers(code_dtype):
    x = torch.tensor([0.0] * 16 + [1e-44] * 16 + [3e38, -3e38])
    codes, scales = module.quantize_blocks(x, BLOCK, code_dtype)
    back = module.dequantize_blocks(codes, scales, x.shape, torch.float32)
    assert (back[:32] == 0).all()
    torch.testing.assert_close(back[32:], x[32:], rtol=2**-4, atol=0)


def test_strided_input():
    torch.manual_seed(3)
    x = torch.randn(9, 7)
    assert torch.equal(module.quantize_blocks(x.t(), BLOCK)[0], module.quantize_blocks(x.t().contiguous(), BLOCK)[0])
