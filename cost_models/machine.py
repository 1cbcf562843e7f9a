"""A cluster: equal nodes of equal devices, one kind of link inside a node and one between nodes.

Ranks are numbered node by node: rank r is device r % devices_per_node of node r // devices_per_node. `mixed_cluster.py`
has clusters of unlike node groups.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost_models import catalog, nccl
from cost_models.catalog import Part
from cost_models.hardware import DTYPE_FALLBACKS, Device, Link

__all__ = ["DTYPE_FALLBACKS", "TRIALS", "Cluster", "Device", "Link"]

TRIALS = "trials"
"""The array of tables with measured steps that a cluster's TOML file may contain besides the cluster."""
FORM = "'[NODESx]DEVICES DEVICE [INTRA_LINK [INTER_LINK]]', for example '4x8 h100-sxm'"


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster of num_nodes x devices_per_node devices; `intra_node` joins the devices of a node, `inter_node` the
    nodes.

    Prints as '4x8 h100-sxm', '8 l4' (one node) or '4x8 a100-80g nvlink3 ib-100g' (links other than the device's usual
    ones), which `parse` reads back to an equal value. A name followed by '*' stands for a device or link that differs
    from the built-in one of that name; `parse` rejects it, and `to_toml` is the complete form.
    """

    device: Device
    num_nodes: int
    devices_per_node: int
    intra_node: Link
    inter_node: Link

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.devices_per_node < 1:
            raise ValueError(f"a cluster needs nodes and devices, got {self.num_nodes}x{self.devices_per_node}")
        joined = nccl.mesh_links(self.intra_node)
        if joined and self.devices_per_node > len(joined):
            raise ValueError(
                f"{self.intra_node.name} joins {len(joined)} devices without a switch, "
                f"and a node has {self.devices_per_node}: more nodes, or another link"
            )

    @property
    def num_devices(self) -> int:
        """Count the devices of all nodes."""
        return self.num_nodes * self.devices_per_node

    @property
    def groups(self) -> tuple[Cluster, ...]:
        """Return the groups of equal nodes, as a mixed cluster does: here the cluster itself."""
        return (self,)

    @staticmethod
    def parse(text: str) -> Cluster:
        """Read a cluster of built-in parts from '[NODESx]DEVICES DEVICE [INTRA_LINK [INTER_LINK]]'; case is ignored.

        Raises ValueError for another form, and for an unknown name with the known device and link names.
        """
        words = text.lower().split()
        counts = re.fullmatch(r"(?:([0-9]+)x)?([0-9]+)", words[0]) if words else None
        if counts is None or not 2 <= len(words) <= 4:
            raise ValueError(
                f"cannot read cluster {text!r}; the form is {FORM}. "
                f"Devices: {', '.join(catalog.devices())}. Links: {', '.join(catalog.links())}."
            )
        device = catalog.device(words[1])
        names = [*words[2:], *(device.intra_link, device.inter_link)[len(words) - 2 :]]
        return Cluster(
            device=device,
            num_nodes=int(counts[1] or 1),
            devices_per_node=int(counts[2]),
            intra_node=catalog.link(names[0]),
            inter_node=catalog.link(names[1]),
        )

    @staticmethod
    def from_toml(path: str | Path) -> Cluster:
        """Read the cluster in a TOML file; `from_toml_text` describes the format. Raises ValueError and OSError."""
        try:
            return Cluster.from_toml_text(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @staticmethod
    def from_toml_text(text: str) -> Cluster:
        """Read a cluster from TOML: num_nodes (default 1), devices_per_node, device, intra_node, inter_node.

        device and the links are each a built-in name or a table of the fields of `Device` or `Link`. An omitted link
        is the device's usual one. Trials of plans (TRIALS) are skipped. Raises ValueError for anything else.
        """
        return Cluster.from_table({key: value for key, value in tomllib.loads(text).items() if key != TRIALS})

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> Cluster:
        """Read the cluster from a parsed TOML table. Raises ValueError as `from_toml_text` does."""
        allowed = {"num_nodes", "devices_per_node", "device", "intra_node", "inter_node"}
        if surplus := sorted(table.keys() - allowed):
            raise ValueError(f"unknown keys {surplus}; the keys are {', '.join(sorted(allowed))}")
        if missing := sorted({"devices_per_node", "device"} - table.keys()):
            raise ValueError(f"missing keys {missing}")
        counts = (table.get("num_nodes", 1), table["devices_per_node"])
        if any(type(count) is not int for count in counts):
            raise ValueError(f"num_nodes and devices_per_node must be whole numbers, got {counts}")
        device = _part(Device, "device", table["device"], catalog.devices())
        return Cluster(
            device=device,
            num_nodes=counts[0],
            devices_per_node=counts[1],
            intra_node=link_from("intra_node", table.get("intra_node", device.intra_link)),
            inter_node=link_from("inter_node", table.get("inter_node", device.inter_link)),
        )

    def to_toml(self) -> str:
        """Return TOML that `from_toml_text` reads back to an equal cluster: built-in parts by name, others in full."""
        counts = f"num_nodes = {self.num_nodes}\ndevices_per_node = {self.devices_per_node}\n"
        return counts + part_lines(
            {"device": self.device, "intra_node": self.intra_node, "inter_node": self.inter_node}
        )

    def with_memory(self, num_bytes: int) -> Cluster:
        """Return the same cluster with devices of `num_bytes` bytes."""
        return replace(self, device=replace(self.device, memory_bytes=num_bytes))

    def __str__(self) -> str:
        counts = f"{self.num_nodes}x{self.devices_per_node}" if self.num_nodes > 1 else f"{self.devices_per_node}"
        words = [counts, label(self.device)]
        usual_intra = label(self.intra_node) == self.device.intra_link
        usual_inter = label(self.inter_node) == self.device.inter_link
        if not (usual_intra and usual_inter):
            words.append(label(self.intra_node))
        if not usual_inter:
            words.append(label(self.inter_node))
        return " ".join(words)


def part_lines(parts: Mapping[str, Device | Link]) -> str:
    """Return the TOML of devices and links: built-in ones by name, then tables of the others."""
    lines = [f'{key} = "{part.name}"\n' for key, part in parts.items() if _is_builtin(part)]
    lines += [f"\n[{key}]\n{catalog.to_table(part)}" for key, part in parts.items() if not _is_builtin(part)]
    return "".join(lines)


def link_from(key: str, value: Any) -> Link:
    """Return a built-in link by name, or a link from its table. Raises ValueError."""
    return _part(Link, key, value, catalog.links())


def _is_builtin(part: Device | Link) -> bool:
    builtin: Device | Link | None
    builtin = (catalog.devices() if isinstance(part, Device) else catalog.links()).get(part.name)
    return part == builtin


def label(part: Device | Link) -> str:
    """Return the part's name, with '*' if it differs from the built-in part of that name."""
    return part.name if _is_builtin(part) else f"{part.name}*"


def _part(kind: type[Part], key: str, value: Any, builtin: Mapping[str, Part]) -> Part:
    if isinstance(value, dict):
        if not isinstance(value.get("name"), str):
            raise ValueError(f"[{key}] needs a name")
        return catalog.from_table(kind, value["name"], value)
    if isinstance(value, str) and value in builtin:
        return builtin[value]
    raise catalog.unknown(kind.__name__.lower(), str(value))
