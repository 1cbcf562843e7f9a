"""A checkpoint of one pipeline continues under other pipelines, ZeRO stages and numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from codegen.runtime import checkpoint
from codegen.runtime.step import Step
from cost_models.schedules.generate import placement
from tests.codegen.runtime.pipeline_program import EagerTraining, make_pipeline, whole_batch
from tests.codegen.runtime.ranks import run_ranks
from tests.codegen.runtime.test_pipeline_step import ROWS, lines, make_step

LAYOUTS = {
    "v": ("zero-bubble-v", 2, {"axes": ("dp",), "sizes": (2,), "zero": 2}),
    "whole": ("1f1b", 4, {}),
    "sharded": ("zero-bubble", 2, {"axes": ("dp",), "sizes": (2,), "zero": 3}),
    "tensor": ("interleaved", 2, {"axes": ("tp",), "sizes": (2,)}),
}


def make(layout: tuple[str, int, dict[str, object]], micro: int = 4) -> Step:
    name, num_pipeline_ranks, options = layout
    pipeline = make_pipeline(placement(name, num_pipeline_ranks), ROWS // micro, **options)
    return make_step(pipeline, lines(name, num_pipeline_ranks, micro), micro)


def train(step: Step, steps: range) -> None:
    for index in steps:
        step(step.local_batch(whole_batch(ROWS, seed=index)))


def check_continuation(step: Step, folder: str, expected: dict[str, Tensor]) -> None:
    checkpoint.load(step, folder)
    assert (step.rng.step, step.num_samples) == (2, 2 * ROWS)
    train(step, range(2, 4))
    state = step.full_state_dict()
    for name, value in expected.items():
        error = (state[name] - value.detach()).abs().max()
        assert error < 1e-11, f"{name} is off by {error:.1e} from {folder}"


def reference() -> dict[str, Tensor]:
    eager = EagerTraining("adamw", None)
    for index in range(4):
        eager.step(whole_batch(ROWS, seed=index))
    return eager.state


def save_and_load(rank: int, world_size: int, folder: str) -> None:
    expected = reference()
    for name in LAYOUTS:
        step = make(LAYOUTS[name])
        train(step, range(2))
        checkpoint.save(step, f"{folder}/{name}")
    for saved, loaded in (("v", "whole"), ("whole", "v"), ("tensor", "sharded"), ("sharded", "tensor")):
        check_continuation(make(LAYOUTS[loaded], micro=2), f"{folder}/{saved}", expected)


@pytest.mark.slow
@pytest.mark.distributed
def test_continues_under_other_pipelines(tmp_path: Path) -> None:
    run_ranks(save_and_load, 4, str(tmp_path))
    for name in LAYOUTS:
        # One rank with all stages, and so with both copies of the tied weight.
        check_continuation(make(("interleaved", 1, {})), str(tmp_path / name), reference())
