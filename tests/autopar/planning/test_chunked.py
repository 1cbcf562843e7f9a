"""Schedules with several stages per pipeline rank: what is passed over without a price does not fit."""

from __future__ import annotations

import pytest

from autopar.planning import chunked
from autopar.planning.bounds import stored_bound
from autopar.planning.chunked import CHUNKED, cuts_by_mode
from autopar.planning.pipelines import EqualSearch
from tests.autopar.requests import request_for


@pytest.mark.parametrize("schedule", CHUNKED)
def test_what_is_soon_found_of_a_cut_is_less_than_its_peak(schedule: str) -> None:
    search = EqualSearch(request_for("llama", "4 a100-80g", pp=2, schedule=schedule))
    configs = [each.under(schedule, 2) for each in search.promising()]
    found = [(config, cut) for config in configs for cut in cuts_by_mode(search, config)]
    assert {cut.mode for _, cut in found} == {"none", "selective", "full", "offload"}
    for config, cut in found:
        assert stored_bound(search.costs, config) / config.pp <= cut.peak_bytes
        assert cut.held_bytes <= cut.peak_bytes
    shares = sorted(cut.held_bytes / cut.peak_bytes for _, cut in found)
    assert shares[len(shares) // 2] > 0.5, shares


@pytest.mark.parametrize("schedule", CHUNKED)
def test_refined_are_the_first_cuts_that_fit(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a budget between the least and the most that cuts take."""
    free = EqualSearch(request_for("llama", "4 a100-80g", pp=2, schedule=schedule))
    configs = [each.under(schedule, 2) for each in free.promising()]
    peaks = sorted(cut.peak_bytes for config in configs for cut in cuts_by_mode(free, config))
    budget = int(peaks[len(peaks) // 4] + free.request.cluster.device.reserved_bytes)
    search = EqualSearch(request_for("llama", "4 a100-80g", pp=2, schedule=schedule, memory=budget))
    usable = search.costs.usable_bytes[0]
    monkeypatch.setattr(chunked, "MOST_REFINED", 100)
    expected = []
    for config in (each.under(schedule, 2) for each in search.promising()):
        fitting = (cut for cut in cuts_by_mode(search, config) if cut.peak_bytes <= usable)
        expected += [cut.found.pipeline for cut in [next(fitting, None)] if cut is not None]
    assert [each.pipeline for each in chunked.refined(search, ())] == expected
    assert 0 < len(expected) < len(configs)
