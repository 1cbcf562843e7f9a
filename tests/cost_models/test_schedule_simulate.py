"""Simulated steps against closed forms and against the longest path of an independently built graph."""

from __future__ import annotations

import itertools
import json

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import schedule
from cost_models.schedule import StageTimes, Timeline
from tests.cost_models.schedule_oracles import check, ideal_seconds, parse_schedule, simulate

EQUAL = StageTimes(forward=1.0, backward=2.0, input=1.0, weight=1.0)
CASES = [
    (name, p, m, chunks)
    for name in schedule.SCHEDULES
    for p in range(1, 7)
    for m in range(1, 13)
    for chunks in ((1, 2, 3) if schedule.SCHEDULES[name].chooses_chunks else (schedule.num_chunks(name),))
]


def simulated(name: str, p: int, m: int, chunks: int | None = None, times: StageTimes = EQUAL) -> Timeline:
    return simulate(schedule.make_schedule(name, p, m, chunks), [times] * len(schedule.placement(name, p, chunks)))


Transfers = dict[tuple[int, int], float]


def dependency_graph(
    lines: schedule.Lines, times: list[StageTimes], transfers: Transfers, edges: list[tuple[int, int]]
) -> nx.DiGraph:
    """Actions and messages as nodes, each edge as long as its source takes; node "end" after everything."""
    pipeline_rank_of = {action.stage: pipeline_rank for pipeline_rank, line in enumerate(lines) for action in line}
    backward = {(a.stage, a.micro): str(a) for line in lines for a in line if a.kind in "BI"}
    graph = nx.DiGraph()
    for pipeline_rank, line in enumerate(lines):
        last_message: dict[int, tuple[str, float]] = {}
        before: tuple[str, float] | None = None
        for action in line:
            stage, micro, node = action.stage, action.micro, str(action)
            cost = times[stage]
            seconds = {"F": cost.forward, "B": cost.backward, "I": cost.input, "W": cost.weight}[action.kind]
            assert seconds is not None
            graph.add_edge(node, "end", weight=seconds)
            if before is not None:
                graph.add_edge(before[0], node, weight=before[1])
            before = node, seconds
            for source, target in edges:
                if action.kind == "F" and source == stage:
                    peer, consumer = target, f"F{target}.{micro}"
                elif action.kind in "BI" and target == stage:
                    peer, consumer = source, backward[source, micro]
                else:
                    continue
                if pipeline_rank_of[peer] == pipeline_rank:
                    graph.add_edge(node, consumer, weight=seconds)
                    continue
                message, duration = f"{node}->{peer}", transfers.get((source, target), 0.0)
                graph.add_edge(node, message, weight=seconds)
                graph.add_edge(message, consumer, weight=duration)
                if pipeline_rank_of[peer] in last_message:
                    earlier, earlier_duration = last_message[pipeline_rank_of[peer]]
                    graph.add_edge(earlier, message, weight=earlier_duration)
                last_message[pipeline_rank_of[peer]] = message, duration
    return graph


@st.composite
def problems(draw: st.DrawFn) -> tuple[schedule.Lines, list[StageTimes], Transfers, list[tuple[int, int]]]:
    """A schedule with unequal stages and transfers, skip connections, and perhaps two actions of a line swapped."""
    name, p, m, chunks = draw(st.sampled_from(CASES))
    lines = [list(line) for line in schedule.make_schedule(name, p, m, chunks)]
    num_stages = p * chunks
    seconds = st.floats(0, 4)
    stage = st.builds(StageTimes, seconds, seconds, seconds, seconds)
    times = draw(st.lists(stage, min_size=num_stages, max_size=num_stages))
    pairs = [(source, target) for target in range(num_stages) for source in range(target)]
    chain = [(stage, stage + 1) for stage in range(num_stages - 1)]
    skips = draw(st.lists(st.sampled_from(pairs), max_size=3)) if pairs else []
    edges = list(dict.fromkeys(chain + skips))
    transfers = {edge: draw(seconds) for edge in edges if draw(st.booleans())}
    if draw(st.booleans()):
        line = draw(st.sampled_from(lines))
        first, second = draw(st.integers(0, len(line) - 1)), draw(st.integers(0, len(line) - 1))
        line[first], line[second] = line[second], line[first]
    return lines, times, transfers, edges


@given(problems())
def test_makespan_is_the_longest_path_and_cycles_are_refused(
    problem: tuple[schedule.Lines, list[StageTimes], Transfers, list[tuple[int, int]]],
) -> None:
    lines, times, transfers, edges = problem
    graph = dependency_graph(lines, times, transfers, edges)
    # What a pipeline rank must have of its own follows from no edge: B and I after F, W after I.
    for line in lines:
        for action in line:
            needed = f"{'I' if action.kind == 'W' else 'F'}{action.stage}.{action.micro}"
            if action.kind != "F" and not graph.has_edge(needed, str(action)):
                graph.add_edge(needed, str(action), weight=0.0)
    if not nx.is_directed_acyclic_graph(graph):
        with pytest.raises(ValueError, match="deadlock|comes without"):
            check(lines, edges=edges)
        with pytest.raises(ValueError, match="deadlock|comes without"):
            simulate(lines, times, transfers, edges)
        return
    check(lines, edges=edges)
    timeline = simulate(lines, times, transfers, edges)
    assert timeline.makespan == pytest.approx(nx.dag_longest_path_length(graph), abs=1e-9)


def test_makespans_equal_the_closed_forms() -> None:
    num_closed_forms = 0
    for name, p, m, chunks in CASES:
        for times in (EQUAL, StageTimes(1.0, 2.5, 1.7, 0.8), StageTimes(0.5, 0.25, 2.0, 0.5)):
            try:
                expected = ideal_seconds(name, p, m, times, chunks)
            except ValueError:
                continue
            assert simulated(name, p, m, chunks, times).makespan == pytest.approx(expected), (name, p, m, chunks, times)
            num_closed_forms += 1
    assert num_closed_forms > 0.6 * 3 * len(CASES)


def test_published_bubbles() -> None:
    """m (f + b) of work; bubbles (p - 1)(f + b), over v chunks, and (p - 1)(f + i - w): Narayanan, Qi."""
    p, m = 4, 8
    assert simulated("gpipe", p, m).makespan == simulated("1f1b", p, m).makespan == 3 * m + 3 * (p - 1)
    half = StageTimes(0.5, 1.0, 0.5, 0.5)
    assert simulated("interleaved", p, m, 2, half).makespan == 3 * m + 3 * (p - 1) / 2
    assert simulated("zero-bubble", p, m).makespan == 3 * m + (p - 1)
    with pytest.raises(ValueError, match="no closed form is known for interleaved"):
        ideal_seconds("interleaved", 4, 6, EQUAL, 2)
    with pytest.raises(ValueError, match="no closed form is known for zero-bubble-v"):
        ideal_seconds("zero-bubble-v", 4, 8, StageTimes(1, 2, 2, 1))


@pytest.mark.parametrize("p", range(2, 9))
def test_interleaving_helps_and_never_hurts_where_groups_are_not_whole(p: int) -> None:
    """v chunks of 1/v of the work: never slower than 1F1B, and within one ragged group of the whole-group formula."""
    for m in range(1, 3 * p):
        for v in (2, 3):
            chunk = StageTimes(1.0, 2.0)
            seconds = simulated("interleaved", p, m, v, chunk).makespan
            assert seconds <= simulated("1f1b", p, m, None, StageTimes(v * 1.0, v * 2.0)).makespan
            whole_groups = -(-m // p) * p
            assert 3 * (m * v + p - 1) <= seconds <= 3 * (whole_groups * v + p - 1)


@pytest.mark.parametrize("p", range(2, 9))
def test_zero_bubble_is_faster_than_1f1b_with_the_same_memory(p: int) -> None:
    for m in (1, p - 1, p, 2 * p, 5 * p):
        if m < 1:
            continue
        plain, split = simulated("1f1b", p, m), simulated("zero-bubble", p, m)
        assert max(split.in_flight) == max(plain.in_flight) == min(m, p)
        assert split.makespan < plain.makespan
        assert max(split.bubble_fractions) < max(plain.bubble_fractions)
        vee = simulated("zero-bubble-v", p, m, None, StageTimes(0.5, 1.0, 0.5, 0.5))
        for line in vee.schedule:
            changes = [{"F": 1, "I": 0, "W": -1}[action.kind] for action in line]
            assert max(itertools.accumulate(changes)) <= 2 * min(m, p)  # chunks, of half a stage each
        assert vee.makespan < plain.makespan


@pytest.mark.parametrize("p", [2, 4, 8])
def test_the_v_has_no_bubble_once_it_runs(p: int) -> None:
    """Every pipeline rank works without a pause; what is left is the way down the V, which does not grow with m."""
    for m in (2 * p, 8 * p, 32 * p):
        timeline = simulated("zero-bubble-v", p, m)
        for pipeline_rank in range(p):
            assert timeline.starts[pipeline_rank][0] == pipeline_rank
            assert timeline.ends[pipeline_rank][-1] - pipeline_rank == timeline.busy[pipeline_rank] == 6 * m
        assert max(timeline.bubble_fractions) == pytest.approx((p - 1) / (6 * m + p - 1))


def test_in_flight_equals_a_count_over_time() -> None:
    for name, p, m, chunks in CASES:
        timeline = simulated(name, p, m, chunks)
        changes: dict[int, list[tuple[float, int]]] = {stage: [] for stage in range(p * chunks)}
        for event in timeline.events():
            if event.action.kind == "F":
                changes[event.action.stage].append((event.start, 1))
            elif event.action.kind in "BW":
                changes[event.action.stage].append((event.end, -1))
        peaks = []
        for stage in range(p * chunks):
            live, peak = 0, 0
            for _, change in sorted(changes[stage]):  # at one time, what ends comes before what starts
                live += change
                peak = max(peak, live)
            peaks.append(peak)
        assert timeline.in_flight == tuple(peaks), (name, p, m, chunks)


def test_messages_queue_for_a_link_and_overlap_with_computation() -> None:
    lines = parse_schedule("F0.0 F0.1 B0.0 B0.1\nF1.0 F1.1 B1.0 B1.1")
    timeline = simulate(lines, [StageTimes(1.0, 1.0)] * 2, {(0, 1): 3.0})
    # F0.1 ends at 2, but its message leaves at 4, when the first has arrived; gradients have the other direction.
    assert timeline.starts == ((0.0, 1.0, 12.0, 15.0), (4.0, 7.0, 8.0, 9.0))
    assert timeline.makespan == 16.0 and timeline.busy == (4.0, 4.0)
    assert timeline.bubble_fractions == (0.75, 0.75)


def test_a_skip_connection_shares_the_link_and_costs_nothing_within_a_pipeline_rank() -> None:
    times = [StageTimes(1.0, 1.0)] * 3
    lines = parse_schedule("F0.0 B0.0\nF1.0 F2.0 B2.0 B1.0")
    edges = [(0, 1), (1, 2), (0, 2)]
    timeline = simulate(lines, times, {(0, 1): 2.0, (1, 2): 50.0, (0, 2): 5.0}, edges)
    # To stage 2: after the 2 s to stage 1 on the same link, so at 1 + 2 + 5. Gradient of (0, 2) leaves first, at 10.
    assert timeline.starts == ((0.0, 17.0), (3.0, 8.0, 9.0, 10.0))


def test_simulate_refuses_what_does_not_fit() -> None:
    lines = schedule.make_schedule("1f1b", 2, 2)
    with pytest.raises(ValueError, match="finite number"):
        simulate(lines, [EQUAL] * 2, {(0, 1): float("nan")})
    with pytest.raises(ValueError, match="F2.0 is missing"):
        simulate(lines, [EQUAL] * 3)
    with pytest.raises(ValueError, match="input and weight seconds are needed"):
        simulate(schedule.make_schedule("zero-bubble", 2, 2), [StageTimes(1.0, 2.0)] * 2)
    with pytest.raises(ValueError, match="backward must be a finite number"):
        StageTimes(1.0, -1.0)


def test_chrome_trace_shows_every_action_once() -> None:
    timeline = simulated("zero-bubble", 3, 4, None, StageTimes(0.25, 0.5, 0.25, 0.25))
    trace = json.loads(json.dumps(schedule.chrome_trace(timeline)))
    shown = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    assert sorted(row["name"] for row in shown) == sorted(str(event.action) for event in timeline.events())
    assert {row["cat"] for row in shown} == {"forward", "input", "weight"}
    assert {row["args"]["name"] for row in trace["traceEvents"] if row["ph"] == "M"} >= {
        "pipeline rank 0",
        "pipeline rank 2",
    }
    assert max(row["ts"] + row["dur"] for row in shown) == pytest.approx(timeline.makespan * 1e6)
    for pipeline_rank in range(3):
        row = [(item["ts"], item["name"]) for item in shown if item["tid"] == pipeline_rank]
        assert [name for _, name in sorted(row)] == [str(action) for action in timeline.schedule[pipeline_rank]]
        assert sum(item["dur"] for item in shown if item["tid"] == pipeline_rank) == pytest.approx(4 * 0.75e6)


@pytest.mark.slow
def test_a_large_pipeline() -> None:
    """64 pipeline ranks, 1,024 micro-batches: 131,072 actions."""
    lines = schedule.make_schedule("1f1b", 64, 1024)
    timeline = simulate(lines, [EQUAL] * 64)
    assert timeline.makespan == ideal_seconds("1f1b", 64, 1024, EQUAL)
