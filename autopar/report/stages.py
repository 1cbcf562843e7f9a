"""The stages of a pipeline: the units, the seconds and the bytes of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.costs.stage_costs import Simulated
from autopar.ir.chain import chain, nodes_of
from autopar.ir.graph import Graph, layer_names
from autopar.ir.plan_data import StagePlan
from autopar.plan import Plan
from autopar.report.plan_words import recompute_words

PICTURE_PIPELINE_RANKS = 8
PICTURE_MICRO_BATCHES = 10
PICTURE_WIDTH = 66


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage. forward, backward: seconds per micro-batch (recomputation in the backward). in_flight: micro-batches."""

    stage: int
    pipeline_rank: int
    units: str
    recompute: str
    forward: float
    backward: float
    in_flight: int


def stage_rows(plan: Plan, graph: Graph, simulated: Simulated) -> Iterator[StageRow]:
    """Yield every stage in model order; a plan without a pipeline is one stage."""
    stages = plan.pipeline.stages or (StagePlan(0, len(chain(graph))),)
    in_flight = simulated.timeline.in_flight
    for index, (stage, cost) in enumerate(zip(stages, simulated.stages, strict=True)):
        words, modes = units_words(graph, stage), recompute_words(stage)
        yield StageRow(
            stage=index,
            pipeline_rank=simulated.home[index],
            units=words,
            recompute=modes,
            forward=cost.forward,
            backward=cost.backward,
            in_flight=in_flight[index],
        )


def units_words(graph: Graph, stage: StagePlan) -> str:
    """Return `embed_tokens, layers 0-7`: modules outside layers by name, layers by number within their class."""
    units = chain(graph)
    classes = layer_names(graph)
    parts: list[str] = []
    index = stage.first
    while index < stage.last:
        name, first = units[index], index
        while index < stage.last and units[index] == name:
            index += 1
        if name not in classes:
            parts.append(_modules(graph, name))
            continue
        before = units[:first].count(name)
        last = before + index - first - 1
        noun = "layer" if len(classes) == 1 else name
        plural = "s" if last > before and noun == "layer" else ""
        parts.append(f"{noun}{plural} {before}" + (f"-{last}" if last > before else ""))
    return ", ".join(part for part in parts if part) or "no parameters"


def _modules(graph: Graph, unit: str) -> str:
    """Return the modules of a unit outside layers that use parameters, and the loss."""
    parameters = {p.name for p in graph.parameters}
    names = []
    for node in nodes_of(graph, unit):
        if any(ref.node in parameters for ref in node.inputs) and node.module:
            names.append(node.module.rpartition(".")[2])
        if node.name == graph.loss.node:
            names.append("loss")
    return ", ".join(dict.fromkeys(names))


def picture(simulated: Simulated, width: int = PICTURE_WIDTH) -> list[str]:
    """Draw the schedule, a line per pipeline rank and a character per slice of time.

    A digit is a forward, a letter the backward of the same micro-batch (its input half, if the schedule splits it), `+`
    weight gradients, a point idle time. Returns [] if there are too many pipeline ranks or micro-batches to tell apart.
    """
    timeline = simulated.timeline
    count = 1 + max((event.action.micro for event in timeline.events()), default=0)
    if (
        not 1 < len(timeline.schedule) <= PICTURE_PIPELINE_RANKS
        or count > PICTURE_MICRO_BATCHES
        or not timeline.makespan
    ):
        return []
    lines = [["·"] * width for _ in timeline.schedule]
    for event in timeline.events():
        first = round(event.start / timeline.makespan * width)
        last = max(round(event.end / timeline.makespan * width), first + 1)
        mark = {"F": str(event.action.micro), "W": "+"}.get(event.action.kind, chr(ord("a") + event.action.micro))
        for column in range(first, min(last, width)):
            lines[event.pipeline_rank][column] = mark
    return ["".join(line) for line in lines]
