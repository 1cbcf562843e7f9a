"""Dropout in generated classes, whose masks are functions of the step and of where in the model and the tensor they
are."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from .attention import attention
from .dropout import Key, dropout, dropout_key
from .layout import Layout
from .parameters import Module


class DropoutModule(Module):
    """Base of generated classes that draw dropout masks.

    dropout_calls, dropout_base: a layer instance's dropout calls are numbered from dropout_base + index *
    dropout_calls; a tuple of bases has one for each instance.
    """

    dropout_base: ClassVar[int | tuple[int, ...]] = 0
    dropout_calls: ClassVar[int] = 0

    def dropout_key(self, call: int) -> Key:
        """The key of this instance's `call`-th dropout (from 0) in this step."""
        base, index = self.dropout_base, self._layer_index
        first = base[index] if isinstance(base, tuple) else base + index * self.dropout_calls
        if self.rng.on_device is not None:
            return self.rng.on_device.key(self.rng.seed, self.rng.step, first + call)
        return dropout_key(self.rng.seed, self.rng.step, first + call)

    def same_dropout(self, x: Tensor, p: float, *, call: int, layout: Layout, batched: bool = True) -> Tensor:
        """Inverted dropout with the mask of this step's `call`-th draw; equal under every plan (`dropout.py`).

        batched: dim 0 is the batch, or starts with it; else every micro-batch draws the same mask.
        """
        if not self.training:
            return x
        offset = self._rows_before(layout) if batched else 0
        return dropout(x, p, key=self.dropout_key(call), layout=layout, mesh=self.mesh, batch_offset=offset)

    def dropout_mask(self, *, call: int, layout: Layout, batched: bool = True) -> dict[str, Any]:
        """Return the start of `same_dropout`'s mask, for a fused kernel that draws it itself (kernels/dropout_add.py),
        and whether there is one."""
        offset = self._rows_before(layout) if batched else 0
        grid = layout.grid(self.mesh, self.mesh.device)
        return {
            "key": self.dropout_key(call),
            "grid": grid,
            "row_offset": layout.row_offset(offset),
            "training": self.training,
        }

    def dropout_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        call: int,
        layout: Layout,
        batched: bool = True,
    ) -> Tensor:
        """Attention with dropout on its probabilities, drawn as in `same_dropout` (`attention.py`)."""
        return attention(
            q,
            k,
            v,
            attn_mask,
            dropout_p if self.training else 0.0,
            is_causal,
            scale,
            enable_gqa,
            key=self.dropout_key(call),
            layout=layout,
            mesh=self.mesh,
            batch_offset=self._rows_before(layout) if batched else 0,
        )

    def _rows_before(self, layout: Layout) -> int:
        """Rows of dim 0 in the step's earlier micro-batches: dim 0 is the batch, or starts with it ([B*S, ...])."""
        shape = layout.global_shape
        return self.rng.micro_batch * shape[0] if shape else 0
