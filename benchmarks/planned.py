"""Published plans beside autopar's own: which is predicted faster, and by how much.

    python benchmarks/planned.py --rows FILE [--source NAME] [--model WORD] [--most N]

FILE has one run per line, in the form of shared/data/measured_runs_2026.jsonl. Rows that share model, GPU, number,
batch, sequence and precision are a configuration, and its fastest row is the published plan. Printed are, per
configuration, the seconds measured, what is predicted under the profile of the row's framework, the published plan as
autopar's program (a search in which it is pinned), autopar's own plan (the same search without pins), and the last two
as a ratio, above 1 where autopar's is predicted faster. Those two are of one walk; the second figure is of another one
and only says how far the walk is from what was measured. Below each row are the parts in which the two differ most.
Configurations that are left out say why.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import transformers

if not __package__:  # run as a file, which leaves the repository's root out of the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.published_runs.planned import Comparison, compare, fastest
from benchmarks.published_runs.predictions import Predictions
from benchmarks.published_runs.rows import Row, SkippedError, read

DIFFERING = 4
"""Parts of predictions that are shown."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "planned.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", required=True, help="a file of runs, one JSON object per line")
    parser.add_argument("--source", help="only rows whose source contains this text")
    parser.add_argument("--model", default="", help="only rows whose model contains this text")
    parser.add_argument("--most", type=int, help="so many configurations at most")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    word = options.model.lower()
    given = [row for row in read(options.rows, options.source) if word in str(row.get("model", "")).lower()]
    rows, skipped = fastest(given)
    predictions = Predictions()
    print(f"{'configuration':58} measured predicted published     own  ratio")
    for row in rows[: options.most]:
        try:
            started = time.process_time()
            _show(compare(row), predictions, started)
        except SkippedError as error:
            skipped.append((row, str(error)))
    for reason, count in Counter(reason for _, reason in skipped).most_common():
        print(f"    skipped {count}: {reason}")
    return 0


def _show(found: Comparison, predictions: Predictions, started: float) -> None:
    row, published, own = found.row, found.published.plan, found.own.plan
    try:
        predicted = f"{predictions.outcome(row).seconds:9.3f}"
    except SkippedError as error:
        predicted = f"{'-':>9}"
        print(f"    not predicted under its framework's profile: {error}")
    fields = ("model", "precision", "gpus_total", "gpu", "seq_len", "global_batch")
    name = " ".join(str(row[field]) for field in fields)
    print(
        f"{name[:58]:58} {row['iter_time_s']:8.3f} {predicted} "
        f"{published.prediction.step_seconds:9.3f} {own.prediction.step_seconds:7.3f} {found.ratio:6.2f}"
    )
    fits = "" if found.fits else f", which does not fit ({published.prediction.peak_bytes / 2**30:.0f} GiB)"
    seconds = time.process_time() - started
    print(f"    {row['id']}: {_text(row)}{fits}; own: {plan_text(found)}; {seconds:.0f} CPU seconds")
    ours, theirs = own.prediction.seconds, published.prediction.seconds
    apart = {kind: ours.get(kind, 0.0) - theirs.get(kind, 0.0) for kind in {**ours, **theirs}}
    most = sorted(apart.items(), key=lambda each: -abs(each[1]))[:DIFFERING]
    print("    own less published: " + ", ".join(f"{kind} {value:+.3f}" for kind, value in most))


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
