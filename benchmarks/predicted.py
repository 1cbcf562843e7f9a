"""Does the step take as long as predicted, and are plans ranked right, on this machine after `autopar profile`?

    python -m benchmarks.predicted                      # from the repository's root; some fifteen minutes on two cores
    python -m benchmarks.predicted --profiles FOLDER    # with 2.toml and 4.toml there, instead of measuring them first

The machine is profiled with 2 and with 4 processes. Then every pair of a model of examples/models.py and a plan pinned
by constraints is compiled for that profile and run: pairs take turns, in --rounds rounds of about a second each, so
that what else the machine does is spread over all of them. Two figures per pair, medians over rounds:

    wall     seconds of a step by the clock
    quiet    the same less what other programs took of the cores meanwhile (autopar.profiling.clock.CpuClock), which is
             what the profile describes; on a quiet machine it is the wall time

Errors are |predicted - measured| / measured; Kendall's tau (b) is of the plans of one model on one number of processes,
once of all pairs of plans, and once of those whose measured times differ by more than CLOSE, which medians of a few
rounds can tell apart. Regret is how much slower the plan predicted to be fastest is than the fastest.
Rows are appended to benchmarks/results/predicted.csv.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar.launch import run_ranks
from autopar.profiling.clock import Usage, gathered, hostname, quiet_seconds
from autopar.profiling.machine import available_cores, cpu_model
from autopar.profiling.profile import profile
from benchmarks.table import append
from examples.models import EXAMPLES

RESULTS = Path(__file__).parent / "results" / "predicted.csv"
WARM_STEPS = 2
CLOSE = 0.1
SIZES: Mapping[str, Mapping[str, int]] = {
    # Many tokens for few parameters, and the other way round.
    "gpt2": {"layers": 4, "width": 256, "num_heads": 4, "seq_len": 64, "batch_size": 8, "vocab_size": 512},
    "llama": {
        "layers": 4, "width": 384, "ffn_width": 1024, "num_heads": 4, "seq_len": 32, "batch_size": 8, "vocab_size": 512,
    },
    "bert": {"layers": 4, "width": 256, "num_heads": 4, "seq_len": 64, "batch_size": 8, "vocab_size": 512},
}  # fmt: skip
PLANS: Mapping[int, Sequence[Mapping[str, Any]]] = {
    2: (
        *({"dp": 2, "zero": zero} for zero in (0, 1, 2, 3)),
        *({"dp": 2, "zero": zero, "micro_batches": 2} for zero in (0, 3)),
        *({"dp": 2, "zero": zero, "micro_batches": 4} for zero in (0, 3)),
        *({"dp": 2, "zero": zero, "recompute": "full"} for zero in (0, 3)),
        *({"tp": 2, "micro_batches": count} for count in (1, 2, 4)),
        {"tp": 2, "recompute": "full"},
        {"cp": 2},
        *({"pp": 2, "micro_batches": count, "schedule": "1f1b"} for count in (2, 4, 8)),
        {"pp": 2, "micro_batches": 4, "schedule": "gpipe"},
        {"pp": 2, "micro_batches": 8, "schedule": "zero-bubble"},
    ),
    4: (
        *({"dp": 4, "zero": zero} for zero in (0, 1, 3)),
        *({"dp": 4, "zero": zero, "micro_batches": 2} for zero in (0, 3)),
        *({"dp": 4, "zero": zero, "recompute": "full"} for zero in (0, 3)),
        *({"tp": 4, "micro_batches": count} for count in (1, 2)),
        *({"dp": 2, "tp": 2, "zero": zero} for zero in (0, 1, 3)),
        {"dp": 2, "tp": 2, "zero": 0, "micro_batches": 2},
        *({"pp": 2, "dp": 2, "micro_batches": count, "zero": 0} for count in (2, 4)),
        {"pp": 2, "tp": 2, "micro_batches": 4},
        *({"pp": 4, "micro_batches": count, "schedule": "1f1b"} for count in (2, 4, 8)),
        {"pp": 4, "micro_batches": 8, "schedule": "zero-bubble"},
    ),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A model under a plan. compiled: for the profile of its number of processes."""

    model: str
    num_ranks: int
    constraints: Mapping[str, Any]
    compiled: Any
    inputs: Mapping[str, torch.Tensor]
    wall: list[float] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.constraints.items())

    @property
    def predicted(self) -> float:
        return float(self.compiled.plan.prediction.step_seconds)

    def error(self, measured: Sequence[float]) -> float:
        """Signed, relative to the median."""
        return self.predicted / statistics.median(measured) - 1


def measure(compiled: Any, inputs: Mapping[str, torch.Tensor], seconds: float, num_cores: float) -> tuple[float, float]:
    """On every rank: (wall, quiet) seconds of a step."""
    step = compiled.build()
    local = compiled.local_batch(inputs)
    for _ in range(WARM_STEPS):
        step(local)
    dist.barrier()
    start = time.perf_counter()
    step(local)
    count = max(2, round(seconds / max(gathered(time.perf_counter() - start))))
    dist.barrier()
    before = Usage.now()
    for _ in range(count):
        step(local)
    usages = gathered((hostname(), before.until(Usage.now())))
    wall = statistics.fmean(usage.wall_seconds for _, usage in usages)
    return wall / count, quiet_seconds(usages, num_cores) / count


def compile_pairs(models: Sequence[str], clusters: Mapping[int, Any]) -> list[Pair]:
    """Every plan of every model; those that cannot be had are printed and left out."""
    found = []
    for name in models:
        example = EXAMPLES[name](**SIZES[name])
        for num_ranks, cluster in clusters.items():
            for constraints in PLANS[num_ranks]:
                try:
                    compiled = autopar.compile(
                        example.model,
                        cluster,
                        example_inputs=example.inputs,
                        loss_fn=example.loss_fn,
                        constraints=dict(constraints),
                    )
                except autopar.AutoparError as error:
                    print(f"no plan for {name} {dict(constraints)}: {error}")
                    continue
                found.append(Pair(name, num_ranks, constraints, compiled, example.inputs))
    return found


def tau(predicted: Sequence[float], measured: Sequence[float], close: float = 0.0) -> float:
    """Kendall's tau-b (M. Kendall, "The treatment of ties in ranking problems", Biometrika 33, 1945).

    close: pairs whose measurements differ by no more than this share are left out.
    """
    score, ties_p, ties_m, total = 0, 0, 0, 0
    for (p, m), (q, n) in itertools.combinations(zip(predicted, measured, strict=True), 2):
        if close and max(m, n) <= (1 + close) * min(m, n):
            continue
        sign_p, sign_m = (p > q) - (p < q), (m > n) - (m < n)
        score, total = score + sign_p * sign_m, total + 1
        ties_p, ties_m = ties_p + (not sign_p), ties_m + (not sign_m)
    scale = ((total - ties_p) * (total - ties_m)) ** 0.5
    return score / scale if scale else float("nan")


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """How much slower the plan that is predicted to be fastest is than the fastest one, as a share of that."""
    return measured[min(range(len(predicted)), key=lambda i: predicted[i])] / min(measured) - 1


def rows_of(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """As they are written to the CSV."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ")
    return [
        {
            "date": date,
            "machine": f"{cpu_model()} {available_cores():g} cores",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "model": pair.model,
            "size": " ".join(f"{name}={value}" for name, value in SIZES[pair.model].items()),
            "processes": pair.num_ranks,
            "plan": pair.text,
            "rounds": len(pair.wall),
            "predicted_seconds": f"{pair.predicted:.5f}",
            "wall_seconds": f"{statistics.median(pair.wall):.5f}",
            "wall_spread": f"{_spread(pair.wall):.3f}",
            "quiet_seconds": f"{statistics.median(pair.quiet):.5f}",
            "quiet_spread": f"{_spread(pair.quiet):.3f}",
            "wall_error": f"{pair.error(pair.wall):+.4f}",
            "quiet_error": f"{pair.error(pair.quiet):+.4f}",
        }
        for pair in pairs
    ]


def _spread(values: Sequence[float]) -> float:
    """(largest - smallest) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def print_summary(pairs: Sequence[Pair]) -> None:
    """Errors of all pairs, and the ranking of each model's plans, by both figures."""
    for name in ("wall", "quiet"):
        errors = sorted(abs(pair.error(getattr(pair, name))) for pair in pairs)
        p90 = errors[min(int(0.9 * len(errors)), len(errors) - 1)]
        print(f"{name:5}: {len(errors)} pairs, median error {statistics.median(errors):.1%}, p90 {p90:.1%}")
        for (model, num_ranks), group in itertools.groupby(pairs, key=lambda pair: (pair.model, pair.num_ranks)):
            own = list(group)
            measured = [statistics.median(getattr(pair, name)) for pair in own]
            predicted = [pair.predicted for pair in own]
            everywhere, apart = tau(predicted, measured), tau(predicted, measured, CLOSE)
            print(
                f"       {model} on {num_ranks}: tau {everywhere:+.2f} of {len(own)} plans, {apart:+.2f} of pairs more "
                f"than {CLOSE:.0%} apart; the plan predicted to be fastest is {regret(predicted, measured):.1%} slower "
                f"than the fastest, a blind choice {statistics.fmean(measured) / min(measured) - 1:.0%}"
            )


def main(arguments: Sequence[str] | None = None) -> list[Pair]:
    """Profile, compile, run in turns, print and append; returns the pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--processes", type=int, nargs="+", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no pair is run again")
    parser.add_argument("--seconds", type=float, default=1.0, help="of steps per pair and round")
    parser.add_argument("--level", default="full", choices=["brief", "quick", "full"], help="of the profile")
    parser.add_argument("--profiles", type=Path, help="folder with N.toml for each number of processes")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="autopar-predicted-") as temporary:
        folder = options.profiles or Path(temporary)
        if not options.profiles:
            for count in options.processes:
                profile(count, out=folder / f"{count}.toml", level=options.level)
        clusters = {count: autopar.ClusterSpec.from_toml(folder / f"{count}.toml") for count in options.processes}
    pairs = compile_pairs(options.models, clusters)
    print(f"{len(pairs)} pairs compiled", flush=True)
    cores = available_cores()
    deadline = time.monotonic() + 60 * options.minutes
    for number in range(options.rounds):
        for pair in pairs:
            if number and time.monotonic() > deadline:
                break
            task = (pair.compiled, pair.inputs, options.seconds, cores)
            wall, quiet = run_ranks(measure, task, pair.num_ranks)[0]
            pair.wall.append(wall)
            pair.quiet.append(quiet)
        print(f"round {number + 1} of {options.rounds}", flush=True)
    for pair in pairs:
        wall, quiet = statistics.median(pair.wall), statistics.median(pair.quiet)
        print(
            f"{pair.model:6} {pair.num_ranks} {pair.text:36} predicted {pair.predicted:7.4f}  wall {wall:7.4f} "
            f"({pair.error(pair.wall):+.0%})  quiet {quiet:7.4f} ({pair.error(pair.quiet):+.0%})"
        )
    print_summary(pairs)
    append(rows_of(pairs), options.output)
    return pairs


if __name__ == "__main__":
    main()
