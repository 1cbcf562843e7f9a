"""NCCL's algorithms and protocols as multiples of a link's own latency and rate, from ``machines/nccl.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from typing import Any, Literal

from cost_models import direct_links
from cost_models.hardware import Link

Algorithm = Literal["ring", "tree"]


@dataclass(frozen=True, slots=True)
class Protocol:
    """Factors of one algorithm and protocol on a link's startup, hop and rate.

    streams: a rank forwards every word as it arrives, not only complete chunks.
    """

    startup: float = 1.0
    hop: float = 1.0
    rate: float = 1.0
    streams: bool = False


PLAIN = Protocol()


def drives(link: Link) -> bool:
    """Whether NCCL moves data over this link, judged by its name."""
    return link.name in _families()


def protocols(links: Sequence[Link]) -> tuple[str, ...]:
    """List the protocols available on a path of these links, all driven by NCCL."""
    excluded = _table()["excluded"]
    names = ("ll", "ll128", "simple")
    return tuple(name for name in names if not any(link.name in excluded.get(name, ()) for link in links))


def protocol(algorithm: Algorithm, name: str, link: Link) -> Protocol:
    """Return the factors on `link`, which NCCL must drive; name is one of `protocols`."""
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
        streams=name != "simple",
    )


def own_step(kind: str) -> float:
    """Return the share of a ring step that copying a rank's own chunk takes, for collectives that copy it."""
    return float(_table()["own_step"]) if kind in ("all_gather", "reduce_scatter", "all_to_all") else 0.0


def message_seconds() -> float:
    """Return the host's time to hand one message to the network; messages are handed over one by one."""
    return float(_table()["message_microseconds"]) * 1e-6


def chunk_bytes() -> float:
    """Return the bytes that a tree forwards at once, of all channels together (Simple protocol and NVLSTree)."""
    return float(_table()["chunk_bytes"])


def switch_rate() -> float:
    """Return the share of a ring's rate inside a node that an all_reduce in the switch reaches."""
    return float(_table()["switch_rate"])


def switch_hop(link: Link) -> float:
    """Return a hop of NVLS (inside a node) or NVLSTree (between nodes) as a multiple of the link's latency_seconds."""
    hop = _table()["hop"][_families()[link.name]]
    return float(hop.get("nvls", hop["tree"]["simple"]) / hop["ring"]["simple"])


def mesh_links(link: Link) -> direct_links.Links | None:
    """Return the links between every two devices of a node, or None where there is a switch."""
    table = _table()["mesh"].get(link.name)
    return table["links"] if table else None


@lru_cache(maxsize=4096)
def mesh_share(link: Link, kind: str, size: int, stride: int, num_devices: int) -> float:
    """Return the share of a device's links that serve it in the worst group of an axis; 1 where there is a switch.

    The groups are base + i * stride, i < size, with several ranks in a node of `num_devices`. Raises ValueError for
    nodes larger than the link joins.
    """
    links = mesh_links(link)
    if links is None:
        return 1.0
    counts = {"p2p": direct_links.message_links, "all_to_all": direct_links.exchange_links}
    count = counts.get(kind, direct_links.collective_links)
    return count(links, size, stride, num_devices) / sum(links[0])


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads(resources.files("cost_models").joinpath("machines", "nccl.toml").read_text(encoding="utf-8"))


@cache
def _families() -> Mapping[str, str]:
    """Return the hardware family by link name."""
    return {name: family for family, names in _table()["links"].items() for name in names}
