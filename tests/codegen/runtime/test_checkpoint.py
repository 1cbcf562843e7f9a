"""A checkpoint saved under one layout continues under every other as if nothing had happened."""

from __future__ import annotations

import itertools
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from codegen.runtime import checkpoint
from codegen.runtime.mesh import Axis, Mesh
from codegen.runtime.optimizer_trial import OptimizerTrial
from codegen.runtime.parameters import Param, shard
from codegen.runtime.sharded_units import ShardedUnits
from codegen.runtime.step import Step
from tests.autopar.optimizer_factories import Lamb, Lion
from tests.codegen.runtime.mlp_program import EagerTraining, make_optimizer, make_program, whole_batch, whole_state
from tests.codegen.runtime.ranks import run_ranks

ROWS = 16


def make_step(mesh: Mesh, zero: int, micro: int = 1) -> Step:
    return Step(
        make_program(zero, ROWS // micro),
        mesh,
        optimizer_factory=partial(make_optimizer, "adamw"),
        num_micro_batches=micro,
        units=ShardedUnits,
    )


def train(step: Step, steps: range) -> None:
    for index in steps:
        step(step.local_batch(whole_batch(ROWS, seed=index)))


def check_continuation(step: Step, folder: str, expected: dict[str, Tensor]) -> None:
    step.rng.seed = 6
    checkpoint.load(step, folder)
    assert (step.rng.step, step.num_samples, step.rng.seed) == (2, 2 * ROWS, 6)
    assert step.optimizer.param_groups[0]["weight_decay"] == 0.1
    train(step, range(2, 4))
    state = step.full_state_dict()
    for name, value in expected.items():
        error = (state[name] - value.detach()).abs().max()
        assert error < 1e-11, f"{name} is off by {error:.1e} under {step.mesh}"


def reference() -> dict[str, Tensor]:
    eager = EagerTraining("adamw")
    for index in range(4):
        eager.step(whole_batch(ROWS, seed=index))
    eager.state.pop("tables.unit")
    return eager.state


def save_and_load(rank: int, world_size: int, folder: str) -> None:
    square, line = Mesh.create(("dp", "tp"), (2, 2)), Mesh.create(("dp",), (4,))
    tall = Mesh.create(("tp",), (4,))
    expected = reference()
    for zero in (0, 2, 3):
        step = make_step(square, zero)
        step.rng.seed = 5
        step.load(whole_state())
        train(step, range(2))
        checkpoint.save(step, f"{folder}/zero{zero}")
        for mesh, other in ((line, 3), (line, 1), (square, 0), (square, 3), (tall, 0)):
            check_continuation(make_step(mesh, other, micro=2), f"{folder}/zero{zero}", expected)


@pytest.mark.slow
@pytest.mark.distributed
def test_continues_under_other_meshes_and_stages(tmp_path: Path) -> None:
    run_ranks(save_and_load, 4, str(tmp_path))
    for zero in (0, 2, 3):
        step = make_step(Mesh.create((), ()), 3)
        check_continuation(step, str(tmp_path / f"zero{zero}"), reference())


@pytest.mark.parametrize("factory", [torch.optim.Adafactor, Lion, Lamb], ids=lambda factory: factory.__name__)
def test_state_of_rows_and_numbers_continues(factory: Any, tmp_path: Path) -> None:
    """Bit by bit, against training that was not interrupted; parameters are stored whole."""

    def new() -> Step:
        step = Step(make_program(0, ROWS), Mesh.create((), ()), optimizer_factory=factory, trial=OptimizerTrial())
        step.load(whole_state())
        return step

    straight, first, second = new(), new(), new()
    train(straight, range(4))
    train(first, range(2))
    checkpoint.save(first, tmp_path / "saved")
    checkpoint.load(second, tmp_path / "saved")
    train(second, range(2, 4))
    state = second.full_state_dict()
    assert all(torch.equal(state[name], value) for name, value in straight.full_state_dict().items())
    assert not torch.equal(state["embed.weight"], first.full_state_dict()["embed.weight"])


def test_refuses_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    mesh = Mesh.create((), ())
    step = make_step(mesh, 0)
    step.load(whole_state())
    checkpoint.save(step, tmp_path)
    wider = make_step(mesh, 0)
    wider.model.BUFFERS = {"scale": Param((4,))}
    with pytest.raises(ValueError, match=r"scale has shape \(6,\) in the checkpoint, \(4,\) in the program"):
        checkpoint.load(wider, tmp_path)
    further = make_step(mesh, 0)
    further.model.register_buffer("shift", torch.zeros(2))
    further.model.BUFFERS = {**further.model.BUFFERS, "shift": Param((2,))}
    with pytest.raises(checkpoint.CheckpointError, match="the checkpoint has no shift"):
        checkpoint.load(further, tmp_path)


@given(st.data())
def test_pieces_cover_each_element_once(data: st.DataObject) -> None:
    """Every rank's every flat slice, laid into the global tensor, gives the tensor by position."""
    size, coarse, fine = data.draw(st.sampled_from([(2, 1, 3), (3, 1, 1), (2, 2, 2), (4, 1, 2)]))
    rest = tuple(data.draw(st.lists(st.integers(1, 4), max_size=2)))
    unit = 2 * size * 6
    shape, sections = [unit * data.draw(st.integers(1, 2)), *rest], 1
    padding, dim = data.draw(st.integers(0, 5)), data.draw(st.integers(0, len(rest)))  # which is no piece of anything
    if dim == 0:
        sections = data.draw(st.sampled_from([1, 2, 3]))
        padding = min(padding, shape[0] // sections - 1)
        shape[0] -= padding * sections
    padded = f"S({dim}/{sections})"
    spec = Param(tuple(shape), dp=f"S(0/{coarse})", tp=f"S(0/{fine})", padding=padding, padded=padded)
    whole = torch.arange(math.prod(shape)).view(shape)
    found = torch.full(shape, -1)
    num_slices = data.draw(st.integers(1, 5))
    for dp, tp in itertools.product(range(2), range(size)):
        axes = (Axis("dp", 2, dp), Axis("tp", size, tp))
        mesh = Mesh(axes, Axis("world", 2 * size, dp * size + tp), torch.device("cpu"))
        local = shard(whole, spec, mesh).reshape(-1)
        cuts = [local.numel() * i // num_slices for i in range(num_slices + 1)]
        for lo, hi in itertools.pairwise(cuts):
            for piece in checkpoint.pieces_of("x", spec, mesh, local[lo:hi], lo):
                place = tuple(slice(at, at + n) for at, n in zip(piece.offsets, piece.value.shape, strict=True))
                assert (found[place] == -1).all(), "an element is stored twice"
                found[place] = piece.value
    assert torch.equal(found, whole)
