"""Compare predicted with measured steps of seven model families on one H100.

    python -m benchmarks.step_errors [--family bert t5]

Measured: shared/data/gpu_h100_families.jsonl, steps that were issued call by call. The host's unit
(`Device.host_call_seconds`) is the only constant that is fitted to whole steps. "left out" predicts a family with the
unit that fits the others best (the least mean of squared logarithms). Rows go to benchmarks/results/step_errors.csv.

"captured" predicts the same step as CUDA graphs (costs/captured_steps.py), which nobody has measured.

The measured programs are older than today's: kernels, layouts and paddings since then are priced as they run now.
ResNet is priced without fused kernels, with images in NCHW as measured.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import autopar
from autopar.costs.layer_costs import HOST
from autopar.costs.updates import DefaultAdamW
from autopar.ir.plan_data import Prediction
from autopar.planning.predict import predicted
from benchmarks.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT.parent / "shared" / "data" / "gpu_h100_families.jsonl"
RESULTS = Path(__file__).resolve().parent / "results" / "step_errors.csv"
CASES = {
    "bert": "bert-large",
    "vit": "vit-l",
    "gemma3": "gemma3",
    "t5": "t5-large",
    "qwen3-moe": "qwen3-moe",
    "llama": "llama1.5b",
    "resnet50": "resnet50",
}
UNITS = (16e-6, 20e-6, 24e-6, 28e-6, 32e-6)
"""Host seconds of a call at which steps are predicted; between them they are interpolated."""


@dataclass(frozen=True, slots=True)
class Step:
    """A family's step. measured: its row. now: the prediction of today's device, and `captured` of a captured step.
    seconds: predicted at UNITS."""

    measured: Mapping[str, Any]
    now: Prediction
    captured: Prediction
    seconds: tuple[float, ...]

    def error(self, unit: float | None = None) -> float:
        """Return the relative error of the prediction, today's or with another unit of the host."""
        seconds = self.now.step_seconds if unit is None else float(np.interp(unit, UNITS, self.seconds))
        return float(seconds / self.measured["step_median_s"] - 1)


def step_of(family: str, measured: Mapping[str, Any]) -> Step:
    """Compile a family for one H100, on meta, and predict its step."""
    with torch.device("meta"):
        example = FAMILIES[family].build("full")
    compiled = autopar.compile(
        example.model,
        "1 h100-sxm",
        example_inputs=example.inputs,
        loss_fn=example.loss_fn,
        optimizer=DefaultAdamW(1e-4),
        precision="bf16",
        kernels="off" if family == "resnet50" else "on",
    )
    request, seconds = compiled.request, []
    for unit in UNITS:
        device = replace(request.cluster.device, host_call_seconds=unit)
        changed = replace(request, cluster=replace(request.cluster, device=device))
        seconds.append(predicted(changed, compiled.best).plan.prediction.step_seconds)
    captured = predicted(replace(request, captures=True), compiled.best).plan.prediction
    return Step(measured, compiled.plan.prediction, captured, tuple(seconds))


def fitted_unit(steps: Sequence[Step]) -> float:
    """Return the host's unit with the least squared logarithms of predicted over measured steps."""
    units = np.arange(UNITS[0], UNITS[-1], 0.1e-6)
    losses = [sum(math.log1p(step.error(unit)) ** 2 for step in steps) for unit in units]
    return float(units[int(np.argmin(losses))])


def measured_rows() -> dict[str, Mapping[str, Any]]:
    """Return the rows of emitted programs without inductor, by family."""
    rows = [json.loads(line) for line in MEASURED.read_text(encoding="utf-8").splitlines()]
    emitted = {row["case"]: row for row in rows if row["side"] == "generated"}
    return {family: emitted[case] for family, case in CASES.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=list(CASES), default=list(CASES))
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    measured = measured_rows()
    steps = {family: step_of(family, measured[family]) for family in options.family}
    rows = []
    for family, step in steps.items():
        others = [other for name, other in steps.items() if name != family]
        unit = fitted_unit(others) if others else float("nan")
        row = step.measured
        rows.append(
            {
                "family": family,
                "measured_ms": f"{1e3 * row['step_median_s']:.1f}",
                "kernels_ms": f"{1e3 * row['kernel_total_s']:.1f}",
                "before_ms": f"{1e3 * row['predicted_step_s']:.1f}",
                "before": f"{row['predicted_step_s'] / row['step_median_s'] - 1:+.1%}",
                "device_ms": f"{1e3 * (step.now.step_seconds - step.now.seconds.get(HOST, 0.0)):.1f}",
                "now_ms": f"{1e3 * step.now.step_seconds:.1f}",
                "now": f"{step.error():+.1%}",
                "captured_ms": f"{1e3 * step.captured.step_seconds:.1f}",
                "left_out_unit_us": f"{1e6 * unit:.1f}",
                "left_out": f"{step.error(unit):+.1%}" if others else "",
            }
        )
    for row in rows:
        print("  ".join(f"{value:>10}" for value in row.values()))
    for name in ("before", "now", "left_out"):
        errors = [abs(float(row[name].rstrip("%"))) for row in rows if row[name]]
        print(f"median |error|, {name}: {statistics.median(errors):.1f} %")
    print(f"unit fitted to all: {1e6 * fitted_unit(list(steps.values())):.1f} us")
    if len(steps) == len(CASES):
        with RESULTS.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
