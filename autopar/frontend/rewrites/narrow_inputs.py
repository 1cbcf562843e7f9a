"""Narrow inputs that forward reads only as a rounded copy: they enter the program rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from autopar.frontend.fx_import import FlatGraph
from autopar.ir.graph import Node, Ref, TensorMeta, base_name
from autopar.ir.operators import arguments_of
from autopar.operators.traits import VIEWS

_CASTS = ("aten.to.dtype", "aten._to_copy.default")


def narrow_inputs(flat: FlatGraph) -> None:
    """Give an input whose every use, through views too, casts it to one half-precision dtype that dtype."""
    readers: dict[Ref, list[Node]] = {}
    for node in flat.nodes:
        for ref in node.inputs:
            readers.setdefault(ref, []).append(node)
    metas = flat.metas()
    renamed: dict[Ref, Ref] = {}
    changed: dict[Ref, TensorMeta] = {}
    for name, meta in flat.inputs.items():
        uses = _Uses(Ref(name), readers, metas)
        if meta.dtype.is_floating_point and uses.dtype is not None and flat.loss not in uses.views:
            changed |= {ref: replace(metas[ref], dtype=uses.dtype) for ref in uses.views}
            renamed |= uses.casts
    flat.inputs = {name: changed.get(Ref(name), meta) for name, meta in flat.inputs.items()}
    kept = [node for node in flat.nodes if Ref(node.name) not in renamed]
    flat.nodes = [
        replace(node, outputs=tuple(changed.get(Ref(node.name, i), meta) for i, meta in enumerate(node.outputs)))
        for node in kept
    ]
    flat.substitute(renamed)


class _Uses:
    """An input with its views, and the casts that read them.

    dtype: the half-precision dtype of all these casts; None if they differ. casts: cast -> its operand.
    """

    def __init__(self, ref: Ref, readers: Mapping[Ref, list[Node]], metas: Mapping[Ref, TensorMeta]) -> None:
        self.views: list[Ref] = []
        self.casts: dict[Ref, Ref] = {}
        dtypes: set[torch.dtype | None] = set()
        waiting = [ref]
        while waiting:
            seen = waiting.pop()
            self.views.append(seen)
            for node in readers.get(seen, ()):
                if node.op in _CASTS and not node.meta.requires_grad:
                    dtypes.add(node.meta.dtype)
                    self.casts[Ref(node.name)] = seen
                elif base_name(node.op) in VIEWS and node.inputs == (seen,) and "dtype" not in arguments_of(node):
                    waiting += [Ref(node.name, index) for index in range(len(node.outputs))]
                else:
                    dtypes.add(None)
        only = dtypes.pop() if len(dtypes) == 1 else None
        self.dtype = only if only is not None and only.itemsize < metas[ref].dtype.itemsize == 4 else None
