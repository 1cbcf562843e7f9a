"""What a reshard does, in words: `gather the sequence over tp, 8 KiB; backward sums and scatters the gradient`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from codegen.program import Reshard, Spec, TensorType
from codegen.runtime.parameters import parse_placement
from codegen.text import bytes_text


@dataclass(frozen=True, slots=True)
class Dims:
    """Names of dims, as far as the batch tells them. tokens: [rows, length] of each input of token numbers."""

    tokens: frozenset[tuple[int, int]] = frozenset()

    @classmethod
    def of(cls, inputs: Mapping[str, Spec]) -> Dims:
        """inputs: of the whole program, a micro-batch of them."""
        found: Iterable[tuple[int, ...]] = (spec.shape for spec in inputs.values() if spec.dtype.startswith("int"))
        return cls(frozenset((shape[0], shape[1]) for shape in found if len(shape) == 2))

    def name(self, held: TensorType, dim: int) -> str:
        """`the sequence`; `dim 2` where no input of the batch has these sizes, or several dims have one."""
        shape = held.shape
        for rows, length in self.tokens:
            if len(shape) > 2 and shape[0] == rows and shape.count(length) == 1 and rows != length:
                at = shape.index(length)
                known = {0: "the batch", at: "the sequence"}
                if len(shape) == 3 and at == 1:
                    known[2] = "the features"
                elif len(shape) == 4 and at == 2:
                    known |= {1: "the heads", 3: "the head's features"}
                return known.get(dim, f"dim {dim}")
        return f"dim {dim}"


_FORMS: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    ("R", "Rp"): ("", "backward sums the gradient over {axis}, {size}"),
    ("R", "S"): ("keep this rank's part of {target} over {axis}", "backward gathers the gradient, {size}"),
    ("R", "P"): ("keep it on the first rank of {axis}, zeros on the others", ""),
    ("Rp", "R"): ("", "backward keeps the gradient on the first rank of {axis}, zeros on the others"),
    ("Rp", "S"): ("keep this rank's part of {target} over {axis}", "backward puts zeros around the gradient"),
    ("Rp", "P"): ("keep it on the first rank of {axis}, zeros on the others", "backward the same"),
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
    held = reshard.source.type
    text = "; ".join(filter(None, parts)).format(
        axis=reshard.axis,
        size=bytes_text(reshard.num_bytes),
        source=dims.name(held, before[1]),
        target=dims.name(held, after[1]),
    )
    return (text or "its gradient is summed elsewhere") + waits
