"""RMS norm kernels in Triton's interpreter, against the formula and its gradient in fp64.

Run by test_kernels_isolated.py with TRITON_INTERPRET=1 in a process of its own.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from codegen.kernels import dispatch
from codegen.kernels.add_rms_norm import add_rms_norm, add_rms_norm_reference
from codegen.kernels.rms_norm import rms_norm
from codegen.kernels.rms_norm_add import rms_norm_add
from codegen.kernels.tile import Tile

module = importlib.import_module("codegen.kernels.norm_launches")
pytestmark = pytest.mark.usefixtures("poisoned_memory")
EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def expected(x, weight, dy):
    """(y, dx, dw) in fp64, by torch's autograd on the formula without any rounding."""
    x, weight, dy = (tensor.detach().double() for tensor in (x, weight, dy))
    x.requires_grad_()
    weight.requires_grad_()
    y = weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


def check(x, weight, dy, assert_near):
    x = x.detach().requires_grad_()
    weight = weight.detach().requires_grad_()
    y = rms_norm(x, weight, EPS)
    assert type(y.grad_fn).__name__ == "_RmsNormBackward", "the reference ran, not the kernel"
    assert y.dtype == x.dtype and y.shape == x.shape
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    assert dx.dtype == x.dtype and dw.dtype == weight.dtype
    for actual, wanted in zip((y, dx, dw), expected(x, weight, dy), strict=True):
        # x's dtype also for the gradient of a wider weight: it is a sum of values rounded to x's dtype.
        assert_near(actual, wanted, x.dtype)


def test_interpreter_is_on():
    assert dispatch.INTERPRETING


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 3, 65), (5, 128), (40, 96), (0, 8)])
def test_matches_fp64(shape, dtype, assert_near):
    torch.manual_seed(0)
    x, dy = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    if x.numel() == 0:
        assert rms_norm(x, weight, EPS).shape == shape
    else:
        check(x, weight, dy, assert_near)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("max_tile", "num_cols"), [(16, 17), pytest.param(16, 100, marks=pytest.mark.slow)])
def test_rows_longer_than_a_tile(max_tile, num_cols, dtype, monkeypatch, assert_near):
    monkeypatch.setattr(module, "FORWARD_TILES", (Tile(max_tile),))
    monkeypatch.setattr(module, "BACKWARD_TILES", (Tile(max_tile),))
    torch.manual_seed(1)
    # 11 rows on 8 row chunks: chunks of two rows and of one.
    check(
        torch.randn(11, num_cols).to(dtype),
        torch.randn(num_cols).to(dtype),
        torch.randn(11, num_cols).to(dtype),
        assert_near,
    )


def test_row_longer_than_the_real_tiles(assert_near):
    num_cols = module.FORWARD_TILES[0].most + 3
    torch.manual_seed(2)
    check(torch.randn(2, num_cols), torch.randn(num_cols), torch.randn(2, num_cols), assert_near)


def test_strided_inputs_surrounded_by_nan(assert_near):
    """A read outside the given elements would turn the result into nan."""
    torch.manual_seed(3)

    def strided(num_rows, num_cols):
        buffer = torch.full((2 * num_rows, num_cols + 5), float("nan"))
        view = buffer[::2, 2 : 2 + num_cols]
        view.copy_(torch.randn(num_rows, num_cols))
        return view

    check(strided(6, 33), strided(1, 33)[0], strided(6, 33), assert_near)
    # No unit stride at all: transposed x, weight taken from every second element, gradient expanded.
    check(torch.randn(33, 6).t(), torch.randn(66)[::2], torch.ones(()).expand(6, 33), assert_near)


def test_fp32_weight_with_bf16_activations(assert_near):
    torch.manual_seed(4)
    check(torch.randn(4, 48).bfloat16(), torch.randn(48), torch.randn(4, 48).bfloat16(), assert_near)


@pytest.mark.parametrize("max_tile", [64, 16])
def test_gradients_one_at_a_time(max_tile, monkeypatch, assert_near):
    """A zero-bubble schedule takes dx first and dw later."""
    monkeypatch.setattr(module, "BACKWARD_TILES", (Tile(max_tile, least=2048),))
    torch.manual_seed(5)
    x, weight, dy = torch.randn(3, 50, requires_grad=True), torch.randn(50, requires_grad=True), torch.randn(3, 50)
    _, dx_wanted, dw_wanted = expected(x, weight, dy)
    y = rms_norm(x, weight, EPS)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
    (dw,) = torch.autograd.grad(y, weight, dy)
    assert_near(dx, dx_wanted)
    assert_near(dw, dw_wanted)


def test_rounds_where_hugging_face_rounds():
    """fp16 output bit for bit, on rows whose mean square is exact so that no summation order matters.

    Not bf16: the interpreter truncates fp32 to bf16 where GPUs round to nearest.
    """
    torch.manual_seed(6)
    x = (torch.randint(0, 2, (8, 64)) * 2 - 1).half() * torch.tensor([1.25, 1.5] * 32).half()
    weight = torch.randn(64).half()
    normed = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)).half()
    unrounded = (weight.float() * x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)).half()
    assert (weight * normed != unrounded).any(), "the inputs do not tell the two roundings apart"
    torch.testing.assert_close(rms_norm(x, weight, EPS), weight * normed, rtol=0, atol=0)


def check_sum(x, residual, weight, dy, dsum, assert_near):
    """y and x + residual, and the three gradients, where either output may go unused (a gradient of None)."""
    x, residual, weight = (tensor.detach().requires_grad_() for tensor in (x, residual, weight))
    y, total = add_rms_norm(x, residual, weight, EPS)
    assert type(y.grad_fn).__name__ == "_AddRmsNormBackward", "the reference ran, not the kernel"
    assert y.dtype == total.dtype == x.dtype and y.shape == total.shape == x.shape
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, residual, weight)]
    total_wanted = exact[0] + exact[1]
    y_wanted = exact[2] * total_wanted / (total_wanted.square().mean(-1, keepdim=True) + EPS).sqrt()
    assert_near(y.detach(), y_wanted.detach())
    assert_near(total.detach(), total_wanted.detach())
    used = [(out, wanted, d) for out, wanted, d in ((y, y_wanted, dy), (total, total_wanted, dsum)) if d is not None]
    outputs, outputs_wanted, gradients = zip(*used, strict=True)
    actual = torch.autograd.grad(outputs, (x, residual, weight), gradients, allow_unused=True)
    wanted = torch.autograd.grad(outputs_wanted, exact, [d.double() for d in gradients], allow_unused=True)
    for a, w in zip(actual, wanted, strict=True):
        assert (a is None) == (w is None)
        if a is not None and w is not None:
            assert_near(a, w, x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "max_tile"), [((1, 1), 64), ((2, 3, 65), 128), ((5, 40), 16)])
def test_sum_matches_fp64(shape, max_tile, dtype, monkeypatch, assert_near):
    """Tiles of 16: rows of several blocks."""
    for name in ("FORWARD_TILES", "BACKWARD_TILES"):
        monkeypatch.setattr(module, name, (Tile(max_tile, least=128),))
    torch.manual_seed(7)
    x, residual, dy, dsum = (torch.randn(shape).to(dtype) for _ in range(4))
    check_sum(x, residual, torch.randn(shape[-1]).to(dtype), dy, dsum, assert_near)


@pytest.mark.parametrize("unused", ["y", "sum"])
def test_one_output_unused(unused, assert_near):
    torch.manual_seed(8)
    x, residual, weight, d = torch.randn(4, 33), torch.randn(4, 33), torch.randn(33), torch.randn(4, 33)
    dy, dsum = (None, d) if unused == "y" else (d, None)
    check_sum(x, residual, weight, dy, dsum, assert_near)


def test_sum_of_strided_inputs_surrounded_by_nan(assert_near):
    torch.manual_seed(9)
    buffer = torch.full((4, 3, 41), float("nan"))
    buffer[..., 4:-4] = torch.randn(4, 3, 33)
    x, residual, dy, dsum = buffer[:, ::2, 4:-4]
    check_sum(x, residual, torch.randn(33), dy, dsum, assert_near)
    # No unit stride, and gradients expanded as `sum().backward()` makes them.
    one = torch.ones(()).expand(6, 33)
    check_sum(torch.randn(33, 6).t(), torch.randn(1, 33).expand(6, 33), torch.randn(33), one, one, assert_near)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_own_row(bad):
    torch.manual_seed(10)
    x, residual, weight = torch.randn(3, 20), torch.randn(3, 20), torch.randn(20)
    x[1, 7] = bad
    y, total = add_rms_norm(x, residual, weight, EPS)
    wanted, total_wanted = add_rms_norm_reference(x, residual, weight, EPS)
    assert wanted[1].isnan().any() and wanted[::2].isfinite().all()
    torch.testing.assert_close(y, wanted, equal_nan=True)
    torch.testing.assert_close(total, total_wanted, equal_nan=True, rtol=0, atol=0)


def test_norm_of_the_rounded_sum():
    """fp16, as an addition before the norm would round: bit for bit, and the unrounded sum gives something else."""
    x = torch.full((1, 64), 2048.0).half()
    residual = torch.ones(1, 64).half()
    residual[0, :32] = 3.0  # 2051 and 2049 are no fp16 numbers: 2052 and 2048
    weight = torch.ones(64).half()
    y, total = add_rms_norm(x, residual, weight, EPS)
    assert total[0, 0] == 2052 and total[0, -1] == 2048
    wide = x.float() + residual.float()
    unrounded = (wide * torch.rsqrt(wide.square().mean() + EPS)).half()
    wanted = rms_norm(total, weight, EPS)
    assert (unrounded != wanted).any(), "the inputs do not tell the two apart"
    torch.testing.assert_close(y, wanted, rtol=0, atol=0)


def test_empty_rows_and_wrong_arguments():
    y, total = add_rms_norm(torch.zeros(0, 8), torch.zeros(0, 8), torch.ones(8), EPS)
    assert y.shape == total.shape == (0, 8)
    with pytest.raises(ValueError, match="agree in shape and dtype"):
        add_rms_norm(torch.zeros(2, 8), torch.zeros(1, 8), torch.ones(8), EPS)
    with pytest.raises(ValueError, match="weight must have shape"):
        add_rms_norm(torch.zeros(2, 8), torch.zeros(2, 8), torch.ones(7), EPS)


def norm(x, weight, offset):
    """The formula without any rounding."""
    return (offset + weight) * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def check_form(place, inputs, gradients, assert_near, **form):
    """Outputs and all gradients of a norm alone, of x + residual, or before the residual is added."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    x, residual, weight = exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    function = {"alone": rms_norm, "of sum": add_rms_norm, "before sum": rms_norm_add}[place]
    offset = form.get("offset", 0.0)
    if place == "alone":
        outputs, wanted = [function(leaves[0], leaves[2], EPS, **form)], [norm(x, weight, offset)]
    elif place == "of sum":
        outputs, wanted = function(*leaves, EPS, **form), [norm(x + residual, weight, offset), x + residual]
    else:
        outputs, wanted = [function(*leaves, EPS, **form)], [norm(x, weight, offset) + residual]
    assert "RmsNorm" in type(outputs[0].grad_fn).__name__, "the reference ran, not the kernel"
    gradients = gradients[: len(outputs)]
    actual = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
    expected_gradients = torch.autograd.grad(wanted, exact, [d.double() for d in gradients], allow_unused=True)
    for a, w in zip((*outputs, *actual), (*wanted, *expected_gradients), strict=True):
        assert (a is None) == (w is None)
        if a is not None:
            assert_near(a.detach(), w.detach(), inputs[0].dtype)
    assert [a.dtype for a in actual if a is not None] == [
        leaf.dtype for a, leaf in zip(actual, leaves, strict=True) if a is not None
    ]


ONE_TILE, BLOCKS = pytest.param((2, 3, 65), 256, id="65"), pytest.param((5, 40), 16, id="40 by 16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", ["alone", "of sum", "before sum"])
@pytest.mark.parametrize(("offset", "rounds_once"), [(1.0, True), (0.0, True), (0.0, False)])
@pytest.mark.parametrize(("shape", "largest"), [ONE_TILE, BLOCKS])
def test_forms_match_fp64(shape, largest, offset, rounds_once, place, dtype, monkeypatch, assert_near):
    """Tiles of 16: rows of several blocks. The fp32 weight of a half x is read as it is."""
    for name in ("FORWARD_TILES", "BACKWARD_TILES"):
        monkeypatch.setattr(module, name, (Tile(largest, least=256 if largest > 16 else 1),))
    torch.manual_seed(11)
    x, residual, dy, dsum = (torch.randn(shape).to(dtype) for _ in range(4))
    weight = torch.randn(shape[-1]).to(torch.float32 if rounds_once else dtype)
    inputs, form = (x, residual, weight), {"offset": offset, "rounds_once": rounds_once}
    check_form(place, inputs, (dy, dsum), assert_near, **form)


def test_sum_after_of_strided_inputs_surrounded_by_nan(assert_near):
    torch.manual_seed(12)
    buffer = torch.full((3, 3, 41), float("nan"))
    buffer[..., 4:-4] = torch.randn(3, 3, 33)
    x, residual, dy = buffer[:, ::2, 4:-4]
    check_form("before sum", (x, residual, torch.randn(66)[::2]), (dy,), assert_near, offset=1.0, rounds_once=True)


@pytest.mark.parametrize("needed", ["x", "residual", "weight"])
def test_one_gradient_of_a_sum_after(needed, assert_near):
    """A zero-bubble schedule takes dx first; the residual's gradient is handed on."""
    torch.manual_seed(13)
    x, residual, weight, dy = torch.randn(3, 33), torch.randn(3, 33), torch.randn(33), torch.randn(3, 33)
    inputs = {"x": x, "residual": residual, "weight": weight}
    exact = {name: tensor.double() for name, tensor in inputs.items()}
    inputs[needed].requires_grad_()
    exact[needed].requires_grad_()
    (actual,) = torch.autograd.grad(rms_norm_add(*inputs.values(), EPS), inputs[needed], dy)
    wanted = norm(exact["x"], exact["weight"], 0.0) + exact["residual"]
    assert_near(actual, *torch.autograd.grad(wanted, exact[needed], dy.double()))
    if needed == "residual":
        assert torch.equal(actual, dy)


def test_rounds_once_where_gemma_does_and_twice_with_a_sum():
    """fp16, as in test_rounds_where_hugging_face_rounds."""
    torch.manual_seed(14)
    x = (torch.randint(0, 2, (8, 64)) * 2 - 1).half() * torch.tensor([1.25, 1.5] * 32).half()
    weight, residual = torch.randn(64).half(), torch.randn(8, 64).half()
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    once, twice = (wide * (1.0 + weight.float())).half(), (wide.half().float() * (1.0 + weight.float())).half()
    assert (once != twice).any(), "the inputs do not tell the two roundings apart"
    form = {"offset": 1.0, "rounds_once": True}
    torch.testing.assert_close(rms_norm(x, weight, EPS, **form), once, rtol=0, atol=0)
    unrounded = (wide * (1.0 + weight.float()) + residual.float()).half()
    assert (unrounded != once + residual).any()
    torch.testing.assert_close(rms_norm_add(x, residual, weight, EPS, **form), once + residual, rtol=0, atol=0)
    assert torch.equal(add_rms_norm(x, residual, weight, EPS, **form)[0], rms_norm(x + residual, weight, EPS, **form))


@pytest.mark.parametrize("largest", [256, 16])
def test_without_a_weight(largest, monkeypatch, assert_near):
    for name in ("FORWARD_TILES", "BACKWARD_TILES"):
        monkeypatch.setattr(module, name, (Tile(largest),))
    torch.manual_seed(15)
    x, residual, dy = torch.randn(3, 5, 33)
    x.requires_grad_()
    wide = x.detach().double().requires_grad_()
    y = rms_norm_add(x, residual, None, EPS)
    wanted = norm(wide, 1.0, 0.0) + residual.double()
    assert_near(y.detach(), wanted.detach())
    assert_near(*torch.autograd.grad(y, x, dy), *torch.autograd.grad(wanted, wide, dy.double()))
