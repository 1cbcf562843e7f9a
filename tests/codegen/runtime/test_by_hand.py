"""What loops do to a step's gradients, optimiser and parameters: as in plain torch on one process, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from codegen.runtime.mesh import Mesh
from codegen.runtime.step import Step
from tests.codegen.runtime.features import features
from tests.codegen.runtime.mlp_program import EagerTraining, whole_batch
from tests.codegen.runtime.ranks import run_ranks
from tests.codegen.runtime.test_step import ROWS, make_step

MESHES = ((("dp",), (2,), 0), (("dp",), (2,), 3), (("tp",), (2,), 0))


def batch_of(step: Step, seed: int) -> dict[str, torch.Tensor]:
    return step.local_batch(whole_batch(ROWS, seed))


def refused(action: Callable[[], object], words: str, kind: type[Exception] = RuntimeError) -> None:
    with pytest.raises(kind, match=words):
        action()


def assert_equal(step: Step, eager: EagerTraining, case: str) -> None:
    state = step.full_state_dict()
    for name, value in eager.state.items():
        if name in state:
            assert torch.allclose(state[name], value.detach(), rtol=0, atol=1e-9), f"{case}: {name}"


def steps_by_hand(rank: int, world_size: int) -> None:
    for axes, sizes, zero in MESHES:
        mesh, case = Mesh.create(axes, sizes), f"{axes}, zero {zero}"
        step, eager = make_step(mesh, zero, 1, "adamw", None), EagerTraining("adamw")
        for seed in range(4):  # loops out of habit drop gradients at every place where one may
            step.optimizer.zero_grad(set_to_none=seed % 2 == 0)
            own = batch_of(step, seed)
            with torch.device("meta"):  # what a step makes, it makes where it needs it
                step(own)
            step.optimizer.zero_grad()
            eager.step(whole_batch(ROWS, seed))
        assert_equal(step, eager, case)
        for _ in range(2):
            step.forward_backward(batch_of(step, 8))
        refused(step.update, "after 2 calls of forward_backward")
        step.optimizer.zero_grad()
        step(batch_of(step, 9))
        eager.step(whole_batch(ROWS, 9))
        assert_equal(step, eager, f"{case}, after dropped gradients")
        refused(step.update, "update\\(\\) without gradients")
        with torch.no_grad():
            refused(partial(step, batch_of(step, 5)), "gradients are switched off")
        assert_equal(step, eager, f"{case}, after refusals")
        _check_clipping(mesh, zero, case)
        _check_settings(step)
    _check_offloaded(Mesh.create(("dp",), (2,)))


def _check_clipping(mesh: Mesh, zero: int, case: str) -> None:
    """By hand, the norm is of what a rank has: right where that is everything."""
    step, eager = make_step(mesh, zero, 1, "sgd", None), EagerTraining("sgd", 0.05)
    eager.step(whole_batch(ROWS, 0))
    step.forward_backward(batch_of(step, 0))
    gradients = [parameter for parameter in step.stored_parameters().values() if parameter.grad is not None]
    nn.utils.clip_grad_norm_(gradients, 0.05)
    if zero or mesh.axes[0].name == "tp":
        refused(step.update, "gradients were changed")
    else:
        step.update()
        assert_equal(step, eager, f"{case}, clipped")
    step.forward_backward(batch_of(step, 1))
    for parameter in gradients:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clone()
    refused(step.update, "gradients were replaced")


def _check_offloaded(mesh: Mesh) -> None:
    """The gradients are on the device, and the parameters that the optimiser has in host memory."""
    for use in (
        lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.05),
        lambda parameters: nn.utils.clip_grad_value_(parameters, 0.05),
        lambda parameters: torch.stack([parameter.grad.norm() for parameter in parameters]),
        lambda parameters: parameters[0].grad.mul_(0.5),
        lambda parameters: torch.optim.SGD(parameters, 0.1).zero_grad(set_to_none=False),
    ):
        step, eager = (
            make_step(mesh, 0, 1, "adamw", None, **features(mesh, offload_optimizer="host")),
            EagerTraining("adamw"),
        )
        parameters = [parameter for parameter in step.stored_parameters().values() if parameter.requires_grad]
        step.forward_backward(batch_of(step, 0))
        refused(partial(use, parameters), "gradients are not in host memory")
        step.optimizer.zero_grad()
        for seed in range(2):
            step(batch_of(step, seed))
            eager.step(whole_batch(ROWS, seed))
        assert_equal(step, eager, "offloaded")
        step.forward_backward(batch_of(step, 0))
        step.forward_backward(batch_of(step, 1))
        refused(step.update, "after 2 calls of forward_backward")
        step.forward_backward(batch_of(step, 0))
        parameters[0].grad = torch.zeros_like(parameters[0])
        step.optimizer.zero_grad()
        step(batch_of(step, 2))


def _check_settings(step: Step) -> None:
    refused(
        lambda: setattr(step, "optimizer", torch.optim.SGD(step.stored_parameters().values())),
        "optimizer",
        AttributeError,
    )
    refused(lambda: setattr(step, "max_grad_norm", 1.0), "max_grad_norm", AttributeError)
    for parameter in (*step.stored_parameters().values(), *step.model.parameters()):
        parameter.requires_grad_(not parameter.requires_grad)
        refused(lambda: step(batch_of(step, 6)), "frozen|made trainable")
        parameter.requires_grad_(not parameter.requires_grad)
    step.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    refused(lambda: step(batch_of(step, 7)), "parameters were added")


@pytest.mark.distributed
def test_loops_by_hand_train_like_one_process_or_are_refused() -> None:
    run_ranks(steps_by_hand, 2)
