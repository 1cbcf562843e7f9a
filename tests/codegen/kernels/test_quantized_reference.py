"""Eight-bit rows and blocks in torch operations: error bounds, the fp8 layer, messages over gloo."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist

from codegen.kernels.fp8 import dequantize_rows, fp8_linear, fp8_linears, quantize_rows
from codegen.kernels.quantize import (
    dequantize_blocks,
    dequantize_sum,
    message_num_bytes,
    message_views,
    num_blocks,
    quantize_blocks,
)
from tests.codegen.runtime.ranks import run_ranks

E4M3 = torch.float8_e4m3fn


def e4m3_error(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The bound of fp8.py: half a step of e4m3."""
    return torch.maximum((2**-4 + 2**-22) * x.double().abs(), 2**-10 * scale.double())


def test_scales_are_per_row_and_the_largest_is_exact() -> None:
    x = torch.tensor([[448.0, 1.0, -2.0], [0.875, 0.0, -0.4375], [0.0, 0.0, 0.0]])
    q, scale = quantize_rows(x)
    assert scale[:2].flatten().tolist() == [1.0, 0.875 / 448]
    assert q.dtype == E4M3 and torch.equal(dequantize_rows(q, scale, torch.float32), x)


def test_every_exponent_is_within_half_a_step() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 512) * torch.exp2(-torch.randint(16, (64, 512)).float())
    q, scale = quantize_rows(x)
    error = (dequantize_rows(q, scale, torch.float32).double() - x.double()).abs()
    assert (error <= e4m3_error(x, scale)).all()
    assert (error >= 0.9 * e4m3_error(x, scale)).any(), "the bound is far from what happens"


@pytest.mark.parametrize("fp8_grad_weight", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_linear_is_within_the_bound_of_its_products(fp8_grad_weight: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 32, 96).to(dtype), torch.randn(48, 96).to(dtype)
    bias = torch.randn(48).to(dtype)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = fp8_linear(*leaves, fp8_grad_weight=fp8_grad_weight)
    dy = torch.randn_like(y)
    dx, dw, db = torch.autograd.grad(y, leaves, dy)
    assert (dx.shape, dw.shape, db.shape) == (x.shape, weight.shape, bias.shape)
    assert {t.dtype for t in (y, dx, dw, db)} == {dtype}
    x_NK, dy_NM = x.view(-1, 96), dy.view(-1, 48)
    rounding = 2**-8 if dtype == torch.bfloat16 else 2**-20

    def compare(actual: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offset: Any = 0.0) -> None:
        """a `[n, k]` times b `[m, k]`, each with its own rows' scales."""
        exact = a.double() @ b.double().t() + offset
        errors = [e4m3_error(t, quantize_rows(t)[1]) for t in (a, b)]
        sizes = [t.double().abs() for t in (a, b)]
        limit = sizes[0] @ errors[1].t() + errors[0] @ sizes[1].t() + errors[0] @ errors[1].t()
        error = (actual.double() - exact).abs()
        assert (error <= limit + 4 * rounding * (sizes[0] @ sizes[1].t() + exact.abs())).all()
        relative = (error.norm() / exact.norm()).item()
        # Independent errors of 2.6 % (a uniform distribution within each step) in both factors.
        assert 0.02 < relative < 0.05, relative

    compare(y.view(-1, 48), x_NK, weight, bias.double())
    compare(dx.view(-1, 96), dy_NM, weight.t())
    if fp8_grad_weight:
        compare(dw, dy_NM.t(), x_NK.t())
    else:
        exact = dy_NM.double().t() @ x_NK.double()
        assert (dw.double() - exact).norm() <= 2 * rounding * exact.norm()
    torch.testing.assert_close(db.double(), dy_NM.double().sum(0), rtol=rounding, atol=1e-5)


def test_fp8_linear_computes_what_is_asked_for() -> None:
    x, weight = torch.randn(4, 8), torch.randn(3, 8, requires_grad=True)
    y = fp8_linear(x, weight)
    (dw,) = torch.autograd.grad(y.sum(), weight)
    torch.testing.assert_close(dw, x.sum(0).expand(3, 8))
    assert fp8_linear(torch.zeros(0, 8), weight).shape == (0, 3)
    with pytest.raises(ValueError, match="of one dtype"):
        fp8_linear(x.bfloat16(), weight)
    with pytest.raises(ValueError, match=r"scale must have shape \(4, 1\)"):
        dequantize_rows(*[t.float() for t in (x, x)], torch.float32)


@pytest.mark.parametrize("fp8_grad_weight", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_one_x_are_those_layers_to_the_bit(
    fp8_grad_weight: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x has other readers before and after, whose gradients are added in turn. x is cast once each way."""
    module = importlib.import_module("codegen.kernels.fp8")
    cast: list[tuple[int, ...]] = []

    def counted(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cast.append(tuple(t.shape))
        return quantize_rows(t)

    monkeypatch.setattr(module, "quantize_rows", counted)
    torch.manual_seed(0)
    x, weights = torch.randn(3, 8, 16).to(dtype), [torch.randn(m, 16).to(dtype) for m in (32, 48, 20)]
    bias, factor = torch.randn(48).to(dtype), torch.randn(16).to(dtype)

    def run(joined: bool) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, *weights, bias)]
        own, a, b, c, d = leaves
        read = own * 1.0
        before = (read * factor).sin()
        if joined:
            ys = fp8_linears(read, (a, b, c), (None, d, None), fp8_grad_weight)
        else:
            ys = tuple(fp8_linear(read, w, v, fp8_grad_weight) for w, v in ((a, None), (b, d), (c, None)))
        results = [*ys, before, read + factor]
        torch.manual_seed(1)
        return [*results, *torch.autograd.grad(results, leaves, [torch.randn_like(y) for y in results])]

    apart = run(False)
    assert cast.count((24, 16)) == 3 and cast.count((16, 24)) == 3 * fp8_grad_weight
    cast.clear()
    for one, other in zip(run(True), apart, strict=True):
        assert torch.equal(one, other)
    assert cast.count((24, 16)) == 1 and cast.count((16, 24)) == fp8_grad_weight


def test_a_second_backward_casts_again() -> None:
    x, weights = torch.randn(8, 16, requires_grad=True), [torch.randn(4, 16, requires_grad=True) for _ in range(2)]
    total = sum(y.square().sum() for y in fp8_linears(x, weights, fp8_grad_weight=True))
    assert isinstance(total, torch.Tensor)
    first, second = (torch.autograd.grad(total, weights, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
@pytest.mark.parametrize("block_size", [16, 256])
def test_blocks_are_within_the_bound(dtype: torch.dtype, block_size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(3000) * torch.exp2(-torch.randint(12, (3000,)).float())
    codes, scales = quantize_blocks(x, block_size, dtype)
    assert codes.shape == (num_blocks(3000, block_size), block_size)
    s = scales.double().repeat_interleave(block_size)[:3000]
    limit = s * (0.5 + 2**-16) if dtype == torch.int8 else e4m3_error(x, s)
    error = (dequantize_blocks(codes, scales, x.shape, torch.float32).double() - x.double()).abs()
    assert (error <= limit).all() and (error >= 0.9 * limit).any()
    # The bound in terms of the block's largest element, whichever way the scale is computed.
    if dtype == torch.int8:
        largest = torch.stack([part.abs().max() for part in x.split(block_size)]).double()
        assert (error <= largest.repeat_interleave(block_size)[:3000] / 254 * (1 + 2**-15)).all()


def test_stochastic_rounding_is_unbiased() -> None:
    x = torch.tensor([127.0] + [0.3] * 15).repeat(4000)
    codes, scales = quantize_blocks(x, 16, seed=1)
    small = codes[:, 1:].float()
    assert scales.eq(1.0).all() and set(small.unique().tolist()) == {0.0, 1.0}
    # 60,000 draws: a standard deviation of 0.46 / sqrt(60000) = 0.0019.
    assert abs(small.mean().item() - 0.3) < 0.01
    assert not torch.equal(codes, quantize_blocks(x, 16, seed=2)[0])


def reduced_scatter(rank: int, world_size: int, num_elements: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """This rank's sum, through one all-to-all of messages, and its error bound."""
    torch.manual_seed(rank)
    gradient = torch.randn(world_size, num_elements)
    sent = torch.zeros(world_size, message_num_bytes(num_elements, 64), dtype=torch.uint8)
    limits = []
    for part, message in zip(gradient, sent, strict=True):
        _, scales = quantize_blocks(part, 64, dtype, out=message_views(message, num_elements, 64, dtype))
        s = scales.double().repeat_interleave(64)[:num_elements]
        limits.append(s * (0.5 + 2**-16) if dtype == torch.int8 else e4m3_error(part, s))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    views = message_views(received, num_elements, 64, dtype)
    total = dequantize_sum(*views, (num_elements,), torch.float32)
    return total.numpy(), gradient.numpy(), torch.stack(limits).numpy()


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
def test_compressed_reduce_scatter_over_gloo(dtype: torch.dtype) -> None:
    ranks = run_ranks(reduced_scatter, 2, 1000, dtype)
    results = [tuple(torch.from_numpy(array) for array in arrays) for arrays in ranks]
    exact = sum(gradient.double() for _, gradient, _ in results)
    limit = sum(limits for _, _, limits in results)
    for rank, (total, _, _) in enumerate(results):
        error = (total.double() - exact[rank]).abs()
        assert error.max() > 0 and (error <= limit[rank] + 1e-6).all()


def test_messages_are_aligned_and_hold_what_they_say() -> None:
    assert message_num_bytes(1, 16) == 16 + 16
    assert message_num_bytes(64 * 5, 64) == 320 + 32
    messages = torch.zeros(2, message_num_bytes(320, 64), dtype=torch.uint8)
    codes, scales = message_views(messages, 320, 64)
    assert codes.shape == (2, 5, 64) and scales.shape == (2, 5)
    codes.fill_(7)
    scales.fill_(-2.5)
    assert (messages[:, :320] == 7).all() and (messages[:, 340:] == 0).all()
    torch.testing.assert_close(dequantize_sum(codes, scales, (320,), torch.float32), torch.full((320,), -35.0))


def test_wrong_arguments_name_what_was_given() -> None:
    x = torch.zeros(40)
    for size in (0, 8, 24, 16384):
        with pytest.raises(ValueError, match=f"power of two from 16 to 8192, got {size}"):
            quantize_blocks(x, size)
    with pytest.raises(ValueError, match="int8 for stochastic rounding"):
        quantize_blocks(x, 16, E4M3, seed=1)
    with pytest.raises(ValueError, match="dtype must be int8 or e4m3"):
        quantize_blocks(x, 16, torch.uint8)
    with pytest.raises(ValueError, match=r"out must be contiguous torch.int8 \(3, 16\)"):
        quantize_blocks(x, 16, out=(torch.zeros(2, 16, dtype=torch.int8), torch.zeros(3)))
    with pytest.raises(ValueError, match="must agree"):
        dequantize_blocks(torch.zeros(3, 16, dtype=torch.int8), torch.zeros(3), (60,), torch.float32)
    with pytest.raises(ValueError, match=r"uint8 \[..., 64\]"):
        message_views(torch.zeros(63, dtype=torch.uint8), 40, 16)
