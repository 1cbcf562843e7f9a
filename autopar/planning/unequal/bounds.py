"""Seconds that no pipeline under given terms can undercut, whatever its cut and its order of submeshes.

With t_c,h the seconds per micro-batch of a block of class c on shape h, u_c,h those once per step, n_c blocks of the
class, m micro-batches, and every block on the shape that is best for it:

    bound = sum_c n_c min_h t_c,h + (m - 1) T + U

T and U are what the busiest stage takes at least per micro-batch and per step: the larger of two bounds.

Area. A stage of r ranks that is busy for t has r t rank-seconds, and all stages together have as many ranks R as there
are. So T >= sum_c n_c min_h (r_h t_c,h) / R.

Rates, where every group g has one shape, and so a known number N_g of stages. If any block takes at least rho_g times
as long on shape g as on the first, in T seconds N_g stages do at most what takes N_g T / rho_g on the first. So
T >= sum_c n_c t_c,1 / sum_g (N_g / rho_g).

T is also no less than the sum of all blocks over the largest number of positions. Zero bubble fills its drain with
weight gradients, w of t: in the first sum it counts t - 2 w.
"""

from __future__ import annotations

from autopar.costs.block_costs import Mode
from autopar.planning.memory_fit import least_kept, least_recompute
from autopar.planning.request import usable_bytes
from autopar.planning.stage_points import HOLDING, modes_of
from autopar.planning.unequal.seat_costs import ClassSeconds, SeatCosts
from autopar.planning.unequal.terms import Terms
from autopar.seats import Seat


def bound(costs: SeatCosts, terms: Terms, recompute_seconds: float = 0.0) -> float:
    """With memory free.

    recompute_seconds: of all layers per micro-batch, that any plan has.
    """
    return _bound(costs, terms, [costs.seconds(seat, terms) for seat in terms.seats], recompute_seconds)


def outline_bound(costs: SeatCosts, outline: Terms) -> float:
    """The same whatever becomes of the parameters."""
    seconds = [costs.activity(seat, outline).seconds for seat in outline.seats]
    totals = [[(own[n].under(outline.schedule), own[n].weight, 0.0) for n in costs.counts] for own in seconds]
    return _bound(costs, outline, totals, 0.0)


def recompute_bound(costs: SeatCosts, terms: Terms) -> float:
    """Seconds per micro-batch that recomputation takes at least, with every block on the seat, in the mode and on the
    position that suit best; inf where even so nothing fits."""
    numbers = costs.positions(terms.seats)
    usable = [usable_bytes(costs.request.of_group(group)) for group in range(len(costs.groups))]
    if len(costs.groups) == 1:
        memory = usable[0] * max(numbers)
    else:
        ranks = {seat.group: seat.mesh.num_ranks for seat in terms.seats}
        memory = sum(usable[g] * (costs.groups[g].num_devices // n) for g, n in ranks.items())
    blocks, fixed = _kept_of_blocks(costs, terms)
    holding = HOLDING[terms.schedule](terms.num_micro_batches)
    return least_recompute(blocks, holding, [(p, i) for p in numbers for i in range(p)], memory, fixed)


def bytes_bound(costs: SeatCosts, terms: Terms) -> float:
    """Of the fullest rank: no cut needs less, with every block as in `recompute_bound`."""
    numbers = costs.positions(terms.seats)
    blocks, fixed = _kept_of_blocks(costs, terms)
    holding = HOLDING[terms.schedule](terms.num_micro_batches)
    return (fixed + least_kept(blocks, holding, [(p, i) for p in numbers for i in range(p)])) / max(numbers)


def _kept_of_blocks(costs: SeatCosts, terms: Terms) -> tuple[list[tuple[int, list[Mode]]], float]:
    """How often each block stands in the model with the modes that it may run in on any seat, and the bytes of all that
    stay, each on the seat where they are fewest."""
    own, pinned = [costs.costs(seat, terms) for seat in terms.seats], costs.request.constraints.recompute
    fixed = sum(count * min(each[name].fixed_bytes for each in own) for name, count in costs.counts.items())
    blocks = [
        (count, [mode for each in own for mode in modes_of(each[name], pinned, not costs.is_on_cpu).values()])
        for name, count in costs.counts.items()
    ]
    return blocks, fixed


def _bound(costs: SeatCosts, terms: Terms, totals: list[list[ClassSeconds]], recompute_seconds: float) -> float:
    """totals: of every seat, as `SeatCosts.seconds`."""
    is_split, least, drained = terms.schedule == "zero-bubble", recompute_seconds, recompute_seconds
    for index, count in enumerate(costs.counts.values()):
        least += count * min(own[index][0] for own in totals)
        drained += count * min(own[index][0] - 2 * own[index][1] for own in totals)
    busy = _bottleneck(costs, terms.seats, [[micro for micro, _, _ in own] for own in totals])
    step = _bottleneck(costs, terms.seats, [[once for _, _, once in own] for own in totals])
    busy = max(busy, least / max(costs.positions(terms.seats)))
    return (drained if is_split else least) + (terms.num_micro_batches - 1) * busy + step


def _bottleneck(costs: SeatCosts, seats: tuple[Seat, ...], seconds: list[list[float]]) -> float:
    """What the busiest stage takes at least. seconds: of every class of blocks on every seat."""
    counts = list(costs.counts.values())
    areas = [[seat.mesh.num_ranks * each for each in own] for seat, own in zip(seats, seconds, strict=True)]
    least = sum(n * min(area[i] for area in areas) for i, n in enumerate(counts)) / costs.request.whole.num_devices
    work = sum(n * each for n, each in zip(counts, seconds[0], strict=True))
    if len(costs.groups) == 1 or not work:
        return least
    rate = 0.0
    for seat, own in zip(seats, seconds, strict=True):
        slower = min(a / b for a, b in zip(own, seconds[0], strict=True) if b)
        if not slower:
            return least
        rate += costs.groups[seat.group].num_devices / seat.mesh.num_ranks / slower
    return max(least, work / rate)
