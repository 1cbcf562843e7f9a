"""Orders: the published ones, the text form, and the refusal of what cannot run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import schedule
from cost_models.schedule import Action, StageTimes


def chunk_counts(name: str) -> tuple[int, ...]:
    return (1, 2, 3) if name == "interleaved" else (schedule.num_chunks(name),)


def cases(max_pipeline_ranks: int, max_micro_batches: int) -> Iterator[tuple[str, int, int, int]]:
    for name in schedule.SCHEDULES:
        for num_pipeline_ranks in range(1, max_pipeline_ranks + 1):
            for num_micro_batches in range(1, max_micro_batches + 1):
                for chunks in chunk_counts(name):
                    yield name, num_pipeline_ranks, num_micro_batches, chunks


def line(lines: schedule.Schedule, pipeline_rank: int) -> str:
    return " ".join(map(str, lines[pipeline_rank]))


def test_every_schedule_is_complete_and_runs_to_the_end() -> None:
    for name, p, m, chunks in cases(6, 12):
        lines = schedule.make_schedule(name, p, m, chunks)
        schedule.check(lines, num_stages=p * chunks, num_micro_batches=m)
        where = {action.stage: pipeline_rank for pipeline_rank, actions in enumerate(lines) for action in actions}
        assert tuple(where[stage] for stage in range(p * chunks)) == schedule.placement(name, p, chunks)
        # check() is ours: the multiset of actions is counted here once more.
        kinds = "FIW" if name.startswith("zero") else "FB"
        expected = sorted(
            f"{kind}{stage}.{micro}" for kind in kinds for stage in range(p * chunks) for micro in range(m)
        )
        assert sorted(str(action) for actions in lines for action in actions) == expected


@pytest.mark.parametrize("name", ["zero-bubble", "zero-bubble-v"])
@given(data=st.data())
def test_schedules_for_given_costs_run_and_are_never_slower_than_the_rule(name: str, data: st.DataObject) -> None:
    p, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 10))
    seconds = st.floats(0.1, 3)
    stage = st.builds(StageTimes, seconds, seconds, seconds, seconds)
    num_stages = len(schedule.placement(name, p))
    costs = data.draw(st.lists(stage, min_size=num_stages, max_size=num_stages))
    lines = schedule.make_schedule(name, p, m, costs=costs)
    schedule.check(lines, num_stages, m)
    if name == "zero-bubble" or m >= 2 * p - 1:  # otherwise the V's orders without costs are not the rule's
        rule = schedule.simulate(schedule.make_schedule(name, p, m), costs)
        assert schedule.simulate(lines, costs).makespan <= rule.makespan * (1 + 1e-9)
    for pipeline_rank, actions in enumerate(lines):
        held, peak = 0, 0
        for action in actions:
            held += {"F": 1, "I": 0, "W": -1}[action.kind]
            peak = max(peak, held)
        assert peak <= min(m, p) * (num_stages // p), (pipeline_rank, peak)


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
    with pytest.raises(ValueError, match="has 4 stages, not 2"):
        schedule.make_schedule("zero-bubble-v", 2, 2, costs=[StageTimes(1, 2, 1, 1)] * 2)


@given(st.sampled_from(list(cases(4, 6))))
def test_text_goes_both_ways(case: tuple[str, int, int, int]) -> None:
    lines = schedule.make_schedule(*case)
    text = schedule.schedule_text(lines)
    assert text.count("\n") == case[1] and schedule.parse_schedule(text) == lines


def test_an_action_prints_and_parses() -> None:
    assert str(Action("I", 12, 3)) == "I12.3" and Action.parse("I12.3") == Action("I", 12, 3)
    assert schedule.parse_schedule("F0.0 B0.0\n\n") == ((Action("F", 0, 0), Action("B", 0, 0)), ())
    for bad in ("X0.1", "F0", "F01.2", "F0.-1", "F0.1 ", "f0.1", ""):
        with pytest.raises(ValueError, match="not an action"):
            Action.parse(bad)
    with pytest.raises(ValueError, match=r"pipeline rank 1 \(line 2\): not an action: 'F1-0'"):
        schedule.parse_schedule("F0.0 B0.0\nF1-0")
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
        schedule.check(schedule.parse_schedule(text))


def test_counts_that_differ_from_the_program_are_refused() -> None:
    lines = schedule.make_schedule("1f1b", 2, 3)
    with pytest.raises(ValueError, match="pipeline rank 0: F0.2 beyond 2 stages of 2 micro-batches"):
        schedule.check(lines, 2, 2)
    with pytest.raises(ValueError, match="pipeline rank 0: F0.3 is missing"):
        schedule.check(lines, 2, 4)
    with pytest.raises(ValueError, match="no pipeline rank: F2.0 is missing"):
        schedule.check(lines, 3, 3)


def test_a_cyclic_wait_is_refused_and_named() -> None:
    lines = schedule.parse_schedule("F0.0 B0.0 F0.1 B0.1\nF1.0 F1.1 B1.0 B1.1")
    with pytest.raises(ValueError) as error:
        schedule.check(lines)
    assert str(error.value) == (
        "deadlock: pipeline rank 0 waits at B0.0 for B1.0, which pipeline rank 1 reaches only after F1.1; "
        "pipeline rank 1 waits at F1.1 for F0.1, which pipeline rank 0 reaches only after B0.0"
    )
    with pytest.raises(
        ValueError, match="pipeline rank 0 waits at F1.0 for F0.0, which pipeline rank 0 reaches only after F1.0"
    ):
        schedule.check(schedule.parse_schedule("F1.0 F0.0 B1.0 B0.0"))


def test_edges_decide_what_waits() -> None:
    """Stages 0 and 1 both feed stage 2, nothing goes from 0 to 1: two encoders and a decoder."""
    lines = schedule.parse_schedule("F1.0 F0.0 B0.0 B1.0\nF2.0 B2.0")
    schedule.check(lines, edges=[(0, 2), (1, 2)])
    with pytest.raises(ValueError, match="deadlock: pipeline rank 0 waits at F1.0 for F0.0"):
        schedule.check(lines)
    skipped = schedule.parse_schedule("F0.0 B0.0\nF1.0 F2.0 B2.0 B1.0")
    schedule.check(skipped, edges=[(0, 1), (1, 2), (0, 2)])
    for edges in ([(1, 0)], [(0, 3)], [(1, 1)], [(0, 1), (0, 1)]):
        with pytest.raises(ValueError, match="edge"):
            schedule.check(skipped, edges=edges)
