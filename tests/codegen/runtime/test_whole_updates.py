"""Updates of whole parameters by their owners: a step's own promises hold as for every optimiser."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from codegen.runtime import whole_updates
from codegen.runtime.mesh import Mesh
from codegen.runtime.optimizer_trial import OptimizerTrial
from codegen.runtime.optimizers import OptimizerError
from codegen.runtime.sharded_units import ShardedUnits
from codegen.runtime.step import Step
from tests.autopar.optimizer_factories import Lamb, clipped, muon_by_ndim
from tests.codegen.runtime.features import features
from tests.codegen.runtime.mlp_program import EagerTraining, make_program, whole_batch, whole_state
from tests.codegen.runtime.ranks import run_ranks

ROWS = 8
LIMIT = 0.05


def make_step(
    mesh: Mesh, zero: int, factory: Any = Lamb, micro: int = 1, dtype: str = "float64", **options: Any
) -> Step:
    step = Step(
        make_program(zero, ROWS // micro, dtype),
        mesh,
        optimizer_factory=factory,
        trial=OptimizerTrial(),
        num_micro_batches=micro,
        **{"units": ShardedUnits, **options},
    )
    step.load(whole_state())
    return step


class Eager(EagerTraining):
    """One process that trains with another optimiser."""

    def __init__(self, factory: Any, max_grad_norm: float | None = None) -> None:
        super().__init__("sgd", max_grad_norm)
        self.optimizer = factory(list(self.trained.values()))


def assert_equal(step: Step, eager: EagerTraining, case: str) -> None:
    state = step.full_state_dict()
    for name, value in eager.state.items():
        if name in state:
            assert torch.allclose(state[name], value.detach(), rtol=0, atol=1e-9), f"{case}: {name}"


def check_exact(rank: int, world_size: int) -> None:
    meshes = [Mesh.create(*shape) for shape in ((("dp", "tp"), (2, 2)), (("dp",), (4,)), (("dp", "cp"), (2, 2)))]
    most = 0
    for factory, mesh, zero in itertools.product((Lamb, muon_by_ndim), meshes, range(4)):
        micro, case = 1 + zero % 2, f"{mesh}, zero {zero}, {factory.__name__}"
        whole_updates.ROUND_BYTES = (2**26, 512)[zero % 2]  # all in one exchange, or a matrix or two
        step, eager = make_step(mesh, zero, factory, micro, max_grad_norm=LIMIT), Eager(factory, LIMIT)
        for seed in range(3):
            step(step.local_batch(whole_batch(ROWS, seed)))
            eager.step(whole_batch(ROWS, seed))
            for optimizer in (step.optimizer, eager.optimizer):
                optimizer.zero_grad()
                optimizer.param_groups[0]["lr"] *= 0.5
        assert_equal(step, eager, case)
        assert step.wholes is not None
        most = max(most, len(step.wholes._rounds))
        assert step.grad_norm is not None and torch.allclose(step.grad_norm.double(), eager.grad_norm.double())
    assert most > 1


@pytest.mark.distributed
@pytest.mark.slow
def test_exact_with_clipping_and_micro_batches() -> None:
    run_ranks(check_exact, 4)


def check_by_hand(rank: int, world_size: int) -> None:
    """Gradients that are not all on a rank are not to be touched, also where copies of parameters are."""
    for axis, zero in (("dp", 0), ("dp", 3), ("tp", 0)):
        step, eager = make_step(Mesh.create((axis,), (2,)), zero), Eager(Lamb)
        step.forward_backward(step.local_batch(whole_batch(ROWS, 7)))
        with pytest.raises(RuntimeError, match="gradients"):
            held = [p for group in step.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(held, LIMIT)
            step.update()
        step.optimizer.zero_grad()
        for seed in range(2):
            step(step.local_batch(whole_batch(ROWS, seed)))
            step.optimizer.zero_grad()
            eager.step(whole_batch(ROWS, seed))
        assert_equal(step, eager, f"{axis}, zero {zero}")
        for seed in range(2):
            step.forward_backward(step.local_batch(whole_batch(ROWS, seed)))
        with pytest.raises(RuntimeError, match="after 2 calls"):
            step.update()


@pytest.mark.distributed
def test_gradients_in_the_hands_of_scripts() -> None:
    run_ranks(check_by_hand, 2)


def check_skipping(rank: int, world_size: int) -> None:
    step = make_step(Mesh.create(("dp",), (2,)), 1)
    step(step.local_batch(whole_batch(ROWS, 0)))
    states = {key: value.clone() for state in step.optimizer.state.values() for key, value in state.items()}
    before = {name: value.clone() for name, value in step.full_state_dict().items()}
    step.model.scale.fill_(float("nan"))
    step(step.local_batch(whole_batch(ROWS, 1)))
    assert step.guard.num_skipped == 1
    after = step.full_state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items() if name != "scale")
    assert all(torch.equal(v, states[k]) for k, v in list(step.optimizer.state.values())[-1].items())


@pytest.mark.distributed
def test_a_skipped_step_changes_nothing() -> None:
    run_ranks(check_skipping, 2)


def check_bf16(rank: int, world_size: int) -> None:
    """Masters stay in fp32: what is stored makes no difference, bit by bit (of two ranks, sums have one order)."""
    found = []
    for zero in range(4):
        step = make_step(Mesh.create(("dp",), (2,)), zero, muon_by_ndim, dtype="float32", precision="bf16")
        for seed in range(3):
            step(step.local_batch(whole_batch(ROWS, seed)))
        held = [p for group in step.optimizer.param_groups for p in group["params"]]
        assert held and all(p.dtype == torch.float32 for p in held)
        found.append(step.full_state_dict())
    initial = whole_state(torch.float32)
    for name in ("embed.weight", "blocks.1.down.weight"):
        assert all(torch.equal(each[name], found[0][name]) for each in found)
        assert not torch.equal(found[0][name], found[0][name].bfloat16().float())
        assert not torch.allclose(found[0][name], initial[name], atol=1e-3)


@pytest.mark.distributed
def test_masters_of_bf16_programs_are_updated_in_fp32() -> None:
    run_ranks(check_bf16, 2)


def check_refused(rank: int, world_size: int) -> None:
    mesh = Mesh.create(("dp",), (2,))
    offloaded = partial(make_step, mesh, **features(mesh, offload_optimizer="host"))
    with pytest.raises(OptimizerError, match="the optimizer is offloaded"):
        offloaded(3)
    with pytest.raises(OptimizerError, match="couples all parameters"):
        make_step(mesh, 1, clipped)
    step, eager = offloaded(0), Eager(Lamb)  # all ranks hold all, and update all
    for seed in range(2):
        step(step.local_batch(whole_batch(ROWS, seed)))
        eager.step(whole_batch(ROWS, seed))
    assert_equal(step, eager, "offloaded")


@pytest.mark.distributed
def test_what_no_rank_can_do_alone_is_refused() -> None:
    run_ranks(check_refused, 2)
