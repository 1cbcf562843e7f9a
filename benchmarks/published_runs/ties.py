"""What a choice among runs that predictions do not tell apart would cost, by rules that prefer the best worst case.

Runs predicted within TIED of the fastest are tied. A rule orders them by what is uncertain: a network as slow as the
lower band of published tables (SLOW times the mean), memory that may not be there, ranks of a pipeline that wait longer
than simulated. Each rule is judged by the regret of its choice in each group, by the mean regret over parts of groups
that are drawn by chance (a quarter of the runs, five at least), which have more ties, and by how many pairs of tied
runs it orders as they were measured.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.costs.stage_costs import BUBBLE
from autopar.report.costs import TIED, is_tied
from autopar.strategies.prediction import StrategyPrediction
from benchmarks.published_runs.predictions import Outcome
from benchmarks.published_runs.regret import FEWEST, Groups
from benchmarks.published_runs.rows import Row

SLOW = 2.0
"""Mean by lower band of shared/data/measured_links.json: the geometric mean over 2 to 64 nodes of two clusters."""
DRAWN = 400
"""Parts of each group."""
SEED = 1


@dataclass(frozen=True, slots=True)
class Worst:
    """A run's predicted seconds, and what they may be: on a slow network, with twice the pipeline's bubble. used: share
    of its memory, by prediction. may_fail: whether it may not fit, by the interval of like rows."""

    seconds: float
    on_slow_network: float
    with_long_bubble: float
    used: float
    may_fail: bool


Rule = Callable[[Worst], tuple[float, ...]]
RULES: Mapping[str, Rule] = {
    "predicted fastest": lambda run: (run.seconds,),
    "on a slow network": lambda run: (run.on_slow_network,),
    "most memory free": lambda run: (run.used, run.seconds),
    "what surely fits": lambda run: (run.may_fail, run.seconds),
    "surely fits, slow network": lambda run: (run.may_fail, run.on_slow_network),
    "twice the bubble": lambda run: (run.with_long_bubble,),
}


@dataclass(frozen=True, slots=True)
class Judged:
    """A rule's regret in each group, on average over drawn parts, and the tied pairs that it orders as measured, of
    those that it orders."""

    regrets: tuple[float, ...]
    drawn: float
    right: int
    pairs: int


def worst_of(outcome: Outcome) -> Worst:
    """What may become of a predicted run."""
    found = outcome.prediction
    assert isinstance(found, StrategyPrediction)
    slow = found.what_if(inter_node={"bytes_per_second": f"x{1 / SLOW}", "latency_seconds": f"x{SLOW}"}).after
    return Worst(
        seconds=found.step_seconds,
        on_slow_network=slow.step_seconds,
        with_long_bubble=found.step_seconds + found.seconds.get(BUBBLE, 0.0),
        used=found.peak_bytes / found.capacity_bytes,
        may_fail=found.certainty.fit != "yes",
    )


def judged(groups: Groups, known: Mapping[str, Worst], rule: Rule) -> Judged:
    """A rule over groups of runs, of which those without a prediction are left out."""
    drawing, regrets, drawn, right, pairs = random.Random(SEED), list[float](), list[float](), 0, 0
    for rows in groups.values():
        own = [row for row in rows if row["id"] in known]
        if len(own) < FEWEST:
            continue
        regrets.append(_regret(own, known, rule))
        size = max(FEWEST, len(own) // 4)
        drawn.append(statistics.fmean(_regret(drawing.sample(own, size), known, rule) for _ in range(DRAWN)))
        orders = list(_orders(own, known, rule))
        right, pairs = right + sum(orders), pairs + len(orders)
    return Judged(tuple(regrets), statistics.fmean(drawn), right, pairs)


def _regret(rows: Sequence[Row], known: Mapping[str, Worst], rule: Rule) -> float:
    least = min(known[row["id"]].seconds for row in rows)
    tied = [row for row in rows if is_tied(known[row["id"]].seconds, least)]
    chosen = min(tied, key=lambda row: rule(known[row["id"]]))
    return float(chosen["iter_time_s"]) / min(float(row["iter_time_s"]) for row in rows) - 1


def _orders(rows: Sequence[Row], known: Mapping[str, Worst], rule: Rule) -> Iterator[bool]:
    """Of each tied pair that a rule orders, and that took unlike times, whether it was as the rule has it."""
    for one, other in itertools.combinations(rows, 2):
        mine, its = known[one["id"]], known[other["id"]]
        is_equal = rule(mine) == rule(its) or one["iter_time_s"] == other["iter_time_s"]
        if is_tied(mine.seconds, its.seconds) and not is_equal:
            yield (rule(mine) < rule(its)) == (one["iter_time_s"] < other["iter_time_s"])


def show_ties(groups: Groups, outcomes: Sequence[Outcome]) -> None:
    """A line per rule."""
    known = {outcome.row["id"]: worst_of(outcome) for outcome in outcomes}
    print(f"\n{f'among runs within {TIED:.0%}, that':36} {'mean':>7} {'median':>7} {'of parts':>9}  pairs as measured")
    for name, rule in RULES.items():
        found = judged(groups, known, rule)
        print(
            f"{name:36} {statistics.fmean(found.regrets):7.1%} {statistics.median(found.regrets):7.1%} "
            f"{found.drawn:9.1%}  {found.right / max(found.pairs, 1):.1%} of {found.pairs}"
        )
