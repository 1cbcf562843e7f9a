"""Greedy elimination orders beside their definition, which counts every score anew."""

from __future__ import annotations

import random
from itertools import combinations
from math import prod

import pytest

from search.elimination import _greedy_order


def by_definition(sizes: list[int], pairs: list[tuple[int, int]], by_fill: bool) -> tuple[int, ...]:
    edges = {frozenset(pair) for pair in pairs}
    left, order = set(range(len(sizes))), list[int]()

    def around(v: int) -> list[int]:
        return [u for u in sorted(left) if {u, v} in edges]

    def score(v: int) -> tuple[int, ...]:
        cells = sizes[v] * prod(sizes[u] for u in around(v))
        missing = [pair for pair in combinations(around(v), 2) if frozenset(pair) not in edges]
        fill = sum(sizes[a] * sizes[b] for a, b in missing)
        return (fill, cells, v) if by_fill else (cells, v)

    while left:
        chosen = min(left, key=score)
        edges |= {frozenset(pair) for pair in combinations(around(chosen), 2)}
        left.remove(chosen)
        order.append(chosen)
    return tuple(order)


@pytest.mark.parametrize("by_fill", [False, True])
def test_orders_are_those_of_the_definition(by_fill: bool) -> None:
    draw = random.Random(0)
    for count in range(2, 14):
        for density in (1, 2, 3):
            sizes = [draw.randint(1, 5) for _ in range(count)]
            pairs = [(a, b) for a, b in (draw.sample(range(count), 2) for _ in range(density * count))]
            assert _greedy_order(sizes, pairs, by_fill) == by_definition(sizes, pairs, by_fill)
