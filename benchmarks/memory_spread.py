"""How far memory of autopar's own programs was from its prediction: the spread that reports name.

    python -m benchmarks.memory_spread [--write]

Of benchmarks/results/gpu_memory.csv (one rank at a time of plans for several GPUs, on one): bytes that the allocator
had reserved by those predicted for it, without what CUDA and NCCL take, which no row has. Of
benchmarks/results/memory.csv (gloo processes on a CPU): bytes of all tensors alive at the peak by those predicted. Of a
plan and rank measured several times the last row counts. Printed are the two tables of
cost_models/machines/memory_spread.toml: the 5th and 95th percentile, rounded outwards to hundredths. --write puts them
there.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.published_runs.accuracy import percentile
from cost_models.certainty import OWN, OWN_ON_CPU, WORKSPACE

ROOT = Path(__file__).resolve().parent.parent
GPU_ROWS, CPU_ROWS = (ROOT / "benchmarks" / "results" / name for name in ("gpu_memory.csv", "memory.csv"))
SPREADS = ROOT / "cost_models" / "machines" / "memory_spread.toml"
Row = Mapping[str, str]


def gpu_ratio(row: Row) -> float:
    """Reserved by predicted bytes of a row of benchmarks/gpu/ranks.py."""
    kinds = dict(part.rsplit(" ", 1) for part in row["parts"].split("; "))
    return float(row["reserved_gib"]) / (float(row["predicted_gib"]) - float(kinds.get(WORKSPACE, 0.0)))


def cpu_ratio(row: Row) -> float:
    """Measured by predicted bytes of a row of benchmarks/memory.py."""
    return float(row["measured"]) / float(row["predicted"])


def ratios(path: Path, names: Sequence[str], ratio: Callable[[Row], float]) -> list[float]:
    """Of the last row for each of what `names` tell apart; rows that failed are left out."""
    with path.open(newline="", encoding="utf-8") as file:
        last = {tuple(row[name] for name in names): row for row in csv.DictReader(file) if not row.get("error")}
    return [ratio(row) for row in last.values()]


def table(kind: str, found: Sequence[float], source: str) -> str:
    """A table of memory_spread.toml."""
    low, high = (percentile(found, share) for share in (0.05, 0.95))
    name = f'"{kind}"' if " " in kind else kind
    low, high = math.floor(100 * low) / 100, math.ceil(100 * high) / 100
    return f'[{name}]\nlow = {low:.2f}\nhigh = {high:.2f}\nrows = {len(found)}\nsource = "{source}"\n'


def tables() -> dict[str, str]:
    """Both tables, by kind."""
    on_gpu = "One H200, benchmarks/results/gpu_memory.csv: what the allocator had reserved, of one rank at a time"
    on_cpu = "gloo processes, benchmarks/results/memory.csv: bytes of all tensors alive at the peak"
    gpu = ratios(GPU_ROWS, ("case", "plan", "rank", "batch"), gpu_ratio)
    cpu = ratios(CPU_ROWS, ("pair", "position"), cpu_ratio)
    return {OWN: table(OWN, gpu, on_gpu), OWN_ON_CPU: table(OWN_ON_CPU, cpu, on_cpu)}


def main() -> None:
    """Print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    text = SPREADS.read_text(encoding="utf-8")
    for kind, new in tables().items():
        print(new)
        old = re.search(rf'^\["?{re.escape(kind)}"?\]\n(?:.+\n)+', text, re.MULTILINE)
        text = text.replace(old.group(), new) if old else f"{text}\n{new}"
    if write:
        SPREADS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
