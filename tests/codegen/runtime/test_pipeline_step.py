"""Pipelines on real gloo processes against plain torch on one: loss, gradients, norm, parameters after two steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from codegen.runtime.loss_scale import LossScale
from codegen.runtime.pipeline import Pipeline
from codegen.runtime.step import Step
from cost_models.schedules.actions import schedule_text
from cost_models.schedules.generate import SCHEDULES, make_schedule, placement
from tests.codegen.runtime.features import features, staged
from tests.codegen.runtime.mlp_program import make_optimizer
from tests.codegen.runtime.pipeline_program import (
    SEED,
    eager_steps,
    make_pipeline,
    whole_batch,
    whole_state,
)
from tests.codegen.runtime.ranks import run_ranks

ROWS = 16
NUM_STEPS = 2  # the second begins with an optimiser's state, with other parameters and with dropout of its own


def make_step(
    pipeline: Pipeline,
    schedule: tuple[str, ...],
    micro: int,
    kind: str = "adamw",
    norm: float | None = None,
    **options: Any,
) -> Step:
    mesh = pipeline.create_mesh()
    step = Step(
        pipeline,
        mesh,
        optimizer_factory=partial(make_optimizer, kind),
        num_micro_batches=micro,
        executor=staged(schedule),
        max_grad_norm=norm,
        seed=SEED,
        **features(mesh, **options),
    )
    step.load(whole_state(bool(pipeline.tied)))
    return step


def lines(name: str, num_pipeline_ranks: int, micro: int) -> tuple[str, ...]:
    return tuple(schedule_text(make_schedule(name, num_pipeline_ranks, micro)).splitlines())


def check_training(
    rank: int,
    name: str,
    num_pipeline_ranks: int,
    micro: int,
    kind: str = "adamw",
    norm: float | None = None,
    **options: Any,
) -> None:
    """options: of make_pipeline, and some of Step."""
    tolerance = options.pop("tolerance", 1e-12)
    names = ("precision", "loss_scaling", "offload_optimizer")
    memory = {key: options.pop(key) for key in names if key in options}
    case = f"{name}, {num_pipeline_ranks} ranks, {micro} micro-batches, {kind}, clipping {norm}, {options}, {memory}"
    hidden_dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(str(memory.get("precision")))
    ranks = placement(name, num_pipeline_ranks)
    pipeline = make_pipeline(ranks, ROWS // micro, hidden_dtype=hidden_dtype, **options)
    schedule = lines(name, num_pipeline_ranks, micro)
    step = make_step(pipeline, schedule, micro, kind, norm, **memory)
    eager, trained = eager_steps(kind, norm, bool(pipeline.tied), ROWS, NUM_STEPS)
    own_line = schedule[pipeline.pipeline_rank_of(rank)].split()

    def assert_near(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        error = (actual.double() - expected).norm() / (expected.norm() + 1e-3)
        assert error < tolerance, f"{case}: {what} is off by {error:.1e}"

    for index, expected in enumerate(eager):
        batch = whole_batch(ROWS, seed=index)
        evaluated = step.evaluate(step.local_batch(batch))
        assert_near(evaluated, expected.evaluated, f"loss without gradients of step {index}")
        assert step.executed == [action for action in own_line if action[0] == "F"]
        loss = step.forward_backward(step.local_batch(batch))
        assert step.executed == own_line
        assert_near(loss, expected.loss, f"loss of step {index}")
        gradients = step.gradients()
        assert gradients.keys() == expected.gradients.keys()
        for each, gradient in expected.gradients.items():
            assert_near(gradients[each], gradient, f"gradient {each} of step {index}")
        step.update()
        if norm is not None:
            assert step.grad_norm is not None
            assert_near(step.grad_norm, expected.grad_norm, f"gradient norm of step {index}")
    assert step.num_samples == NUM_STEPS * ROWS
    state, at_zero = step.full_state_dict(), step.full_state_dict(rank0_only=True)
    assert state.keys() == {*trained, "head.weight"}
    assert at_zero.keys() == (state.keys() if rank == 0 else set())
    for each, value in trained.items():
        assert_near(state[each], value, f"{each} after training")
        assert rank > 0 or torch.equal(at_zero[each], state[each])


def two_ranks(rank: int, world_size: int) -> None:
    for name in SCHEDULES:
        check_training(rank, name, 2, 4)
        check_training(rank, name, 2, 2, "sgd", 0.05)
    check_training(rank, "zero-bubble", 2, 4, recompute="full")
    check_training(rank, "1f1b", 2, 4, recompute="selective")
    check_training(rank, "1f1b", 2, 1)
    check_training(rank, "zero-bubble-v", 2, 4, norm=0.05, offload_optimizer="host")
    check_training(rank, "1f1b", 2, 4, dtype="float32", tolerance=1e-4, kind="sgd")
    check_training(rank, "zero-bubble-v", 2, 4, dtype="float32", tolerance=0.1, kind="sgd", precision="bf16")
    scaled: dict[str, Any] = {"precision": "fp16", "loss_scaling": LossScale(init_scale=2.0**10)}
    for name in ("1f1b", "interleaved", "zero-bubble"):
        check_training(rank, name, 2, 4, dtype="float32", tolerance=0.02, kind="sgd", norm=0.05, **scaled)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_pipeline_ranks_train_like_one_process() -> None:
    run_ranks(two_ranks, 2)


def four_pipeline_ranks(rank: int, world_size: int) -> None:
    for name in SCHEDULES:
        check_training(rank, name, 4, 8, "sgd", 0.05)
        check_training(rank, name, 4, 2)


@pytest.mark.slow
@pytest.mark.distributed
def test_four_pipeline_ranks_train_like_one_process() -> None:
    run_ranks(four_pipeline_ranks, 4)


def two_by_two(rank: int, world_size: int) -> None:
    dp, tp = {"axes": ("dp",), "sizes": (2,)}, {"axes": ("tp",), "sizes": (2,)}
    for zero in (0, 1, 2, 3):
        check_training(rank, "1f1b", 2, 4, "adamw", 0.05, zero=zero, **dp)
        check_training(rank, "zero-bubble", 2, 4, "sgd", 0.05, zero=zero, **dp)
        check_training(rank, "zero-bubble-v", 2, 2, "adamw", None, zero=zero, **dp)
    check_training(rank, "interleaved", 2, 4, zero=3, recompute="full", **dp)
    check_training(rank, "zero-bubble", 2, 4, zero=3, recompute="full", **dp)
    check_training(rank, "1f1b", 2, 4, "sgd", 0.05, **tp)
    check_training(rank, "zero-bubble-v", 2, 4, "sgd", 0.05, boundary="S(1)", **tp)


@pytest.mark.slow
@pytest.mark.distributed
def test_pipeline_ranks_of_two_ranks_train_like_one_process() -> None:
    run_ranks(two_by_two, 4)


def unequal(rank: int, world_size: int) -> None:
    for meshes in (((("dp",), (2,)), ((), ())), (((), ()), (("dp",), (2,))), ((("dp",), (2,)), (("tp",), (1,)))):
        check_training(rank, "1f1b", 2, 4, "adamw", 0.05, is_tied=False, meshes=meshes)
        check_training(rank, "zero-bubble", 2, 4, "adamw", 0.05, is_tied=False, meshes=meshes, zero=2)


@pytest.mark.slow
@pytest.mark.distributed
def test_pipeline_ranks_of_unequal_meshes_train_like_one_process() -> None:
    run_ranks(unequal, 3)


def test_all_stages_on_one_process() -> None:
    check_training(0, "interleaved", 1, 4, "sgd", 0.05)
    check_training(0, "zero-bubble-v", 1, 4)
