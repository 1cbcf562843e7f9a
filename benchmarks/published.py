"""Predictions against published training runs.

    python benchmarks/published.py --rows FILE [FILE...] [--source NAME] [--leave-one-source-out] [--leave-sizes-out]
        [--csv] [--svg]

FILE has one run per line, in the form of shared/data/measured_runs.jsonl. The model of each row is built on meta, its
strategy is scored under the profile of its framework, and printed are, per source: rows, skipped rows with the reason,
median and 90th-percentile absolute relative error of step time, signed bias, the same for memory by kind of
measurement, and Kendall's tau of the ranking among rows that share model and GPUs. A row that lacks what a prediction
needs is skipped and says so. What had to be assumed for rows that are used is printed, too.

Rows with the arguments of one of Megatron-LM's own cases (`args`) come first: their step times say little, as models
are tiny, and their memory, exact on the last rank, is held against the tensors that Megatron-Core keeps
(cost_models/megatron_core). --source "functional-test" prints this alone.

--leave-one-source-out: rates of kernels by architecture are fitted to the rows (rates.py) once with all sources, and
once without each source, which is then predicted; sources weigh the same whatever their number of rows. Predictions
have no such rates: they only show what kernels seem to take in training steps.
--leave-sizes-out: nanotron's host seconds of pipelines and of groups over nodes are fitted to runs on few GPUs, and
runs on more are predicted with them (left_out.py).
--csv writes every row to benchmarks/results/published.csv; --svg draws all rows, docs/images/accuracy.svg.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import transformers

if not __package__:  # run as a file, which leaves the repository's root out of the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.published_runs.case_memory import predict_cases, show_cases
from benchmarks.published_runs.left_out import sizes_left_out
from benchmarks.published_runs.megatron_cases import is_case
from benchmarks.published_runs.predictions import predict_rows
from benchmarks.published_runs.rates import fit_rates, left_out_seconds
from benchmarks.published_runs.regret import groups_of, polled
from benchmarks.published_runs.rows import read
from benchmarks.published_runs.scatter import drawing
from benchmarks.published_runs.tables import show, show_left_out, show_sizes, write

DRAWING = Path(__file__).resolve().parents[1] / "docs" / "images" / "accuracy.svg"


def main() -> int:
    parser = argparse.ArgumentParser(
        "published.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", required=True, nargs="+", help="files of runs, one JSON object per line")
    parser.add_argument("--source", help="only rows whose source contains this text")
    parser.add_argument("--leave-one-source-out", action="store_true")
    parser.add_argument("--leave-sizes-out", action="store_true")
    parser.add_argument("--csv", action="store_true")
    parser.add_argument("--svg", action="store_true", help="draw all rows")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = [row for path in options.rows for row in read(path, options.source)]
    if cases := [row for row in rows if is_case(row)]:
        show_cases(*predict_cases(cases))
    if len(cases) == len(rows):
        return 0
    outcomes, skipped, predictions = predict_rows(row for row in rows if not is_case(row))
    show(outcomes, skipped)
    print(
        f"\n{len(predictions.predictors)} models traced in {predictions.trace_seconds:.0f} s, "
        f"{len(outcomes)} rows predicted in {predictions.score_seconds:.1f} s"
    )
    left_out = left_out_seconds(outcomes) if options.leave_one_source_out else {}
    if left_out:
        show_left_out(outcomes, fit_rates(outcomes), left_out)
    if options.leave_sizes_out:
        show_sizes(sizes_left_out([outcome.row for outcome in outcomes]))
    if options.csv:
        write(outcomes, skipped, left_out)
    if options.svg:
        flukes = [*groups_of(rows)[1], *polled(rows)]
        DRAWING.write_text(drawing(outcomes, {row["id"] for row in flukes}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
