"""How frameworks send rows to the ranks that have their experts: named kinds, as data (``machines/dispatches.toml``).

What a kind takes on a cluster follows by one rule (autopar/costs/expert_exchange.py).
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

    between: a row crosses between nodes once for every choice of its token, once for every node that has one of them,
    or goes to all ranks. inside: inside a node once for every choice, or for every rank that has one. power: both ways
    take (a^p + b^p)^(1/p) seconds, a + b if one waits for the other. passes: readings and writings of all rows beside
    the one copy by which any exchange sorts them; copy_passes: of the rows between nodes. hidden: the share of it that
    runs behind other computation, where there is as much. in_programs: autopar's programs have it. source: where the
    constants come from.

    Raises ValueError for words that are not known and figures out of range.
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
    """All kinds by name."""
    text = resources.files("cost_models").joinpath("machines", "dispatches.toml").read_text(encoding="utf-8")
    known, found = {item.name for item in fields(Dispatch)}, dict[str, Dispatch]()
    for name, table in tomllib.loads(text).items():
        if surplus := sorted(table.keys() - known):
            raise ValueError(f"dispatch {name}: unknown keys {surplus}")
        found[name] = Dispatch(name, **table)
    return MappingProxyType(found)


def dispatch(name: str) -> Dispatch:
    """The kind called `name`. Raises ValueError that lists the known ones."""
    if name not in dispatches():
        raise ValueError(f"unknown dispatch {name!r}. Known: {', '.join(dispatches())}.")
    return dispatches()[name]
