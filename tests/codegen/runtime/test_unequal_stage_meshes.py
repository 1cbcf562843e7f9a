"""Pipeline ranks with meshes of unequal sizes, on ranks that are not in the order of pipeline ranks: training and
checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from autopar.launch import run_ranks
from codegen.runtime import checkpoint
from codegen.runtime.parameters import Module, Param, shard
from codegen.runtime.pipeline import Pipeline, Stage
from codegen.runtime.pipeline_ranks import tiled
from codegen.runtime.sharded_units import ShardedUnits
from codegen.runtime.step import Step
from tests.codegen.runtime.features import staged
from tests.codegen.runtime.pipeline_program import make_pipeline
from tests.codegen.runtime.test_pipeline_checkpoint import check_continuation, make, reference, train
from tests.codegen.runtime.test_pipeline_step import check_training

AXES = ("dp", "tp")


def meshes(*sizes: tuple[int, int]) -> tuple[Any, ...]:
    return tuple((AXES, each) for each in sizes)


WIDE_FIRST = {"meshes": meshes((2, 1), (1, 1)), "first_ranks": (1, 0)}
WIDE_LAST = {"meshes": meshes((1, 1), (1, 2)), "first_ranks": (2, 0), "table": "S(1)", "boundary": "S(1)"}
THREE_RANKS = ("1f1b", 2, {**WIDE_FIRST, "zero": 2})
ONE_RANK = ("interleaved", 1, {})


def three_ranks(folder: str) -> None:
    rank = dist.get_rank()
    check_training(rank, "1f1b", 2, 2, "adamw", 0.05, zero=1, **WIDE_FIRST)
    check_training(rank, "zero-bubble-v", 2, 2, "sgd", 0.05, zero=3, **WIDE_FIRST)
    check_training(rank, "zero-bubble", 2, 2, "adamw", 0.05, **WIDE_LAST)
    low = {"dtype": "float32", "tolerance": 0.1, "precision": "bf16"}
    check_training(rank, "1f1b", 2, 4, "sgd", zero=2, **low, **WIDE_FIRST)
    check_continuation(make(THREE_RANKS), f"{folder}/one", reference())
    step = make(THREE_RANKS)
    train(step, range(2))
    checkpoint.save(step, f"{folder}/three")
    check_copies(f"{folder}/copies")


def check_copies(folder: str) -> None:
    """A frozen tied weight and a buffer that two stages hold, cut on one of their meshes only: saved once each."""
    frozen = Param((4, 2), tp="S(0)", requires_grad=False)
    x = Param((2, 4), dp="S(0)")

    class First(Module):
        PARAMETERS = {"a": Param((4,), dp="Rp"), "frozen": frozen}
        BUFFERS = {"table": Param((4,), tp="S(0)"), "hidden_table": Param((4,), tp="S(0)", persistent=False)}
        INPUTS = {"x": x}
        SENDS = {"y": x}

        def forward(self, x: Tensor) -> Tensor:
            return x * self.a

    class Last(Module):
        PARAMETERS = {"b": Param((4,), dp="Rp"), "frozen": frozen}
        BUFFERS = First.BUFFERS
        RECEIVES = {"y": x}

        def forward(self, y: Tensor) -> Tensor:
            return self.mesh.dp.all_reduce((y * self.b).sum())

    state = {name: torch.rand(4) for name in ("a", "b", "table", "hidden_table")} | {"frozen": torch.rand(4, 2)}

    def make_step(sizes: tuple[tuple[int, int], ...], first_ranks: tuple[int, ...]) -> Step:
        stages, tied = (Stage(First, 0), Stage(Last, 1)), (("frozen", (0, 1)),)
        pipeline = Pipeline(stages, meshes=meshes(*sizes), tied=tied, first_ranks=first_ranks)
        schedule = ("F0.0 B0.0", "F1.0 B1.0")
        return Step(
            pipeline,
            pipeline.create_mesh(),
            optimizer_factory=torch.optim.Adam,
            executor=staged(schedule),
            units=ShardedUnits,
        )

    step = make_step(((1, 2), (1, 1)), (1, 0))
    step.load(state)
    batch = step.local_batch({"x": torch.ones(2, 4)})
    assert_close(step(batch), 2 * (state["a"] * state["b"]).sum())
    trained = step.full_state_dict()
    assert trained.keys() == state.keys() - {"hidden_table"} and torch.equal(trained["frozen"], state["frozen"])
    checkpoint.save(step, folder)
    for sizes, first_ranks in ((((1, 1), (1, 2)), (0, 1)), (((2, 1), (1, 1)), (0, 2))):
        other = make_step(sizes, first_ranks)
        checkpoint.load(other, folder)
        loaded = other.full_state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in trained.items())
        for part in other.parts:
            for name, spec, value in part.model.buffer_slots():
                assert torch.equal(value, shard(state[name], spec, other.mesh))


@pytest.mark.slow
@pytest.mark.distributed
def test_three_ranks_train_like_one_and_exchange_checkpoints_with_it(tmp_path: Path) -> None:
    step = make(ONE_RANK)
    train(step, range(2))
    checkpoint.save(step, tmp_path / "one")
    run_ranks(three_ranks, (str(tmp_path),), 3)
    check_continuation(make(ONE_RANK), str(tmp_path / "three"), reference())


def six_ranks(folder: str) -> None:
    rank = dist.get_rank()
    layouts = {
        "two": ("1f1b", 2, {"meshes": meshes((2, 2), (2, 1)), "first_ranks": (2, 0)}),
        "three": ("zero-bubble", 3, {"meshes": meshes((1, 2), (2, 1), (1, 2)), "first_ranks": (2, 4, 0)}),
        "v": ("zero-bubble-v", 2, {"meshes": meshes((1, 2), (4, 1)), "first_ranks": (4, 0)}),
    }
    for index, (name, (schedule, count, options)) in enumerate(layouts.items()):
        for zero in (0, 1, 2, 3):
            cut = {"table": "S(1)", "boundary": "S(1)"} if zero % 2 else {}
            if (zero + index) % 2:
                check_training(rank, schedule, count, 2, "sgd", None, zero=zero, recompute="full", **cut, **options)
            else:
                check_training(rank, schedule, count, 4, "adamw", 0.05, zero=zero, **cut, **options)
        low = {"dtype": "float32", "tolerance": 0.1, "precision": "bf16", "offload_optimizer": "host"}
        check_training(rank, schedule, count, 4, "sgd", zero=2, **low, **options)
        step = make((schedule, count, {**options, "zero": 1, "table": "S(1)"}))
        train(step, range(2))
        checkpoint.save(step, f"{folder}/{name}")
    equal = ("1f1b", 3, {"axes": AXES, "sizes": (2, 1), "zero": 3})
    for name in layouts:
        check_continuation(make(equal), f"{folder}/{name}", reference())
    step = make(equal)
    train(step, range(2))
    checkpoint.save(step, f"{folder}/equal")
    for schedule, count, options in layouts.values():
        continued = make((schedule, count, {**options, "zero": 2, "table": "S(1)"}))
        check_continuation(continued, f"{folder}/equal", reference())


@pytest.mark.slow
@pytest.mark.distributed
def test_six_ranks_train_like_one_and_exchange_checkpoints(tmp_path: Path) -> None:
    run_ranks(six_ranks, (str(tmp_path),), 6)


# --- without processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first_ranks", "message"),
    [
        ((0, 3), r"pipeline rank 1 begins at rank 3, where the ranks before it end at 4: first ranks \(0, 3\)"),
        ((0, 5), "pipeline rank 1 begins at rank 5, where the ranks before it end at 4"),
        ((1, 5), "pipeline rank 0 begins at rank 1, where the ranks before it end at 0"),
        ((-4, 0), "pipeline rank 0 begins at rank -4"),
        ((0, 0), "pipeline rank 0 begins at rank 0, where the ranks before it end at 2"),
        ((2,), "1 first ranks for 2 pipeline ranks"),
    ],
)
def test_ranks_that_do_not_tile_are_refused(first_ranks: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_pipeline((0, 1), 4, meshes=meshes((2, 2), (1, 2)), first_ranks=first_ranks)


def test_ranks_of_pipeline_ranks() -> None:
    assert tiled((4, 2, 1)) == tiled((4, 2, 1), ()) == (0, 4, 6)
    pipeline = make_pipeline((0, 1, 2), 4, meshes=meshes((2, 2), (2, 1), (1, 1)), first_ranks=(1, 5, 0))
    assert [list(stage_mesh.ranks) for stage_mesh in pipeline.stage_meshes] == [[1, 2, 3, 4], [5, 6], [0]]
    assert [pipeline.pipeline_rank_of(rank) for rank in range(7)] == [2, 0, 0, 0, 0, 1, 1]
    other = make_pipeline((0, 1, 2), 4, meshes=meshes((2, 2), (2, 1), (1, 1)))
    assert pipeline.describe() != other.describe()


def test_copies_on_unequal_meshes_exchange_each_element_once() -> None:
    """A rank of the unsplit copy gets both halves, each half's rank gets its half; equal meshes reduce in groups."""
    pipeline = make_pipeline((0, 1), 4, meshes=meshes((2, 2), (1, 1)), first_ranks=(1, 0), table="S(1)")
    there, back = pipeline.exchanges(*pipeline.tied[0])
    assert (there.source, there.target, back.source, back.target) == (0, 1, 1, 0)
    got = {(copy.target, copy.target_box[1].start, copy.target_box[1].stop) for copy in there.forward}
    assert got == {(0, 0, 3), (0, 3, 6)} and len(there.forward) == 2
    assert sorted((copy.source, copy.target, copy.source_box[1].start) for copy in back.forward) == [
        (0, 1, 0), (0, 2, 3), (0, 3, 0), (0, 4, 3),
    ]  # fmt: skip
    # Axes of one rank make no difference.
    same = make_pipeline((0, 1), 4, meshes=((("dp", "tp"), (2, 1)), (("dp",), (2,))))
    assert same.exchanges(*same.tied[0]) == ()
