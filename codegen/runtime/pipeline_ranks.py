"""Which processes each pipeline rank owns: consecutive ones, the pipeline ranks in any order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def tiled(num_ranks: Sequence[int], first_ranks: Sequence[int] | None = None) -> tuple[int, ...]:
    """The first process of each pipeline rank. num_ranks: of each; first_ranks: where they are not in the order of
    pipeline ranks.

    Raises ValueError unless the pipeline ranks own the processes from 0 on, each once.
    """
    if not first_ranks:
        return tuple(itertools.accumulate(num_ranks, initial=0))[:-1]
    if len(first_ranks) != len(num_ranks):
        raise ValueError(f"{len(first_ranks)} first ranks for {len(num_ranks)} pipeline ranks")
    end = 0
    for first, count, pipeline_rank in sorted(zip(first_ranks, num_ranks, range(len(num_ranks)), strict=True)):
        if first != end:
            raise ValueError(
                f"pipeline rank {pipeline_rank} begins at rank {first}, where the ranks before it end at {end}: first "
                f"ranks {tuple(first_ranks)} of meshes of {', '.join(map(str, num_ranks))} ranks leave a gap or overlap"
            )
        end = first + count
    return tuple(first_ranks)
