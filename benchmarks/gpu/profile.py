"""`autopar profile` on one GPU, in one call.

    python -m benchmarks.gpu.profile            # from the repository's root, on a machine with one GPU; five minutes
    python -m benchmarks.gpu.profile --smoke    # anywhere: the brief cases on one CPU process, to a temporary place

Writes benchmarks/results/profile-NAME.toml (the cluster that plans are made for, with its provenance) and .jsonl (every
sample; an interrupted run goes on from there), and appends how well the fit meets what was measured, by kind of kernel,
to benchmarks/results/profile.csv. What cannot be measured (out of memory, say) is named and left out. After --seconds,
what was measured has to do if it is every case once; else another call goes on. A GPU that is not known by name needs
--like, a built-in device that is close enough.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

# Run by its path, a script has its own folder first, and there this file would hide a standard module.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from rich.console import Console

from autopar.profiling.profile import Profile, profile
from autopar.report.tables import error_table
from benchmarks.table import append
from cost_models.machine import Cluster

RESULTS = Path(__file__).resolve().parents[1] / "results"


def rows_of(found: Profile) -> list[dict[str, object]]:
    """A CSV row per kind of kernel: how many were measured, and how far the fitted device is from them."""
    origin = found.provenance
    rows: list[dict[str, object]] = []
    for kind, errors in found.errors().items():
        sizes = [abs(error) for error in errors]
        rows.append(
            {
                "date": origin.date,
                "device": origin.device,
                "torch": origin.torch,
                "cuda": origin.cuda,
                "driver": origin.driver,
                "kind": kind,
                "cases": len(sizes),
                "samples": found.measured.num_samples,
                "spread": f"{found.measured.spread:.4f}",
                "median_error": f"{statistics.median(sizes):.4f}",
                "largest_error": f"{max(sizes):.4f}",
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> Profile:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and rounds")
    parser.add_argument("--like", help="a built-in device, for its nominal figures")
    parser.add_argument("--seconds", type=float, default=420.0, help="after which nothing more is measured")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args(arguments)
    if not options.smoke and not torch.cuda.is_available():
        parser.error("no CUDA device; --smoke runs without one")
    with tempfile.TemporaryDirectory(prefix="autopar-profile-") as temporary:
        folder = Path(temporary) if options.smoke else options.output
        name = "smoke" if options.smoke else re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
        like = Cluster.parse(f"1 {options.like}") if options.like else None
        level = "brief" if options.smoke else "quick" if options.quick else "full"
        console = Console(highlight=False)
        out = folder / f"profile-{name}.toml"
        folder.mkdir(parents=True, exist_ok=True)
        found = profile(1, out=out, level=level, like=like, console=console, limit_seconds=options.seconds)
        assert found is not None, "one process is the first rank"
        console.print(error_table(found.errors()))
        append(rows_of(found), folder / "profile.csv")
        # What the file says is what planning gets.
        read = Cluster.from_toml(out)
        if replace(read, device=found.cluster.device) != found.cluster or read.device.name != found.cluster.device.name:
            raise RuntimeError("the written profile does not read back as it was")
    return found


if __name__ == "__main__":
    main()
