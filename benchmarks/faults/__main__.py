"""`python -m benchmarks.faults [KIND ...]`: what was tried, what was clear, raw or wrong.

Ends with 1 where anything was raw or wrong. Rows are appended to benchmarks/results/faults.csv.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time
from datetime import date
from pathlib import Path

import torch

import benchmarks.faults
from benchmarks.faults.case import OUTCOMES
from benchmarks.table import append

RESULTS = Path("benchmarks/results/faults.csv")
KINDS = tuple(
    sorted(m.name for m in pkgutil.iter_modules(benchmarks.faults.__path__) if m.name not in ("__main__", "case"))
)


def run(kind: str, count: int | None, seed: int, seconds: float) -> tuple[dict[str, object], list[str]]:
    """A row of figures for one kind, and a line for everything raw or wrong."""
    cases = importlib.import_module(f"benchmarks.faults.{kind}").cases(count, seed)
    tally, defects, started = dict.fromkeys(OUTCOMES, 0), [], time.monotonic()
    for case in cases:
        result = case.run()
        tally[result.outcome] += 1
        if result.outcome in ("raw", "wrong"):
            defects.append(f"{kind}: {result.outcome}: {case.name}: {result.detail}")
            print(defects[-1], flush=True)
        if time.monotonic() - started > seconds:
            print(f"{kind}: stopped after {seconds:.0f} s", flush=True)
            break
    row = {"date": date.today(), "torch": torch.__version__, "kind": kind, "seed": seed, "tried": sum(tally.values())}
    return {**row, **tally, "seconds": round(time.monotonic() - started)}, defects


def main() -> int:
    """Runs the campaign and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all by default")
    parser.add_argument("--count", type=int, help="cases of each kind; each kind has its own default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600, help="after which a kind stops (600)")
    options = parser.parse_args()
    unknown = sorted(set(options.kinds) - set(KINDS))
    if unknown:
        parser.error(f"no such kind: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    rows, defects = [], []
    for kind in options.kinds or KINDS:
        row, found = run(kind, options.count, options.seed, options.seconds)
        rows.append(row)
        defects += found
    append(rows, RESULTS)
    columns = ("kind", "tried", *OUTCOMES, "seconds")
    for row in (dict(zip(columns, columns, strict=True)), *rows):
        print("  ".join(f"{row[c]!s:>12}" for c in columns))
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
