"""A strategy beside the same one with something changed: what a prediction with the change gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.errors import ConstraintError
from cost_models.machine import Cluster
from tests.autopar.requests import BATCH, hostless
from tests.autopar.strategies.test_predictor import predicted, predictor

BASE = {"dp": 2, "tp": 2, "zero": 0, "micro_batches": 2}


def test_a_changed_part_gives_what_a_prediction_with_it_gives() -> None:
    before = predicted(profile="fsdp", **BASE)
    spec = Cluster.parse("4 a100-80g")
    link = replace(spec.intra_node, bytes_per_second=spec.intra_node.bytes_per_second / 4, latency_seconds=1e-4)
    device = replace(
        spec.device,
        memory_bytes=2**36,
        peak_flops_per_second={k: 2 * v for k, v in spec.device.peak_flops_per_second.items()},
    )
    found = before.what_if(
        device={"peak_flops_per_second": "x2", "memory_bytes": "64GiB"},
        intra_node={"bytes_per_second": "x0.25", "latency_seconds": 1e-4},
        global_batch_size=2 * BATCH,
        strategy={"recompute": "full", "micro_batches": 4},
    )
    strategy = BASE | {"recompute": "full", "micro_batches": 4}
    other = predictor("llama").predict(
        replace(spec, device=device, intra_node=link), strategy, global_batch_size=2 * BATCH, framework="fsdp"
    )
    assert found.after == other and found.before is before
    assert found.after.capacity_bytes == 2**36
    assert found.speedup == pytest.approx(2 * before.step_seconds / other.step_seconds)


def test_parts_add_up_and_only_those_move_that_depend_on_the_change() -> None:
    strategy = {"dp": 4, "zero": 1, "micro_batches": 2}
    found = predicted(profile="fsdp", **strategy).what_if(intra_node={"bytes_per_second": "x0.5"})
    for side, whole in (("before", found.before), ("after", found.after)):
        parts = [p for p in found.parts() if p.group not in ("memory", "hidden communication")]
        assert sum(getattr(p, side) for p in parts) == pytest.approx(whole.step_seconds)
        assert sum(getattr(p, side) for p in found.parts() if p.group == "memory") == whole.peak_bytes
    for part in found.parts():
        if part.group in ("compute", "optimizer", "memory"):
            assert part.before == part.after
        elif part.group == "exposed communication":
            assert part.after > part.before
    unchanged = predicted(**BASE).what_if()
    assert unchanged.before == unchanged.after


def test_a_field_may_be_taken_away_and_a_part_replaced() -> None:
    before = predicted(**BASE | {"recompute": "full"})
    assert before.what_if(strategy={"recompute": None}).after == predicted(**BASE)
    assert before.what_if(device="h100-sxm").after.scenario.cluster.device.name == "h100-sxm"
    other = hostless(Cluster.parse("4 h100-sxm"))
    assert before.what_if(cluster=other).after == predicted(cluster="4 h100-sxm", **BASE | {"recompute": "full"})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"intra_node": {"speed": 1}}, "has no field 'speed'"),
        ({"intra_node": {"bytes_per_second": "fast"}}, "is a number"),
        ({"intra_node": {"bytes_per_second": -1}}, "no such cluster"),
        ({"device": "a1000"}, "no such cluster"),
        ({"strategy": {"dp": 4}}, "number of devices"),
        ({"global_batch_size": 7}, "not divided"),
        ({"framework": "megatron"}, "framework is not one"),
    ],
)
def test_an_impossible_change_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConstraintError, match=words):
        predicted(**BASE).what_if(**change)
