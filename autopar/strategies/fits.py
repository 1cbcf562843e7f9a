"""Whether a strategy fits the memory, and changed strategies that do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import AutoparError, InfeasibleError
from autopar.planning.request import divisors
from autopar.strategies.prediction import StrategyPrediction
from autopar.units import bytes_text

SHOWN = 4
"""Number of other strategies that an error names."""


def require_fit(prediction: StrategyPrediction) -> None:
    """Raises InfeasibleError with the bytes by kind, the capacity, and strategies one or two fields away that fit."""
    if prediction.fits:
        return
    kinds = sorted(((kind, value) for kind, value in prediction.num_bytes.items() if value), key=lambda pair: -pair[1])
    error = InfeasibleError(
        "the strategy does not fit the memory of a rank",
        values={"needed": bytes_text(prediction.peak_bytes), "capacity": bytes_text(prediction.capacity_bytes)}
        | {kind: bytes_text(value) for kind, value in kinds},
        alternatives=_alternatives(prediction),
    )
    error.needed_bytes = int(prediction.peak_bytes)
    raise error


def _alternatives(prediction: StrategyPrediction) -> list[str]:
    """Return the neighboring strategies that fit, the fastest first, and the memory that the given one needs."""
    fitting: list[tuple[float, str]] = []
    for changes in _neighbors(prediction):
        scenario = prediction.scenario
        try:
            other = replace(scenario, strategy={**scenario.strategy, **changes}).predict()
        except AutoparError:
            continue
        if other.fits:
            words = ", ".join(f"{key}={value}" for key, value in changes.items())
            fitting.append((other.step_seconds, f"{words}: {other.step_seconds:.4g} s, {bytes_text(other.peak_bytes)}"))
    return [text for _, text in sorted(fitting)[:SHOWN]] + [f"memory of {bytes_text(prediction.peak_bytes)} per rank"]


def _neighbors(prediction: StrategyPrediction) -> Iterator[Mapping[str, Any]]:
    """Strategies with another recompute mode, ZeRO stage, number of micro-batches or offload, alone and together."""
    strategy, rows = prediction.scenario.strategy, prediction.scenario.global_batch_size
    data = strategy.get("dp", 1) * strategy.get("cp", 1)
    micro = strategy.get("micro_batches", 1)
    limit = rows // (strategy.get("dp", 1) * strategy.get("ddp", 1))
    more = [n for n in divisors(limit) if n > micro]
    singles: list[Mapping[str, Any]] = [
        {"recompute": mode} for mode in ("selective", "full") if strategy.get("recompute", "none") != mode
    ]
    singles += [{"zero": stage} for stage in (1, 2, 3) if data > 1 and stage > strategy.get("zero", 0)]
    singles += [{"micro_batches": count} for count in more[:2] + more[-1:]]
    if not strategy.get("offload") or strategy["offload"] == "none":
        singles.append({"offload": "optimizer"})
    yield from singles
    for index, one in enumerate(singles):
        for other in singles[index + 1 :]:
            if not one.keys() & other.keys():
                yield {**one, **other}
