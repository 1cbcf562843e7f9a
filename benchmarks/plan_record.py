"""Plans of some forty requests, on record: what a change of rules, prices or searches moves.

    python -m benchmarks.plan_record [--only llama-3-8b]              plan, and put on record
    python -m benchmarks.plan_record --compare [--only ...]           plan, and print what moved

A request is planned as a user would plan it, in a process of its own in which everything is imported before. Its plan
stands in benchmarks/results/plan_record/NAME.yaml, where seconds and bytes by kind are part of it; CPU seconds of
planning (tracing, searching and lowering; the least of REPEATS) and errors stand in benchmarks/results/plan_record.csv.
`--compare` writes nothing. A request has moved where its plan is another one, where a prediction differs by more than
TOLERANCE, or where it takes more than SLOWER times the CPU seconds; exits with 1 then.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import autopar
from autopar.errors import AutoparError
from autopar.plan import Plan
from benchmarks.planning import CASES, Case, build

RESULTS = Path(__file__).resolve().parent / "results"
TABLE = RESULTS / "plan_record.csv"
FOLDER = RESULTS / "plan_record"
TOLERANCE = 0.01
SLOWER = 1.3
REPEATS = 2
"""Whole plannings of a request; more of those that take less than QUICK seconds, which are noisier."""
QUICK = 2.0

IMPORTED = (
    "autopar.compile",
    "benchmarks.plan_record",
    "ortools.linear_solver.pywraplp",
    "ortools.math_opt.python.mathopt",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)
"""What planning imports, so that planning is all that is timed."""

MODELS: Mapping[str, Case] = {
    case.name: case
    for case in (
        *CASES.values(),
        # Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, table 2.
        Case("gpt-2-125m", 12, 768, 3072, 12, 0, 50257, "", 0, 1024),
        Case("gpt-2-1.5b", 48, 1600, 6400, 25, 0, 50257, "", 0, 1024),
        # Meta's published configurations of Llama 3.2 1B and of Llama 3 70B.
        Case("llama-3-1b", 16, 2048, 8192, 32, 8, 128256, "", 0, 4096),
        Case("llama-3-70b", 80, 8192, 28672, 64, 8, 128256, "", 0, 8192),
        # Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023, table 2.
        Case("llama-7b", 32, 4096, 11008, 32, 32, 32000, "", 0, 2048),
        Case("llama-13b", 40, 5120, 13824, 40, 40, 32000, "", 0, 2048),
        Case("llama-33b", 60, 6656, 17920, 52, 52, 32000, "", 0, 2048),
    )
}


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request: a model of MODELS, and what is said to `autopar.compile`. seq 0: the model's own length."""

    model: str
    cluster: str
    batch: int
    seq: int = 0
    precision: str = "bf16"
    pins: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A file's name that tells the request."""
        words = [self.model, self.cluster, f"batch {self.batch}", f"seq {self.seq}" if self.seq else ""]
        words += [self.precision, *(f"{k}={v}" for k, v in {**self.pins, **self.options}.items())]
        kept = (character if character.isalnum() or character in ".=-" else "_" for character in " ".join(words))
        return "_".join(filter(None, "".join(kept).split("_")))


REQUESTS = (
    Recorded("gpt-2-125m", "1 a100-80g", 8),
    Recorded("gpt-2-125m", "2 cpu", 8, 256, "fp32"),
    Recorded("gpt-2-125m", "4 cpu", 16, 256, "fp32", options={"kernels": "on"}),
    Recorded("gpt-2-125m", "8 v100-16g", 64, precision="fp32"),
    Recorded("gpt-2-1.5b", "1 a100-40g", 4),
    Recorded("gpt-2-1.5b", "4 rtx3090", 16),
    Recorded("gpt-2-1.5b", "2x8 v100-32g", 64, precision="fp32"),
    Recorded("llama-3-1b", "1 h100-sxm", 4, options={"kernels": "off"}),
    Recorded("llama-3-1b", "4 l4", 8),
    Recorded("llama-3-1b", "8 cpu", 8, 512, "fp32"),
    Recorded("llama-7b", "8 a100-80g", 64),
    Recorded("llama-7b", "8 a100-40g", 32),
    Recorded("llama-7b", "4x8 a100-40g", 128, pins={"memory": "20GiB"}),
    Recorded("llama-7b", "8 h100-sxm", 64, options={"fp8": True}),
    Recorded("llama-7b", "2x8 a100-80g", 64, pins={"zero": 3}, options={"compression": {"gather": "int8"}}),
    Recorded("llama-3-8b", "8x8 h100-sxm", 128),
    Recorded("llama-3-8b", "8x8 h100-sxm", 128, options={"kernels": "off"}),
    Recorded("llama-3-8b", "8x8 h100-sxm", 128, options={"fp8": True}),
    Recorded("llama-3-8b", "8 h100-sxm", 64, pins={"memory": "40GiB"}),
    Recorded("llama-3-8b", "8 h100-sxm", 64, pins={"tp": 8}),
    Recorded("llama-3-8b", "8x8 h100-sxm", 128, pins={"dp": 64, "zero": 3}),
    Recorded("llama-3-8b", "2x8 a100-80g", 64, pins={"pp": 4, "schedule": "zero-bubble"}),
    Recorded("llama-3-8b", "2x8 a100-80g", 64, pins={"pp": 4, "schedule": "interleaved", "chunks": 2}),
    Recorded("llama-3-8b", "8x8 h100-sxm", 16, 32768),
    Recorded("llama-3-8b", "4 a100-80g", 8, pins={"offload": "optimizer"}),
    Recorded("llama-3-8b", "2x8 a100-80g", 64, pins={"recompute": "full"}),
    Recorded("llama-3-8b", "2048x8 h100-sxm", 16384),
    Recorded("llama-3-8b", "1x8 a100-80g + 1x8 h100-sxm", 64),
    Recorded("llama-13b", "1x8 v100-32g + 2x4 a100-40g", 48),
    Recorded("llama-13b", "2x8 a100-80g", 64),
    Recorded("llama-13b", "8x8 v100-32g", 128, precision="fp32", pins={"pp": 4}),
    Recorded("llama-33b", "8x8 a100-80g", 256),
    Recorded("llama-33b", "7x8 a100-40g", 56),
    Recorded("llama-3-70b", "8x8 h100-sxm", 256),
    Recorded("llama-3-70b", "128x8 h100-sxm", 1024),
    Recorded("llama-3-70b", "3x8 h200-sxm", 96, pins={"zero": 3}),
    Recorded("llama-3-70b", "64x8 a100-80g", 512, pins={"pp": 8, "tp": 8}),
    Recorded("llama-3-70b", "8 a100-40g", 8),
    Recorded("gpt-3-175b", "128x8 a100-80g", 1536),
    Recorded("gpt-3-175b", "48x8 a100-80g", 1536, pins={"pp": 12, "tp": 8, "schedule": "interleaved"}),
    Recorded("gpt-3-175b", "64x8 h100-sxm", 1024, options={"fp8": True}),
    Recorded("llama-3-405b", "2048x8 h100-sxm", 2048),
    Recorded("llama-3-405b", "128x8 b200", 512),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """plan: the file's text, or empty where there is none. error: why. cpu_seconds: of planning."""

    plan: str
    error: str
    cpu_seconds: float


# --- planning ---------------------------------------------------------------------------------------------------------


def answer(request: Recorded) -> Answer:
    """Planned in processes forked from one that has imported everything and planned nothing."""
    found = [_in_a_fork(request)]
    while len(found) < (REPEATS if found[0].cpu_seconds > QUICK else 2 * REPEATS):
        found.append(_in_a_fork(request))
    if len({(each.plan, each.error) for each in found}) > 1:
        raise AssertionError(f"{request.name} has two answers")
    return min(found, key=lambda each: each.cpu_seconds)


def _in_a_fork(request: Recorded) -> Answer:
    """Of a server that has no threads: OpenMP's are not there after a fork, and are waited for."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    with context.Pool(1) as pool:
        return pool.apply(_plan, (request,))


def _plan(request: Recorded) -> Answer:
    case = MODELS[request.model]
    model, batch = build(replace(case, batch=request.batch, seq=request.seq or case.seq))
    started = time.process_time()
    plan = error = ""
    try:
        compiled = autopar.compile(
            model,
            request.cluster,
            example_inputs=batch,
            precision=request.precision,
            constraints=request.pins,
            **request.options,
        )
        plan = compiled.plan.to_yaml()
    except AutoparError as refusal:
        error = str(refusal)
    return Answer(plan, error, time.process_time() - started)


# --- the record -------------------------------------------------------------------------------------------------------


COLUMNS = ("request", "layout", "step_seconds", "peak_gib", "cpu_seconds", "error")


def row_of(request: Recorded, found: Answer) -> dict[str, str]:
    """A row of the table."""
    row = dict.fromkeys(COLUMNS, "") | {"request": request.name, "cpu_seconds": f"{found.cpu_seconds:.2f}"}
    if not found.plan:
        return row | {"error": " ".join(found.error.split())}
    plan = Plan.from_yaml(found.plan, request.name)
    layout = f"{plan.mesh_text}, {plan.num_micro_batches} micro-batches"
    seconds, peak = plan.prediction.step_seconds, plan.prediction.peak_bytes / 2**30
    return row | {"layout": layout, "step_seconds": f"{seconds:.6g}", "peak_gib": f"{peak:.4f}"}


def put_on_record(rows: Mapping[str, Mapping[str, str]], plans: Mapping[str, str]) -> None:
    """Replace what was on record of these requests, and drop what is no longer asked."""
    kept = {**recorded_rows(), **rows}
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in plans.items():
        path = FOLDER / f"{name}.yaml"
        path.write_text(text) if text else path.unlink(missing_ok=True)
    names = [request.name for request in REQUESTS if request.name in kept]
    for path in FOLDER.glob("*.yaml"):
        if path.stem not in names:
            path.unlink()
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(kept[name] for name in names)


def recorded_rows() -> dict[str, dict[str, str]]:
    """The table by request; empty before there is one."""
    if not TABLE.exists():
        return {}
    with TABLE.open(newline="") as file:
        return {row["request"]: row for row in csv.DictReader(file)}


def moved(name: str, before: Mapping[str, str], after: Mapping[str, str], text: str) -> Iterator[str]:
    """What differs between the record and now, a line each; nothing where nothing moved."""
    path = FOLDER / f"{name}.yaml"
    old = path.read_text() if path.exists() else ""
    if bool(old) != bool(text) or before["error"] != after["error"]:
        yield f"answer: {before['layout'] or before['error']} -> {after['layout'] or after['error']}"
    elif text:
        yield from _moved_predictions(Plan.from_yaml(old, str(path)), Plan.from_yaml(text, "now"))
        changes = list(difflib.unified_diff(_decisions(old), _decisions(text), "on record", "now", n=0, lineterm=""))
        yield from changes[2:]
    ratio = float(after["cpu_seconds"]) / max(float(before["cpu_seconds"]), 1e-3)
    if ratio > SLOWER:
        yield f"planning: {before['cpu_seconds']} -> {after['cpu_seconds']} CPU-s, {ratio:.2f} times"


def _moved_predictions(before: Plan, after: Plan) -> Iterator[str]:
    for what, unit in (("seconds", "s"), ("num_bytes", "bytes")):
        old, new = getattr(before.prediction, what), getattr(after.prediction, what)
        whole = before.prediction.step_seconds if unit == "s" else before.prediction.peak_bytes
        for kind in old | new:
            change = new.get(kind, 0.0) - old.get(kind, 0.0)
            if abs(change) > TOLERANCE * whole:
                yield (
                    f"{kind}: {old.get(kind, 0.0):.6g} -> {new.get(kind, 0.0):.6g} {unit}, {change / whole:+.2%} of all"
                )


def _decisions(text: str) -> list[str]:
    """A plan file's lines but those of predictions and runner-ups."""
    lines: list[str] = []
    is_kept = True
    for line in text.splitlines():
        if not line.startswith((" ", "-")):
            is_kept = not line.startswith(("predicted_", "runner_ups"))
        if is_kept:
            lines.append(line)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="requests whose name contains this")
    parser.add_argument("--compare", action="store_true", help="print what moved, and write nothing")
    options = parser.parse_args()
    known, num_moved = recorded_rows(), 0
    for request in REQUESTS:
        if options.only not in request.name:
            continue
        found = answer(request)
        row = row_of(request, found)
        print(f"{request.name}: " + ", ".join(filter(None, list(row.values())[1:])), flush=True)
        if not options.compare:
            put_on_record({request.name: row}, {request.name: found.plan})
            continue
        lines = (
            list(moved(request.name, known[request.name], row, found.plan))
            if request.name in known
            else ["not on record"]
        )
        num_moved += bool(lines)
        for line in lines:
            print(f"    {line}", flush=True)
    if options.compare:
        print(f"{num_moved} moved")
    return 1 if num_moved else 0


if __name__ == "__main__":
    sys.exit(main())
