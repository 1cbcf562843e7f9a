"""`python -m benchmarks.faults [KIND ...]`: one table of what came of every case, a row for each kind.

Ends with 1 where anything was raw, wrong, hung, or left files or processes. The row of a kind that was tried whole
replaces the kind's row in benchmarks/results/faults.csv.
"""

from __future__ import annotations

import argparse
import csv
import gc
import importlib
import pkgutil
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

import torch

import benchmarks.faults
from benchmarks.fault_scratch import CASE_SECONDS, Scratch, bounded
from benchmarks.faults.case import DEFECTS, OUTCOMES

RESULTS = Path("benchmarks/results/faults.csv")
KINDS = tuple(
    sorted(m.name for m in pkgutil.iter_modules(benchmarks.faults.__path__) if m.name not in ("__main__", "case"))
)
COLUMNS = ("kind", "cases", *OUTCOMES, "seconds")


def run(kind: str, count: int | None, seed: int, seconds: float) -> tuple[dict[str, object], bool]:
    """Return the figures of one kind, and whether all its cases were tried; print a line for every defect."""
    tally, started, is_whole = dict.fromkeys(OUTCOMES, 0), time.monotonic(), True
    num_cases = 0
    with Scratch() as scratch:
        cases = iter(importlib.import_module(f"benchmarks.faults.{kind}").cases(count, seed))
        for case in cases:
            result = bounded(case.run)
            scratch.note(case.name)
            tally[result.outcome] += 1
            num_cases += 1
            if result.outcome in DEFECTS:
                print(f"{kind}: {result.outcome}: {case.name}: {result.detail}", flush=True)
            if time.monotonic() - started > seconds:
                print(f"{kind}: stopped after {seconds:.0f} s", flush=True)
                is_whole = False
                break
        del cases  # a campaign's own processes end with it
        gc.collect()
        for each in scratch.left():
            tally["leftovers"] += 1
            print(f"{kind}: leftovers: {each}", flush=True)
    figures: dict[str, object] = {"date": date.today(), "torch": torch.__version__, "kind": kind, "seed": seed}
    figures |= {"cases": num_cases, **tally, "seconds": round(time.monotonic() - started)}
    return figures, is_whole and count is None


def write(rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows over those of their kinds."""
    old = list(csv.DictReader(RESULTS.open(encoding="utf-8"))) if RESULTS.exists() else []
    kept: dict[str, Mapping[str, object]] = {each["kind"]: dict(each) for each in old}
    kept |= {str(each["kind"]): each for each in rows}
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(kept[kind] for kind in sorted(kept))


def main() -> int:
    """Run the campaigns and print their table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all by default")
    parser.add_argument("--count", type=int, help="cases of each kind; each kind has its own default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=3600, help=f"after which a kind stops (3600); a case, after {CASE_SECONDS:.0f}"
    )
    options = parser.parse_args()
    unknown = sorted(set(options.kinds) - set(KINDS))
    if unknown:
        parser.error(f"no such kind: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    rows = []
    for kind in options.kinds or KINDS:
        row, is_whole = run(kind, options.count, options.seed, options.seconds)
        rows.append(row)
        if is_whole:
            write([row])
    total = {"kind": "all", **{name: sum(int(str(row[name])) for row in rows) for name in COLUMNS[1:]}}
    for row in (dict(zip(COLUMNS, COLUMNS, strict=True)), *rows, total):
        print("  ".join(f"{row[name]!s:>{18 if name == 'kind' else 9}}" for name in COLUMNS))
    return 1 if any(total[name] for name in DEFECTS) else 0


if __name__ == "__main__":
    sys.exit(main())
