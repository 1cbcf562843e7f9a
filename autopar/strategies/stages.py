"""The stages that a framework cuts, with the seconds that it adds or hides: host, gradient sums, data parallelism."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from autopar.costs.layer_costs import ACCUMULATION, HIDDEN, HOST, SYNCHRONISATION, LayerCost
from autopar.costs.stage_costs import StageCost
from autopar.errors import ConstraintError
from autopar.strategies.strategy import Strategy
from cost_models.framework_profiles import Framework
from cost_models.hardware import Device

INPUT_GRADIENTS = "reduce_scatter tp"
"""Half of them backward, of inputs' gradients that column-parallel linears make; the other half forward, of results."""
PRODUCTS = "backward matmuls"
"""Half of them make gradients of weights, and of these half are column-parallel."""


def cut(
    units: Sequence[str],
    layer_names: Collection[str],
    costs: Sequence[Mapping[str, LayerCost]],
    weights: Mapping[str, float],
    how: str,
) -> tuple[int, ...]:
    """Return the first unit of each stage, and the number of units. layer_names: of the units that are layers. costs:
    of all units on every stage. weights: multiply-adds of a unit's matrices. how: see `Framework.stages`. Raises
    ConstraintError for too few units, or for layers that do not divide."""
    layers = [i for i, name in enumerate(units) if name in layer_names]
    count = len(costs)
    if count == 1:
        return (0, len(units))
    if how == "layers" and len(layers) >= count:
        return _even(layers, len(units), count)
    if count > len(units):
        raise ConstraintError(
            "the model has fewer blocks than there are stages",
            values=f"{len(units)} blocks, {count} stages",
            alternatives=f"at most {len(units)} stages",
        )
    if how == "weights":
        return _by_weight([weights[name] for name in units], count)
    return _shortest(
        [
            [costs_of_rank[name].forward_seconds + costs_of_rank[name].backward_seconds for name in units]
            for costs_of_rank in costs
        ]
    )


def _even(layers: Sequence[int], num_units: int, count: int) -> tuple[int, ...]:
    """Equally many layers; where they do not divide, the first stages have one more."""
    size, more = divmod(len(layers), count)
    firsts, at = [0], 0
    for stage in range(count - 1):
        at += size + (stage < more)
        firsts.append(layers[at])
    return (*firsts, num_units)


def _by_weight(weights: Sequence[float], count: int) -> tuple[int, ...]:
    """Cut as nanotron's models/base.py: a stage ends with the unit where the sum of the weights reaches its even share.

    Llama-1.34B's last matrix weighs as much as four layers: its first of four stages had the memory and seconds of five
    layers. If the last matrix passes its share before the last stage, nanotron gives the loss to the next stage, and
    nothing to the others. Here the last matrix and the loss are one unit, the last stage. The units before it are one
    stage each, while stages are left.
    """
    total, sum_, firsts, alone = sum(weights), 0.0, [0], 0
    for index, weight in enumerate(weights[:-1], 1):
        sum_ += weight
        if sum_ > total * len(firsts) / count * (1 - 1e-9) and len(firsts) < count:
            firsts.append(index)
    while len(firsts) + alone < count:
        alone += 1
        firsts = [first for first in firsts if first < len(weights) - alone]
    return (*firsts, *range(len(weights) - alone, len(weights)), len(weights))


def _shortest(seconds: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The longest stage as short as can be, by dynamic programming; ties go to later boundaries. seconds: of every unit
    on each stage."""
    n = len(seconds[0])
    first, *others = [list(itertools.accumulate(seconds_of_rank, initial=0.0)) for seconds_of_rank in seconds]
    best = first
    boundaries: list[list[int]] = []
    for stages, sums in enumerate(others, 2):
        longest_of, at = [float("inf")] * (n + 1), [0] * (n + 1)
        for end in range(stages, n + 1):
            for start in range(end - 1, stages - 2, -1):
                last = sums[end] - sums[start]
                longest = max(best[start], last)
                if longest < longest_of[end]:
                    longest_of[end], at[end] = longest, start
                if last > longest_of[end]:
                    break
        best = longest_of
        boundaries.append(at)
    firsts, end = [n], n
    for at in reversed(boundaries):
        end = at[end]
        firsts.append(end)
    return (0, *reversed(firsts))


def profiled(
    stage: StageCost,
    layers: int,
    framework: Framework,
    device: Device,
    wanted: Strategy,
    gradient_bytes: float,
    spans_nodes: bool = False,
    is_far: bool = False,
) -> StageCost:
    """Return a stage of so many layers, with the seconds that the framework adds and without those that it hides.
    gradient_bytes: of an element's gradient and its copies. spans_nodes: whether the pipeline does; is_far: whether a
    tensor-parallel group does."""
    micro, step = dict(stage.micro), dict(stage.step)
    tp = wanted.mesh.size("tp")
    traffic = micro.get(SYNCHRONISATION, 0.0)
    forward, backward = stage.forward, stage.backward - traffic
    elements = stage.fixed.get("gradients", 0.0) / max(gradient_bytes, 1)
    if wanted.zero < 2 and framework.accumulate_bytes:
        rate = device.memory_bytes_per_second * device.memory_efficiency
        added = elements * framework.accumulate_bytes / rate
        micro[ACCUMULATION] = added
        backward += added
    if not framework.hides_by_share:
        overlap = framework.overlap if framework.zero_overlaps or not wanted.zero else 0.0
        exposed = _exposed(traffic, overlap * (forward + backward), layers)
        _hide(micro, SYNCHRONISATION, traffic - exposed)
        traffic = exposed
        sums = step.get(SYNCHRONISATION, 0.0)
        _hide(step, SYNCHRONISATION, sums - _exposed(sums, overlap * backward, layers))
    if framework.async_linears and tp > 1:
        hidden = min(micro.get(INPUT_GRADIENTS, 0.0) / 2, micro.get(PRODUCTS, 0.0) / 4)
        _hide(micro, INPUT_GRADIENTS, hidden)
        backward -= hidden
    host = layers * framework.host_layer_seconds
    if tp > 1:
        host += layers * 4 * framework.host_collective_seconds
        host += layers * tp * framework.host_apart_seconds if spans_nodes else 0.0
        host += layers * tp * framework.host_far_seconds if is_far else 0.0
    late = max(host - forward - backward - traffic, 0.0)
    if late:
        micro[HOST] = late
        forward, backward = forward + late / 3, backward + late * 2 / 3
    if wanted.pp > 1 and framework.host_step_seconds:
        step[HOST] = framework.host_step_seconds
    return replace(stage, micro=micro, step=step, forward=forward, backward=backward + traffic)


def _exposed(traffic: float, window: float, layers: int) -> float:
    """Return the seconds that do not fit behind the window. The last bucket has nothing to hide behind."""
    return max(traffic - window, traffic / max(layers, 1)) if window else traffic


def _hide(seconds: dict[str, float], kind: str, hidden: float) -> None:
    if kind in seconds:
        seconds[kind] -= hidden
        seconds[HIDDEN] = seconds.get(HIDDEN, 0.0) + hidden
