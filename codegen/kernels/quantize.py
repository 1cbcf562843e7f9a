"""Blocks of numbers as 8 bits each and a scale, for collectives that move a quarter or half of the bytes.

Formula, per block of B consecutive elements (Wang et al. 2023, "ZeRO++", section 3.1; symmetric, so zero stays zero):

    scale = max(amax(|x|), 2 ** -100) / L        L = 127 for int8, 448 for e4m3; nan where the block is not finite
    code  = round(x / scale)                     to the nearest integer or e4m3, ties to even
    xhat  = code * scale

    stochastic (int8):  code = floor(x / scale + u),  u uniform in [0, 1)

and for a sum over R parts, each quantized by itself, as the receiver of a reduce-scatter by all-to-all forms it:

    total = sum_R(code_R * scale_R)              in fp32, in order of R: equal bits on every run

Error, with s the block's scale. |x| / s <= L, so nothing is clipped.

    int8        |xhat - x| = s |round(x / s) - x / s| <= s / 2 = amax / 254
    stochastic  floor(z + u) is one of the two integers around z, the upper one with probability z - floor(z): the
                expectation of xhat is x, and |xhat - x| < s = amax / 127
    e4m3        |xhat - x| <= max(2 ** -4 |x|, 2 ** -10 s) (see fp8.py): better for small elements, worse for large ones
    sum         |total - sum_R(x_R)| <= the sum of the parts' bounds: R * amax / 254 for equal amax

Each fp32 rounding (of s, of x / s <= 127, of the product) adds at most 2 ** -24 of |x|, 2 ** -16 s in all. A result in
bf16 or fp16 is rounded once more. Bytes per element: 1 + 4 / B.

Shapes: n elements in F blocks of B (the last filled with zeros), R parts.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from . import dispatch
from .dispatch import jit, tl, use_triton
from .fp8 import E4M3, E4M3_MAX, SMALLEST_AMAX, has_e4m3
from .tile import Tile
from .tuning import launch

_LARGEST: Final = {torch.int8: 127.0, E4M3: E4M3_MAX}
_SMALLEST_BLOCK: Final = 16
_LARGEST_BLOCK: Final = 8192
# Short blocks share a program; longer ones have one each, whatever `most` says.
TILES: Final = (
    Tile(_LARGEST_BLOCK, least=4096),
    Tile(_LARGEST_BLOCK, least=4096, per_warp=256),
    Tile(_LARGEST_BLOCK, least=4096, per_warp=1024),
    Tile(_LARGEST_BLOCK, least=2048),
    Tile(_LARGEST_BLOCK, least=8192),
)
_ALIGNMENT: Final = 16


def num_blocks(num_elements: int, block_size: int) -> int:
    """F; raises ValueError where the block size is not a power of two between 16 and 8192."""
    if block_size.bit_count() != 1 or not _SMALLEST_BLOCK <= block_size <= _LARGEST_BLOCK:
        raise ValueError(
            f"block_size must be a power of two from {_SMALLEST_BLOCK} to {_LARGEST_BLOCK}, got {block_size}"
        )
    return -(-num_elements // block_size)


def message_num_bytes(num_elements: int, block_size: int) -> int:
    """Bytes of codes and scales in one message, a multiple of 16 so that messages may follow one another."""
    blocks = num_blocks(num_elements, block_size)
    return blocks * block_size + -(-4 * blocks // _ALIGNMENT) * _ALIGNMENT


def message_views(
    messages: torch.Tensor, num_elements: int, block_size: int, dtype: torch.dtype = torch.int8
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes `[..., F, B]`, scales `[..., F]` fp32) within messages `[..., message_num_bytes]` uint8: codes come first.

    So that one collective moves both.
    """
    blocks = num_blocks(num_elements, block_size)
    if messages.dtype != torch.uint8 or messages.shape[-1:] != (message_num_bytes(num_elements, block_size),):
        raise ValueError(
            f"messages must be uint8 [..., {message_num_bytes(num_elements, block_size)}], "
            f"got {messages.dtype} {tuple(messages.shape)}"
        )
    codes = messages[..., : blocks * block_size].view(dtype).view(*messages.shape[:-1], blocks, block_size)
    return codes, messages[..., blocks * block_size :].view(torch.float32)[..., :blocks]


def quantize_blocks_reference(
    x: torch.Tensor, block_size: int, dtype: torch.dtype = torch.int8, seed: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula in torch operations; its random numbers are torch's, not the kernel's."""
    blocks = num_blocks(x.numel(), block_size)
    x_FB = torch.zeros(blocks * block_size, dtype=torch.float32, device=x.device)
    x_FB[: x.numel()] = x.reshape(-1)
    x_FB = x_FB.view(blocks, block_size)
    amax_F = x_FB.abs().amax(1)
    scales_F = amax_F.clamp(min=SMALLEST_AMAX) / _LARGEST[dtype]
    scales_F.masked_fill_(~amax_F.isfinite(), torch.nan)
    ratio_FB = x_FB / scales_F[:, None]
    if dtype != torch.int8:
        return ratio_FB.to(dtype), scales_F
    if seed is None:
        ratio_FB = ratio_FB.round()
    else:
        generator = torch.Generator(x.device).manual_seed(seed)
        ratio_FB = (ratio_FB + torch.rand(ratio_FB.shape, generator=generator, device=x.device)).floor()
    return ratio_FB.clamp(-127, 127).nan_to_num(0.0).to(dtype), scales_F


def dequantize_sum_reference(
    codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The formula in torch operations."""
    total_FB = torch.zeros(codes.shape[1:], dtype=torch.float32, device=codes.device)
    for codes_FB, scales_F in zip(codes, scales, strict=True):
        total_FB += codes_FB.to(torch.float32) * scales_F[:, None]
    return total_FB.view(-1)[: math.prod(shape)].view(shape).to(dtype)


def quantize_blocks(
    x: torch.Tensor,
    block_size: int,
    dtype: torch.dtype = torch.int8,
    seed: int | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of x, read as one line of elements.

    Args:
        x: n elements of any shape and floating dtype.
        block_size: B, a power of two from 16 to 8192; 256 is ZeRO++'s order of magnitude.
        dtype: torch.int8 or torch.float8_e4m3fn.
        seed: for stochastic rounding (int8 only), other in every call; None: to nearest.
        out: (codes, scales) to write into, such as `message_views` gives.

    Returns:
        Codes `[F, B]`, scales `[F]` fp32. A block with an element that is not finite gets the scale nan, and is nan
        when dequantized.

    Raises:
        ValueError: block size, dtype or `out` are none of these.
    """
    blocks = num_blocks(x.numel(), block_size)
    if dtype not in _LARGEST or (seed is not None and dtype != torch.int8):
        raise ValueError(f"dtype must be int8 or e4m3, and int8 for stochastic rounding; got {dtype}")
    if out is None:
        codes = torch.empty((blocks, block_size), dtype=dtype, device=x.device)
        scales = torch.empty(blocks, dtype=torch.float32, device=x.device)
    else:
        codes, scales = out
        _check_out(codes, scales, (blocks, block_size), dtype)
    if not (use_triton(x) and has_e4m3(x)):
        quantized = quantize_blocks_reference(x, block_size, dtype, seed)
        codes.copy_(quantized[0])
        scales.copy_(quantized[1])
        return codes, scales
    x = x.contiguous()

    def run(tile: Tile) -> None:
        rows, _, _, warps = tile.fit(block_size)
        _quantize_kernel[(-(-blocks // rows),)](
            x,
            codes,
            scales,
            x.numel(),
            blocks,
            0 if seed is None else seed,
            LARGEST=_LARGEST[dtype],
            SMALLEST_AMAX=SMALLEST_AMAX,
            ROWS=rows,
            BLOCK=block_size,
            INTEGER=dtype == torch.int8,
            STOCHASTIC=seed is not None,
            num_warps=warps,
        )

    launch("quantize_blocks", TILES, run, (blocks, block_size), x, codes, stochastic=seed is not None)
    return codes, scales


def _check_out(codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
    shapes_fit = codes.shape == shape and scales.shape == shape[:1]
    if not (shapes_fit and codes.dtype == dtype and codes.is_contiguous() and scales.is_contiguous()):
        raise ValueError(
            f"out must be contiguous {dtype} {shape} and fp32 {shape[:1]}, "
            f"got {codes.dtype} {tuple(codes.shape)} and {scales.dtype} {tuple(scales.shape)}"
        )


def dequantize_blocks(
    codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return the input of `quantize_blocks`, but for its error: `shape`, in `dtype`."""
    return dequantize_sum(codes[None], scales[None], shape, dtype)


def dequantize_sum(
    codes: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """The sum of R parts, in one pass.

    Args:
        codes: `[R, F, B]`, contiguous but for R.
        scales: `[R, F]` fp32, contiguous but for R.
        shape: of the result, of F B elements or fewer.
        dtype: of the result.

    Raises:
        ValueError: shapes do not agree.
    """
    blocks, block_size = codes.shape[1:]
    if scales.shape != codes.shape[:2] or num_blocks(math.prod(shape), block_size) != blocks:
        raise ValueError(
            f"codes [R, F, B], scales [R, F] and a shape of F blocks must agree; "
            f"got {tuple(codes.shape)}, {tuple(scales.shape)}, {shape}"
        )
    contiguous = codes[:1].is_contiguous() and scales[:1].is_contiguous()
    if not (use_triton(scales) and has_e4m3(scales) and dtype in dispatch.KERNEL_DTYPES and contiguous):
        return dequantize_sum_reference(codes, scales, shape, dtype)

    def run(tile: Tile) -> torch.Tensor:
        rows, _, _, warps = tile.fit(block_size)
        out = torch.empty(shape, dtype=dtype, device=codes.device)
        _dequantize_sum_kernel[(-(-blocks // rows),)](
            codes,
            scales,
            out,
            out.numel(),
            blocks,
            codes.shape[0],
            codes.stride(0),
            scales.stride(0),
            ROWS=rows,
            BLOCK=block_size,
            num_warps=warps,
        )
        return out

    half = dtype.itemsize == 2
    return launch("dequantize_sum", TILES, run, (codes.shape[0], blocks, block_size), codes, half=half)


@jit
def _quantize_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_elements: tl.tensor,
    num_blocks: tl.tensor,
    seed: tl.tensor,
    LARGEST: tl.constexpr,
    SMALLEST_AMAX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTEGER: tl.constexpr,
    STOCHASTIC: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + index, mask=index < num_elements, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(x), axis=1)
    # 0 for finite elements, nan otherwise; a maximum may pass over nan.
    not_finite = tl.sum(x * 0.0, axis=1)
    scale = tl.div_rn(tl.maximum(amax, SMALLEST_AMAX), LARGEST) + not_finite
    code = tl.div_rn(x, tl.broadcast_to(scale[:, None], (ROWS, BLOCK)))
    if INTEGER:
        if STOCHASTIC:
            # A number per element of x, whatever the blocks: the counter is the element's 64-bit index.
            low = (index & 0xFFFFFFFF).to(tl.uint32)
            high = (index >> 32).to(tl.uint32)
            random, _, _, _ = tl.philox(seed, low, high, high * 0, high * 0)
            code = tl.floor(code + tl.uint_to_uniform_float(random))
        else:
            # 1.5 * 2 ** 23: the sum has no bits after the point, so adding it rounds to nearest even.
            code = (code + 12582912.0) - 12582912.0
        # x / scale + u may round to 128; nan has no integer, and its scale says it.
        code = tl.minimum(tl.maximum(code, -127.0), 127.0)
        code = tl.where(scale[:, None] == scale[:, None], code, 0.0)
    tl.store(codes_ptr + index, code.to(codes_ptr.dtype.element_ty), mask=(rows < num_blocks)[:, None])
    tl.store(scales_ptr + rows, scale, mask=rows < num_blocks)


@jit
def _dequantize_sum_kernel(
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_elements: tl.tensor,
    num_blocks: tl.tensor,
    num_parts: tl.tensor,
    codes_stride: tl.tensor,
    scales_stride: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    index = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    row_ok = rows < num_blocks
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for part in range(0, num_parts):
        codes_part = codes_ptr + tl.cast(part, tl.int64) * codes_stride
        scales_part = scales_ptr + tl.cast(part, tl.int64) * scales_stride
        code = tl.load(codes_part + index, mask=row_ok[:, None]).to(tl.float32)
        scale = tl.load(scales_part + rows, mask=row_ok, other=0.0)
        total += code * scale[:, None]
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=index < num_elements)
