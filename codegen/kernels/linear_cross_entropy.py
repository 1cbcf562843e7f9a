"""Linear layer and softmax cross entropy in chunks of rows: the logits `[N, V]` never exist whole, nor their gradient.

Formula, per row, with s = scale / num_targets, where scale is the gradient of the loss:

    logits_NV = round(x_NH @ weight_VH.T + bias_V)                      round: to x's dtype, as unfused modules do
    loss_N    = log(sum_V(exp(logits_NV - max_N))) - (logits_N[target_N] - max_N)   0 where target_N == ignore_index
    loss      = sum_N(loss_N) / num_targets

    dlogits   = exp(logits_NV - max_N - logsum_N) - onehot_NV                  0 where target_N == ignore_index
    dx_NH     = s * dlogits @ weight_VH
    dweight   = s * dlogits.T @ x_NH
    dbias     = s * sum_N(dlogits)

The gradients but for s are computed in the forward pass while a chunk's logits are there (Hsu et al. 2024, "Liger
Kernel", section 3.2), dlogits in the place of the logits. s is applied in the backward pass in fp32, so that a small
1 / num_targets neither rounds dlogits nor underflows in fp16, and a loss scale is in it exactly. In fp16 gradients wait
times 2 ** 10: those of rows that are nearly right, whose dlogits are small, would else have lost digits before a loss
scale came to them. A row's |dlogits| add up to 2 at most, so nothing overflows with weights below 31.

Sharded vocabulary. Rank r of t holds rows [r V, (r + 1) V) of the weight, so its own logits. With m_r, z_r the maximum
over its columns and the sum of exp(logits - m_r), and y_r the target's logit where it holds it, else 0:

    max    = max_r(m_r)
    logsum = log(sum_r(z_r * exp(m_r - max)))
    loss_N = logsum - (sum_r(y_r) - max)

so (m_r, z_r, y_r), 3 fp32 numbers per row, are all that ranks must exchange: one all-gather. Without gradients that is
one for all rows, at the end. With gradients it is one per chunk: rows of dlogits @ weight could be corrected afterwards
(the softmax over a rank's own columns is off by a factor per row), dlogits.T @ x could not, since it sums over rows;
the other way, computing the logits again once the sums are known, costs a fourth product of N x H x V. A rank's
chunks hold t times the rows in the same memory, so they are few. dx is a partial sum: the caller adds up the ranks'.

Shapes: N tokens, H hidden, V vocabulary of this rank, C rows of a chunk. Peak memory beside inputs, in bytes, with e
bytes per element of x and weight (dw in fp32: 4 bytes; in the weight's dtype: a = e):

    forward    C V e + N H e + V H a            logits of one chunk, dx, dw
    backward   N H 2 e + V H (a + e)            dx and dw as computed, and times s in the inputs' dtype

against N V (4 + 2 e) for the unfused pair with an fp32 copy of the logits, at least. The tile decides in which order
logsum is summed, and neither C nor the memory.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch

from .cross_entropy import BACKWARD_TILES as ELEMENT_TILES
from .dispatch import as_rows, launch_device, use_triton
from .linear_cross_entropy_kernels import scaled, statistics, to_gradient
from .tile import Tile
from .tuning import choose

# Elements of a chunk of logits: 512 MiB in bf16, where the rows (2048 for 128k entries) still fill a GPU's products.
_ELEMENTS_PER_CHUNK_CPU: Final = 1 << 20
_ELEMENTS_PER_CHUNK_GPU: Final = 1 << 28
_ROW_GRANULE: Final = 128
_FP16_UNIT: Final = 2.0**10


class VocabAxis(Protocol):
    """The ranks that share a vocabulary; `runtime.mesh.Axis` is one."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def gather_parts(self, part: torch.Tensor) -> torch.Tensor:
        """`[*part]` -> `[size, *part]`: every rank's part, in rank order."""
        ...


def linear_cross_entropy_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    num_targets: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """The formula in torch operations, with whole logits; torch raises for targets outside `[0, V)` on CPU."""
    logits = torch.nn.functional.linear(x, weight, bias)
    logits_compute = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = torch.nn.functional.cross_entropy(logits_compute, target, ignore_index=ignore_index, reduction="sum")
    return total * _inverse_count(target, ignore_index, num_targets, total.dtype)


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    num_targets: torch.Tensor | float | None = None,
    vocab_axis: VocabAxis | None = None,
    chunk_rows: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Negative log-likelihood summed over targets and divided by `num_targets`; differentiable once in x, weight, bias.

    Args:
        x: `[N, H]`, any strides.
        weight: `[V, H]`, this rank's rows if `vocab_axis` is given; x's dtype.
        target: `[N]` int64, entries of the whole vocabulary or `ignore_index`. Anything else gives nan loss and
            gradients: raising would need a device synchronization.
        bias: `[V]` of x's dtype, or None.
        num_targets: the divisor, a number or a 0-dim tensor; 1 gives the sum, None the mean over the valid targets
            given here. Where it is 0 the loss is nan and its gradients are 0, as of torch's mean.
        vocab_axis: the axis over whose ranks the vocabulary lies in equal consecutive parts; x and target are equal on
            all of them. The loss is too; the gradient of x is this rank's partial sum.
        chunk_rows: C; None: as many as keep a chunk's logits at 512 MiB in bf16 (on a GPU), in even chunks.
        accumulate_dtype: of the sum of dweight over chunks: fp32 (None; fp64 for fp64) or the weight's dtype, which
            saves 2 bytes per element of a bf16 weight and rounds the sum once more per chunk, by at most 2**-9 of
            the partial sum each time. Products accumulate in fp32 within a chunk either way.

    An ignored row's x must be finite where weight needs a gradient: 0 times nan is nan there, as in the unfused pair.

    Returns:
        0-dim, fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: shapes or dtypes do not agree, or `chunk_rows` is not positive.
    """
    _check(x, weight, target, bias, chunk_rows)
    if vocab_axis is not None and vocab_axis.size == 1:
        vocab_axis = None
    dtype = sum_dtype(x.dtype)
    if accumulate_dtype not in (None, dtype, weight.dtype):
        raise ValueError(f"accumulate_dtype must be {dtype} or {weight.dtype}, got {accumulate_dtype}")
    inverse = _inverse_count(target, ignore_index, num_targets, dtype)
    if chunk_rows is None:
        chunk_rows = even_chunk(x.shape[0], weight.shape[0], x.device.type == "cpu")
    chunks = _Chunks(ignore_index, vocab_axis, chunk_rows, accumulate_dtype or dtype)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        loss: torch.Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, target, inverse, chunks
        )
        return loss
    losses_N, *_ = chunks.run(x, weight, bias, target, (False, False, False))
    return losses_N.sum() * inverse


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of a dtype are summed over chunks."""
    return torch.promote_types(dtype, torch.float32)


def _check(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None, chunk_rows: int | None
) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or target.shape != x.shape[:1]:
        raise ValueError(
            "x must be [N, H], weight [V, H], target [N]; "
            f"got {tuple(x.shape)}, {tuple(weight.shape)}, {tuple(target.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    dtypes = [x.dtype, weight.dtype, *([] if bias is None else [bias.dtype])]
    if len(set(dtypes)) != 1 or not x.is_floating_point() or target.dtype != torch.int64:
        raise ValueError(f"x, weight and bias must have one floating dtype, target int64; got {dtypes}, {target.dtype}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")


def _inverse_count(
    target: torch.Tensor, ignore_index: int, num_targets: torch.Tensor | float | None, dtype: torch.dtype
) -> torch.Tensor:
    """1 / num_targets; inf where that is 0: with no target the sum is 0, and the mean nan."""
    if num_targets is None:
        num_targets = (target != ignore_index).sum()
    if isinstance(num_targets, torch.Tensor):
        return 1 / num_targets.detach().to(target.device, dtype)
    # Made on the device: a copy from the host would wait for it.
    return 1 / torch.full((), num_targets, dtype=dtype, device=target.device)


def even_chunk(num_rows: int, num_classes: int, is_cpu: bool) -> int:
    """Rows of chunks that are as even as multiples of _ROW_GRANULE can be, within the elements of a chunk."""
    limit = _ELEMENTS_PER_CHUNK_CPU if is_cpu else _ELEMENTS_PER_CHUNK_GPU
    most = max(1, limit // max(1, num_classes))
    num_chunks = max(1, -(-num_rows // most))
    even = -(-num_rows // num_chunks)
    return max(1, min(most, -(-even // _ROW_GRANULE) * _ROW_GRANULE))


def _over_ranks(stats_3C: torch.Tensor, axis: VocabAxis | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(max, logsum, the target's logit), each `[C]`, over the whole vocabulary: one all-gather of 3 C numbers."""
    if axis is None:
        return stats_3C[0], stats_3C[1].log(), stats_3C[2]
    parts_T3C = axis.gather_parts(stats_3C)
    largest_C = parts_T3C[:, 0].amax(0)
    # A rank whose logits are all -inf adds exp(-inf) = 0; if all ranks' are, the loss is nan as in one piece.
    shift_C = largest_C.masked_fill(largest_C == -torch.inf, 0.0)
    total_C = (parts_T3C[:, 1] * (parts_T3C[:, 0] - shift_C).exp()).sum(0)
    return largest_C, total_C.log(), parts_T3C[:, 2].sum(0)


def _accumulate(sum_VH: torch.Tensor, dlogits_CV: torch.Tensor, x_CH: torch.Tensor) -> None:
    """sum += dlogits.T @ x, added to in the sum's dtype."""
    if sum_VH.dtype == x_CH.dtype:
        sum_VH.addmm_(dlogits_CV.t(), x_CH)
    elif x_CH.is_cuda:
        # cuBLAS multiplies half precision and adds to fp32 in one pass, without an fp32 product beside the sum.
        torch.ops.aten.addmm.dtype_out(sum_VH, dlogits_CV.t(), x_CH, sum_VH.dtype, out=sum_VH)
    else:
        sum_VH.addmm_(dlogits_CV.t().to(sum_VH.dtype), x_CH.to(sum_VH.dtype))


class _Chunks:
    """The rows in chunks; `run` is the forward pass."""

    def __init__(
        self, ignore_index: int, axis: VocabAxis | None, chunk_rows: int, accumulate_dtype: torch.dtype
    ) -> None:
        self.ignore_index = ignore_index
        self.axis = axis
        self.chunk_rows = chunk_rows
        self.accumulate_dtype = accumulate_dtype

    def unit(self, dtype: torch.dtype) -> float:
        """Return the factor of gradients until the backward pass, for inputs of a dtype: a power of two."""
        return _FP16_UNIT if dtype == torch.float16 != self.accumulate_dtype else 1.0

    def run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        needs: tuple[bool, bool, bool],
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """(losses `[N]`, dx, dweight, dbias), the gradients of unit * sum_N(losses), None where not in `needs`."""
        x_NH, weight_VH, target_N = as_rows(x), as_rows(weight), target.contiguous()
        (num_rows, hidden), num_classes = x_NH.shape, weight_VH.shape[0]
        first_class = 0 if self.axis is None else self.axis.rank * num_classes
        all_classes = num_classes * (1 if self.axis is None else self.axis.size)
        options: dict[str, Any] = {"device": x.device, "dtype": self.accumulate_dtype}
        dx_NH = torch.empty((num_rows, hidden), dtype=x.dtype, device=x.device) if needs[0] else None
        dw_VH = torch.zeros((num_classes, hidden), **options) if needs[1] else None
        db_V = torch.zeros(num_classes, **options) if needs[2] else None
        stats_dtype = torch.promote_types(x.dtype, torch.float32)
        stats_3N = torch.empty((3, num_rows), dtype=stats_dtype, device=x.device)
        losses_N = torch.empty(num_rows, dtype=stats_dtype, device=x.device)
        buffer_CV = torch.empty((min(self.chunk_rows, num_rows), num_classes), dtype=x.dtype, device=x.device)
        tile = ELEMENT_TILES[0]
        if any(needs) and use_triton(buffer_CV):
            tile = self._gradient_tile(buffer_CV, target_N, stats_3N, first_class, all_classes)
        for top in range(0, num_rows, self.chunk_rows):
            rows = slice(top, min(top + self.chunk_rows, num_rows))
            x_CH, target_C, logits_CV = x_NH[rows], target_N[rows], buffer_CV[: rows.stop - top]
            if bias is None:
                torch.mm(x_CH, weight_VH.t(), out=logits_CV)
            else:
                torch.addmm(bias, x_CH, weight_VH.t(), out=logits_CV)
            stats_3C = stats_3N[:, rows]
            statistics(logits_CV, target_C, first_class, stats_3C)
            if not any(needs):
                continue
            max_C, logsum_C, x_target_C = _over_ranks(stats_3C, self.axis)
            losses_N[rows] = self._losses(max_C, logsum_C, x_target_C, target_C, all_classes)
            bounds = first_class, all_classes, self.ignore_index
            to_gradient(logits_CV, target_C, max_C, logsum_C, *bounds, self.unit(x.dtype), tile)
            if dx_NH is not None:
                torch.mm(logits_CV, weight_VH, out=dx_NH[rows])
            if dw_VH is not None:
                _accumulate(dw_VH, logits_CV, x_CH)
            if db_V is not None:
                db_V += logits_CV.sum(0, dtype=stats_dtype)
        if not any(needs):
            losses_N = self._losses(*_over_ranks(stats_3N, self.axis), target_N, all_classes)
        return losses_N, dx_NH, dw_VH, db_V

    def _gradient_tile(
        self,
        buffer_CV: torch.Tensor,
        target_N: torch.Tensor,
        stats_3N: torch.Tensor,
        first_class: int,
        all_classes: int,
    ) -> Tile:
        """Measured while nothing is in the buffer yet: dlogits take the place of the logits."""
        num_rows = len(buffer_CV)
        max_C, logsum_C, _ = stats_3N[:, :num_rows]
        bounds = first_class, all_classes, self.ignore_index

        def run_tile(tile: Tile) -> None:
            to_gradient(buffer_CV, target_N[:num_rows], max_C, logsum_C, *bounds, self.unit(buffer_CV.dtype), tile)

        with launch_device(buffer_CV):
            return choose("linear_cross_entropy_gradient", ELEMENT_TILES, run_tile, tuple(buffer_CV.shape), buffer_CV)

    def _losses(
        self,
        max_C: torch.Tensor,
        logsum_C: torch.Tensor,
        x_target_C: torch.Tensor,
        target_C: torch.Tensor,
        classes: int,
    ) -> torch.Tensor:
        loss_C = logsum_C - (x_target_C - max_C)
        loss_C.masked_fill_((target_C < 0) | (target_C >= classes), torch.nan)
        return loss_C.masked_fill_(target_C == self.ignore_index, 0.0)


class _LinearCrossEntropy(torch.autograd.Function):
    """Saves dx, dweight and dbias but for a factor; x, weight and logits are not needed again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        inverse: torch.Tensor,
        chunks: _Chunks,
    ) -> torch.Tensor:
        losses_N, *gradients = chunks.run(x, weight, bias, target, ctx.needs_input_grad[:3])
        ctx.save_for_backward(inverse, *gradients)
        ctx.dtype, ctx.unit = x.dtype, chunks.unit(x.dtype)
        return losses_N.sum() * inverse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inverse, *gradients = ctx.saved_tensors
        scale = dloss * inverse.masked_fill(inverse.isinf(), 0.0) / ctx.unit
        return *(None if g is None else scaled(g, scale, ctx.dtype) for g in gradients), None, None, None
