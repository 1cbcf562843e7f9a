"""GEGLU and bias-GELU kernels in Triton's interpreter, against the formulas and their gradients in fp64.

Run by test_kernels_isolated.py with TRITON_INTERPRET=1 in a process of its own.
"""

from __future__ import annotations

import math

import pytest
import torch

from codegen.kernels import bias_gelu as bias_module
from codegen.kernels import gated
from codegen.kernels.bias_gelu import bias_gelu
from codegen.kernels.geglu import geglu
from codegen.kernels.tile import Tile

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.usefixtures("exact_bf16")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
APPROXIMATIONS = ["none", "tanh"]


def exact_gelu(x, approximate):
    """The formula in fp64, by operations that torch's own gelu does not use."""
    if approximate == "tanh":
        return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    return x * torch.special.ndtr(x)


def check(operation, formula, name, inputs, dy, approximate, assert_near):
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    y = operation(*inputs, approximate)
    assert type(y.grad_fn).__name__ == f"{name}Backward", "the reference ran, not the kernel"
    y_wanted = formula(*exact)
    assert y.dtype == inputs[0].dtype and y.shape == inputs[0].shape
    assert_near(y.detach(), y_wanted.detach())
    grads = torch.autograd.grad(y, inputs, dy)
    grads_wanted = torch.autograd.grad(y_wanted, exact, dy.double())
    for leaf, a, w in zip(inputs, grads, grads_wanted, strict=True):
        assert a.dtype == leaf.dtype
        # x's dtype also for the gradient of a wider bias, which sees the sum rounded to x's.
        assert_near(a, w, inputs[0].dtype)


def check_geglu(gate, up, dy, approximate, assert_near):
    def formula(gate, up):
        return exact_gelu(gate, approximate) * up

    check(geglu, formula, "_GeGlu", (gate, up), dy, approximate, assert_near)


def check_bias_gelu(x, bias, dy, approximate, assert_near):
    def formula(x, bias):
        return exact_gelu(x + bias, approximate)

    check(bias_gelu, formula, "_BiasGelu", (x, bias), dy, approximate, assert_near)


@pytest.fixture
def small_tiles(monkeypatch):
    """Several blocks to a row, several rows to a tile where rows are short."""
    monkeypatch.setattr(gated, "TILES", (Tile(16),))
    for name in ("FORWARD_TILES", "BACKWARD_TILES"):
        monkeypatch.setattr(bias_module, name, (Tile(16, least=16),))


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3, 7), (2, 3, 65)])
def test_geglu_matches_fp64(shape, dtype, approximate, assert_near):
    torch.manual_seed(0)
    gate, up, dy = (torch.randn(shape).to(dtype) for _ in range(3))
    check_geglu(gate * 3, up, dy, approximate, assert_near)


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 3, 65)])
def test_bias_gelu_matches_fp64(shape, dtype, approximate, assert_near):
    torch.manual_seed(1)
    x, bias, dy = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype), torch.randn(shape).to(dtype)
    check_bias_gelu(x, bias, dy, approximate, assert_near)


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_blocks(dtype, assert_near):
    torch.manual_seed(2)
    gate, up = torch.randn(4, 2 * 37).to(dtype).chunk(2, dim=-1)
    check_geglu(gate, up, torch.randn(4, 37).to(dtype), "none", assert_near)
    check_geglu(gate.contiguous(), up.contiguous(), torch.randn(4, 37).to(dtype), "tanh", assert_near)
    # More tiles of rows than programs, each of 3 blocks, the last ragged; then 4 rows to a tile, the last with 3.
    for num_rows, num_cols in ((11, 37), (43, 3)):
        x, bias, dy = torch.randn(num_rows, num_cols), torch.randn(num_cols), torch.randn(num_rows, num_cols)
        check_bias_gelu(x.to(dtype), bias.to(dtype), dy.to(dtype), "none", assert_near)


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
def test_strided_inputs_surrounded_by_nan(approximate, assert_near):
    """A read outside the given elements would turn the result into nan."""
    torch.manual_seed(3)
    buffer = torch.full((2, 7, 2 * 21 + 4), float("nan"))
    buffer[..., 2:-2] = torch.randn(2, 7, 42)
    gate, up = buffer[:, ::2, 2:-2].chunk(2, dim=-1)
    check_geglu(gate, up, torch.randn(2, 4, 21), approximate, assert_near)
    check_bias_gelu(gate, buffer[0, 1, 2:23], up, approximate, assert_near)
    # Transposed, every second element, expanded, and a gradient as `sum().backward()` makes it.
    one = torch.ones(()).expand(5, 9)
    check_geglu(torch.randn(9, 5).t(), torch.randn(1, 9).expand(5, 9), one, approximate, assert_near)
    check_bias_gelu(torch.randn(9, 5).t(), torch.randn(18)[::2], one, approximate, assert_near)


def test_fp32_bias_with_bf16_activations(assert_near):
    torch.manual_seed(4)
    x, dy = torch.randn(2, 4, 48).bfloat16()
    check_bias_gelu(x, torch.randn(48), dy, "tanh", assert_near)


def test_gradients_one_at_a_time(assert_near):
    """A zero-bubble schedule takes dx first and db later."""
    torch.manual_seed(5)
    x, bias, dy = torch.randn(3, 50, requires_grad=True), torch.randn(50, requires_grad=True), torch.randn(3, 50)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, bias)]
    wanted = torch.autograd.grad(exact_gelu(exact[0] + exact[1], "none"), exact, dy.double())
    y = bias_gelu(x, bias)
    assert_near(*torch.autograd.grad(y, x, dy, retain_graph=True), wanted[0])
    assert_near(*torch.autograd.grad(y, bias, dy), wanted[1])


@pytest.mark.parametrize("approximate", APPROXIMATIONS)
def test_far_out_and_not_finite(approximate):
    """0 and x far out, with slopes 0 and 1; where x is not finite, what the formula gives: inf 1, -inf 0 and inf 0.

    torch's own gelu is no reference at inf: it gives inf or nan, depending on the CPU's vector width.
    """
    x = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4, float("nan"), float("inf"), -float("inf")])
    inputs = [x.clone().requires_grad_(), torch.full_like(x, 2.0).requires_grad_()]
    y = geglu(*inputs, approximate)
    dgate, dup = torch.autograd.grad(y.sum(), inputs)
    gelu, slope = torch.tensor([0.0, 0, 0, 0, 20, 100, 1e4]), torch.tensor([0.0, 0, 0, 0.5, 1, 1, 1])
    torch.testing.assert_close(y[:7].detach(), 2 * gelu)
    torch.testing.assert_close(dgate[:7], 2 * slope)
    torch.testing.assert_close(dup[:7], gelu)
    nan, inf = float("nan"), float("inf")
    for actual, wanted in ((y.detach(), [nan, inf, nan]), (dgate, [nan, nan, nan]), (dup, [nan, inf, nan])):
        torch.testing.assert_close(actual[7:], torch.tensor(wanted), equal_nan=True)
    zero = torch.zeros_like(x).requires_grad_()
    h = bias_gelu(x[None], zero, approximate)
    torch.testing.assert_close(2 * h[0], y, equal_nan=True)
    torch.testing.assert_close(2 * torch.autograd.grad(h.sum(), zero)[0], dgate, equal_nan=True)


def test_rounds_where_unfused_operations_round():
    """fp16: gelu before the product, and the sum before gelu, are rounded."""
    torch.manual_seed(6)
    gate, up, bias = torch.randn(64, 64).half(), torch.randn(64, 64).half(), torch.randn(64).half()
    halves = torch.nn.functional.gelu(gate) * up
    unrounded = (torch.nn.functional.gelu(gate.float()) * up.float()).half()
    ours = geglu(gate, up)
    # An ulp of erf may turn a rounding of some element.
    assert (ours != halves).float().mean() < 0.01 < (unrounded != halves).float().mean()
    halves = torch.nn.functional.gelu(gate + bias)
    unrounded = torch.nn.functional.gelu(gate.float() + bias.float()).half()
    ours = bias_gelu(gate, bias)
    assert (ours != halves).float().mean() < 0.01 < (unrounded != halves).float().mean()


def test_a_bias_that_is_not_finite_spoils_its_own_column():
    """Also where a tile has rows and columns beyond the tensor's."""
    x, bias = torch.randn(3, 5), torch.zeros(5)
    bias[2] = float("nan")
    bias.requires_grad_()
    y = bias_gelu(x, bias)
    (db,) = torch.autograd.grad(y.sum(), bias)
    assert y.isnan().sum() == 3 and y[:, 2].isnan().all()
    assert db.isnan().sum() == 1 and db[2].isnan()


def test_saves_only_its_inputs():
    saved = []
    a, b, bias = (torch.randn(shape, requires_grad=True) for shape in ((3, 5), (3, 5), (5,)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda t: t):
        geglu(a, b)
        bias_gelu(a, bias)
    assert sorted(saved) == sorted([a.data_ptr(), b.data_ptr(), a.data_ptr(), bias.data_ptr()])


def test_empty_and_wrong_arguments():
    assert geglu(torch.zeros(0, 4), torch.zeros(0, 4)).shape == bias_gelu(torch.zeros(0, 4), torch.zeros(4)).shape
    with pytest.raises(ValueError, match="approximate must be"):
        geglu(torch.zeros(2), torch.zeros(2), "sigmoid")
    with pytest.raises(ValueError, match="agree in shape and dtype"):
        geglu(torch.zeros(2), torch.zeros(2).half())
    with pytest.raises(ValueError, match="bias must have shape"):
        bias_gelu(torch.zeros(2, 4), torch.zeros(2))
