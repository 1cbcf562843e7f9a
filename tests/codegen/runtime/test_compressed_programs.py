"""Compressed programs go on as others do: checkpoints, evaluation, offload, pipelines, near the eager model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from codegen.runtime import checkpoint
from codegen.runtime.compressed import Compression
from codegen.runtime.mesh import Mesh
from codegen.runtime.step import Step
from tests.codegen.runtime import mlp_program, pipeline_program, transformer_program
from tests.codegen.runtime.features import sharded, staged
from tests.codegen.runtime.mlp_program import EagerTraining, make_optimizer
from tests.codegen.runtime.ranks import run_ranks
from tests.codegen.runtime.test_compressed import BOTH, NUM_LAYERS, ROWS, make_step, whole_flat
from tests.codegen.runtime.test_pipeline_step import lines


def train(step: Step, steps: range) -> dict[str, Tensor]:
    losses = {f"loss {i}": step(step.local_batch(transformer_program.whole_batch(ROWS, seed=i))) for i in steps}
    return {**losses, **step.full_state_dict()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], case: str) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{case}: {name} differs by {(found[name] - value).abs().max():.1e}"


def offload_and_checkpoints(rank: int, world_size: int, folder: str) -> None:
    mesh, adamw = Mesh.create(("dp",), (2,)), partial(torch.optim.AdamW, lr=1e-2)
    for stage, precision in ((1, "fp32"), (2, "bf16"), (3, "fp32")):
        case = f"ZeRO-{stage}, {precision}"
        options = {"precision": precision, "compression": BOTH, "optimizer_factory": adamw, "micro": 2}
        step = make_step(mesh, stage, **options)
        initial = step.full_state_dict()
        assert_equal(initial, {n: v.float() for n, v in transformer_program.whole_state(NUM_LAYERS).items()}, case)
        train(step, range(2))
        path = f"{folder}/{stage}-{precision}"
        checkpoint.save(step, path)
        saved = step.full_state_dict()
        batch = step.local_batch(transformer_program.whole_batch(ROWS, seed=7))
        before = step.evaluate(batch)
        assert torch.equal(before, step.forward_backward(batch)), f"{case}: evaluation"
        step.optimizer.zero_grad()
        expected = train(step, range(2, 4))
        other = make_step(mesh, stage, **options)
        checkpoint.load(other, path)
        assert torch.equal(before, other.evaluate(batch)), f"{case}: evaluation after loading"
        assert_equal(train(other, range(2, 4)), expected, f"{case}: from a checkpoint")
        # Another division, other buckets, no compression: the same masters.
        plain = make_step(mesh, 3 - stage, **{**options, "compression": None})
        checkpoint.load(plain, path)
        assert_equal(plain.full_state_dict(), saved, f"{case}: without compression")
        for place in ({"offload_optimizer": "host"}, {"offload_optimizer": "host", "offload_parameters": True}):
            held = make_step(mesh, stage, **options, **place)
            train(held, range(2))
            assert_equal(train(held, range(2, 4)), expected, f"{case}: {place}")


@pytest.mark.slow
@pytest.mark.distributed
def test_checkpoints_evaluation_and_offload(tmp_path: Path) -> None:
    run_ranks(offload_and_checkpoints, 2, str(tmp_path))


def near_the_eager_model(rank: int, world_size: int) -> None:
    """Frozen and unused parameters, tied names, clipping: as far off as eight bits explain."""
    for axes, sizes in ((("dp",), (4,)), (("dp", "tp"), (2, 2))):
        mesh = Mesh.create(axes, sizes)
        for stage in (1, 2, 3):
            program = mlp_program.make_program(stage, 4, "float32")
            factory = partial(make_optimizer, "sgd")
            step = Step(
                program,
                mesh,
                optimizer_factory=factory,
                num_micro_batches=4,
                max_grad_norm=0.05,
                units=sharded(compression=Compression(BOTH)),
            )
            step.load(mlp_program.whole_state())
            eager, case = EagerTraining("sgd", 0.05), f"{mesh}, ZeRO-{stage}"
            for index in range(3):
                batch = mlp_program.whole_batch(16, seed=index)
                loss, expected = step(step.local_batch(batch)), eager.step(batch)
                assert abs(loss - expected) < 0.01 * expected, f"{case}: loss of step {index}"
            state = step.full_state_dict()
            assert state["head.weight"] is state["embed.weight"]
            for name in ("blocks.0.frozen", "blocks.1.frozen"):
                assert torch.equal(state[name], mlp_program.whole_state()[name].float()), f"{case}: {name}"
            for name, value in eager.trained.items():
                error = (state[name].double() - value.detach()).norm() / value.detach().norm()
                assert error < 0.01, f"{case}: {name} is off by {error:.1e}"


def pipelines(rank: int, world_size: int) -> None:
    """Two stages of two ranks: training near plain torch, and a tied weight of equal bits on both stages."""
    for stage, name in ((1, "1f1b"), (2, "zero-bubble"), (3, "zero-bubble-v")):
        pipeline_ranks = {"zero-bubble-v": (0, 1, 1, 0)}.get(name, (0, 1))
        pipeline = pipeline_program.make_pipeline(pipeline_ranks, 4, ("dp",), (2,), zero=stage, dtype="float32")
        step = Step(
            pipeline,
            pipeline.create_mesh(),
            optimizer_factory=partial(make_optimizer, "sgd"),
            num_micro_batches=4,
            executor=staged(lines(name, 2, 4)),
            seed=pipeline_program.SEED,
            units=sharded(compression=Compression(BOTH)),
        )
        step.load(pipeline_program.whole_state())
        eager, case = pipeline_program.EagerTraining("sgd", None), f"{name}, ZeRO-{stage}"
        for index in range(3):
            batch = pipeline_program.whole_batch(16, seed=index)
            loss, (expected, _) = step(step.local_batch(batch)), eager.step(batch)
            assert abs(loss - expected) < 0.02 * expected, f"{case}: loss of step {index}"
        state = step.full_state_dict()
        for each, value in eager.state.items():
            error = (state[each].double() - value.detach()).norm() / value.detach().norm()
            assert error < 0.02, f"{case}: {each} is off by {error:.1e}"
        tied = [b for b in step.buckets if b.entries[0].slot.name == pipeline_program.TIED]
        values = [whole_flat(bucket) for bucket in tied]
        found: list[Any] = [None] * world_size
        dist.all_gather_object(found, [v.numpy().tobytes() for v in values])
        assert len({each for own in found for each in own}) == 1, f"{case}: copies of the tied weight differ"


@pytest.mark.slow
@pytest.mark.distributed
def test_four_ranks_stay_near_the_eager_model() -> None:
    run_ranks(near_the_eager_model, 4)


@pytest.mark.slow
@pytest.mark.distributed
def test_pipelines_stay_near_the_eager_model() -> None:
    run_ranks(pipelines, 4)
