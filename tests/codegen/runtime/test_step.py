"""Step on real gloo processes against plain torch on one: loss, gradients, norm and parameters after three steps."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch

from codegen.runtime import zero as zero_units
from codegen.runtime.loss_scale import LossScale
from codegen.runtime.mesh import Mesh
from codegen.runtime.sharded_units import ShardedUnits
from codegen.runtime.step import Step
from tests.codegen.runtime.mlp_program import EagerTraining, make_optimizer, make_program, whole_batch, whole_state
from tests.codegen.runtime.ranks import run_ranks

ROWS = 16
NUM_STEPS = 2  # the second begins with an optimiser's state and with other parameters


def make_step(mesh: Mesh, zero: int, micro: int, kind: str, norm: float | None, **options: Any) -> Step:
    program = make_program(zero, ROWS // micro, options.pop("dtype", "float64"))
    step = Step(
        program,
        mesh,
        optimizer_factory=partial(make_optimizer, kind),
        num_micro_batches=micro,
        max_grad_norm=norm,
        **{"units": ShardedUnits, **options},
    )
    step.load(whole_state())
    return step


def check_training(mesh: Mesh, zero: int, micro: int, kind: str, norm: float | None, **options: Any) -> None:
    tolerance = options.pop("tolerance", 1e-10)
    step, eager = make_step(mesh, zero, micro, kind, norm, **options), EagerTraining(kind, norm)
    case = f"{mesh}, zero {zero}, {micro} micro-batches, {kind}, clipping {norm}, {options}"

    def assert_near(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        error = (actual.double() - expected.detach()).norm() / (expected.detach().norm() + 1e-3)
        assert error < tolerance, f"{case}: {what} is off by {error:.1e}"

    for index in range(NUM_STEPS):
        batch = whole_batch(ROWS, seed=index)
        before = step.evaluate(step.local_batch(batch))
        loss = step.forward_backward(step.local_batch(batch))
        expected = eager.step(batch)
        assert_near(loss, expected, f"loss of step {index}")
        assert_near(before, expected, f"loss without gradients of step {index}")
        gradients = step.gradients()
        assert gradients.keys() == eager.gradients.keys()
        for name, gradient in eager.gradients.items():
            assert_near(gradients[name], gradient, f"gradient {name} of step {index}")
        step.update()
        if norm is not None:
            assert step.grad_norm is not None
            assert_near(step.grad_norm, eager.grad_norm, f"gradient norm of step {index}")
    state = step.full_state_dict()
    eager.state.pop("tables.unit")
    assert state.keys() == {*eager.state, "head.weight"}
    assert state["head.weight"] is state["embed.weight"]
    for name, value in eager.state.items():
        assert_near(state[name], value, f"{name} after training")


OPTIMIZERS = (("adamw", None), ("sgd", 0.05))
MESHES = ((("dp", "tp"), (2, 2)), (("dp",), (4,)), (("dp", "cp"), (2, 2)))


def four_ranks(rank: int, world_size: int, half: int) -> None:
    """Half of the combinations; either half has every pair of mesh, ZeRO stage, micro-batches and optimizer."""
    meshes = [Mesh.create(*each) for each in MESHES]
    for place, zero, micro in itertools.product(range(len(meshes)), (0, 1, 2, 3), (1, 4)):
        check_training(meshes[place], zero, micro, *OPTIMIZERS[(place + zero + micro // 4 + half) % 2])
    for zero in (0, 1, 2, 3):
        micro = (1, 4)[(zero + half) % 2]
        check_training(meshes[0], zero, micro, "sgd", 0.05, precision="bf16", dtype="float32", tolerance=0.06)
        scaled = {"precision": "fp16", "loss_scaling": LossScale(init_scale=2.0**10)}
        check_training(meshes[0], zero, micro, "sgd", 0.05, dtype="float32", tolerance=0.008, **scaled)


def four_ranks_once(rank: int, world_size: int) -> None:
    """What does not depend on the combination."""
    meshes = [Mesh.create(*each) for each in MESHES]
    for zero in (0, 3):
        check_training(meshes[0], zero, 1, "sgd", None, dtype="float32", tolerance=1e-5)
    # Several buckets to a stage; this process ends with the test.
    zero_units.BUCKET_BYTES = 300
    for zero in (0, 1, 2, 3):
        check_training(meshes[2], zero, 2, "adamw", 0.05)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_four_ranks_train_like_one_process(half: int) -> None:
    run_ranks(four_ranks, 4, half)


@pytest.mark.distributed
def test_four_ranks_train_in_float32_and_with_several_buckets() -> None:
    run_ranks(four_ranks_once, 4)
