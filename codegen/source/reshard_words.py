"""Reshards in words: `gather the sequence over tp, 8 KiB; backward sums and scatters the gradient`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from codegen.program import Reshard, TensorType
from codegen.runtime.parameters import parse_placement
from codegen.source.text import bytes_text

_ROLES: Final[Mapping[str, str]] = {
    "BATCH": "the batch",
    "SEQUENCE": "the sequence",
    "HEADS": "the heads",
    "KV_HEADS": "the heads of keys and values",
    "HEAD_DIM": "the heads' features",
}


@dataclass(frozen=True, slots=True)
class Dims:
    """Names of dims in words. roles: `Program.dims`. scope: whose variables they are, a layer class' or ""."""

    roles: Mapping[tuple[str, str, int], tuple[str, ...]]
    scope: str = ""

    def name(self, tensor_type: TensorType, dim: int) -> str:
        """`the sequence`; `dim 2` where the program does not know what it is."""
        roles = self.roles.get((self.scope, *tensor_type.tensor), ())
        words = [_ROLES.get(role, "the sequence" if role else "") for role in roles]
        if words[1:] == ["the sequence", ""]:
            words[2] = "the features"
        return (words[dim] if 0 <= dim < len(words) else "") or f"dim {dim}"


_FORMS: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    ("R", "Rp"): ("", "backward sums the gradient over {axis}, {size}"),
    ("R", "S"): ("keep this rank's part of {target} over {axis}", "backward gathers the gradient, {size}"),
    ("R", "P"): ("zero on all ranks of {axis} but the first, added once", ""),
    ("Rp", "R"): ("", "backward keeps the gradient on the first rank of {axis}, zeros on the others"),
    ("Rp", "S"): ("keep this rank's part of {target} over {axis}", "backward puts zeros around the gradient"),
    ("Rp", "P"): ("zero on all ranks of {axis} but the first, added once", "backward the same"),
    ("S", "R"): ("gather {source} over {axis}, {size}", "backward keeps this rank's part of the gradient"),
    ("S", "Rp"): ("gather {source} over {axis}, {size}", "backward sums and scatters the gradient"),
    ("S", "S"): ("gather {source} and scatter {target} over {axis}, {size}", "backward the reverse"),
    ("P", "R"): ("sum over {axis}, {size}", ""),
    ("P", "Rp"): ("sum over {axis}, {size}", "backward sums the gradient"),
    ("P", "S"): ("sum over {axis} and scatter {target}, {size}", "backward gathers the gradient"),
}
"""(kind of placement before, after) -> what happens, and what in backward. R whole, Rp whole with a partial gradient,
S sharded, P partial sum."""


def in_words(reshard: Reshard, dims: Dims) -> str:
    """The comment on a reshard."""
    waits = "; the step waits for it" if ("wait", False) in reshard.kwargs else ""
    if reshard.method == "sum_over":
        return f"targets of all ranks{waits}"
    before, after = (parse_placement(v.type.placement(reshard.axis)) for v in (reshard.source, reshard.result))
    forward, backward = _FORMS[before[0], after[0]]
    parts = (forward, backward if reshard.source.type.requires_grad else "")
    tensor_type = reshard.source.type
    text = "; ".join(filter(None, parts)).format(
        axis=reshard.axis,
        size=bytes_text(reshard.num_bytes),
        source=dims.name(tensor_type, before[1]),
        target=dims.name(tensor_type, after[1]),
    )
    return (text or "its gradient is summed elsewhere") + waits
