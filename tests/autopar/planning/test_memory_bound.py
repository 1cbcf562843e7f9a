"""The least recomputation that fits: against enumeration, a closed form, and the search without it."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.costs.memory_bound import least_seconds
from autopar.planning import bounds
from autopar.planning.pipelines import EqualSearch
from autopar.planning.smallest_memory import smallest_pipeline
from autopar.planning.stage_problem import StageProblem
from tests.autopar.requests import request_for

CHOICE = st.tuples(st.integers(0, 9), st.integers(0, 20)).map(lambda pair: (float(pair[0]), float(pair[1])))
CLASS = st.tuples(st.integers(1, 3), st.lists(CHOICE, min_size=1, max_size=3))


@settings(deadline=None)
@given(st.lists(CLASS, min_size=1, max_size=3), st.integers(0, 80))
def test_no_choice_of_whole_layers_is_cheaper(classes: list[tuple[int, list[tuple[float, float]]]], room: int) -> None:
    layers = [choices for count, choices in classes for _ in range(count)]
    fitting = [
        sum(seconds for seconds, _ in chosen)
        for chosen in itertools.product(*layers)
        if sum(kept for _, kept in chosen) <= room
    ]
    found = least_seconds(classes, float(room))
    assert (found == math.inf) == (not fitting)
    assert found <= min(fitting, default=math.inf) + 1e-9


@given(st.integers(1, 50), st.floats(0.0, 1.0))
def test_two_choices_are_mixed_in_proportion(count: int, share: float) -> None:
    """Keep 10 bytes for nothing, or 2 bytes for 3 seconds: the share that must change pays. The third is on no hull."""
    room = count * (2.0 + 8.0 * share)
    choices = [(0.0, 10.0), (2.9, 6.0), (3.0, 2.0)]
    assert least_seconds([(count, choices)], room) == pytest.approx(3.0 * count * (1 - share), abs=1e-6)


@pytest.mark.parametrize("share", [0.7, 0.3, 0.0, -0.1])
@pytest.mark.slow
def test_the_search_finds_the_same_with_and_without_it(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """share: of the way from the smallest budget that is named to what the fastest plan takes; below, nothing fits."""
    ample = EqualSearch(request_for("gpt2")).run().solutions[0]
    search = EqualSearch(request_for("gpt2"))
    costs = StageProblem.of(search.costs, ample.config).assembled(ample.pipeline)
    workspace = search.request.cluster.device.reserved_bytes
    most = workspace + costs.peak_bytes
    smallest = smallest_pipeline(EqualSearch(request_for("gpt2", memory=workspace + 1)))
    assert smallest is not None
    least = smallest.num_bytes
    budget = math.ceil(least + share * (most - least))
    with_bound = EqualSearch(request_for("gpt2", memory=budget)).run()
    monkeypatch.setattr(bounds, "recompute_bound", lambda *_: 0.0)
    without = EqualSearch(request_for("gpt2", memory=budget)).run()
    assert [(f.objective, f.config) for f in with_bound.solutions] == [
        (f.objective, f.config) for f in without.solutions
    ]
    assert bool(with_bound.solutions) == (share >= 0)
