"""How many links serve a group of devices in a node without a switch, from the links between every two of them.

The links are an undirected graph with L[a][b] links between devices a and b. A ring collective on a set S of devices
runs along as many rings as NCCL can lay without sharing a direction of a link; each ring leaves every proper subset of
S at least once, so there are at most

    rings(S) = min over T, {} < T < S, of  sum of L[a][b], a in T, b in S - T            (the smallest cut)

of them, each at the rate of one link; where S is a chain, trees take their place. (J. Edmonds, "Edge-disjoint
branchings", 1973: broadcasts reach this bound; G. Wang et al., "Blink", MLSys 2020, pack trees up to it on the DGX-1.)
Point-to-point messages use the links between the two devices, or, where there are none, those of the best way over one
other device, max over c of min(L[a][c], L[c][b]) (NCCL's PATH_NVB); such detours also count where S is not connected by
its own links.

An axis of ranks has many groups in a node, and waits for the one with the fewest links.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

Links = Sequence[Sequence[int]]
"""Links between every two devices of a node: symmetric, zero on the diagonal."""


def rings(links: Links, members: Sequence[int]) -> int:
    """The most rings, each with a link of its own, through two or more `members`; 0 if they are not connected."""
    first, *others = members
    cuts = []
    for count in range(len(others)):
        for chosen in itertools.combinations(others, count):
            inside = {first, *chosen}
            cuts.append(sum(links[a][b] for a in inside for b in members if b not in inside))
    return min(cuts)


def pair(links: Links, sender: int, receiver: int) -> int:
    """Links that a message from one device to another can use at once, over one other device if need be."""
    detours = (min(links[sender][via], links[via][receiver]) for via in range(len(links)))
    return links[sender][receiver] or max(detours)


def collective_links(links: Links, size: int, stride: int, num_devices: int) -> int:
    """Links that serve one rank in the worst group base + i * stride, i < size, on nodes of `num_devices` devices.

    num_devices: may be fewer than the node has; the first ones are used then.
    """
    return min(
        rings(links, part) or rings(_with_detours(links), part) for part in _parts(links, size, stride, num_devices)
    )


def message_links(links: Links, size: int, stride: int, num_devices: int) -> int:
    """Links between the worst two neighbors of a group, base + i * stride and base + (i + 1) * stride."""
    parts = _parts(links, size, stride, num_devices)
    return min(pair(links, a, b) for part in parts for a, b in itertools.pairwise(part))


def exchange_links(links: Links, size: int, stride: int, num_devices: int) -> int:
    """Links of one rank when everyone sends to everyone directly: as many times those of the worst two as it has
    others, but not more than serve a collective."""
    parts = list(_parts(links, size, stride, num_devices))
    worst = min(pair(links, a, b) for part in parts for a, b in itertools.combinations(part, 2))
    others = min(map(len, parts)) - 1
    return min(others * worst, collective_links(links, size, stride, num_devices))


def _with_detours(links: Links) -> Links:
    count = len(links)
    return [[pair(links, a, b) if a != b else 0 for b in range(count)] for a in range(count)]


def _parts(links: Links, size: int, stride: int, num_devices: int) -> Iterator[tuple[int, ...]]:
    """What the groups of an axis have in one node, where that is more than one rank. Raises ValueError for nodes with
    more devices than `links` has."""
    if num_devices > len(links):
        raise ValueError(f"a node of {num_devices} devices is joined by links of {len(links)}")
    span = size * stride
    seen = set()
    for start in range(0, math.lcm(span, num_devices), span):
        for base in range(start, start + stride):
            ranks = range(base, base + span, stride)
            for _, same_node in itertools.groupby(ranks, key=lambda rank: rank // num_devices):
                part = tuple(rank % num_devices for rank in same_node)
                if len(part) > 1 and part not in seen:
                    seen.add(part)
                    yield part
