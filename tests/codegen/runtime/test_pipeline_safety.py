"""Schedules that cannot work are refused before anything runs; a rank that dies takes the others with it."""

from __future__ import annotations

import multiprocessing
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from codegen.runtime.actions import Link, check_lines, parse_lines
from codegen.runtime.parameters import Module, Param
from codegen.runtime.pipeline import Pipeline, Stage
from codegen.runtime.step import Step
from cost_models.schedules.generate import SCHEDULES, placement
from tests.codegen.runtime.features import staged
from tests.codegen.runtime.pipeline_program import make_pipeline, whole_batch
from tests.codegen.runtime.ranks import run_ranks, start_method
from tests.codegen.runtime.test_pipeline_step import ROWS, lines, make_step

CHAIN = [Link(0, 1, True)]


def check(schedule: tuple[str, ...], count: int = 2, links: list[Link] = CHAIN) -> None:
    check_lines(parse_lines(schedule), (0, 1), count, links)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1"), "pipeline rank 1: stage 1 and micro-batch 1 need F and B"),
        (("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 I1.1"), r"need F and B, or F, I and W; .* F1.1, I1.1"),
        (("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1 F1.0"), r"pipeline rank 1: F1.0 is there twice"),
        (("F0.0 F0.1 B0.0 B0.1 F1.0", "B1.0 F1.1 B1.1"), r"pipeline rank 0: F1.0 belongs to pipeline rank 1"),
        (("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1 F2.0"), r"pipeline rank 1: F2.0 names stage 2 of 2"),
        (("F0.0 F0.1 B0.0 B0.1 F0.2", "F1.0 B1.0 F1.1 B1.1"), r"pipeline rank 0: F0.2 names micro-batch 2 of 2"),
        (("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 X1.1"), r"pipeline rank 1: 'X1.1' is not an action"),
        (("F0.0 F0.1 B0.0 B0.1",), "the schedule has 1 lines, the pipeline 2 pipeline ranks"),
        # Stage 0 wants gradients in the order 1, 0 before it sends the second micro-batch.
        (
            ("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"),
            "pipeline rank 0: B0.0 waits for B1.0; pipeline rank 1: F1.1 waits for F0.1",
        ),
        (("F0.0 F0.1 B0.0 B0.1", "W1.0 F1.0 I1.0 F1.1 B1.1"), "pipeline rank 1: W1.0 waits for I1.0"),
        (("B0.0 F0.0 F0.1 B0.1", "F1.0 B1.0 F1.1 B1.1"), "pipeline rank 0: B0.0 waits for F0.0, B1.0"),
    ],
)
def test_lines_that_do_not_fit_together_are_refused(schedule: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(schedule)


def test_what_waits_follows_the_links() -> None:
    # Legal if nothing goes back from stage 1; in a circle if something does.
    schedule = ("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1")
    check(schedule, links=[Link(0, 1, False)])
    with pytest.raises(ValueError, match="never ends"):
        check(schedule)


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(1, 6), st.data())
def test_named_schedules_pass_and_a_lost_action_is_noticed(name: str, p: int, m: int, data: st.DataObject) -> None:
    pipeline_ranks = placement(name, p)
    links = [Link(stage, stage + 1, True) for stage in range(len(pipeline_ranks) - 1)]
    schedule = lines(name, p, m)
    check_lines(parse_lines(schedule), pipeline_ranks, m, links)
    place = data.draw(st.integers(0, p - 1))
    words = schedule[place].split()
    lost = data.draw(st.integers(0, len(words) - 1))
    changed = (*schedule[:place], " ".join(words[:lost] + words[lost + 1 :]), *schedule[place + 1 :])
    with pytest.raises(ValueError, match=f"pipeline rank {place}: stage"):
        check_lines(parse_lines(changed), pipeline_ranks, m, links)


def test_pipelines_that_cannot_be_are_refused() -> None:
    class Sender(Module):
        PARAMETERS = {"w": Param((2,))}
        SENDS = {"x": Param((4,))}

    class Receiver(Module):
        PARAMETERS = {"w": Param((2,))}
        RECEIVES = {"x": Param((4,))}

    stages = (Stage(Sender, 0), Stage(Receiver, 1))
    with pytest.raises(ValueError, match="stages 0 and 1 hold w and it is not in `tied`"):
        Pipeline(stages)
    with pytest.raises(ValueError, match="stage 0 receives 'x', which no earlier stage sends"):
        Pipeline(stages[::-1], tied=(("w", (0, 1)),))

    class Other(Receiver):
        PARAMETERS = {"w": Param((2,), dp="Rp", zero=1)}

    with pytest.raises(ValueError, match="copies of w in stages .* must lie alike on their meshes"):
        Pipeline((stages[0], Stage(Other, 1)), tied=(("w", (0, 1)),))
    with pytest.raises(ValueError, match="v is tied, but stage 0 has no parameter of that name"):
        Pipeline(stages, tied=(("w", (0, 1)), ("v", (0, 1))))

    class Wrong(Receiver):
        PARAMETERS = {}
        RECEIVES = {"x": Param((4,), dtype="int64")}

    with pytest.raises(ValueError, match="'x' is sent as torch.float32, stage 1 receives it as torch.int64"):
        Pipeline((Stage(Sender, 0), Stage(Wrong, 1)))

    class First(Sender):
        INPUTS = {"ids": Param((4,))}

    class Second(Wrong):
        RECEIVES = {}
        INPUTS = {"ids": Param((4,), dp="S(0)")}

    Pipeline((Stage(First, 0), Stage(Second, 1)))
    with pytest.raises(ValueError, match="stages of pipeline rank 0 take 'ids' in two layouts"):
        Pipeline((Stage(First, 0), Stage(Second, 0)))
    with pytest.raises(ValueError, match="needs 2 processes .* but 1 run"):
        Pipeline(stages, tied=(("w", (0, 1)),)).create_mesh()


def test_a_result_of_another_shape_is_refused() -> None:
    class Sender(Module):
        PARAMETERS = {"w": Param((2,))}
        INPUTS = {"x": Param((4,))}
        SENDS = {"y": Param((4,))}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[1:]

    class Receiver(Module):
        RECEIVES = {"y": Param((4,))}

    pipeline = Pipeline((Stage(Sender, 0), Stage(Receiver, 0)))
    schedule = ("F0.0 F1.0 B1.0 B0.0",)
    step = Step(pipeline, pipeline.create_mesh(), optimizer_factory=torch.optim.AdamW, executor=staged(schedule))
    with pytest.raises(ValueError, match=r"stage 0 sends 'y' of shape \(3,\), SENDS says \(4,\)"):
        step({"x": torch.zeros(4)})


def disagree(rank: int, world_size: int) -> str:
    pipeline = make_pipeline((0, 1), ROWS // 2)
    try:
        make_step(pipeline, lines("1f1b" if rank else "gpipe", 2, 2), 2)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_ranks_with_different_schedules_are_refused() -> None:
    for text in run_ranks(disagree, 2):
        assert "ranks [1] have another schedule or pipeline than rank 0" in text


def train_until_death(rank: int, folder: str) -> None:
    """Rank 1 of 3 dies in its third step; the others write how long they lasted after it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 3)
    # Longer than the test: what ends the others must be the broken connection.
    timeout = timedelta(seconds=600)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timeout)
    pipeline = make_pipeline((0, 1, 2), ROWS // 4, is_tied=False)
    step = make_step(pipeline, lines("1f1b", 3, 4), 4)
    for index in range(1000):
        if rank == 1 and index == 2:
            Path(folder, "died").write_text(repr(time.time()))
            os._exit(1)
        try:
            step(step.local_batch(whole_batch(ROWS, seed=index)))
        except RuntimeError as error:
            Path(folder, f"rank_{rank}").write_text(f"{time.time()!r} {index} {error}")
            os._exit(2)


@pytest.mark.distributed
def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    context = multiprocessing.get_context(start_method())
    arguments = [(rank, str(tmp_path)) for rank in range(3)]
    processes = [context.Process(target=train_until_death, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=900)
    assert [process.exitcode for process in processes] == [2, 1, 2]
    died = float((tmp_path / "died").read_text())
    for rank in (0, 2):
        seconds, index, message = (tmp_path / f"rank_{rank}").read_text().split(" ", 2)
        assert float(seconds) - died < 10
        assert index == "2" and message
