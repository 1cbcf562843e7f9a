"""Rows scaled to 8-bit floating point (e4m3), and a linear layer that multiplies them.

Formula, per row (Micikevicius et al. 2022, "FP8 Formats for Deep Learning", sections 3 and 3.2; a scale per row: per
token of x, per output of weight):

    scale_N = max(amax_K(|x_NK|), 2 ** -100) / 448           448: the largest e4m3; nan where the row is not finite
    q_NK    = round(x_NK / scale_N)                          round: to e4m3, to nearest even
    xhat_NK = q_NK * scale_N

    y_NM  = (qx_NK @ qw_MK.T) * scale_x_N * scale_w_M + bias_M
    dx_NK = (qdy_NM @ qwt_KM.T) * scale_dy_N * scale_wt_K    wt: the transposed weight, scaled by its own rows
    dw_MK = dy_NM.T @ x_NK                                   in x's dtype, or by the same product of qdyt and qxt

Error. e4m3 has 3 bits after the leading one down to 2 ** -6, and steps of 2 ** -9 below. Half a step is at most
2 ** -4 of the value, or 2 ** -10, so (but for fp32 roundings, 2 ** -22 of the value)

    |xhat - x| <= e(x) = max(2 ** -4 |x|, 2 ** -10 scale)    2 ** -10 scale = 2.2e-6 of the row's largest

and nothing is clipped, since |x| / scale <= 448. A product of two such errs by at most
sum_K(|x| e(w) + |w| e(x) + e(x) e(w)), at worst 13 % of sum_K(|x| |w|); rounding errors are independent, so that the
usual error is 4 % of |y|.

Shapes: N rows (all leading dims), K inputs, M outputs. Scales are fp32. Products run on the fp8 units, which GPUs have
from compute capability 8.9 on (`torch._scaled_mm` with a scale per row, which gives bf16 and needs multiples of 16; for
8.9 torch has a kernel of its own since 2.7: github.com/pytorch/pytorch/pull/144348); elsewhere, and for other dtypes
and sizes, the same numbers are multiplied in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from . import dispatch
from .dispatch import as_rows, jit, tl, use_triton
from .tile import Tile
from .tuning import launch

E4M3: Final = torch.float8_e4m3fn
E4M3_MAX: Final = 448.0
# Below this a row counts as zero but for its subnormals: 448 / amax would overflow for the smallest fp32 numbers.
SMALLEST_AMAX: Final = 2.0**-100
QUANTIZE_TILES: Final = (
    Tile(8192),
    Tile(8192, per_warp=256),
    Tile(8192, per_warp=1024),
    Tile(16384),
    Tile(4096),
)
DEQUANTIZE_TILES: Final = (Tile(8192), Tile(8192, per_warp=256), Tile(4096), Tile(2048), Tile(1024))
_MULTIPLE: Final = 16


def has_e4m3(tensor: torch.Tensor) -> bool:
    """Whether Triton kernels on the tensor's device can convert to e4m3: compute capability 8.9, or the interpreter."""
    return not tensor.is_cuda or torch.cuda.get_device_capability(tensor.device) >= (8, 9)


def quantize_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula in torch operations."""
    x_compute = x.to(torch.float32)
    amax = x_compute.abs().amax(-1, keepdim=True)
    scale = amax.clamp(min=SMALLEST_AMAX) / E4M3_MAX
    scale = scale.masked_fill(~amax.isfinite(), torch.nan)
    return (x_compute / scale).to(E4M3), scale


def dequantize_rows_reference(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The formula in torch operations."""
    return (q.to(torch.float32) * scale).to(dtype)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x `[..., K]`, any strides and floating dtype -> (q `[..., K]` e4m3, scale `[..., 1]` fp32), contiguous.

    A row with an element that is not finite gets the scale nan, and is nan when dequantized.
    """
    if not (use_triton(x) and has_e4m3(x)):
        return quantize_rows_reference(x)
    x_NK = as_rows(x)
    num_rows, num_cols = x_NK.shape

    def run(tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
        _, block, whole_row, warps = tile.fit(num_cols)
        q = torch.empty(x.shape, dtype=E4M3, device=x.device)
        scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
        _quantize_kernel[(num_rows,)](
            x_NK,
            q,
            scale,
            num_cols,
            x_NK.stride(0),
            LARGEST=E4M3_MAX,
            SMALLEST_AMAX=SMALLEST_AMAX,
            BLOCK=block,
            WHOLE_ROW=whole_row,
            num_warps=warps,
        )
        return q, scale

    return launch("quantize_rows", QUANTIZE_TILES, run, (num_rows, num_cols), x_NK)


def dequantize_rows(q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """q `[..., K]`, scale `[..., 1]` as `quantize_rows` gives them -> `[..., K]` in `dtype`.

    Raises:
        ValueError: scale is not `[..., 1]`.
    """
    if scale.shape != (*q.shape[:-1], 1):
        raise ValueError(f"scale must have shape {(*q.shape[:-1], 1)}, got {tuple(scale.shape)}")
    is_kernel_dtype = dtype in dispatch.KERNEL_DTYPES
    if not (use_triton(scale) and has_e4m3(scale) and is_kernel_dtype and q.is_contiguous() and q.numel()):
        return dequantize_rows_reference(q, scale, dtype)
    scale = scale.contiguous()
    num_cols = q.shape[-1]
    num_rows = q.numel() // num_cols

    def run(tile: Tile) -> torch.Tensor:
        _, block, _, warps = tile.fit(num_cols)
        blocks_per_row = -(-num_cols // block)
        out = torch.empty(q.shape, dtype=dtype, device=q.device)
        _dequantize_kernel[(num_rows * blocks_per_row,)](
            q, scale, out, num_cols, blocks_per_row, BLOCK=block, num_warps=warps
        )
        return out

    return launch("dequantize_rows", DEQUANTIZE_TILES, run, (num_rows, num_cols), q, half=dtype.itemsize == 2)


def scaled_product(
    q_a_NK: torch.Tensor,
    scale_a_N1: torch.Tensor,
    q_b_MK: torch.Tensor,
    scale_b_M1: torch.Tensor,
    dtype: torch.dtype,
    fast_accumulation: bool = False,
) -> torch.Tensor:
    """`[N, M]`: the rows of a times the rows of b, dequantized; on the fp8 units where they can.

    fast_accumulation: partial sums stay in the units' own registers (14 bits or so) instead of being added in fp32.
    """
    num_outputs, num_inputs = q_b_MK.shape
    fits = num_outputs % _MULTIPLE == num_inputs % _MULTIPLE == 0 and q_a_NK.numel() > 0 and q_b_MK.numel() > 0
    if fits and dtype == torch.bfloat16 and _has_products(q_a_NK.device):
        product: torch.Tensor = torch._scaled_mm(
            q_a_NK,
            q_b_MK.t(),
            scale_a=scale_a_N1,
            scale_b=scale_b_M1.t(),
            out_dtype=dtype,
            use_fast_accum=fast_accumulation,
        )
        return product
    # Not in place: selective recomputation may hold the product.
    scaled = (q_a_NK.to(torch.float32) @ q_b_MK.to(torch.float32).t()) * scale_a_N1
    return scaled.mul_(scale_b_M1.t()).to(dtype)


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    fp8_grad_weight: bool = False,
    fast_accumulation: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.linear` with its products in e4m3, for those who ask; differentiable once.

    Args:
        x: `[..., K]`.
        weight: `[M, K]`, x's dtype.
        bias: `[M]`, x's dtype, or None.
        fp8_grad_weight: the gradient of weight in e4m3 too; its sum over all tokens is what training is most sensitive
            to, and it takes two more transposed copies.
        fast_accumulation: of the forward product, see `scaled_product`; gradients never.

    Raises:
        ValueError: shapes or dtypes do not agree.
    """
    (y,) = fp8_linears(x, (weight,), (bias,), fp8_grad_weight, fast_accumulation)
    return y


def fp8_linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
    fp8_grad_weight: bool = False,
    fast_accumulation: bool = False,
) -> tuple[torch.Tensor, ...]:
    """`fp8_linear` of x with each weight and its bias, if any, to the bit; x is cast once.

    With `fp8_grad_weight` its transpose is, too, in the first backward that needs it. Each layer is a node of its own
    in autograd's graph, so that gradients are made, handed on and added up one by one, as of separate calls.
    """
    for weight in weights:
        if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:] or x.dtype != weight.dtype:
            raise ValueError(
                "x must be [..., K] and weight [M, K] of one dtype; "
                f"got {tuple(x.shape)} {x.dtype} and {tuple(weight.shape)} {weight.dtype}"
            )
    with torch.no_grad():
        rows = quantize_rows(x.reshape(-1, x.shape[-1]))
    columns = _Columns(len(weights)) if fp8_grad_weight else None
    pairs = zip(weights, biases or (None,) * len(weights), strict=True)
    return tuple(
        _Fp8Linear.apply(x, weight, bias, rows, columns, fast_accumulation)  # type: ignore[no-untyped-call]
        for weight, bias in pairs
    )


def _has_products(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


@jit
def _quantize_kernel(
    x_ptr: tl.tensor,
    q_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    num_cols: tl.tensor,
    x_row_stride: tl.tensor,
    LARGEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + row * x_row_stride
    q_row = q_ptr + row * num_cols
    cols = tl.arange(0, BLOCK)
    if WHOLE_ROW:
        x = tl.load(x_row + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
        amax = tl.max(tl.abs(x), axis=0)
        # 0 for finite elements, nan otherwise; a maximum may pass over nan.
        not_finite = tl.sum(x * 0.0, axis=0)
        scale = tl.div_rn(tl.maximum(amax, SMALLEST_AMAX), LARGEST) + not_finite
        tl.store(q_row + cols, tl.div_rn(x, scale).to(q_ptr.dtype.element_ty), mask=cols < num_cols)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        zeros = tl.zeros([BLOCK], tl.float32)
        for start in range(0, num_cols, BLOCK):
            x = tl.load(x_row + start + cols, mask=start + cols < num_cols, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(x))
            zeros += x * 0.0
        amax = tl.max(largest, axis=0)
        scale = tl.div_rn(tl.maximum(amax, SMALLEST_AMAX), LARGEST) + tl.sum(zeros, axis=0)
        for start in range(0, num_cols, BLOCK):
            ok = start + cols < num_cols
            x = tl.load(x_row + start + cols, mask=ok, other=0.0).to(tl.float32)
            tl.store(q_row + start + cols, tl.div_rn(x, scale).to(q_ptr.dtype.element_ty), mask=ok)
    tl.store(scale_ptr + row, scale)


@jit
def _dequantize_kernel(
    q_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_cols: tl.tensor,
    blocks_per_row: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row = (program // blocks_per_row).to(tl.int64)
    cols = (program % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    ok = cols < num_cols
    q = tl.load(q_ptr + row * num_cols + cols, mask=ok).to(tl.float32)
    value = q * tl.load(scale_ptr + row)
    tl.store(out_ptr + row * num_cols + cols, value.to(out_ptr.dtype.element_ty), mask=ok)


class _Columns:
    """The transpose of an x in e4m3: cast for the first of its readers that asks, let go by the last."""

    def __init__(self, num_readers: int) -> None:
        self._num_readers = self._num_left = num_readers
        self._cast: tuple[torch.Tensor, torch.Tensor] | None = None

    def of(self, x_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The codes `[K, N]` and scales `[K, 1]` of x."""
        cast = quantize_rows(x_NK.t()) if self._cast is None else self._cast
        self._num_left -= 1
        self._cast = cast if self._num_left else None
        self._num_left = self._num_left or self._num_readers
        return cast


class _Fp8Linear(torch.autograd.Function):
    """Saves x and weight as they are: their transposes need scales of their own. rows: x in e4m3."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: tuple[torch.Tensor, torch.Tensor],
        columns: _Columns | None,
        fast_accumulation: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.columns = columns
        y_NM = scaled_product(*rows, *quantize_rows(weight), x.dtype, fast_accumulation)
        return (y_NM if bias is None else y_NM + bias).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        columns: _Columns | None = ctx.columns
        need_dx, need_dw, need_db, *_ = ctx.needs_input_grad
        dy_NM, x_NK = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dx = dw = db = None
        if need_dx:
            dx = scaled_product(*quantize_rows(dy_NM), *quantize_rows(weight.t()), x.dtype).view(x.shape)
        if need_dw and columns is not None:
            dw = scaled_product(*quantize_rows(dy_NM.t()), *columns.of(x_NK), x.dtype)
        elif need_dw:
            dw = dy_NM.t() @ x_NK
        if need_db:
            db = dy_NM.sum(0, dtype=torch.float32).to(x.dtype)
        return dx, dw, db, None, None, None
