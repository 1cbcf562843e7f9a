"""Published plans beside autopar's own: which is predicted faster, and by how much.

    python benchmarks/planned.py --rows FILE [--source NAME] [--model WORD] [--most N] [--csv]

FILE has one run per line, in the form of shared/data/measured_runs_2026.jsonl. Rows that share model, GPU, number,
batch, sequence and precision are a configuration, and its fastest row is the published plan. Printed are, per
configuration, the seconds measured, what is predicted under the profile of the row's framework, the published plan as
autopar's program (a search in which it is pinned), autopar's own plan (the same search without pins), and the last two
as a ratio, above 1 where autopar's is predicted faster. Those two are of one walk; the second figure is of another one
and only says how far the walk is from what was measured. Below each row are the parts in which the two differ most.
Configurations that are left out say why. Those on few GPUs come first.

--csv writes each to benchmarks/results/planned.csv as soon as it is found, over what is there of the same row.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import transformers

if not __package__:  # run as a file, which leaves the repository's root out of the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.published_runs.planned import CONFIGURATION, Comparison, compare, fastest
from benchmarks.published_runs.predictions import Predictions
from benchmarks.published_runs.rows import Row, SkippedError, read

DIFFERING = 4
"""Parts of predictions that are shown."""

RESULTS = Path(__file__).parent / "results" / "planned.csv"
CONFIGURED = (*CONFIGURATION, "precision")
"""Fields of a row that name a configuration."""

FIELDS = (
    *("id", *CONFIGURED, "measured_seconds", "profile_seconds", "published_seconds", "own_seconds", "ratio", "fits"),
    *("published_plan", "own_plan", "differing", "cpu_seconds"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "planned.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", required=True, help="a file of runs, one JSON object per line")
    parser.add_argument("--source", help="only rows whose source contains this text")
    parser.add_argument("--model", default="", help="only rows whose model contains this text")
    parser.add_argument("--most", type=int, help="so many configurations at most")
    parser.add_argument("--csv", action="store_true", help="write benchmarks/results/planned.csv")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    word = options.model.lower()
    given = [row for row in read(options.rows, options.source) if word in str(row.get("model", "")).lower()]
    rows, skipped = fastest(given)
    rows.sort(key=lambda row: int(row["gpus_total"]))
    predictions = Predictions()
    print(f"{'configuration':58} measured  profile published   own  ratio")
    for row in rows[: options.most]:
        try:
            started = time.process_time()
            found = record(compare(row), predictions, started)
            _show(found)
            if options.csv:
                write(found)
        except SkippedError as error:
            skipped.append((row, str(error)))
    for reason, count in Counter(reason for _, reason in skipped).most_common():
        print(f"    skipped {count}: {reason}")
    return 0


def record(found: Comparison, predictions: Predictions, started: float) -> dict[str, str]:
    """What is printed and written of a configuration, by FIELDS."""
    row, published, own = found.row, found.published.plan, found.own.plan
    try:
        predicted = f"{predictions.outcome(row).seconds:.3f}"
    except SkippedError as error:
        predicted = "-"
        print(f"    not predicted under its framework's profile: {error}")
    fits = "" if found.fits else f"does not fit ({published.prediction.peak_bytes / 2**30:.0f} GiB)"
    ours, theirs = own.prediction.seconds, published.prediction.seconds
    apart = {kind: ours.get(kind, 0.0) - theirs.get(kind, 0.0) for kind in {**ours, **theirs}}
    most = sorted(apart.items(), key=lambda each: -abs(each[1]))[:DIFFERING]
    values = (
        *(str(row[field]) for field in ("id", *CONFIGURED)),
        *(f"{row['iter_time_s']:.3f}", predicted, f"{published.prediction.step_seconds:.3f}"),
        *(f"{own.prediction.step_seconds:.3f}", f"{found.ratio:.2f}", fits, _text(row), plan_text(found)),
        ", ".join(f"{kind} {value:+.3f}" for kind, value in most),
        f"{time.process_time() - started:.0f}",
    )
    return dict(zip(FIELDS, values, strict=True))


def _show(found: dict[str, str]) -> None:
    name = " ".join(found[field] for field in CONFIGURED)
    seconds = ("measured", "profile", "published", "own")
    print(f"{name[:58]:58}", *(f"{found[f'{of}_seconds']:>8}" for of in seconds), f"{found['ratio']:>6}")
    fits = f", which {found['fits']}" if found["fits"] else ""
    plans = f"{found['published_plan']}{fits}; own: {found['own_plan']}"
    print(f"    {found['id']}: {plans}; {found['cpu_seconds']} CPU seconds")
    print(f"    own less published: {found['differing']}", flush=True)


def write(found: dict[str, str]) -> None:
    """Into the record, in place of what it has of the same row."""
    rows = {row["id"]: row for row in read_record()} | {found["id"]: found}
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())


def read_record() -> list[dict[str, str]]:
    """The rows of the record, none where there is none."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _text(row: Row) -> str:
    names = ("dp", "tp", "pp", "cp", "ep", "vpp", "zero_stage", "micro_batch")
    return " ".join(f"{name} {row[name]}" for name in names if row.get(name, 1) not in (1, None))


def plan_text(found: Comparison) -> str:
    """Autopar's plan in words."""
    plan = found.own.plan
    modes: Counter[str] = Counter()
    for stage in plan.pipeline.stages:
        for runs in stage.recompute.values():
            modes.update({mode: number for mode, number in runs if mode != "none"})
    zero = {each.zero for scope in plan.scopes.values() for each in scope.parameters.values()}
    words = [plan.mesh_text, f"{plan.num_micro_batches} micro-batches", f"zero {'/'.join(map(str, sorted(zero)))}"]
    words += [plan.pipeline.schedule] if plan.pipeline.num_pipeline_ranks > 1 else []
    words += [f"{plan.pipeline.num_chunks} chunks"] if plan.pipeline.num_chunks > 1 else []
    words += [f"recompute {', '.join(f'{mode} {number}' for mode, number in modes.items())}"] if modes else []
    words += [f"offload {plan.pipeline.offload}"] if plan.pipeline.offload else []
    return ", ".join(words)


if __name__ == "__main__":
    sys.exit(main())
