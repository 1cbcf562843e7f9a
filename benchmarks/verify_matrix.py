"""Every example model under every mesh and ZeRO stage against the single-process model.

    python -m benchmarks.verify_matrix [--models gpt2,llama] [--quick]

For each model: dp4, tp4, dp2 x tp2 (pinned) and free choice; ZeRO 0-3 where there is a data axis; plain, and with
dropout, clipping and four micro-batches at once; SGD with momentum, and AdamW, which magnifies round-off and is
therefore run in fp32 and in fp64. Three steps on four gloo processes each. Pinned meshes are planned for
`examples/clusters/ideal.toml`, on which sharding always pays, so that the programs really shard; the free choice is
planned for the generic CPU. Prints a row per run and a summary; exits 1
if any error exceeds 1e-5 (in fp32, a parameter's: and is not explained by the reference's own distance from fp64, see
autopar/verify.py). `--csv` appends the rows to benchmarks/results/verify_matrix.csv.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import autopar
from examples.models import EXAMPLES

ROOT = Path(__file__).resolve().parent.parent
IDEAL = str(ROOT / "examples" / "clusters" / "ideal.toml")
RESULTS = ROOT / "benchmarks" / "results" / "verify_matrix.csv"
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Case:
    """One verification: constraints, and what is switched on."""

    model: str
    constraints: dict[str, Any]
    cluster: str
    full: bool
    optimizer: str
    dtype: torch.dtype = torch.float32

    @property
    def text(self) -> str:
        mesh = " ".join(f"{k}={v}" for k, v in self.constraints.items()) or "free choice"
        precision = " fp64" if self.dtype == torch.float64 else ""
        extras = "; dropout, clipping, 4 micro-batches" if self.full else ""
        return f"{self.model}: {mesh}; {self.optimizer}{precision}{extras}"


def cases(models: list[str], quick: bool) -> Iterator[Case]:
    """The matrix; quick keeps ZeRO 0 and 3 and leaves AdamW out."""
    stages = (0, 3) if quick else (0, 1, 2, 3)
    for model in models:
        pinned = [{"dp": 4, "zero": z} for z in stages] + [{"tp": 4}] + [{"dp": 2, "tp": 2, "zero": z} for z in stages]
        for full in (False, True):
            for constraints in pinned:
                micro = {"micro_batches": 2 if constraints.get("dp") == 4 else 4} if full else {}
                yield Case(model, {**constraints, **micro}, IDEAL, full, "sgd")
            yield Case(model, {}, "4 cpu", full, "sgd")
        if not quick:
            for constraints in ({"dp": 4, "zero": 2}, {"tp": 4}, {"dp": 2, "tp": 2, "zero": 3}):
                for dtype in (torch.float32, torch.float64):
                    yield Case(model, constraints, IDEAL, False, "adamw", dtype)


def run(case: Case) -> autopar.VerifyReport:
    """Verify one case."""
    rows = 16 if case.full and case.constraints.get("dp") == 4 else 8
    example = EXAMPLES[case.model](dropout=0.1 if case.full else 0.0, batch_size=rows)
    constraints = dict(case.constraints)
    if case.full and rows == 16:
        constraints["micro_batches"] = 4
    inputs = {n: v.to(case.dtype) if v.is_floating_point() else v for n, v in example.inputs.items()}
    return autopar.verify(
        example.model.to(case.dtype),
        case.cluster,
        example_inputs=inputs,
        loss_fn=example.loss_fn,
        constraints=constraints,
        optimizer=torch.optim.AdamW if case.optimizer == "adamw" else None,
        max_grad_norm=0.5 if case.full else None,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(EXAMPLES))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows, failed = [], 0
    for case in cases(options.models.split(","), options.quick):
        started = time.perf_counter()
        try:
            report = run(case)
            good = report.ok(TOLERANCE)
            figures = (
                report.mesh,
                report.loss,
                report.largest_gradient,
                report.largest_parameter,
                max((report.floors[n] for n, e in report.parameters.items() if e > TOLERANCE), default=0.0),
                "; ".join(report.round_off),
            )
        except Exception as error:
            good, figures = False, (type(error).__name__, *[float("nan")] * 4, str(error)[-200:])
        failed += not good
        rows.append((case, good, *figures))
        print(
            f"{'ok ' if good else 'BAD'} {case.text:<75} {figures[0]:<10} loss {figures[1]:.1e} "
            f"gradient {figures[2]:.1e} parameter {figures[3]:.1e}"
            + (f" (reference's own {figures[4]:.1e})" if figures[4] else "")
            + f"  {time.perf_counter() - started:.1f} s",
            flush=True,
        )
    worst = [max((row[i] for row in rows if row[i] == row[i]), default=0.0) for i in (3, 4, 5)]
    print(
        f"\n{len(rows)} runs, {failed} beyond {TOLERANCE}; "
        f"worst loss {worst[0]:.2e}, gradient {worst[1]:.2e}, parameter {worst[2]:.2e}"
    )
    left_out = sorted({part for row in rows for part in row[7].split("; ") if part and row[1]})
    print(f"pure round-off, left out by the rule in autopar/verify.py: {', '.join(left_out) or 'nothing'}")
    if options.csv:
        _write(rows)
    return 1 if failed else 0


def _write(rows: list[tuple[Any, ...]]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(
                [
                    "date",
                    "torch",
                    "case",
                    "mesh",
                    "ok",
                    "loss_error",
                    "gradient_error",
                    "parameter_error",
                    "reference_error",
                    "round_off",
                ]
            )
        today = datetime.date.today().isoformat()
        for case, good, mesh, loss, gradient, parameter, floor, round_off in rows:
            figures = [f"{loss:.2e}", f"{gradient:.2e}", f"{parameter:.2e}", f"{floor:.2e}"]
            writer.writerow([today, torch.__version__, case.text, mesh, good, *figures, round_off])


if __name__ == "__main__":
    sys.exit(main())
