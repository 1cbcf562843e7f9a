"""Orders: the published ones, the text form, and the refusal of what cannot run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import schedule
from cost_models.schedule import Action
from tests.cost_models.schedule_oracles import check, parse_schedule


def chunk_counts(name: str) -> tuple[int, ...]:
    return (1, 2, 3) if schedule.SCHEDULES[name].chooses_chunks else (schedule.num_chunks(name),)


def cases(max_pipeline_ranks: int, max_micro_batches: int) -> Iterator[tuple[str, int, int, int]]:
    for name in schedule.SCHEDULES:
        for num_pipeline_ranks in range(1, max_pipeline_ranks + 1):
            for num_micro_batches in range(1, max_micro_batches + 1):
                for chunks in chunk_counts(name):
                    yield name, num_pipeline_ranks, num_micro_batches, chunks


def line(lines: schedule.Lines, pipeline_rank: int) -> str:
    return " ".join(map(str, lines[pipeline_rank]))


def test_every_schedule_is_complete_and_runs_to_the_end() -> None:
    for name, p, m, chunks in cases(6, 12):
        lines = schedule.make_schedule(name, p, m, chunks)
        check(lines, num_stages=p * chunks, num_micro_batches=m)
        where = {action.stage: pipeline_rank for pipeline_rank, actions in enumerate(lines) for action in actions}
        assert tuple(where[stage] for stage in range(p * chunks)) == schedule.placement(name, p, chunks)
        # check() is ours: the multiset of actions is counted here once more.
        kinds = "FIW" if name.startswith("zero") else "FB"
        expected = sorted(
            f"{kind}{stage}.{micro}" for kind in kinds for stage in range(p * chunks) for micro in range(m)
        )
        assert sorted(str(action) for actions in lines for action in actions) == expected


def test_1f1b_is_the_published_order() -> None:
    """Narayanan et al. (2021), figure 3: four devices, eight micro-batches."""
    lines = schedule.make_schedule("1f1b", 4, 8)
    assert line(lines, 0).startswith("F0.0 F0.1 F0.2 F0.3 B0.0 F0.4 B0.1 F0.5 B0.2 F0.6 B0.3 F0.7 B0.4 B0.5")
    assert line(lines, 2).startswith("F2.0 F2.1 B2.0 F2.2 B2.1 F2.3")
    assert line(lines, 3).startswith("F3.0 B3.0 F3.1 B3.1 F3.2")


def test_interleaved_is_the_published_order() -> None:
    """Narayanan et al. (2021), figure 4: four devices, eight micro-batches, two chunks."""
    lines = schedule.make_schedule("interleaved", 4, 8, 2)
    assert line(lines, 0) == (
        "F0.0 F0.1 F0.2 F0.3 F4.0 F4.1 F4.2 F4.3 F0.4 F0.5 F0.6 B4.0 F0.7 B4.1 F4.4 B4.2 F4.5 B4.3 F4.6 B0.0 F4.7 "
        "B0.1 B0.2 B0.3 B4.4 B4.5 B4.6 B4.7 B0.4 B0.5 B0.6 B0.7"
    )
    assert line(lines, 3).startswith("F3.0 F3.1 F3.2 F3.3 F7.0 B7.0 F7.1 B7.1 F7.2 B7.2 F7.3 B7.3 F3.4 B3.0")


def test_gpipe_with_one_stage_and_interleaved_with_one_chunk() -> None:
    assert line(schedule.make_schedule("gpipe", 1, 3), 0) == "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2"
    assert schedule.make_schedule("interleaved", 4, 6, 1) == schedule.make_schedule("1f1b", 4, 6)


def test_placements() -> None:
    assert schedule.placement("1f1b", 3) == (0, 1, 2)
    assert schedule.placement("interleaved", 2, 3) == (0, 1, 0, 1, 0, 1)
    assert schedule.placement("zero-bubble-v", 3) == (0, 1, 2, 2, 1, 0)


def test_unknown_schedules_and_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown schedule '2f2b'; known: gpipe, 1f1b"):
        schedule.make_schedule("2f2b", 2, 2)
    with pytest.raises(ValueError, match="1f1b has 1 chunks per pipeline rank, not 2"):
        schedule.make_schedule("1f1b", 2, 2, 2)
    with pytest.raises(ValueError, match="zero-bubble-v has 2 chunks per pipeline rank, not 1"):
        schedule.placement("zero-bubble-v", 2, 1)
    with pytest.raises(ValueError, match="at least one pipeline rank"):
        schedule.make_schedule("gpipe", 0, 2)
    with pytest.raises(ValueError, match="at least one micro-batch"):
        schedule.make_schedule("gpipe", 2, 0)


@given(st.sampled_from(list(cases(4, 6))))
def test_text_goes_both_ways(case: tuple[str, int, int, int]) -> None:
    lines = schedule.make_schedule(*case)
    text = schedule.schedule_text(lines)
    assert text.count("\n") == case[1] and parse_schedule(text) == lines


def test_an_action_prints_what_it_is() -> None:
    assert str(Action("I", 12, 3)) == "I12.3"
    with pytest.raises(ValueError, match="at least 0"):
        Action("F", -1, 0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("F0.0 F0.0 B0.0", "pipeline rank 0: F0.0 comes twice"),
        ("F0.0 B0.0 B0.0", "pipeline rank 0: B0.0 comes twice"),
        ("F0.0 B0.0\nF1.0", r"pipeline rank 1: B1.0 \(or I and W\) is missing"),
        ("F0.0 B0.0\nF1.0 B1.0 F1.1 B1.1", "pipeline rank 0: F0.1 is missing"),
        ("F0.0 I0.0", "pipeline rank 0: W0.0 is missing"),
        ("B0.0 F0.0", "pipeline rank 0: B0.0 comes without F0.0 before it"),
        ("F0.0 W0.0 I0.0", "pipeline rank 0: W0.0 comes without I0.0 before it"),
        ("F0.0 B0.0 W0.0", "pipeline rank 0: W0.0 comes without I0.0 before it"),
        ("F0.0 B0.0 I0.0 W0.0", "pipeline rank 0: I0.0 comes after the same micro-batch's other kind of backward"),
        ("F0.0 I0.0 W0.0 B0.0", "pipeline rank 0: B0.0 comes after the same micro-batch's other kind of backward"),
        ("F0.0 B0.0\nF0.1 B0.1", "pipeline rank 1: F0.1 stage 0 runs on pipeline rank 0 already"),
        ("F1.0 B1.0", "no pipeline rank: F0.0 is missing"),
        ("F0.0 B0.0 F0.1000000000000 B0.1000000000000", "pipeline rank 0: F0.1 is missing"),
        ("", "no pipeline rank has anything to do"),
    ],
)
def test_schedules_that_are_not_whole_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check(parse_schedule(text))


def test_counts_that_differ_from_the_program_are_refused() -> None:
    lines = schedule.make_schedule("1f1b", 2, 3)
    with pytest.raises(ValueError, match="pipeline rank 0: F0.2 beyond 2 stages of 2 micro-batches"):
        check(lines, 2, 2)
    with pytest.raises(ValueError, match="pipeline rank 0: F0.3 is missing"):
        check(lines, 2, 4)
    with pytest.raises(ValueError, match="no pipeline rank: F2.0 is missing"):
        check(lines, 3, 3)


def test_a_cyclic_wait_is_refused_and_named() -> None:
    lines = parse_schedule("F0.0 B0.0 F0.1 B0.1\nF1.0 F1.1 B1.0 B1.1")
    with pytest.raises(ValueError) as error:
        check(lines)
    assert str(error.value) == (
        "deadlock: pipeline rank 0 waits at B0.0 for B1.0, which pipeline rank 1 reaches only after F1.1; "
        "pipeline rank 1 waits at F1.1 for F0.1, which pipeline rank 0 reaches only after B0.0"
    )
    with pytest.raises(
        ValueError, match="pipeline rank 0 waits at F1.0 for F0.0, which pipeline rank 0 reaches only after F1.0"
    ):
        check(parse_schedule("F1.0 F0.0 B1.0 B0.0"))


def test_edges_decide_what_waits() -> None:
    """Stages 0 and 1 both feed stage 2, nothing goes from 0 to 1: two encoders and a decoder."""
    lines = parse_schedule("F1.0 F0.0 B0.0 B1.0\nF2.0 B2.0")
    check(lines, edges=[(0, 2), (1, 2)])
    with pytest.raises(ValueError, match="deadlock: pipeline rank 0 waits at F1.0 for F0.0"):
        check(lines)
    skipped = parse_schedule("F0.0 B0.0\nF1.0 F2.0 B2.0 B1.0")
    check(skipped, edges=[(0, 1), (1, 2), (0, 2)])
