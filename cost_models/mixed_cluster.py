"""A cluster of unlike node groups: 2x8 a100-80g + 4x8 v100-32g.

Ranks are numbered group by group, starting with the first. No collective spans two groups (each pipeline stage is in
one group); activations cross between groups over the link `between`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost_models import catalog
from cost_models.hardware import Link
from cost_models.machine import TRIALS, Cluster, label, link_from, part_lines

VIA = " via "


@dataclass(frozen=True, slots=True)
class MixedCluster:
    """A cluster of at least two groups of equal nodes. between: the link between nodes of different groups, one
    direction per device.

    Prints as '2x8 a100-80g + 4x8 v100-32g', with ' via LINK' where `between` is not the slowest of the links between
    the groups' own nodes; `parse` reads that back.
    """

    groups: tuple[Cluster, ...]
    between: Link

    def __post_init__(self) -> None:
        if len(self.groups) < 2:
            raise ValueError(f"a mixed cluster needs two groups of nodes or more, got {len(self.groups)}")

    @property
    def num_devices(self) -> int:
        """Count the devices of all groups."""
        return sum(group.num_devices for group in self.groups)

    @staticmethod
    def of(groups: tuple[Cluster, ...]) -> MixedCluster:
        """Join groups by the slowest of their own links between nodes."""
        return MixedCluster(groups, _slowest(groups))

    @staticmethod
    def parse(text: str) -> MixedCluster:
        """Read groups as `Cluster.parse` does, joined by '+', and the link between them after 'via'.

        Raises ValueError as `Cluster.parse` does.
        """
        text, _, link = text.lower().partition(VIA)
        groups = tuple(Cluster.parse(part) for part in text.split("+"))
        return MixedCluster(groups, catalog.link(link.strip())) if link else MixedCluster.of(groups)

    def to_toml(self) -> str:
        """Return TOML text that `parse_toml` reads back to an equal cluster."""
        parts = [_as_array_entry(group.to_toml()) for group in self.groups]
        return part_lines({"between": self.between}) + "\n" + "\n".join(parts)

    def map(self, function: Callable[[Cluster], Cluster]) -> MixedCluster:
        """Return the same cluster with every group replaced by `function(group)`."""
        return replace(self, groups=tuple(function(group) for group in self.groups))

    def with_memory(self, num_bytes: int) -> MixedCluster:
        """Return the same cluster with devices of `num_bytes` bytes."""
        return self.map(lambda group: group.with_memory(num_bytes))

    def __str__(self) -> str:
        text = " + ".join(map(str, self.groups))
        return text if self.between == _slowest(self.groups) else f"{text}{VIA}{label(self.between)}"


AnyCluster = Cluster | MixedCluster


def parse(text: str) -> AnyCluster:
    """Read '4x8 h100-sxm', or groups joined by '+'. Raises ValueError."""
    return MixedCluster.parse(text) if "+" in text else Cluster.parse(text)


def from_toml(path: str | Path) -> AnyCluster:
    """Read the cluster in a TOML file. Raises ValueError and OSError."""
    try:
        return parse_toml(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_toml(text: str) -> AnyCluster:
    """Read the cluster of a TOML text as `from_table` does, skipping trials of plans. Raises ValueError."""
    return from_table({key: value for key, value in tomllib.loads(text).items() if key != TRIALS})


def from_table(table: Mapping[str, Any]) -> AnyCluster:
    """Read a cluster as `Cluster.from_table` does, or a mixed cluster.

    A mixed cluster has an array of tables `group` of that form, and a link `between` (a name or a table; by default the
    slowest of the groups' links between nodes). Raises ValueError.
    """
    if "group" not in table:
        return Cluster.from_table(table)
    if surplus := sorted(table.keys() - {"group", "between"}):
        raise ValueError(f"unknown keys {surplus} beside group; the keys are group, between")
    entries = table["group"]
    if not (isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)):
        raise ValueError("write the groups of nodes as an array of tables, [[group]], one for each")
    groups = tuple(Cluster.from_table(entry) for entry in entries)
    if "between" not in table:
        return MixedCluster.of(groups)
    return MixedCluster(groups, link_from("between", table["between"]))


def _slowest(groups: tuple[Cluster, ...]) -> Link:
    return min((group.inter_node for group in groups), key=lambda link: link.achievable_bytes_per_second)


def _as_array_entry(text: str) -> str:
    """Return a cluster's TOML as an entry of the array `group`."""
    return "[[group]]\n" + re.sub(r"^\[", "[group.", text, flags=re.MULTILINE)
