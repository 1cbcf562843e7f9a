"""NCCL's algorithms and protocols as proportions of a link's own latency and rate, from ``machines/nccl.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from cost_models.hardware import Link

Algorithm = Literal["ring", "tree"]


@dataclass(frozen=True, slots=True)
class Protocol:
    """What one algorithm and protocol multiply a link's startup, hop and rate by.

    own_step: share of a ring step that copying a rank's own chunk takes.
    """

    startup: float = 1.0
    hop: float = 1.0
    rate: float = 1.0
    own_step: float = 0.0


PLAIN = Protocol()


def drives(link: Link) -> bool:
    """Whether NCCL moves data over this link, by its name."""
    return link.name in _families()


def protocols(links: Sequence[Link]) -> tuple[str, ...]:
    """The protocols that can be had on a path of these links, all driven by NCCL."""
    excluded = _table()["excluded"]
    names = ("ll", "ll128", "simple")
    return tuple(name for name in names if not any(link.name in excluded.get(name, ()) for link in links))


def protocol(algorithm: Algorithm, name: str, link: Link) -> Protocol:
    """The proportions on `link`, which NCCL must drive; name is one of `protocols`."""
    table = _table()
    startup, hop = table["startup"], table["hop"][_families()[link.name]]
    rate = table["rate"][algorithm][name]
    limit = table["ll_limit"].get(link.name)
    if name == "ll" and limit is not None:
        rate = min(rate, limit * 1e9 / link.achievable_bytes_per_second)
    return Protocol(
        startup=startup[algorithm][name] / startup["ring"]["simple"],
        hop=hop[algorithm][name] / hop["ring"]["simple"],
        rate=rate,
        own_step=table["own_step"],
    )


def switch_hop(link: Link) -> float:
    """A hop of NVLS (inside a node) or NVLSTree (between nodes) as a multiple of the link's latency_seconds."""
    hop = _table()["hop"][_families()[link.name]]
    return float(hop.get("nvls", hop["tree"]["simple"]) / hop["ring"]["simple"])


def mesh_share(link: Link, ranks_per_node: int) -> float:
    """The share of a device's links that lead to the other ranks of its group: 1 where there is a switch."""
    return float(_table()["mesh"].get(link.name, {}).get(str(ranks_per_node), 1.0))


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads(resources.files("cost_models").joinpath("machines", "nccl.toml").read_text(encoding="utf-8"))


@cache
def _families() -> Mapping[str, str]:
    """Hardware family by link name."""
    return {name: family for family, names in _table()["links"].items() for name in names}
