"""One model under memory budgets from ample to impossible: what the plans give up, and what it costs.

    python -m benchmarks.budget [--steps 16] [--csv]

GPT-2 with 1.3 billion parameters (24 layers of width 2048, sequence 2048) on 8 A100s of 80 GiB, batch 64, bf16 with
AdamW. The budget per rank falls geometrically from the device's memory until nothing fits. Printed per budget: the plan
(layout, micro-batches, ZeRO, schedule, layers by recompute mode, offload), its predicted step time and its peak on the
fullest rank. Exits 1 unless

- every plan's peak is within its budget,
- the step time never falls as the budget falls, and
- on the way down sharding comes no later than recomputation, and recomputation no later than offload, all three come,
  and the lowest budget is impossible.

`--csv` writes benchmarks/results/budget.csv and budget.svg (a drawing of step time over budget).
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autopar.cluster import as_cluster
from autopar.errors import InfeasibleError
from autopar.plan import Plan
from autopar.planning.make_request import request_of
from autopar.planning.planner import search_plans
from autopar.settings.compile_options import CompileOptions

RESULTS = Path(__file__).resolve().parent / "results"
CLUSTER = "8 a100-80g"
BATCH, SEQ, LAYERS, WIDTH, HEADS, VOCABULARY = 64, 2048, 24, 2048, 16, 50304
AMPLE_BYTES = 80 * 2**30
LEAST_BYTES = 2 * 2**30
GIB = 2**30
SLACK = 1e-9
"""Relative round-off in comparing two predictions."""


@dataclass(frozen=True, slots=True)
class Row:
    """One budget. plan: None where nothing fits."""

    budget_bytes: int
    plan: Plan | None
    cpu_seconds: float

    @property
    def zero(self) -> int:
        assert self.plan is not None
        return max(s.zero for scope in self.plan.scopes.values() for s in scope.parameters.values())

    @property
    def recomputed(self) -> dict[str, int]:
        """Layers by mode, without those that keep everything."""
        assert self.plan is not None
        found: dict[str, int] = {}
        for stage in self.plan.pipeline.stages:
            for runs in stage.recompute.values():
                for mode, number in runs:
                    found[mode] = found.get(mode, 0) + number
        return {mode: number for mode, number in found.items() if mode != "none" and number}

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold parts of the model's state."""
        assert self.plan is not None
        return self.zero > 0 or self.plan.mesh.size("tp") > 1 or self.plan.pipeline.num_pipeline_ranks > 1

    @property
    def measures(self) -> str:
        """What saves memory: `sharding`, `recompute`, `offload`, joined by plus signs."""
        assert self.plan is not None
        present = {
            "sharding": self.is_sharded,
            "recompute": bool(self.recomputed),
            "offload": bool(self.plan.pipeline.offload),
        }
        return " + ".join(name for name, is_there in present.items() if is_there) or "none"


def request() -> Any:
    """The planning problem with all of the device's memory."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=SEQ, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, use_cache=False
        )
        model: Any = GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"
        ids = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    inputs = {"input_ids": ids, "labels": ids.clone()}
    return request_of(model, as_cluster(CLUSTER), CompileOptions(example_inputs=inputs, precision="bf16"))


def rows_of(asked: Any, budgets: Sequence[int]) -> list[Row]:
    """The best plan under each budget."""
    rows = []
    for budget in budgets:
        before = time.process_time()
        limits = replace(asked.constraints, memory_bytes=budget)
        try:
            plan: Plan | None = search_plans(replace(asked, constraints=limits)).best.plan
        except InfeasibleError:
            plan = None
        rows.append(Row(budget, plan, time.process_time() - before))
        print(text_of(rows[-1]), flush=True)
    return rows


def text_of(row: Row) -> str:
    """One line of the table."""
    start = f"{row.budget_bytes / GIB:6.2f} GiB  "
    if row.plan is None:
        return f"{start}nothing fits  ({row.cpu_seconds:.1f} CPU-s)"
    plan = row.plan
    layers = ", ".join(f"{number} {mode}" for mode, number in row.recomputed.items()) or "-"
    return (
        f"{start}{plan.prediction.step_seconds:8.4f} s  peak {plan.prediction.peak_bytes / GIB:6.2f} GiB  "
        f"{plan.mesh_text:<18} {plan.num_micro_batches:>3} micro-batches  zero {row.zero}  "
        f"{plan.pipeline.schedule or '-':<12} recompute {layers:<24} offload {plan.pipeline.offload or '-'}  "
        f"({row.cpu_seconds:.1f} CPU-s)"
    )


def complaints(rows: Sequence[Row]) -> list[str]:
    """What is not as it must be; rows from the largest budget to the smallest."""
    wrong = []
    feasible = [(row, row.plan.prediction) for row in rows if row.plan is not None]
    for row, prediction in feasible:
        if prediction.peak_bytes > row.budget_bytes:
            wrong.append(f"{row.budget_bytes / GIB:.2f} GiB: the peak is {prediction.peak_bytes / GIB:.2f} GiB")
    for (above, more), (below, less) in zip(feasible, feasible[1:], strict=False):
        if less.step_seconds < more.step_seconds * (1 - SLACK):
            wrong.append(
                f"{below.budget_bytes / GIB:.2f} GiB is faster than {above.budget_bytes / GIB:.2f} GiB: "
                f"{less.step_seconds:.6g} s instead of {more.step_seconds:.6g} s"
            )
    if any(row.plan is not None for row in rows[len(feasible) :]):
        wrong.append("a budget is feasible below one that is not")
    if len(feasible) == len(rows):
        wrong.append("the smallest budget is not impossible")
    firsts = {
        name: next((i for i, (row, _) in enumerate(feasible) if name in row.measures), None)
        for name in ("sharding", "recompute", "offload")
    }
    order = [first for first in firsts.values() if first is not None]
    if len(order) < 3 or order != sorted(order):
        wrong.append(f"sharding, recompute and offload come in at rows {firsts}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    ratio = (LEAST_BYTES / AMPLE_BYTES) ** (1 / (options.steps - 1))
    rows = rows_of(request(), [int(AMPLE_BYTES * ratio**i) for i in range(options.steps)])
    wrong = complaints(rows)
    print("\n" + ("\n".join(wrong) if wrong else "peaks, times and order are as they must be"))
    if options.csv:
        RESULTS.mkdir(exist_ok=True)
        _write(rows)
        (RESULTS / "budget.svg").write_text(drawing(rows))
    return 1 if wrong else 0


def _write(rows: Sequence[Row]) -> None:
    head = ["budget_gib", "layout", "micro_batches", "zero", "schedule", "layers_selective", "layers_full", "offload"]
    with (RESULTS / "budget.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*head, "step_seconds", "peak_gib", "cpu_seconds"])
        for row in rows:
            budget, spent = f"{row.budget_bytes / GIB:.3f}", f"{row.cpu_seconds:.1f}"
            if row.plan is None:
                writer.writerow([budget, "nothing fits", *[""] * 8, spent])
                continue
            plan, modes = row.plan, row.recomputed
            chosen = [plan.mesh_text, plan.num_micro_batches, row.zero, plan.pipeline.schedule]
            chosen += [modes.get("selective", 0), modes.get("full", 0), plan.pipeline.offload]
            figures = [f"{plan.prediction.step_seconds:.6g}", f"{plan.prediction.peak_bytes / GIB:.3f}"]
            writer.writerow([budget, *chosen, *figures, spent])


# --- the drawing ------------------------------------------------------------------------------------------------------

COLOURS = {
    "none": "#4c72b0",
    "sharding": "#55a868",
    "sharding + recompute": "#dd8452",
    "sharding + offload": "#8172b3",
    "sharding + recompute + offload": "#c44e52",
    "recompute": "#937860",
}
PLOT_WIDTH, PLOT_HEIGHT, MARGIN = 760, 380, 70


def drawing(rows: Sequence[Row]) -> str:
    """An SVG: step time over budget (logarithmic, ample on the left), a dot per plan in the colour of its measures."""
    import math

    feasible = [(row, row.plan.prediction.step_seconds) for row in rows if row.plan is not None]
    most = max(seconds for _, seconds in feasible) * 1.05
    high, low = (math.log(rows[i].budget_bytes) for i in (0, -1))

    def across(num_bytes: float) -> float:
        return MARGIN + (high - math.log(num_bytes)) / (high - low) * (PLOT_WIDTH - 2 * MARGIN)

    def down(seconds: float) -> float:
        return PLOT_HEIGHT - MARGIN - seconds / most * (PLOT_HEIGHT - 2 * MARGIN)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PLOT_WIDTH} {PLOT_HEIGHT}" font-family="sans-serif" '
        f'font-size="11">',
        f'<rect width="{PLOT_WIDTH}" height="{PLOT_HEIGHT}" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="14">GPT-2 1.3B on {CLUSTER}: predicted step time under a memory budget'
        "</text>",
        f'<path d="M{MARGIN} {MARGIN} V{down(0)} H{PLOT_WIDTH - MARGIN}" fill="none" stroke="black"/>',
        f'<text x="{PLOT_WIDTH / 2}" y="{PLOT_HEIGHT - 14}" text-anchor="middle">budget per rank, GiB</text>',
        f'<text x="16" y="{PLOT_HEIGHT / 2}" transform="rotate(-90 16 {PLOT_HEIGHT / 2})" text-anchor="middle">'
        "seconds per step</text>",
    ]
    for gib in (80, 40, 20, 10, 5, 2.5):
        if rows[-1].budget_bytes <= gib * GIB <= rows[0].budget_bytes:
            x = across(gib * GIB)
            parts.append(f'<text x="{x:.1f}" y="{down(0) + 16}" text-anchor="middle">{gib:g}</text>')
    for share in (0.25, 0.5, 0.75, 1.0):
        seconds = most * share / 1.05
        y = down(seconds)
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{seconds:.2g}</text>')
        parts.append(f'<path d="M{MARGIN} {y:.1f} H{PLOT_WIDTH - MARGIN}" stroke="#ddd"/>')
    points = [(across(row.budget_bytes), down(seconds), row.measures) for row, seconds in feasible]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#999"/>')
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{COLOURS.get(m, "black")}"/>' for x, y, m in points]
    impossible = [across(row.budget_bytes) for row in rows if row.plan is None]
    if impossible:
        x = (impossible[0] + points[-1][0]) / 2
        parts.append(f'<path d="M{x:.1f} {MARGIN} V{down(0)}" stroke="black" stroke-dasharray="4 4"/>')
        parts.append(f'<text x="{x + 4:.1f}" y="{MARGIN + 10}">nothing fits</text>')
    for number, measures in enumerate(dict.fromkeys(m for _, _, m in points)):
        x, y = MARGIN + 10, MARGIN + 14 * number
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="5" fill="{COLOURS.get(measures, "black")}"/>')
        parts.append(f'<text x="{x + 10}" y="{y}">{measures}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
