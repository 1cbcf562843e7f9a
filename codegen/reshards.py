"""Which method of an axis takes a tensor from one placement to another: the one table of them.

The backward of each is its transpose (`codegen/runtime/reshard.py`), from the conjugate of where the tensor went to the
conjugate of where it came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from codegen.runtime.parameters import parse_placement

Kwargs = tuple[tuple[str, Any], ...]
AxisCall = tuple[str, Kwargs]
"""An axis' method and its keyword arguments."""

_FULL: Final[Kwargs] = (("grad", "full"),)
_PARTIAL: Final[Kwargs] = (("grad", "partial"),)

METHODS: Final[Mapping[tuple[str, str], AxisCall]] = {
    ("R", "Rp"): ("for_use", ()),
    ("R", "S"): ("slice", ()),
    ("R", "P"): ("first_rank_only", ()),
    ("Rp", "R"): ("first_rank_grad", ()),
    ("Rp", "S"): ("slice", _PARTIAL),
    ("Rp", "P"): ("first_rank_only", _PARTIAL),
    ("S", "R"): ("all_gather", _FULL),
    ("S", "Rp"): ("all_gather", ()),
    ("S", "S"): ("all_to_all", ()),
    ("P", "R"): ("all_reduce", ()),
    ("P", "Rp"): ("all_reduce", _PARTIAL),
    ("P", "S"): ("reduce_scatter", ()),
}
"""(kind of the source's placement, kind of the target's) -> the method, and what it takes beside dims."""


def axis_call(source: str, target: str, sections: tuple[int, int], requires_grad: bool) -> AxisCall:
    """The call from one placement, as text, to another.

    sections: those of the local tensor's sharded dim, before and after. Without a gradient none is full or partial,
    except where it is Rp's. Raises KeyError where there is no such method.
    """
    (kind, dim, _), (target_kind, target_dim, _) = parse_placement(source), parse_placement(target)
    method, grad = METHODS[kind, target_kind]
    if method == "all_to_all":
        named = ("split_dim", target_dim), ("concat_dim", dim)
        counts = ("split_sections", sections[1]), ("concat_sections", sections[0])
        return method, (*named, *(pair for pair in counts if pair[1] > 1))
    kwargs: Kwargs = ()
    if "S" in (kind, target_kind):
        count = sections[0] if kind == "S" else sections[1]
        kwargs = (("dim", dim if kind == "S" else target_dim), *((("sections", count),) if count > 1 else ()))
    return method, kwargs + (grad if requires_grad or grad != _FULL else ())
