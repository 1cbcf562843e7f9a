"""Layer norm kernels in Triton's interpreter, against the formula and its gradient in fp64.

Run by test_kernels_isolated.py with TRITON_INTERPRET=1 in a process of its own.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from codegen.kernels import dispatch
from codegen.kernels.add_layer_norm import add_layer_norm, add_layer_norm_reference
from codegen.kernels.layer_norm import layer_norm
from codegen.kernels.layer_norm_add import layer_norm_add
from codegen.kernels.tile import Tile

module = importlib.import_module("codegen.kernels.norm_launches")
pytestmark = pytest.mark.usefixtures("poisoned_memory")
EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ("y", "sum")
SEVERAL_TILES = [pytest.param(*tile, marks=pytest.mark.slow) for tile in (((40, 24), 256), ((5, 40), 16))]


def expected(x, residual, weight, bias):
    """(y, sum) by the formula."""
    total = x if residual is None else x + residual
    variance = total.var(-1, unbiased=False, keepdim=True)
    y = (total - total.mean(-1, keepdim=True)) / (variance + EPS).sqrt() * weight
    return y if bias is None else y + bias, total


def check(x, residual, weight, bias, gradients, assert_near):
    """Outputs and all gradients; `gradients` maps the outputs that are used to their gradients."""
    inputs = [None if t is None else t.detach().requires_grad_() for t in (x, residual, weight, bias)]
    exact = [None if t is None else t.detach().double().requires_grad_() for t in inputs]
    x, residual, weight, bias = inputs
    if residual is None:
        outputs = (layer_norm(x, weight, bias, EPS),)
        assert type(outputs[0].grad_fn).__name__ == "_LayerNormBackward", "the reference ran, not the kernel"
    else:
        outputs = add_layer_norm(x, residual, weight, bias, EPS)
        assert type(outputs[0].grad_fn).__name__ == "_AddLayerNormBackward", "the reference ran, not the kernel"
    wanted = expected(*exact)[: len(outputs)]
    for a, w in zip(outputs, wanted, strict=True):
        assert a.dtype == x.dtype and a.shape == x.shape
        assert_near(a.detach(), w.detach())
    used = [NAMES.index(name) for name in gradients]
    leaves, exact_leaves = ([t for t in tensors if t is not None] for tensors in (inputs, exact))
    given = list(gradients.values())
    grads = torch.autograd.grad([outputs[i] for i in used], leaves, given, allow_unused=True)
    grads_wanted = torch.autograd.grad(
        [wanted[i] for i in used], exact_leaves, [d.double() for d in given], allow_unused=True
    )
    for leaf, a, w in zip(leaves, grads, grads_wanted, strict=True):
        assert (a is None) == (w is None)
        if a is not None and w is not None:
            assert a.dtype == leaf.dtype
            assert_near(a, w, x.dtype)


def set_tiles(monkeypatch, largest, smallest):
    for name in ("FORWARD_TILES", "BACKWARD_TILES"):
        monkeypatch.setattr(module, name, (Tile(largest, least=smallest),))


def test_interpreter_is_on():
    assert dispatch.INTERPRETING


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("shape", "largest"), [((3, 7), 256), ((2, 3, 65), 256), *SEVERAL_TILES])
def test_matches_fp64(shape, largest, with_bias, dtype, monkeypatch, assert_near):
    """Tiles of 16: rows of several blocks."""
    set_tiles(monkeypatch, largest, 256 if largest > 16 else 1)
    torch.manual_seed(0)
    x, dy = (torch.randn(shape).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[-1]).to(dtype) for _ in range(2))
    check(x, None, weight, bias if with_bias else None, {"y": dy}, assert_near)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("shape", "largest"), [((2, 3, 65), 256), *SEVERAL_TILES])
def test_sum_matches_fp64(shape, largest, with_bias, dtype, monkeypatch, assert_near):
    set_tiles(monkeypatch, largest, 256 if largest > 16 else 1)
    torch.manual_seed(1)
    x, residual, dy, dsum = (torch.randn(shape).to(dtype) for _ in range(4))
    weight, bias = (torch.randn(shape[-1]).to(dtype) for _ in range(2))
    check(x, residual, weight, bias if with_bias else None, {"y": dy, "sum": dsum}, assert_near)


@pytest.mark.parametrize("used", NAMES)
def test_one_output_used(used, assert_near):
    torch.manual_seed(2)
    x, residual, d, weight, bias = *torch.randn(3, 4, 33), *torch.randn(2, 33)
    check(x, residual, weight, bias, {used: d}, assert_near)


def test_row_longer_than_the_real_tiles(assert_near):
    num_cols = module.FORWARD_TILES[0].most + 3
    torch.manual_seed(3)
    x, residual, dy, dsum = torch.randn(4, 2, num_cols)
    weight, bias = torch.randn(2, num_cols)
    check(x, residual, weight, bias, {"y": dy, "sum": dsum}, assert_near)


def test_strided_inputs_surrounded_by_nan(assert_near):
    """A read outside the given elements would turn the result into nan."""
    torch.manual_seed(4)
    buffer = torch.full((4, 9, 41), float("nan"))
    buffer[..., 4:-4] = torch.randn(4, 9, 33)
    x, residual, dy, dsum = buffer[:, ::2, 4:-4]
    weight, bias = buffer[0, 1, 4:-4], buffer[0, 3, 4:-4]
    check(x, None, weight, bias, {"y": dy}, assert_near)
    check(x, residual, weight, bias, {"y": dy, "sum": dsum}, assert_near)
    # No unit stride, a residual of zero strides, and gradients expanded as `sum().backward()` makes them.
    one = torch.ones(()).expand(6, 33)
    weight, bias = torch.randn(66)[::2], torch.randn(66)[::2]
    check(torch.randn(33, 6).t(), torch.randn(33).expand(6, 33), weight, bias, {"y": one, "sum": one}, assert_near)


def test_fp32_parameters_with_bf16_activations(assert_near):
    torch.manual_seed(5)
    x, dy = torch.randn(2, 4, 48).bfloat16()
    check(x, None, torch.randn(48), torch.randn(48), {"y": dy}, assert_near)


@pytest.mark.parametrize("largest", [64, 16])
def test_gradients_one_at_a_time(largest, monkeypatch, assert_near):
    """A zero-bubble schedule takes dx first and those of the parameters later."""
    set_tiles(monkeypatch, largest, 64)
    torch.manual_seed(6)
    x, weight, bias, dy = torch.randn(3, 50), torch.randn(50), torch.randn(50), torch.randn(3, 50)
    exact = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    y_wanted, _ = expected(exact[0], None, *exact[1:])
    wanted = torch.autograd.grad(y_wanted, exact, dy.double())
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    y = layer_norm(*inputs, EPS)
    for leaf, gradient in zip(inputs, wanted, strict=True):
        assert_near(*torch.autograd.grad(y, leaf, dy, retain_graph=True), gradient)


def test_mean_far_larger_than_the_spread(assert_near):
    """A variance from the mean square would have no digits left: 10^4 squared is 10^8, fp32 resolves 8 of it."""
    torch.manual_seed(7)
    x = torch.randn(4, 100) + 1e4
    wanted, _ = expected(x.double(), None, torch.ones(100).double(), None)
    # x and its mean are multiples of 2 ** -10 in fp32: the mean may be off by one.
    y = layer_norm(x, torch.ones(100), None, EPS)
    torch.testing.assert_close(y.double(), wanted, rtol=0, atol=1.5e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_own_row(bad):
    torch.manual_seed(8)
    x, residual, (weight, bias) = torch.randn(3, 20), torch.randn(3, 20), torch.randn(2, 20)
    x[1, 7] = bad
    y, total = add_layer_norm(x, residual, weight, bias, EPS)
    wanted, total_wanted = add_layer_norm_reference(x, residual, weight, bias, EPS)
    assert wanted[1].isnan().all() and wanted[::2].isfinite().all()
    torch.testing.assert_close(y, wanted, equal_nan=True)
    torch.testing.assert_close(total, total_wanted, equal_nan=True, rtol=0, atol=0)


def test_norm_of_the_rounded_sum():
    """fp16, as an addition before the norm would round: the unrounded sum gives something else."""
    x = torch.full((1, 64), 2048.0).half()
    residual = torch.ones(1, 64).half()
    residual[0, :32] = 3.0  # 2051 and 2049 are no fp16 numbers: 2052 and 2048
    residual[0, 0] = 100.0
    weight = torch.ones(64).half()
    y, total = add_layer_norm(x, residual, weight, None, EPS)
    assert total[0, 1] == 2052 and total[0, -1] == 2048
    unrounded = layer_norm((x.float() + residual.float()), weight, None, EPS).half()
    wanted = layer_norm(total, weight, None, EPS)
    assert (unrounded != wanted).any(), "the inputs do not tell the two apart"
    torch.testing.assert_close(y, wanted, rtol=0, atol=0)


def test_empty_rows_and_wrong_arguments():
    y, total = add_layer_norm(torch.zeros(0, 8), torch.zeros(0, 8), torch.ones(8), torch.ones(8), EPS)
    assert y.shape == total.shape == layer_norm(torch.zeros(0, 8), torch.ones(8), None, EPS).shape == (0, 8)
    with pytest.raises(ValueError, match="agree in shape and dtype"):
        add_layer_norm(torch.zeros(2, 8), torch.zeros(1, 8), torch.ones(8), None, EPS)
    with pytest.raises(ValueError, match="bias must have shape"):
        layer_norm(torch.zeros(2, 8), torch.ones(8), torch.ones(7), EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("shape", "largest"), [((2, 3, 65), 256), ((5, 40), 16)])
def test_sum_after_matches_fp64(shape, largest, with_bias, dtype, monkeypatch, assert_near):
    """The bias has another dtype than the weight: both gradients are of one launch."""
    set_tiles(monkeypatch, largest, 256 if largest > 16 else 1)
    torch.manual_seed(9)
    tensors = [torch.randn(shape).to(dtype) for _ in range(2)] + [torch.randn(shape[-1]).to(dtype)]
    tensors += [torch.randn(shape[-1])] if with_bias else []
    leaves, exact = (
        [t.detach().clone().to(to or t.dtype).requires_grad_() for t in tensors] for to in (None, torch.float64)
    )
    x, residual, weight, *bias = leaves
    y, dy = layer_norm_add(x, residual, weight, bias[0] if bias else None, EPS), torch.randn(shape).to(dtype)
    assert type(y.grad_fn).__name__ == "_LayerNormAddBackward", "the reference ran, not the kernel"
    x, residual, weight, *bias = exact
    wanted = expected(x, None, weight, bias[0] if bias else None)[0] + residual
    assert_near(y.detach(), wanted.detach())
    gradients = zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(wanted, exact, dy.double()), strict=True)
    for leaf, (a, w) in zip(leaves, gradients, strict=True):
        assert a.dtype == leaf.dtype
        assert_near(a, w, dtype)


@pytest.mark.parametrize("largest", [256, 16])
def test_without_parameters(largest, monkeypatch, assert_near):
    set_tiles(monkeypatch, largest, 1)
    torch.manual_seed(10)
    x, dy = torch.randn(2, 5, 33)
    x.requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, wanted = layer_norm(x, None, None, EPS), expected(wide, None, 1.0, None)[0]
    assert_near(y.detach(), wanted.detach())
    assert_near(*torch.autograd.grad(y, x, dy), *torch.autograd.grad(wanted, wide, dy.double()))
