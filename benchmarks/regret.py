"""How much slower the run predicted fastest is than the fastest, among published runs of one model on the same GPUs.

    python benchmarks/regret.py --rows FILE [FILE...] [--source NAME] [--left-out] [--without-polled] [--ties]
                                [--worst N]

FILE has one run per line, in the form of shared/data/measured_runs.jsonl. Runs that share source, model, GPU, number of
GPUs, sequence length, precision and batch are a group where there are five or more; a run more than twice as slow as
one that differs in its ZeRO stage only is a fluke and left out. Printed are, per group, runs and the regret of the
predicted best, of the best of the predicted three, and of a blind choice; per source and over all groups median and
mean; and how much such twins scatter, which is the metric's own floor. The worst groups are shown with the parts of
their predictions.

--left-out: each source is predicted without the constants that were fitted to its own step times or its own network:
host seconds and traffic hidden are the framework's without a measurement (none, and the plain profile's), the link's
contention is its family's.
--ties: also what rules would choose among runs that predictions do not tell apart (published_runs/ties.py).
--without-polled: pipelines of nanotron that slept between messages (published_runs/regret.py, polled) are flukes, too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import transformers

if not __package__:  # run as a file, which leaves the repository's root out of the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.published_runs.left_out import LeftOut
from benchmarks.published_runs.predictions import Outcome, Predictions, predict_rows
from benchmarks.published_runs.regret import Choice, choice_of, groups_of, polled, scatter_of
from benchmarks.published_runs.rows import Row, read
from benchmarks.published_runs.ties import show_ties

NAMED = ("dp", "tp", "pp", "zero_stage", "micro_batch")
TOLD = 0.01
"""Share of a step from which on a part of it is shown."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "regret.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", required=True, nargs="+", help="files of runs, one JSON object per line")
    parser.add_argument("--source", help="only rows whose source contains this text")
    parser.add_argument("--left-out", action="store_true", help="without what was fitted to a source's own runs")
    parser.add_argument("--ties", action="store_true", help="also choices among runs predicted equally fast")
    parser.add_argument("--without-polled", action="store_true", help="leave out pipelines that slept between messages")
    parser.add_argument("--worst", type=int, default=3, help="groups that are shown with their predictions' parts")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    rows = [row for path in options.rows for row in read(path, options.source)]
    slept = {row["id"] for row in polled(rows)} if options.without_polled else set()
    groups, flukes = groups_of([row for row in rows if row["id"] not in slept])
    predictions = LeftOut() if options.left_out else Predictions()
    outcomes, skipped, _ = predict_rows([row for rows in groups.values() for row in rows], predictions)
    seconds = {outcome.row["id"]: outcome.seconds for outcome in outcomes}
    choices = [found for key, rows in groups.items() if (found := choice_of(key, rows, seconds))]
    _show(choices)
    scatter = scatter_of(groups)
    if scatter:
        print(
            f"\nfloor: {len(scatter)} sets of twins differ by a median of {statistics.median(scatter):.1%} "
            f"and a mean of {statistics.fmean(scatter):.1%}; {len(flukes)} flukes and {len(slept)} polled runs left out"
        )
    if options.ties:
        show_ties(groups, outcomes)
    for reason, count in Counter(reason for _, reason in skipped).most_common():
        print(f"    skipped {count}: {reason}")
    known = {outcome.row["id"]: outcome for outcome in outcomes}
    for choice in sorted(choices, key=lambda each: -each.regret)[: options.worst]:
        if choice.regret > 0:
            _explain(choice, known)
    return 0


def _show(choices: Sequence[Choice]) -> None:
    print(f"{'group':58} runs  rank   regret  of three    blind")
    by_source: dict[str, list[Choice]] = defaultdict(list)
    for choice in choices:
        source, model, gpu, number, seq, _, batch = choice.key
        by_source[str(source)].append(choice)
        name = f"{str(source)[:16]} {model} {number} {gpu} {seq} x {batch}"
        print(
            f"{name[:58]:58} {choice.num_runs:4} {choice.rank:5} {choice.regret:8.1%} {choice.of_three:9.1%} "
            f"{choice.random:8.0%}"
        )
    print()
    for source, own in [*by_source.items(), ("all groups", list(choices))]:
        if own:
            one, three = [c.regret for c in own], [c.of_three for c in own]
            print(
                f"{source[:48]:48} {len(own):3} groups: median {statistics.median(one):.1%}, mean "
                f"{statistics.fmean(one):.1%}; of three median {statistics.median(three):.1%}, mean "
                f"{statistics.fmean(three):.1%}; blind {statistics.fmean(c.random for c in own):.0%}"
            )


def _explain(choice: Choice, known: dict[str, Outcome]) -> None:
    print(f"\n{' '.join(str(part) for part in choice.key)}")
    for word, row in (("chosen", choice.chosen), ("fastest", choice.best)):
        whole = known[row["id"]].seconds
        print(f"  {word:8} {_strategy(row)}: measured {row['iter_time_s']:.3f} s, predicted {whole:.3f}")
        parts = [(kind, value) for kind, value in known[row["id"]].prediction.seconds.items() if value > TOLD * whole]
        print("           " + ", ".join(f"{kind} {value:.3f}" for kind, value in parts))


def _strategy(row: Row) -> str:
    return " ".join(f"{name} {row.get(name)}" for name in NAMED)


if __name__ == "__main__":
    sys.exit(main())
