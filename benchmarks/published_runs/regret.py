"""What it costs to believe predictions: the run predicted fastest beside the fastest one, among runs that share what a
user has (model, GPUs, batch) and differ in how the work was cut.

regret = measured(predicted best) / measured(best) - 1.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.published_runs.rows import Row

SHARED = ("source", "model", "gpu", "gpus_total", "seq_len", "precision", "global_batch")
"""Fields in which the runs of a group agree."""
CUT = ("dp", "tp", "pp", "vpp", "cp", "ep", "micro_batch", "grad_accum", "recompute", "offload", "sp", "schedule")
"""How the work was cut, the ZeRO stage (and its groups) aside: runs of a group that agree in them are twins."""
FLUKE = 2.0
"""A run this many times as slow as a twin had another problem than its plan (shared/data/README.md)."""
PIPELINED = ("source", "model", "gpu", "seq_len", "precision", "recompute", "tp", "micro_batch")
"""Fields by which a layer of a pipeline does the same work for a micro-batch, wherever the stages are cut."""
SHAPED = ("dp", "micro_batch", "global_batch", "gpus_total", "gpus_per_node")
"""Fields without which nothing is known of a micro-batch's time."""
POLLED_SECONDS = 0.4
"""What a micro-batch at least waits for in a pipeline of two stages that polls, and twice that where there are inner
stages: two transfers (four) with two messages of sizes each, slept for in steps of 0.1 s. nanotron polled so while its
benchmarks ran (huggingface/nanotron 67c5ebb6 of 27 December 2024, pipeline_parallel/p2p.py), and no longer does;
rows do not tell their revision."""
FEWEST = 5
"""Runs of a group from which on it is judged."""

Groups = Mapping[tuple[object, ...], Sequence[Row]]


def groups_of(rows: Sequence[Row]) -> tuple[dict[tuple[object, ...], list[Row]], list[Row]]:
    """(runs by what they share, of which there are at least FEWEST; flukes that were left out)."""
    shared: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in _ok(rows):
        shared[tuple(row.get(name) for name in SHARED)].append(row)
    flukes: list[Row] = []
    kept = {}
    for key, members in shared.items():
        fastest = _fastest_twins(members)
        own = [row for row in members if row["iter_time_s"] <= FLUKE * fastest[_cut(row)]]
        flukes += [row for row in members if row["iter_time_s"] > FLUKE * fastest[_cut(row)]]
        if len(own) >= FEWEST:
            kept[key] = own
    return kept, flukes


def polled(rows: Sequence[Row]) -> list[Row]:
    """Pipelines that seem to have polled: a micro-batch waited for POLLED_SECONDS or longer, and its layers took more
    than twice what they took in the fastest pipeline of the same tensor parallelism and micro-batches, on one node or
    on several. By measurements alone."""
    alike: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in _ok(rows):
        if (row.get("pp") or 1) > 1 and all(row.get(name) for name in SHAPED):
            spans = row["gpus_total"] > row["gpus_per_node"]
            alike[(*(row.get(name) for name in PIPELINED), spans)].append(row)
    found = []
    for members in alike.values():
        least = min(row["iter_time_s"] / _slots(row) * row["pp"] for row in members)
        for row in members:
            alone, waits = least / row["pp"] * _slots(row), POLLED_SECONDS * (1 if row["pp"] == 2 else 2)
            late = row["iter_time_s"] - alone
            if late > alone and late >= waits * _micro_batches(row):
                found.append(row)
    return found


def _ok(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.get("iter_time_s") and row.get("status", "ok") == "ok"]


def _micro_batches(row: Row) -> float:
    return float(row["global_batch"] / row["dp"] / row["micro_batch"])


def _slots(row: Row) -> float:
    """Micro-batches and bubbles that a stage passes through in a step."""
    return _micro_batches(row) + row["pp"] - 1


def _cut(row: Row) -> tuple[object, ...]:
    return tuple(row.get(name) for name in CUT)


def _fastest_twins(rows: Sequence[Row]) -> dict[tuple[object, ...], float]:
    found: dict[tuple[object, ...], float] = {}
    for row in rows:
        found[_cut(row)] = min(found.get(_cut(row), row["iter_time_s"]), row["iter_time_s"])
    return found


@dataclass(frozen=True, slots=True)
class Choice:
    """What predictions choose of one group.

    regret: of the run predicted fastest. of_three: of the fastest of the three predicted fastest. rank: of the chosen
    run among the measured, from 1. random: regret of a run taken blindly, on average.
    """

    key: tuple[object, ...]
    chosen: Row
    best: Row
    num_runs: int
    regret: float
    of_three: float
    rank: int
    random: float


def choice_of(key: tuple[object, ...], rows: Sequence[Row], seconds: Mapping[str, float]) -> Choice | None:
    """seconds: predicted, by the row's id. Rows without a prediction are left out; None where fewer than FEWEST remain.
    Equal predictions are in the order of the file."""
    own = sorted((row for row in rows if row["id"] in seconds), key=lambda row: seconds[row["id"]])
    if len(own) < FEWEST:
        return None
    measured = [row["iter_time_s"] for row in own]
    least = min(measured)
    return Choice(
        key=key,
        chosen=own[0],
        best=own[measured.index(least)],
        num_runs=len(own),
        regret=measured[0] / least - 1,
        of_three=min(measured[:3]) / least - 1,
        rank=sorted(measured).index(measured[0]) + 1,
        random=statistics.fmean(measured) / least - 1,
    )


def scatter_of(groups: Groups) -> list[float]:
    """By how much the slower one of two runs that differ in the ZeRO stage only, or not at all, is slower: what no
    prediction of such a pair's order can be blamed for."""
    found = []
    for rows in groups.values():
        twins: dict[tuple[object, ...], list[float]] = defaultdict(list)
        for row in rows:
            twins[_cut(row)].append(row["iter_time_s"])
        found += [max(pair) / min(pair) - 1 for pair in twins.values() if len(pair) > 1]
    return found
