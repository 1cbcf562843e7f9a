"""Kinds of exchange of experts' rows as data, and the words that they may have."""

from __future__ import annotations

import pytest

from cost_models.dispatch import Dispatch, dispatch, dispatches
from cost_models.framework_profiles import Framework, framework


def test_every_kind_has_a_source_and_programs_have_two() -> None:
    assert all(kind.source for kind in dispatches().values())
    assert [name for name, kind in dispatches().items() if kind.in_programs] == ["all_to_all", "once_per_node"]
    assert framework("autopar").dispatches == ("all_to_all", "once_per_node")


FAULTS = ({"between": "rack"}, {"inside": "node"}, {"passes": -1.0}, {"power": 0.5}, {"hidden": 1.5})


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_faulty_kinds_are_refused(fault: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="dispatch odd"):
        Dispatch("odd", "nowhere", **fault)  # type: ignore[arg-type]


def test_unknown_kinds_are_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="Known: all_to_all"):
        dispatch("pigeon")
    with pytest.raises(ValueError, match="pigeon"):
        Framework("odd", "nowhere", dispatches=("pigeon",))
