"""Write `as_strided`, which reads memory by strides, by positions of its operand: reshape, unfold and slices.

A program's tensors have other layouts than one process'. For dims that are contiguous as one dim, each stride of the
result is a whole number of steps: one such dim of the result is a slice, two are windows that may overlap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError


@dataclass(slots=True)
class _Line:
    """A dim of the operand, or neighboring dims that are one in memory: ``size`` elements, ``stride`` apart.

    start: of the read. ways: (dim of the result, its size, positions per step), largest steps first.
    """

    size: int
    stride: int
    start: int = 0
    ways: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def last(self) -> int:
        """Return the last position that is read."""
        return self.start + sum((size - 1) * step for _, size, step in self.ways)


class ByPosition(TorchFunctionMode):
    """Context manager in which `as_strided` calls its equivalent by positions, and `stft`, whose frames overlap,
    unfolds.

    Raises TraceError where strides are unknown.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.stft, Tensor.stft):
            return _stft(*args, **kwargs)
        if func not in (torch.as_strided, Tensor.as_strided):
            return func(*args, **kwargs)
        arguments = dict(zip(("input", "size", "stride", "storage_offset"), args, strict=False)) | dict(kwargs)
        return by_position(
            arguments["input"], tuple(arguments["size"]), tuple(arguments["stride"]), arguments.get("storage_offset")
        )


def by_position(x: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int | None) -> Tensor:
    """Return `x.as_strided(size, stride, offset)`. Raises TraceError where it reads outside x, or along no line."""
    lines = _lines(x)
    rest = 0 if offset is None else offset - int(x.storage_offset())
    count = math.prod(size)
    if x.is_contiguous() and _is_packed(size, stride) and rest >= 0 and 0 < count <= x.numel() - rest:
        return (x if count == x.numel() else x.reshape(-1).narrow(0, rest, count)).reshape(size)
    for line in sorted(lines, key=lambda line: -line.stride):
        line.start, rest = divmod(rest, line.stride)
    dims = sorted((d for d, n in enumerate(size) if n != 1), key=lambda d: -stride[d])
    for dim in dims:
        fitting = [line for line in lines if stride[dim] and stride[dim] % line.stride == 0]
        if fitting:
            line = max(fitting, key=lambda line: line.stride)
            line.ways.append((dim, size[dim], stride[dim] // line.stride))
    lines = _merged(lines)
    is_read = rest == 0 and sum(len(line.ways) for line in lines) == len(dims) and 0 not in size
    if not is_read or any(line.last >= line.size or line.start < 0 or len(line.ways) > 2 for line in lines):
        raise refused_strides(
            f"size {size}, stride {stride} of a tensor of shape {tuple(x.shape)}, stride {x.stride()}"
        )
    result = x.reshape([line.size for line in lines])
    order: list[int] = []
    for at, line in enumerate(lines):
        result = result.narrow(at, line.start, line.last - line.start + 1)
        if len(line.ways) == 2:
            (outer, _, step), (inner, count, inner_step) = line.ways
            result = result.unfold(at, (count - 1) * inner_step + 1, step)[..., ::inner_step]
            order.append(outer)
            continue
        order += [dim for dim, _, _ in line.ways]
        result = result[(slice(None),) * at + (slice(None, None, line.ways[0][2]),)] if line.ways else result
    kept = [n for n, line in zip(result.shape, lines, strict=False) if line.ways]
    result = result.reshape(kept + list(result.shape[len(lines) :]))
    order += [line.ways[1][0] for line in lines if len(line.ways) == 2]
    return result.permute([order.index(dim) for dim in sorted(order)]).reshape(size)


def _is_packed(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether elements are contiguous, those of the last dim adjacent."""
    inner = [math.prod(size[dim + 1 :]) for dim in range(len(size))]
    return all(actual == wanted for n, actual, wanted in zip(size, stride, inner, strict=True) if n != 1)


def refused_strides(values: str) -> TraceError:
    """Return the error for strides without such a form."""
    return TraceError(
        "as_strided reads memory by strides, which differ in a program",
        values=values,
        alternatives="use unfold, slices, transposes and expand, which go by positions",
    )


def _lines(x: Tensor) -> list[_Line]:
    """Return the dims of x, in order."""
    lines = [_Line(int(size), int(stride)) for size, stride in zip(x.shape, x.stride(), strict=True) if size != 1]
    if not lines or any(line.stride <= 0 or line.size == 0 for line in lines):
        raise refused_strides(f"a tensor of shape {tuple(x.shape)}, stride {x.stride()}")
    return lines


def _merged(lines: list[_Line]) -> list[_Line]:
    """Return the lines; one that is read beyond its end joins the one before it, if memory continues there."""
    merged: list[_Line] = []
    for line in reversed(lines):
        merged.insert(0, line)
        while len(merged) > 1 and merged[1].last >= merged[1].size:
            left, right = merged[:2]
            if left.stride != right.size * right.stride:
                break
            ways = [(dim, size, step * right.size) for dim, size, step in left.ways] + right.ways
            merged[:2] = [_Line(left.size * right.size, right.stride, left.start * right.size + right.start, ways)]
    return merged


def _stft(
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    **others: Any,
) -> Tensor:
    """Return `torch.stft`: the frames, windowed, and their transform."""
    if others.get("align_to_window") is not None or return_complex is not True or x.is_complex():
        raise refused_strides("torch.stft of complex numbers, as real numbers, or with align_to_window")
    length = n_fft if win_length is None else win_length
    window = torch.ones(length, dtype=x.dtype) if window is None else window
    if length < n_fft:
        window = F.pad(window, ((n_fft - length) // 2, n_fft - length - (n_fft - length) // 2))
    if center:
        rows = x.reshape(1, -1, x.shape[-1])
        x = F.pad(rows, (n_fft // 2, n_fft // 2), mode=pad_mode).reshape(*x.shape[:-1], -1)
    frames = x.unfold(-1, n_fft, hop_length or n_fft // 4) * window
    transform = torch.fft.rfft if onesided is not False and not window.is_complex() else torch.fft.fft
    spectrum: Tensor = transform(frames, norm="ortho" if normalized else None).transpose(-1, -2)
    return spectrum
