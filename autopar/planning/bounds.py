"""Seconds that no pipeline under a parallel config can undercut, whatever its cut and its order of stage meshes.

With t_c,h the seconds per micro-batch of a unit of class c on stage mesh h, u_c,h those once per step, n_c units of
the class, m micro-batches, and every unit on the mesh that is best for it:

    bound = sum_c n_c min_h t_c,h + (m - 1) T + U

T and U are what the busiest stage takes at least per micro-batch and per step: the larger of two bounds.

Area. A stage of r devices that is busy for t has r t device-seconds, and all stages together have as many devices R as
there are. So T >= sum_c n_c min_h (r_h t_c,h) / R. Where all stage meshes are alike that is an even cut.

Rates, where every group g has one stage mesh, and so a known number N_g of stages. If any unit takes at least rho_g
times as long on the mesh of g as on the first, in T seconds N_g stages do at most what takes N_g T / rho_g on the
first. So T >= sum_c n_c t_c,1 / sum_g (N_g / rho_g).

T is also no less than the sum of all units over the largest number p of stages, nor than the ceil(n_c / p) units of a
class that one of them has. Zero bubble fills its drain with weight gradients, w of t: in the first sum it counts
t - 2 w, and T is stretched (stage_points.py).
"""

from __future__ import annotations

import math
from operator import mul

from autopar.costs.layer_costs import Mode
from autopar.costs.stage_boundaries import hop_seconds
from autopar.ir.stage_mesh import StageMesh
from autopar.planning.config_costs import ClassSeconds, ConfigCosts
from autopar.planning.memory_fit import least_kept, least_recompute
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.solved_layers import SolvedLayer
from autopar.planning.stage_points import HOLDING, stretched


def bound(costs: ConfigCosts, config: ParallelConfig, recompute_seconds: float = 0.0) -> float:
    """With memory and transfers free. recompute_seconds: of all layers per micro-batch, that any plan has."""
    if recompute_seconds:
        return _bound(costs, config, [costs.seconds(config, own) for own in config.stage_meshes], recompute_seconds)
    known = costs.known.bounds
    if config not in known:
        known[config] = _bound(costs, config, [costs.seconds(config, own) for own in config.stage_meshes], 0.0)
    return known[config]


def bound_without_parameters(costs: ConfigCosts, config: ParallelConfig) -> float:
    """The same whatever becomes of the parameters."""
    totals = [costs.seconds_without_parameters(config, own) for own in config.stage_meshes]
    return _bound(costs, config, totals, 0.0)


def bound_of_many_rows(costs: ConfigCosts, config: ParallelConfig, many: SolvedLayer, rows: int) -> float:
    """The same from what `rows` rows of a data-parallel rank take: one takes no less where there are fewer of them."""
    (own,) = config.stage_meshes
    share, busy = config.rows_on(own) / rows, costs.busy(many, config)
    micro, weight = ([share * seconds for seconds in kind] for kind in (busy.micro, busy.weight))
    return _bound(costs, config, [ClassSeconds(micro, weight, busy.step)], 0.0)


def tightened(costs: ConfigCosts, config: ParallelConfig) -> float:
    """`bound` with the recomputation and the transfers that any cut has; inf where the memory is too small."""
    key = costs.limits, config
    if key not in costs.known.tight:
        costs.known.tight[key] = _tightened(costs, config)
    return costs.known.tight[key]


def _tightened(costs: ConfigCosts, config: ParallelConfig) -> float:
    recompute_seconds = recompute_bound(costs, config)
    if recompute_seconds == math.inf:
        return math.inf
    found = bound(costs, config, recompute_seconds)
    crossed = min(config.pipeline_ranks) - 1
    if crossed:
        boundaries = [costs.solved_layer(config, own).call_costs.boundary_bytes for own in config.stage_meshes]
        rates = byte_seconds(costs, config, boundaries)
        found += 2 * crossed * min(rates.values()) * min(max(own) for own in list(zip(*boundaries, strict=True))[1:])
    return found


def byte_seconds(
    costs: ConfigCosts, config: ParallelConfig, boundaries: list[tuple[float, ...]]
) -> dict[tuple[StageMesh, StageMesh], float]:
    """Of one byte of the largest message, between any two stage meshes. boundaries: bytes on every stage mesh at every
    boundary."""
    largest = [max(own) for own in zip(*boundaries, strict=True)]
    at = max(range(len(largest)), key=lambda i: largest[i])
    if config.pp == 1:
        return {(mesh, mesh): 0.0 for mesh in config.stage_meshes}
    sent = {mesh: own[at] for mesh, own in zip(config.stage_meshes, boundaries, strict=True)}
    return {
        (a, b): hop_seconds(costs.request.whole, a, b, max(sent[a], sent[b])) / max(largest[at], 1.0)
        for a in sent
        for b in sent
    }


def recompute_bound(costs: ConfigCosts, config: ParallelConfig) -> float:
    """Seconds per micro-batch that recomputation takes at least, with every unit on the stage mesh, in the mode and on
    the pipeline rank that suit best; inf where even so nothing fits."""
    if len(costs.groups) == 1:
        memory = costs.usable_bytes[0] * config.pp
    else:
        devices = {each.group: each.mesh.num_ranks for each in config.stage_meshes}
        groups = costs.request.whole.groups
        memory = sum(costs.usable_bytes[g] * (groups[g].num_devices // n) for g, n in devices.items())
    units, fixed = _kept_of_units(costs, config)
    holding = HOLDING[config.schedule](config.num_micro_batches)
    return least_recompute(units, holding, _ranks(config), memory, fixed)


def bytes_bound(costs: ConfigCosts, config: ParallelConfig) -> float:
    """Bytes of the fullest rank below which no cut gets, with every unit as in `recompute_bound`."""
    units, fixed = _kept_of_units(costs, config)
    holding = HOLDING[config.schedule](config.num_micro_batches)
    return (fixed + least_kept(units, holding, _ranks(config))) / config.pp


def stored_bound(costs: ConfigCosts, config: ParallelConfig) -> float:
    """Bytes of one rank of every stage together: what stays from step to step, each unit on the mesh where it is
    least."""
    own = [costs.stored_bytes(config, mesh) for mesh in config.stage_meshes]
    return sum(count * min(each.get(name, 0.0) for each in own) for name, count in costs.counts.items())


def _ranks(config: ParallelConfig) -> list[tuple[int, int]]:
    """Every (number of pipeline ranks, one of them)."""
    return [(p, i) for p in config.pipeline_ranks for i in range(p)]


def _kept_of_units(costs: ConfigCosts, config: ParallelConfig) -> tuple[list[tuple[int, list[Mode]]], float]:
    """How often each unit stands in the model with the modes that it may run in on any stage mesh, and
    `stored_bound`."""
    own = [costs.solved_layer(config, mesh).costs for mesh in config.stage_meshes]
    units = [
        (count, [mode for each in own for mode in costs.modes(each[name]).values()])
        for name, count in costs.counts.items()
    ]
    return units, stored_bound(costs, config)


def _bound(costs: ConfigCosts, config: ParallelConfig, totals: list[ClassSeconds], recompute_seconds: float) -> float:
    """totals: on every stage mesh."""
    counts, p = list(costs.counts.values()), config.pp
    micro = _least([own.micro for own in totals])
    fill = least = _total(counts, micro) + recompute_seconds
    busy = _bottleneck(costs, config, [own.micro for own in totals])
    busy = max(busy, least / p, *(n * t for n, t in zip((math.ceil(n / p) for n in counts), micro, strict=True)))
    if config.schedule == "zero-bubble":
        drained = [[t - 2 * w for t, w in zip(own.micro, own.weight, strict=True)] for own in totals]
        fill = _total(counts, _least(drained)) + recompute_seconds
        sums = [(_total(counts, own.weight), _total(counts, own.micro)) for own in totals]
        busy *= min(stretched(weight, each, config.num_micro_batches) for weight, each in sums)
    return fill + (config.num_micro_batches - 1) * busy + _bottleneck(costs, config, [own.step for own in totals])


def _least(seconds: list[list[float]]) -> list[float]:
    """Of every class of units, on the stage mesh that is best for it."""
    return seconds[0] if len(seconds) == 1 else list(map(min, *seconds))


def _total(counts: list[int], seconds: list[float]) -> float:
    """Of all units."""
    return float(sum(map(mul, counts, seconds)))


def _bottleneck(costs: ConfigCosts, config: ParallelConfig, seconds: list[list[float]]) -> float:
    """What the busiest stage takes at least. seconds: of every class of units on every stage mesh."""
    whole, counts = costs.request.whole, list(costs.counts.values())
    devices = [each.mesh.num_ranks for each in config.stage_meshes]
    areas = [[count * each for each in own] for count, own in zip(devices, seconds, strict=True)]
    least = _total(counts, _least(areas)) / whole.num_devices
    if len(costs.groups) == 1:
        return least
    work, rate = _total(counts, seconds[0]), 0.0
    for each, own in zip(config.stage_meshes, seconds, strict=True):
        slower = min((a / b for a, b in zip(own, seconds[0], strict=True) if b), default=0.0)
        if not slower:
            return least
        rate += whole.groups[each.group].num_devices / each.mesh.num_ranks / slower
    return max(least, work / rate)
