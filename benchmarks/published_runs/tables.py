"""What is printed of all rows, source by source, and the file of every row."""

from __future__ import annotations

import csv
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks.published_runs.accuracy import measured_bytes, memory_kind, percentile, predicted_bytes, tau_of
from benchmarks.published_runs.predictions import Outcome, Skipped
from benchmarks.published_runs.rates import Rates, scaled_seconds
from benchmarks.published_runs.strategies import assumptions

RESULTS = Path(__file__).resolve().parents[1] / "results" / "published.csv"


def show(outcomes: Sequence[Outcome], skipped: Sequence[Skipped]) -> None:
    """Errors and ranks of step times, skipped rows and assumptions; then memory."""
    sources = list(dict.fromkeys([o.row["source"] for o in outcomes] + [str(r.get("source")) for r, _ in skipped]))
    print(f"{'source':48} rows skip   median     p90    bias     tau (pairs)")
    medians = []
    for source in sources:
        own = [o for o in outcomes if o.row["source"] == source]
        left = Counter(reason for row, reason in skipped if row.get("source") == source)
        if own:
            errors = [o.error for o in own]
            medians.append(statistics.median(map(abs, errors)))
            ranking, pairs = tau_of(own)
            print(
                f"{source[:48]:48} {len(own):4} {sum(left.values()):4} {medians[-1]:8.1%} "
                f"{percentile([abs(e) for e in errors], 0.9):7.1%} {statistics.median(errors):+7.1%} "
                f"{ranking:7.2f} ({pairs})"
            )
        for reason, count in left.items():
            print(f"    skipped {count}: {reason}")
        for text, count in Counter(text for o in own for text in assumptions(o.row)).items():
            print(f"    {count} rows: {text}")
    if medians:
        print(f"mean over {len(medians)} sources of the median error {statistics.fmean(medians):.1%}")
    _show_kinds([o for o in outcomes if o.row.get("left_out")])
    _show_memory(outcomes)


def _show_kinds(outcomes: Sequence[Outcome]) -> None:
    """Of rows that only name their model, by model, GPU and precision."""
    kinds: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for o in outcomes:
        kind = "experts" if o.row.get("experts") else "dense"
        kinds[kind, o.row["model"], o.row["gpu"], o.row["precision"].split(" ")[0]].append(o.error)
    if kinds:
        print(f"\n{'kind, model, GPU and precision':60} rows   median    bias")
    for key, errors in sorted(kinds.items()):
        name, size = ", ".join(key)[:60], statistics.median(map(abs, errors))
        print(f"{name:60} {len(errors):4} {size:8.1%} {statistics.median(errors):+7.1%}")


def _show_memory(outcomes: Sequence[Outcome]) -> None:
    tables: dict[tuple[str, str], list[float]] = defaultdict(list)
    for o in outcomes:
        if memory_kind(o.row):
            tables[o.row["source"], memory_kind(o.row)].append(predicted_bytes(o) / measured_bytes(o.row) - 1)
    if tables:
        print(f"\n{'memory: source and kind':76} rows   median     p90    bias")
    for (source, kind), errors in tables.items():
        sizes = [abs(e) for e in errors]
        print(
            f"{f'{source}, {kind}'[:76]:76} {len(errors):4} {statistics.median(sizes):8.1%} "
            f"{percentile(sizes, 0.9):7.1%} {statistics.median(errors):+7.1%}"
        )


def show_left_out(outcomes: Sequence[Outcome], everywhere: Rates, left_out: Mapping[str, float]) -> None:
    """The errors with rates. everywhere: fitted to all rows; left_out: seconds as `left_out_seconds`."""
    print(f"\n{len(everywhere)} rates fitted to {len(outcomes)} rows:")
    print("    " + ", ".join(f"{owner} {kind} {rate:.2f}" for (owner, kind), rate in everywhere.items()))
    print(f"{'source':48} rows unfitted  fitted  left out     p90    bias     tau (pairs)")
    medians = []
    for source in dict.fromkeys(o.row["source"] for o in outcomes):
        own = [o for o in outcomes if o.row["source"] == source]
        errors = [left_out[o.row["id"]] / o.row["iter_time_s"] - 1 for o in own]
        fitted = [abs(scaled_seconds(o, everywhere) / o.row["iter_time_s"] - 1) for o in own]
        medians.append(statistics.median(map(abs, errors)))
        ranking, pairs = tau_of(own, left_out)
        print(
            f"{source[:48]:48} {len(own):4} {statistics.median(abs(o.error) for o in own):8.1%} "
            f"{statistics.median(fitted):7.1%} {medians[-1]:9.1%} {percentile([abs(e) for e in errors], 0.9):7.1%} "
            f"{statistics.median(errors):+7.1%} {ranking:7.2f} ({pairs})"
        )
    print(f"mean over {len(medians)} sources of the median error, left out: {statistics.fmean(medians):.1%}")


def show_sizes(found: Iterable[tuple[int, int, Mapping[str, float], list[Outcome]]]) -> None:
    """As `left_out.sizes_left_out` yields them."""
    print(f"\n{'fitted to':>16} {'predicted':>12} rows   median     p90     tau  figures")
    for most, fewest, figures, outcomes in found:
        sizes = [abs(o.error) for o in outcomes]
        told = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
        print(
            f"{f'up to {most} GPUs':>16} {f'{fewest} and more':>12} {len(sizes):4} {statistics.median(sizes):8.1%} "
            f"{percentile(sizes, 0.9):7.1%} {tau_of(outcomes)[0]:7.2f}  {told}"
        )


def write(outcomes: Sequence[Outcome], skipped: Sequence[Skipped], left_out: Mapping[str, float]) -> None:
    """All rows, to RESULTS."""
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        head = ["id", "source", "model", "gpu", "gpus", "measured_seconds", "predicted_seconds", "left_out_seconds"]
        writer.writerow([*head, "measured_gib", "predicted_gib", "memory_kind", "skipped"])
        for o in outcomes:
            row, kind = o.row, memory_kind(o.row)
            names = [row["id"], row["source"], row["model"], row["gpu"], row["gpus_total"], row["iter_time_s"]]
            left = f"{left_out[row['id']]:.5g}" if row["id"] in left_out else ""
            size = f"{measured_bytes(row) / 2**30:.3f}" if kind else ""
            writer.writerow([*names, f"{o.seconds:.5g}", left, size, f"{predicted_bytes(o) / 2**30:.3f}", kind, ""])
        for row, reason in skipped:
            names = [row.get(key, "") for key in ("id", "source", "model", "gpu", "gpus_total", "iter_time_s")]
            writer.writerow([*names, "", "", "", "", "", reason])
