"""What kernels seem to take in training steps: rates by architecture and kind of kernel, fitted to measured runs.

A rate r multiplies the predicted seconds of one kind of kernel on one architecture. Fitted are the rates that minimise

    mean over sources of the mean over their rows of min(|log(predicted / measured)|, 1)

so that sources weigh the same whatever their number of rows, and a row that is far off no more than one off by e.
Predictions have no such rates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from autopar.costs.layer_costs import HOST, RECOMPUTATION
from autopar.costs.stage_costs import BUBBLE
from benchmarks.published_runs.predictions import Outcome
from benchmarks.published_runs.rows import attention_of
from benchmarks.published_runs.strategies import profile_of

Rates = Mapping[tuple[str, str], float]
"""(architecture, kind of kernel) -> by what its predicted seconds are multiplied."""

SCALED = ("matmuls", "attention", "memory-bound kernels")
STEPS = (1.25, 1.08, 1.03)
LIMITS = (0.4, 2.5)


def kernel_kinds(outcome: Outcome) -> dict[str, float]:
    """Seconds of forward and backward by kind of kernel; the attention kernels are told apart."""
    seconds = outcome.prediction.seconds
    variant = (attention_of(outcome.row) or profile_of(outcome.row).attention).replace("flash", "fa2")
    found = {}
    for kind in SCALED:
        name = f"{variant} attention" if kind == "attention" else kind
        found[name] = seconds.get(f"forward {kind}", 0.0) + seconds.get(f"backward {kind}", 0.0)
    return found


def scaled_seconds(outcome: Outcome, rates: Rates) -> float:
    """The step if kernels took other times: recomputation and bubbles scale with what they repeat and wait for, the
    optimiser with memory-bound kernels, and the host's floor stays."""
    seconds, kernels = outcome.prediction.seconds, kernel_kinds(outcome)
    before = sum(kernels.values())
    after = sum(value * rates.get((outcome.architecture, kind), 1.0) for kind, value in kernels.items())
    ratio = after / before if before else 1.0
    memory = rates.get((outcome.architecture, "memory-bound kernels"), 1.0)
    again, late, idle = (seconds.get(kind, 0.0) for kind in (RECOMPUTATION, HOST, BUBBLE))
    update = seconds.get("optimizer", 0.0)
    other = outcome.seconds - before - again - late - idle - update
    late_after = max(late + before + again - (before + again) * ratio, 0.0) if late else 0.0
    busy, busy_after = before + again + late + other, after + again * ratio + late_after + other
    return busy_after + idle * (busy_after / busy if busy else 1.0) + update * memory


def fit_rates(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], float]:
    """The rates, found one at a time by smaller and smaller steps from 1."""
    keys = sorted({(o.architecture, kind) for o in outcomes for kind, value in kernel_kinds(o).items() if value})
    rates = dict.fromkeys(keys, 1.0)
    own = {key: [o for o in outcomes if o.architecture == key[0]] for key in keys}
    weight = Counter(o.row["source"] for o in outcomes)

    def part(key: tuple[str, str], tried: Rates) -> float:
        return sum(
            min(abs(math.log(scaled_seconds(o, tried) / o.row["iter_time_s"])), 1.0) / weight[o.row["source"]]
            for o in own[key]
        )

    for step in STEPS:
        for _ in range(3):
            moved = False
            for key in keys:
                best = part(key, rates)
                for factor in (step, 1 / step):
                    tried = {**rates, key: min(max(rates[key] * factor, LIMITS[0]), LIMITS[1])}
                    if part(key, tried) < best - 1e-6:
                        rates, moved = tried, True
                        break
            if not moved:
                break
    return rates


def left_out_seconds(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Row id -> seconds with rates fitted without the row's source."""
    found: dict[str, float] = {}
    for source in dict.fromkeys(o.row["source"] for o in outcomes):
        rates = fit_rates([o for o in outcomes if o.row["source"] != source])
        found |= {o.row["id"]: scaled_seconds(o, rates) for o in outcomes if o.row["source"] == source}
    return found
