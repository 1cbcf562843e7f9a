"""How a reshard step is written in a program: the axis method, its arguments, and what a reader wants to know."""

from __future__ import annotations

from typing import Any

from autopar.graph import TensorMeta
from autopar.sharding.reshard import Step
from autopar.units import bytes_text


def reshard_call(step: Step, requires_grad: bool = True) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """Axis method and keyword arguments of one step (codegen/runtime/mesh.py)."""
    source, target = step.source, step.target
    kinds = (source.kind, target.kind)
    if kinds == ("S", "S"):
        pairs = [("split_dim", target.dim), ("concat_dim", source.dim)]
        pairs += [("split_sections", step.target_sections)] if step.target_sections > 1 else []
        pairs += [("concat_sections", step.source_sections)] if step.source_sections > 1 else []
        return "all_to_all", tuple(pairs)
    shard = source if source.is_shard else target
    sections = step.source_sections if source.is_shard else step.target_sections
    dims: tuple[tuple[str, Any], ...] = (("dim", shard.dim),) if shard.is_shard else ()
    dims += (("sections", sections),) if sections > 1 else ()
    full, partial = (("grad", "full"),), (("grad", "partial"),)
    table: dict[tuple[str, str], tuple[str, tuple[tuple[str, Any], ...]]] = {
        ("R", "Rp"): ("for_use", ()),
        ("R", "S"): ("slice", dims),
        ("R", "P"): ("first_rank_only", ()),
        ("Rp", "R"): ("first_rank_grad", ()),
        ("Rp", "S"): ("slice", dims + partial),
        ("Rp", "P"): ("first_rank_only", partial),
        ("S", "R"): ("all_gather", dims + (full if requires_grad else ())),
        ("S", "Rp"): ("all_gather", dims),
        ("P", "R"): ("all_reduce", ()),
        ("P", "Rp"): ("all_reduce", partial),
        ("P", "S"): ("reduce_scatter", dims),
    }
    return table[kinds]


def traffic_text(step: Step, meta: TensorMeta) -> str:
    """`64 KiB, backward reduce_scatter`; what a reader wants to know of a reshard."""
    size = bytes_text(meta.num_bytes * step.fraction)
    forward = size if step.forward else "no communication"
    backward = f", backward {step.backward}" if step.backward and meta.requires_grad else ""
    return forward + (f"{backward} {size}" if backward and not step.forward else backward)
