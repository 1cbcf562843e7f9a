"""Seconds that no pipeline under a parallel config can undercut, whatever its cut and its order of stage meshes.

S: seconds of all units per micro-batch, each on its best mesh. T: least seconds of the busiest stage per micro-batch;
U: its least seconds once per step. p is the number of pipeline ranks, m the number of micro-batches. The bound is one
of the simulated step, so it follows from the order of actions on a rank.

T and U are each the larger of two bounds.

Area. A stage of r devices that is busy for t has r t device-seconds; all stages together have R devices. So T >= sum_c
n_c min_h (r_h t_c,h) / R. With equal stage meshes that is an even cut.

Rates, if every group g has one stage mesh, and so a known number N_g of stages. Suppose every unit takes at least rho_g
times as long on the mesh of g as on the first. Then in T seconds N_g stages do at most the work that takes N_g T /
rho_g on the first. So T >= sum_c n_c t_c,1 / sum_g (N_g / rho_g).

T is also at least the sum of all units over the largest number p of stages, and at least ceil(n_c / p) units of a
class: one stage has so many.

From T to the step. Stage s takes f_s forward and b_s backward, t_s together, and R_s stands for the stages behind it.
It begins w_s = min(m, p - s) forwards before its first backward, which waits for R_s after the first forward ends. Its
last backward waits for R_s after the last forward ends. So stage s is idle for at least R_s - (w_s - 1) f_s in the
first wait and R_s - (w_s - 1) b_s in the last one. Both waits are one where m = w_s. With the stages ahead of s:

    step >= S + (m - w_s) t_s + R_s                    where m > w_s
    step >= S + (m - 1) max(f_s, b_s)                  where m = w_s

An average over the stages weighs all units equally, whatever the cut: `one_forward_one_backward_seconds`. With m > p
that is S + (m - 1) S / p, the time of an even cut. An uneven cut may undercut S + (m - 1) T. GPipe's last stage runs
all forwards first, so its step takes S + (m - 1) (max f + max b). Zero bubble may end with weight gradients anywhere,
so only its first wait counts: `zero_bubble`.

On a CPU a stage is faster while others wait, down to `core_share` of its time, and every action takes its host longer.
"""

from __future__ import annotations

import math
from functools import lru_cache
from operator import mul

import numpy as np

from autopar.costs.layer_costs import Mode, defers_weights
from autopar.costs.stage_boundaries import hop_seconds
from autopar.ir.stage_mesh import StageMesh
from autopar.planning.config_costs import ClassSeconds, ConfigCosts
from autopar.planning.memory_fit import least_kept, least_recompute
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.solved_layers import SolvedLayer
from autopar.planning.stage_points import CLOSED_FORMS, hidden_weights, holding_of
from cost_models.schedule import PLAIN

EXACT_DEVICES = 8
"""The most devices for which the search misses no pipeline with a plan that predicts less than its closed form."""

Seconds = np.ndarray
"""Of every class of units."""


def bound(costs: ConfigCosts, config: ParallelConfig) -> float:
    """Return the bound with memory and transfers free."""
    bounds = costs.cached.bounds
    if config not in bounds:
        bounds[config] = _bound(
            costs, config, [costs.seconds(config, stage_mesh) for stage_mesh in config.stage_meshes]
        )
    return bounds[config]


def bound_without_parameters(costs: ConfigCosts, config: ParallelConfig) -> float:
    """Return the same for free parameters."""
    totals = [costs.seconds_without_parameters(config, stage_mesh) for stage_mesh in config.stage_meshes]
    return _bound(costs, config, totals)


def bound_of_many_rows(costs: ConfigCosts, config: ParallelConfig, many: SolvedLayer, rows: int) -> float:
    """Return the same from the seconds of `rows` rows of a data-parallel rank: one row takes no less with fewer of
    them."""
    (stage_mesh,) = config.stage_meshes
    share, busy = config.rows_on(stage_mesh) / rows, costs.busy(many, config)
    micro, weight, forward = ([share * seconds for seconds in kind] for kind in (busy.micro, busy.weight, busy.forward))
    return _bound(costs, config, [ClassSeconds(micro, weight, busy.step, forward)])


def tightened(costs: ConfigCosts, config: ParallelConfig) -> float:
    """Return `bound` plus the recomputation and the transfers of any cut; inf if the memory is too small."""
    key = costs.limits, config
    if key not in costs.cached.tight:
        costs.cached.tight[key] = _tightened(costs, config)
    return costs.cached.tight[key]


def _tightened(costs: ConfigCosts, config: ParallelConfig) -> float:
    recompute_seconds = recompute_bound(costs, config)
    if recompute_seconds == math.inf:
        return math.inf
    crossing, crossed = 0.0, min(config.pipeline_ranks) - 1
    if crossed:
        boundaries = [
            costs.solved_layer(config, stage_mesh).call_costs.boundary_bytes for stage_mesh in config.stage_meshes
        ]
        rates = byte_seconds(costs, config, boundaries)
        crossing = (
            2 * crossed * min(rates.values()) * min(max(sizes) for sizes in list(zip(*boundaries, strict=True))[1:])
        )
    if not recompute_seconds and not crossing:
        return bound(costs, config)
    totals = [costs.seconds(config, stage_mesh) for stage_mesh in config.stage_meshes]
    return _bound(costs, config, totals, recompute_seconds, crossing)


def byte_seconds(
    costs: ConfigCosts, config: ParallelConfig, boundaries: list[tuple[float, ...]]
) -> dict[tuple[StageMesh, StageMesh], float]:
    """Return the seconds of one byte of the largest message, between any two stage meshes. boundaries: bytes on
    every stage mesh at every boundary."""
    largest = [max(sizes) for sizes in zip(*boundaries, strict=True)]
    at = max(range(len(largest)), key=lambda i: largest[i])
    if config.pp == 1:
        return {(mesh, mesh): 0.0 for mesh in config.stage_meshes}
    sent = {mesh: sizes[at] for mesh, sizes in zip(config.stage_meshes, boundaries, strict=True)}
    return {
        (a, b): hop_seconds(costs.request.whole, a, b, max(sent[a], sent[b])) / max(largest[at], 1.0)
        for a in sent
        for b in sent
    }


def recompute_bound(costs: ConfigCosts, config: ParallelConfig) -> float:
    """Return the least seconds of recomputation per micro-batch, with every unit on its best stage mesh, mode and
    pipeline rank. Return inf if nothing fits even then."""
    if len(costs.groups) == 1:
        memory = costs.usable_bytes[0] * config.pp
    else:
        devices = {stage_mesh.group: stage_mesh.mesh.num_ranks for stage_mesh in config.stage_meshes}
        groups = costs.request.whole.groups
        memory = sum(costs.usable_bytes[g] * (groups[g].num_devices // n) for g, n in devices.items())
    units, fixed = _kept_of_units(costs, config)
    holding = holding_of(config.schedule, config.num_micro_batches)
    return least_recompute(units, holding, _ranks(config), memory, fixed)


def bytes_bound(costs: ConfigCosts, config: ParallelConfig) -> float:
    """Return a lower bound on the bytes of the fullest rank of any cut, with every unit as in `recompute_bound`."""
    units, fixed = _kept_of_units(costs, config)
    holding = holding_of(config.schedule, config.num_micro_batches)
    return (fixed + least_kept(units, holding, _ranks(config))) / config.pp


def stored_bound(costs: ConfigCosts, config: ParallelConfig) -> float:
    """Return the bytes of one rank of every stage together that stay from step to step, each unit on the mesh where
    it is least."""
    sizes_of_meshes = [costs.stored_bytes(config, mesh) for mesh in config.stage_meshes]
    return sum(count * min(sizes.get(name, 0.0) for sizes in sizes_of_meshes) for name, count in costs.counts.items())


def _ranks(config: ParallelConfig) -> list[tuple[int, int]]:
    """Return every (number of pipeline ranks, one of them)."""
    return [(p, i) for p in config.pipeline_ranks for i in range(p)]


def _kept_of_units(costs: ConfigCosts, config: ParallelConfig) -> tuple[list[tuple[int, list[Mode]]], float]:
    """Return how often each unit is in the model with its possible modes on any stage mesh, and `stored_bound`."""
    costs_of_meshes = [costs.solved_layer(config, mesh).costs for mesh in config.stage_meshes]
    units = [
        (count, [mode for unit_costs in costs_of_meshes for mode in costs.modes(unit_costs[name]).values()])
        for name, count in costs.counts.items()
    ]
    return units, stored_bound(costs, config)


def _bound(
    costs: ConfigCosts,
    config: ParallelConfig,
    totals: list[ClassSeconds],
    recompute_seconds: float = 0.0,
    crossing: float = 0.0,
) -> float:
    """Return the bound. totals: on every stage mesh. recompute_seconds: of all layers per micro-batch, in any plan.
    crossing: seconds of a micro-batch's messages in both directions."""
    counts, p, count, host = list(costs.counts.values()), config.pp, config.num_micro_batches, costs.host
    micro = _least([seconds.micro for seconds in totals])
    acting, least_seconds = _acting(costs, config), CLOSED_FORMS[config.schedule or PLAIN].least_seconds
    work = _total(counts, micro) + recompute_seconds + min(config.pipeline_ranks) * acting
    busy = _bottleneck(costs, config, [seconds.micro for seconds in totals]) + acting
    busy = max(busy, work / p, *(n * t for n, t in zip((math.ceil(n / p) for n in counts), micro, strict=True)))
    if len(totals) > 1 and costs.request.whole.num_devices > EXACT_DEVICES:
        least = _closed_form(counts, totals, config, work, busy) + crossing
    elif least_seconds is None:
        least = zero_bubble(counts, totals, config, recompute_seconds, crossing) + count * acting
    else:
        least = min(least_seconds(work, busy, p, count) for p in config.pipeline_ranks) + crossing
    # The busiest stage's time includes no message.
    least = max(host.core_share * least if p > 1 and host.carries else least, count * busy)
    return least + _bottleneck(costs, config, [seconds.step for seconds in totals])


def _acting(costs: ConfigCosts, config: ParallelConfig) -> float:
    """Return the host's seconds in addition to a stage's work with one micro-batch."""
    if config.pp == 1 or not costs.host.action_seconds:
        return 0.0
    num_forwards = 2 if costs.has_first_pass(config) else 1
    return costs.host.action_seconds * (num_forwards + (2 if defers_weights(config.schedule) else 1))


def _closed_form(
    counts: list[int], totals: list[ClassSeconds], config: ParallelConfig, work: float, busy: float
) -> float:
    """Return the seconds of all micro-batches by the closed form of `search.inter_op`. On many devices pipelines of
    unlike stage meshes are searched by it (see `GAP` of pipelines.py). Their bounds are not reported."""
    count, sums = (
        config.num_micro_batches,
        [(_total(counts, seconds.weight), _total(counts, seconds.micro)) for seconds in totals],
    )
    if defers_weights(config.schedule):
        hidden = hidden_weights(count)
        drained = [[t - hidden * w for t, w in zip(seconds.micro, seconds.weight, strict=True)] for seconds in totals]
        work += _total(counts, _least(drained)) - _total(counts, _least([seconds.micro for seconds in totals]))
        busy *= 1.0 + 2.0 * min(weight / total for weight, total in sums) / (count - 1) if count > 1 else 1.0
    return work + (count - 1) * busy


def zero_bubble(
    counts: list[int], totals: list[ClassSeconds], config: ParallelConfig, recompute_seconds: float, crossing: float
) -> float:
    """Return the seconds of zero bubble's micro-batches.

    A backward is i_s seconds of input gradients, then weight gradients at any time. Before s has its first gradient,
    the stages ahead of s run their forwards, and those behind it forwards and input gradients. So for any weights l of
    the stages, with L_s the sum of those ahead of s,

        step >= sum_s l_s (m t_s + sum_(r < s) f_r + sum_(r > s) (f_r + i_r) - (w_s - 1) f_s)
             >= sum over units of min_s (l_s m t + (1 - l_s w_s) f + L_s i)
    """
    least, first = math.inf, totals[0]
    busy, forward, weight = (_total(counts, seconds) or 1.0 for seconds in (first.micro, first.forward, first.weight))
    shares = round(forward / busy, 2), round((busy - forward - weight) / busy, 2)
    for p in config.pipeline_ranks:
        weights = _weights(p, config.num_micro_batches, *shares)
        on_best_stages = [_on_best_stage(seconds, weights) for seconds in totals]
        recomputed = recompute_seconds * float((weights[0] + weights[2]).min())
        least = min(least, float(np.minimum.reduce(on_best_stages) @ np.array(counts)) + recomputed + crossing / 2)
    return least


def _on_best_stage(seconds: ClassSeconds, weights: np.ndarray) -> Seconds:
    """Return the share of a unit in the sum of `zero_bubble`, on its best stage."""
    micro, forward, weight = np.array((seconds.micro, seconds.forward, seconds.weight))
    least: Seconds = (weights.T @ np.array((micro, forward, micro - forward - weight))).min(axis=0)
    return least


@lru_cache(maxsize=4096)
def _weights(p: int, count: int, forward: float, gradients: float) -> np.ndarray:
    """Return by stage l_s m, 1 - l_s w_s and L_s, such that a unit of these shares of forwards and input gradients
    adds as much on every stage."""
    begun, weights, ahead = [min(count, p - stage) for stage in range(p)], list[float](), 0.0
    for number in begun:
        weights.append(max((1.0 - gradients * ahead) / (count - number * forward), 0.0))
        ahead += weights[-1]
    shares = np.array(weights) / ahead
    return np.array((shares * count, 1.0 - shares * np.array(begun), np.cumsum(shares) - shares))


def _least(seconds: list[list[float]]) -> list[float]:
    """Return the least seconds of every class of units over the stage meshes."""
    return seconds[0] if len(seconds) == 1 else list(map(min, *seconds))


def _total(counts: list[int], seconds: list[float]) -> float:
    """Return the seconds of all units."""
    return float(sum(map(mul, counts, seconds)))


def _bottleneck(costs: ConfigCosts, config: ParallelConfig, seconds: list[list[float]]) -> float:
    """Return the least seconds of the busiest stage. seconds: of every class of units on every stage mesh."""
    whole, counts = costs.request.whole, list(costs.counts.values())
    devices = [stage_mesh.mesh.num_ranks for stage_mesh in config.stage_meshes]
    areas = [[count * unit for unit in unit_seconds] for count, unit_seconds in zip(devices, seconds, strict=True)]
    least = _total(counts, _least(areas)) / whole.num_devices
    if len(costs.groups) == 1:
        return least
    work, rate = _total(counts, seconds[0]), 0.0
    for stage_mesh, unit_seconds in zip(config.stage_meshes, seconds, strict=True):
        slower = min((a / b for a, b in zip(unit_seconds, seconds[0], strict=True) if b), default=0.0)
        if not slower:
            return least
        rate += whole.groups[stage_mesh.group].num_devices / stage_mesh.mesh.num_ranks / slower
    return max(least, work / rate)
