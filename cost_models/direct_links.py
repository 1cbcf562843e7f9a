"""Count the links that serve a group of devices in a node without a switch, from the links between every two devices.

The links are an undirected graph with L[a][b] links between devices a and b. A ring collective on a set S of devices
uses as many rings as NCCL can lay without sharing a direction of a link. Each ring leaves every proper subset of S at
least once, so there are at most

    rings(S) = min over T, {} < T < S, of  sum of L[a][b], a in T, b in S - T            (the smallest cut)

rings, each at the rate of one link; where S is a chain, trees replace them. (J. Edmonds, "Edge-disjoint
branchings", 1973: broadcasts reach this bound; G. Wang et al., "Blink", MLSys 2020, pack trees up to it on the DGX-1.)
Point-to-point messages use the links between the two devices. If there are none, they use the best detour over one
other device, max over c of min(L[a][c], L[c][b]) (NCCL's PATH_NVB). Detours also count where S is not connected by its
own links.

An axis of ranks has many groups in a node, and waits for the one with the fewest links.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

Links = Sequence[Sequence[int]]
"""Links between every two devices of a node: symmetric, zero on the diagonal."""


def rings(links: Links, members: Sequence[int]) -> int:
    """Count the most rings, each with its own links, through two or more `members`; 0 if they are not connected."""
    first, *others = members
    cuts = []
    for count in range(len(others)):
        for chosen in itertools.combinations(others, count):
            inside = {first, *chosen}
            cuts.append(sum(links[a][b] for a in inside for b in members if b not in inside))
    return min(cuts)


def pair(links: Links, sender: int, receiver: int) -> int:
    """Count the links that a message between two devices can use at once, over one other device if necessary."""
    detours = (min(links[sender][via], links[via][receiver]) for via in range(len(links)))
    return links[sender][receiver] or max(detours)


def collective_links(links: Links, size: int, stride: int, num_devices: int) -> int:
    """Count the links that serve one rank in the worst group base + i * stride, i < size, on nodes of `num_devices`.

    num_devices: may be fewer than `links` has; the first devices are used then.
    """
    return min(
        rings(links, part) or rings(_with_detours(links), part) for part in _parts(links, size, stride, num_devices)
    )


def message_links(links: Links, size: int, stride: int, num_devices: int) -> int:
    """Count the links between the worst two neighbors of a group, base + i * stride and base + (i + 1) * stride."""
    parts = _parts(links, size, stride, num_devices)
    return min(pair(links, a, b) for part in parts for a, b in itertools.pairwise(part))


def exchange_links(links: Links, size: int, stride: int, num_devices: int) -> int:
    """Count the links of one rank when everyone sends to everyone directly.

    That is the links of the worst pair times the number of other ranks, but at most the links that serve a collective.
    """
    parts = list(_parts(links, size, stride, num_devices))
    worst = min(pair(links, a, b) for part in parts for a, b in itertools.combinations(part, 2))
    others = min(map(len, parts)) - 1
    return min(others * worst, collective_links(links, size, stride, num_devices))


def _with_detours(links: Links) -> Links:
    count = len(links)
    return [[pair(links, a, b) if a != b else 0 for b in range(count)] for a in range(count)]


def _parts(links: Links, size: int, stride: int, num_devices: int) -> Iterator[tuple[int, ...]]:
    """Yield the ranks that a group of an axis has in one node, where there are several. Raises ValueError for nodes
    with more devices than `links` has."""
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
