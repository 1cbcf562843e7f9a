"""The axes that a mesh may have, as records: what the ranks of each axis share out.

Their order, from the slowest varying rank to neighbors, and the axes of ZeRO are in `codegen/runtime`, which generated
programs have beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from codegen.runtime.mesh import AXIS_NAMES
from codegen.runtime.parameters import ZERO_AXES


@dataclass(frozen=True, slots=True)
class AxisKind:
    """A kind of mesh axis. Ranks that differ on it alone are a group.

    has_stages: ranks of a group run different stages. cuts_batch: they have different rows of the batch.
    cuts_sequence: they have different positions of each sequence. cuts_features: they have different features.
    cuts_experts: they may have different experts of a mixture; with `cuts_batch` the rows go to their experts.
    is_basic: every config has its degree. Only the degrees of basic axes may differ from one pipeline rank to the next.
    """

    name: str
    has_stages: bool = False
    cuts_batch: bool = False
    cuts_sequence: bool = False
    cuts_features: bool = False
    cuts_experts: bool = False
    is_basic: bool = False

    @property
    def cuts_tokens(self) -> bool:
        """Whether ranks of a group have different tokens."""
        return self.cuts_batch or self.cuts_sequence

    @property
    def shards_optimizer(self) -> bool:
        """Whether ZeRO shards over the axis what all its ranks have whole."""
        return self.name in ZERO_AXES


_KINDS = (
    # Pipeline parallelism.
    AxisKind("pp", has_stages=True),
    # Data parallelism: between groups that each have all ZeRO shards, and inside such a group.
    AxisKind("ddp", cuts_batch=True),
    AxisKind("dp", cuts_batch=True, is_basic=True),
    # Context parallelism.
    AxisKind("cp", cuts_sequence=True, cuts_experts=True),
    # Expert parallelism.
    AxisKind("ep", cuts_batch=True, cuts_experts=True),
    # Tensor parallelism: the outer axis of a grid, and the inner one.
    AxisKind("ttp", cuts_features=True, cuts_experts=True),
    AxisKind("tp", cuts_features=True, cuts_experts=True, is_basic=True),
)

AXES: Final[Mapping[str, AxisKind]] = {name: next(k for k in _KINDS if k.name == name) for name in AXIS_NAMES}
"""Every kind of axis by its name, the slowest varying first."""
