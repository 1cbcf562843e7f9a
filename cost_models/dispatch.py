"""Named ways to send rows to the ranks that have their experts, as data (``machines/dispatches.toml``).

One rule prices all of them on a cluster (autopar/costs/expert_exchange.py).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from types import MappingProxyType

BETWEEN = ("choice", "node", "all")
INSIDE = ("choice", "rank")


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One kind of exchange.

    between: a row crosses between nodes once per choice of its token ("choice"), once per node that has one of them
    ("node"), or goes to all ranks ("all"). inside: within a node, a row moves once per choice, or once per rank that
    has one. power: both ways take (a^p + b^p)^(1/p) seconds; p = 1 means that one waits for the other. passes: reads
    and writes of all rows beyond the one copy by which any exchange sorts them; copy_passes: the same for rows between
    nodes. hidden: the share of the exchange that can overlap other computation. in_programs: autopar's programs have
    this kind. source: the origin of the constants.

    Raises ValueError for unknown words and for figures out of range.
    """

    name: str
    source: str
    between: str = "choice"
    inside: str = "choice"
    power: float = 1.0
    passes: float = 0.0
    copy_passes: float = 0.0
    hidden: float = 0.0
    in_programs: bool = False

    def __post_init__(self) -> None:
        for key, legal in (("between", BETWEEN), ("inside", INSIDE)):
            if getattr(self, key) not in legal:
                raise ValueError(f"dispatch {self.name}: {key} must be one of {', '.join(legal)}")
        if not (self.passes >= 0 and self.copy_passes >= 0 and self.power >= 1 and 0 <= self.hidden <= 1):
            raise ValueError(f"dispatch {self.name}: passes are zero or more, power is 1 or more, hidden is in [0, 1]")


@cache
def dispatches() -> Mapping[str, Dispatch]:
    """Return all kinds by name."""
    text = resources.files("cost_models").joinpath("machines", "dispatches.toml").read_text(encoding="utf-8")
    allowed, kinds = {item.name for item in fields(Dispatch)}, dict[str, Dispatch]()
    for name, table in tomllib.loads(text).items():
        if surplus := sorted(table.keys() - allowed):
            raise ValueError(f"dispatch {name}: unknown keys {surplus}")
        kinds[name] = Dispatch(name, **table)
    return MappingProxyType(kinds)


def dispatch(name: str) -> Dispatch:
    """Return the kind called `name`. Raises ValueError that lists the known kinds."""
    if name not in dispatches():
        raise ValueError(f"unknown dispatch {name!r}. Known: {', '.join(dispatches())}.")
    return dispatches()[name]
