"""Make tensors that forward uses and no module has registered (attributes, globals, closures) buffers of
the program.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from autopar.frontend.fx_import import FlatGraph, unused_name
from autopar.frontend.layers import layer_path
from autopar.ir.graph import Parameter, Ref, TensorMeta

_UNNAMED = re.compile(r"_?(lifted_tensor|tensor_constant|constant)_?\d*$")
"""Names that torch.export gives to tensors that are no module's attributes."""


def keep_tables(flat: FlatGraph, tables: Mapping[str, Tensor]) -> dict[Ref, Ref]:
    """Make buffers of constants, by their names; return the buffer to read in place of each.

    Equal ones are one buffer of the whole model. A constant of a layer becomes its buffer, as its parameters are.
    """
    alike: dict[tuple[TensorMeta, bytes], list[str]] = {}
    for name, value in tables.items():
        alike.setdefault((_meta(value), _digest(value)), []).append(name)
    readers: dict[str, set[str]] = {name: set() for name in tables}
    for node in flat.nodes:
        for ref in node.inputs:
            if ref.node in readers:
                readers[ref.node].add(layer_path(node.module))
    taken = {node.name for node in flat.nodes} | flat.inputs.keys() | flat.parameters.keys() | _parts(flat)
    renamed: dict[Ref, Ref] = {}
    for (meta, _), names in alike.items():
        path = layer_path(names[0])
        is_own = len(names) == 1 and path and readers[names[0]] == {path}
        leaf = names[0].rpartition(".")[2]
        wish = names[0] if is_own else "table" if _UNNAMED.match(leaf) else leaf
        kept = unused_name(wish, taken)
        taken.add(kept)
        flat.parameters[kept] = Parameter(kept, meta, is_buffer=True, persistent=False, value=tables[names[0]])
        renamed |= {Ref(name): Ref(kept) for name in names if name != kept}
    return renamed


def carried(flat: FlatGraph, name: str) -> None:
    """Make a buffer of a constant that forward writes to; it keeps the written value."""
    value = flat.constants.pop(name)
    flat.parameters[name] = replace(flat.parameters[name], meta=_meta(value), value=value)


def _meta(value: Tensor) -> TensorMeta:
    return TensorMeta(tuple(value.shape), value.dtype, False)


def _digest(value: Tensor) -> bytes:
    content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content.tobytes()).digest()


def _parts(flat: FlatGraph) -> set[str]:
    """Return the first steps of all paths, which are attributes of the program's root."""
    return {name.partition(".")[0] for name in (*flat.parameters, *flat.classes)}
