"""Views: any two shapes with equal element counts, every common factor proven."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.proofs import prove_rule
from autopar.rules import rule_for
from autopar.rules.factorize import view_factors
from tests.autopar.rules.handmade_calls import f, make_node


@st.composite
def shape_pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two groupings of the same primes, each shuffled, with dims of size 1 strewn in."""
    primes = draw(st.lists(st.sampled_from([2, 2, 2, 3, 3, 5]), min_size=1, max_size=6))

    def grouped(order: list[int]) -> tuple[int, ...]:
        shape = [1]
        for prime in order:
            if draw(st.booleans()):
                shape.append(1)
            shape[-1] *= prime
        return tuple(shape)

    return grouped(primes), grouped(list(draw(st.permutations(primes))))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(shape_pairs())
def test_every_shared_factor_is_right(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """By the proof: forward, backward, in sections, and on two axes; and no plain shard is overlooked."""
    source, target = pair
    node, inputs = make_node("aten.view.default", f(*source), target)
    rule = rule_for(node, inputs)
    assert rule is not None
    report = prove_rule(node, inputs, rule)
    assert report.wrong == ()
    assert report.missed == ()


@given(shape_pairs())
def test_factors_multiply_to_the_dims(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    source, target = pair
    factors = view_factors(source, target)
    for shape, dims in ((source, factors.source), (target, factors.target)):
        assert tuple(math.prod(factors.sizes[f] for f in dim) for dim in dims) == shape
    shared = {f for dim in factors.source for f in dim} & {f for dim in factors.target for f in dim}
    assert shared.isdisjoint(factors.blocked)
    assert shared | factors.blocked == set(factors.sizes)


@pytest.mark.parametrize(
    ("source", "target", "merged"),
    [
        ((8, 16, 32), (8, 16, 4, 8), "heads split"),
        ((8, 16, 4, 8), (8, 16, 32), "heads merged"),
        ((8, 16, 32), (128, 32), "batch and sequence merged"),
        ((1, 8, 16), (8, 1, 16), "dims of size 1 move"),
    ],
)
def test_usual_views_lose_no_factor(source: tuple[int, ...], target: tuple[int, ...], merged: str) -> None:
    assert view_factors(source, target).blocked == frozenset(), merged


def test_what_has_no_common_loop_is_blocked() -> None:
    factors = view_factors((2, 3), (3, 2))
    assert factors.blocked == frozenset(factors.sizes)
    assert all(len(dim) == 1 for dim in (*factors.source, *factors.target))


def test_common_loops_at_both_ends_of_an_opaque_middle() -> None:
    """(2, 2*3) and (2*3, 2): the major 2 is shared, then 2*3 against 3*2 shares nothing from either end."""
    factors = view_factors((10, 21, 22), (14, 15, 22))
    (major,) = set(factors.source[0]) & set(factors.target[0])
    assert factors.sizes[major] == 2
    (minor,) = set(factors.source[1]) & set(factors.target[1])
    assert factors.sizes[minor] == 3
    assert factors.source[2] == factors.target[2]


def test_unequal_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot turn"):
        view_factors((4, 6), (5, 5))
