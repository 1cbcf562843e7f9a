"""Costs of each stage of a pipeline, and the prediction of the step: its schedule simulated event by event."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from autopar.costs import host_calls
from autopar.costs.captured_steps import STEP_SECONDS
from autopar.costs.host import OWN_CORES, Host
from autopar.costs.layer_costs import (
    FETCHING,
    FIRST_PASS,
    HIDDEN,
    HOST,
    RECOMPUTATION,
    WAITED,
    LayerCost,
    chosen_seconds,
)
from autopar.costs.peak import Holding, Life, Peaks, Slot, at_peak, peaks
from autopar.ir.plan_data import Pipeline, Prediction, StagePlan
from cost_models.schedule import Shape, StageTimes, Timeline, make_schedule, placement, schedule_named, simulate

BUBBLE = "pipeline bubble"
ACTIONS = "pipeline actions"
DEFERRING = "deferring weight gradients"
ROUND_OFF = 1e-9
"""Share of a step below which a bubble is only the sum's round-off."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage on one of its ranks.

    micro, step: seconds by kind per micro-batch and per step. forward, backward, weight: exposed seconds per
    micro-batch; weight is the deferrable part of backward, deferring the extra cost of schedules that do so. fixed:
    constant bytes, by kind. peaks: of the rest. overlapped: seconds by kind of sums that overlap weight gradients.
    These are not in micro and backward; schedules that defer weight gradients add them. waiting: of forward and
    backward, seconds in which the device waits for its host.
    """

    micro: Mapping[str, float]
    step: Mapping[str, float]
    forward: float
    backward: float
    weight: float
    fixed: Mapping[str, float]
    peaks: Peaks
    deferring: float = 0.0
    overlapped: Mapping[str, float] = field(default_factory=dict)
    waiting: tuple[float, float] = (0.0, 0.0)

    @property
    def times(self) -> StageTimes:
        """Return the times of its actions."""
        return StageTimes(self.forward, self.backward, self.backward - self.weight, self.weight)

    @property
    def chosen_times(self) -> StageTimes:
        """Return the same as plan choice counts them."""
        forward, backward = (seconds * (1.0 - WAITED) for seconds in self.waiting)
        return replace(self, forward=self.forward - forward, backward=self.backward - backward).times


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter in stages `first` and `last`: bytes of the second copy by kind, seconds of the sum."""

    first: int
    last: int
    fixed: Mapping[str, float]
    step_seconds: float


@dataclass(frozen=True, slots=True)
class SecondCopy:
    """The buffers of a parameter's second copy, if the units `first` and `last` that read it are in two stages."""

    first: int
    last: int
    slot: Slot


def stage_cost(
    costs: Mapping[str, LayerCost],
    units: Sequence[str],
    layers: Collection[str],
    stage: StagePlan,
    sent_bytes: float = 0.0,
    copies: Sequence[SecondCopy] = (),
    host_call_seconds: float = 0.0,
    is_alone: bool = True,
    is_captured: bool = False,
) -> StageCost:
    """Price the units of a stage under its recompute modes. units: of the whole chain. layers: the units that are
    classes of layers. sent_bytes: of results kept until their gradients come. copies: second copies of parameters
    in this stage. host_call_seconds: of the host (host_calls.py). is_alone: there are no other stages. is_captured: as
    of Rates."""
    micro: dict[str, float] = defaultdict(float)
    step: dict[str, float] = defaultdict(float)
    fixed: dict[str, float] = defaultdict(float)
    overlapped: dict[str, float] = defaultdict(float)
    names = units[stage.first : stage.last]
    modes = {name: _modes(stage, name, names.count(name)) for name in dict.fromkeys(names)}
    forward = backward = weight = deferring = 0.0
    lives = []
    for index, name in enumerate(names, stage.first):
        cost, label = costs[name], modes[name].pop(0)
        slots = (*cost.slots, *(copy.slot for copy in copies if copy.last == index))
        tables = (cost.forward, micro), (cost.backward, micro), (cost.step, step), (cost.overlapped, overlapped)
        for table, seconds in (*tables, (cost.fixed, fixed)):
            for kind, value in table.items():
                seconds[kind] += value
        forward, backward = forward + cost.forward_seconds, backward + cost.backward_seconds
        weight, deferring = weight + cost.weight_seconds, deferring + cost.deferring_seconds
        kept, live = cost.live.kept, cost.live
        if cost.modes:
            mode = cost.modes.get(label, cost.modes["none"])
            micro[FETCHING if label == "offload" else RECOMPUTATION] += mode.seconds
            backward += mode.seconds
            kept, live = mode.kept_bytes, mode.live
        lives.append(Life(name, kept, live, slots, is_layer=name in layers))
    late = late_seconds([costs[name] for name in names], host_call_seconds, is_alone, is_captured)
    if late.step:
        forward, backward = forward + late.forward, backward + late.backward
        micro[HOST] += late.forward + late.backward
        step[HOST] += late.step
    received_bytes = lives[0].live.entering if stage.first else 0.0
    stage_peaks = peaks(lives, received_bytes, sent_bytes)
    return StageCost(
        micro=micro,
        step=step,
        forward=forward,
        backward=backward,
        weight=weight,
        fixed=fixed,
        peaks=stage_peaks,
        deferring=deferring,
        overlapped=overlapped,
        waiting=(
            sum(costs[name].forward.get(HOST, 0.0) for name in names) + late.forward,
            sum(costs[name].backward.get(HOST, 0.0) for name in names) + late.backward,
        ),
    )


@dataclass(frozen=True, slots=True)
class Late:
    """Extra seconds of a stage's forward, backward and step for calls of its host that belong to no unit."""

    forward: float = 0.0
    backward: float = 0.0
    step: float = 0.0


def late_seconds(
    units: Sequence[LayerCost], host_call_seconds: float, is_alone: bool, is_captured: bool = False
) -> Late:
    """Return the seconds for a stage of these units, less its host's lead. is_alone: there are no other stages.
    is_captured: the host then has one bound, that of a step."""
    if is_captured:
        device = sum(cost.forward_seconds + cost.backward_seconds + cost.step_seconds for cost in units)
        return Late(step=max(STEP_SECONDS - device, 0.0))
    if not host_call_seconds:
        return Late()
    action = 0.0 if is_alone else host_calls.ACTION
    forward, backward, step = (
        host_call_seconds * count for count in (host_calls.MICRO_BATCH + action, action, host_calls.STEP)
    )
    return Late(
        max(forward - sum(cost.forward_seconds - cost.host[0] for cost in units), 0.0),
        max(backward - sum(cost.backward_seconds - cost.host[1] for cost in units), 0.0),
        max(step - sum(cost.step_seconds for cost in units), 0.0) + host_calls.SYNCHRONISED * host_call_seconds,
    )


def _modes(stage: StagePlan, unit: str, count: int) -> list[str]:
    runs = [mode for mode, number in stage.recompute.get(unit, ()) for _ in range(number)]
    return (runs + ["none"] * count)[:count]


@dataclass(frozen=True, slots=True)
class Simulated:
    """A pipeline's prediction, with the simulated timeline behind it.

    stages: in model order; home: their pipeline ranks. once: of each pipeline rank, its seconds once per step by
    kind. memory: bytes by kind of one device of each pipeline rank. transfers: seconds of one micro-batch's message,
    by (source stage, target stage).
    """

    prediction: Prediction
    timeline: Timeline
    stages: tuple[StageCost, ...]
    home: tuple[int, ...]
    once: tuple[Mapping[str, float], ...]
    memory: tuple[Mapping[str, float], ...]
    transfers: Mapping[tuple[int, int], float]


def simulated(
    stages: Sequence[StageCost],
    pipeline: Pipeline,
    num_micro_batches: int,
    transfers: Mapping[tuple[int, int], float],
    tied: Sequence[TiedParameter] = (),
    workspace_bytes: Sequence[float] = (),
    capacities: Sequence[float] = (),
    host: Host = OWN_CORES,
) -> Simulated:
    """Simulate and predict the whole pipeline.

    transfers: (source stage, target stage) -> seconds of one micro-batch's message. workspace_bytes, capacities: of
    a device of each pipeline rank (none, and equal ones, by default). host: effects shared by pipeline ranks.
    Seconds by kind are those of the busiest pipeline rank, seconds once per step those of the slowest; the rest is
    bubble. A first pass (`FIRST_PASS`) is simulated as the first half of every forward: except for messages, this
    takes as long as all its forwards first.
    """
    schedule, pp, chunks = pipeline.schedule, pipeline.num_pipeline_ranks, pipeline.num_chunks
    lines = make_schedule(schedule, pp, num_micro_batches, chunks)
    workspace = [{"workspace": size} if size else {} for size in workspace_bytes or [0.0] * pp]
    defers = any(action.kind == "W" for action in lines[0])
    if defers:
        stages = [_apart(stage) for stage in stages]
    if pp > 1 and host.action_seconds:
        stages = [_in_actions(stage, host.action_seconds, defers) for stage in stages]
    shape = Shape(num_micro_batches, home := placement(schedule, pp, chunks))
    timeline = simulate(lines, [stage.times for stage in stages], transfers, shape)
    tables = [_of_rank(stages, home, rank, num_micro_batches, tied) for rank in range(pp)]
    exposed = [sum(v for k, v in table.items() if k != HIDDEN) for table, _ in tables]
    busiest = max(range(pp), key=lambda rank: exposed[rank])
    slowest = max(range(pp), key=lambda rank: sum(v for k, v in tables[rank][1].items() if k != HIDDEN))
    seconds = defaultdict(float, tables[busiest][0])
    if host.carries and timeline.makespan > 0:
        lost = _receiving(home, transfers, num_micro_batches)
        least = max(busy + waits for busy, waits in zip(exposed, lost, strict=True))
        # On shared cores a pipeline rank is the faster the more of the others wait.
        timeline = timeline.scaled(max(host.core_share, least / timeline.makespan))
    if pp > 1 and any(any(stage.waiting) for stage in stages):
        less = simulate(lines, [stage.chosen_times for stage in stages], transfers, shape).makespan
        exposed[busiest] += _waits_of_step(timeline.makespan, less, exposed[busiest], seconds)
    bubble = timeline.makespan - exposed[busiest]
    if pp > 1:
        seconds[BUBBLE] = bubble if bubble > ROUND_OFF * timeline.makespan else 0.0
    for kind, value in _once([table for _, table in tables], slowest).items():
        seconds[kind] += value
    bytes_of_ranks = rank_bytes(stages, pipeline, num_micro_batches, tied)
    memory = [kinds | busy for kinds, busy in zip(bytes_of_ranks, workspace, strict=True)]
    sizes = capacities or [1.0] * pp
    fullest = memory[max(range(pp), key=lambda rank: sum(memory[rank].values()) / sizes[rank])]
    prediction = Prediction(dict(seconds), fullest, tuple(memory) if pp > 1 else ())
    return Simulated(
        prediction=prediction,
        timeline=timeline,
        stages=tuple(stages),
        home=home,
        once=tuple(table for _, table in tables),
        memory=tuple(memory),
        transfers=dict(transfers),
    )


def _once(tables: Sequence[Mapping[str, float]], slowest: int) -> dict[str, float]:
    """Return the seconds of the slowest pipeline rank once per step, by kind.

    If another one takes longer as plan choice counts it, part of the slowest one's waiting for its host becomes
    bubble, until both are equal.
    """
    seconds = dict(tables[slowest])
    lacking = max(map(chosen_seconds, tables)) - chosen_seconds(seconds)
    if lacking > 0.0:
        bubble = min(lacking / (1.0 - WAITED), seconds.get(HOST, 0.0))
        seconds[HOST] = seconds.get(HOST, 0.0) - bubble
        seconds[BUBBLE] = bubble
    return seconds


def _waits_of_step(makespan: float, less: float, busy: float, seconds: dict[str, float]) -> float:
    """Put the whole step's waiting for hosts into the seconds by kind of a pipeline rank that is busy throughout,
    and return the increase. less: the makespan as plan choice counts it."""
    before = seconds[HOST]
    seconds[HOST] = min((makespan - less) / (1.0 - WAITED), makespan - busy + before)
    return seconds[HOST] - before


def _receiving(home: Sequence[int], transfers: Mapping[tuple[int, int], float], count: int) -> list[float]:
    """Return the seconds that each pipeline rank loses to receiving, if the compute cores also move messages."""
    lost = [0.0] * (max(home) + 1)
    for (source, target), seconds in transfers.items():
        if home[source] != home[target]:
            lost[home[target]] += count * seconds  # results
            lost[home[source]] += count * seconds  # their gradients
    return lost


def _apart(stage: StageCost) -> StageCost:
    """Return the stage with sums that wait, if weight gradients are deferred."""
    micro = defaultdict(float, stage.micro)
    for kind, value in stage.overlapped.items():
        micro[kind] += value
    return replace(stage, micro=micro, backward=stage.backward + sum(stage.overlapped.values()), overlapped={})


def _in_actions(stage: StageCost, seconds: float, defers: bool) -> StageCost:
    """Return the stage with the extra seconds of its actions; half of the cost of deferring gradients is paid in W."""
    late = stage.deferring / 2 if defers else 0.0
    forwards = 2 if FIRST_PASS in stage.micro else 1
    more = {ACTIONS: (forwards + (2 if defers else 1)) * seconds} | ({DEFERRING: 2 * late} if late else {})
    weight = stage.weight + (late + seconds if defers else 0.0)
    backward = stage.backward + seconds + (2 * late + seconds if defers else 0.0)
    return replace(
        stage,
        micro={**stage.micro, **more},
        forward=stage.forward + forwards * seconds,
        backward=backward,
        weight=weight,
    )


def rank_bytes(
    stages: Sequence[StageCost], pipeline: Pipeline, num_micro_batches: int, tied: Sequence[TiedParameter]
) -> list[dict[str, float]]:
    """Return the peak of one device of every pipeline rank by kind, without the device's workspace."""
    schedule, pp, chunks = pipeline.schedule, pipeline.num_pipeline_ranks, pipeline.num_chunks
    states = holding_states(schedule, pp, num_micro_batches, chunks)
    home = placement(schedule, pp, chunks)
    return [_memory(stages, home, states[rank], rank, tied) for rank in range(pp)]


@lru_cache(maxsize=1024)
def holding_states(schedule: str, pp: int, num_micro_batches: int, chunks: int) -> tuple[tuple[Holding, ...], ...]:
    """Return per pipeline rank every kind of action with its stages' micro-batches in flight, once each."""
    count = schedule_named(schedule).representative_micro_batches(pp, num_micro_batches)
    home = placement(schedule, pp, chunks)
    states_of_ranks = []
    for rank, line in enumerate(make_schedule(schedule, pp, count, chunks)):
        counts_of = {stage: [0, 0] for stage, where in enumerate(home) if where == rank}
        seen: dict[Holding, None] = {}
        for action in line:
            counts = counts_of[action.stage]
            counts[0] -= action.kind in "BI"
            seen[action.kind, action.stage, tuple((s, kept, late) for s, (kept, late) in counts_of.items())] = None
            counts[0] += action.kind == "F"
            counts[1] += {"I": 1, "W": -1}.get(action.kind, 0)
        states_of_ranks.append(tuple(seen))
    return tuple(states_of_ranks)


def _of_rank(
    stages: Sequence[StageCost], home: Sequence[int], rank: int, count: int, tied: Sequence[TiedParameter]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return (seconds in micro-batches, seconds once per step) by kind of one pipeline rank."""
    many: dict[str, float] = defaultdict(float)
    once: dict[str, float] = defaultdict(float)
    for stage, where in zip(stages, home, strict=True):
        if where == rank:
            for kind, value in stage.micro.items():
                many[kind] += value * count
            for kind, value in stage.step.items():
                once[kind] += value
    for pair in tied:
        if rank in (home[pair.first], home[pair.last]) and home[pair.first] != home[pair.last]:
            once["tied gradients over pp"] += pair.step_seconds
    return many, once


def _memory(
    stages: Sequence[StageCost],
    home: Sequence[int],
    states: Sequence[Holding],
    rank: int,
    tied: Sequence[TiedParameter],
) -> dict[str, float]:
    """Return the peak of one device of a pipeline rank by kind."""
    num_bytes: dict[str, float] = defaultdict(float)
    stages_of_rank = [i for i, where in enumerate(home) if where == rank]
    for index in stages_of_rank:
        for kind, value in stages[index].fixed.items():
            num_bytes[kind] += value
    for pair in tied:
        if home[pair.last] == rank and home[pair.first] != rank:
            for kind, value in pair.fixed.items():
                num_bytes[kind] += value
    activations, peak = at_peak(states, {index: stages[index].peaks for index in stages_of_rank})
    updated = sum(stages[index].peaks.updated for index in stages_of_rank)
    num_bytes["activations"], num_bytes["transient"] = activations, max(peak, updated) - activations
    return dict(num_bytes)
