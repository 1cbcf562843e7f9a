"""Which processes each position of a pipeline owns: consecutive ones, the positions in any order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def tiled(num_ranks: Sequence[int], first_ranks: Sequence[int] | None = None) -> tuple[int, ...]:
    """The first process of each position. num_ranks: of each; first_ranks: where they are not in position order.

    Raises ValueError unless the positions own the processes from 0 on, each once.
    """
    if not first_ranks:
        return tuple(itertools.accumulate(num_ranks, initial=0))[:-1]
    if len(first_ranks) != len(num_ranks):
        raise ValueError(f"{len(first_ranks)} first ranks for {len(num_ranks)} positions")
    end = 0
    for first, count, position in sorted(zip(first_ranks, num_ranks, range(len(num_ranks)), strict=True)):
        if first != end:
            raise ValueError(
                f"position {position} begins at rank {first}, where the ranks before it end at {end}: first ranks "
                f"{tuple(first_ranks)} of positions of {', '.join(map(str, num_ranks))} ranks leave a gap or overlap"
            )
        end = first + count
    return tuple(first_ranks)
