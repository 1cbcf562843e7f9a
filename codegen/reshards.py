"""Methods that take a tensor from one placement on an axis to another: the one table of them.

The backward of each is its transpose (`codegen/runtime/reshard.py`), from the conjugate of where the tensor went to the
conjugate of where it came from. What is not in the table takes two steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from codegen.runtime.parameters import parse_placement

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, slots=True)
class Method:
    """A method of an axis. grad: its argument of that name, if it takes one. forward, backward: what it sends."""

    name: str
    grad: str = ""
    forward: Collective | None = None
    backward: Collective | None = None


METHODS: Final[Mapping[tuple[str, str], Method]] = {
    ("R", "Rp"): Method("for_use", backward="all_reduce"),
    ("R", "S"): Method("slice", backward="all_gather"),
    ("R", "P"): Method("first_rank_only"),
    ("Rp", "R"): Method("first_rank_grad"),
    ("Rp", "S"): Method("slice", "partial"),
    ("Rp", "P"): Method("first_rank_only", "partial"),
    ("S", "R"): Method("all_gather", "full", "all_gather"),
    ("S", "Rp"): Method("all_gather", "", "all_gather", "reduce_scatter"),
    ("S", "S"): Method("all_to_all", "", "all_to_all", "all_to_all"),
    ("P", "R"): Method("all_reduce", "", "all_reduce"),
    ("P", "Rp"): Method("all_reduce", "partial", "all_reduce", "all_reduce"),
    ("P", "S"): Method("reduce_scatter", "", "reduce_scatter", "all_gather"),
}
"""(kind of the source's placement, kind of the target's) -> the method."""


Kwargs = tuple[tuple[str, Any], ...]


def axis_kwargs(source: str, target: str, sections: tuple[int, int], requires_grad: bool) -> Kwargs:
    """Return the keyword arguments of the method of METHODS between two placements, which are text.

    sections: those of the local tensor's sharded dim, before and after; 1 is left out. So is the gradient's being full
    where there is none.
    """
    (kind, dim, _), (target_kind, target_dim, _) = parse_placement(source), parse_placement(target)
    named: Kwargs = ()
    if kind == target_kind == "S":
        named = ("split_dim", target_dim), ("concat_dim", dim)
        named += ("split_sections", sections[1]), ("concat_sections", sections[0])
    elif kind == "S":
        named = ("dim", dim), ("sections", sections[0])
    elif target_kind == "S":
        named = ("dim", target_dim), ("sections", sections[1])
    grad = METHODS[kind, target_kind].grad
    named += (("grad", grad),) if grad and (requires_grad or grad != "full") else ()
    return tuple((name, value) for name, value in named if value != 1 or "sections" not in name)
