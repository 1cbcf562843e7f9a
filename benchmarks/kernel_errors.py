"""How far are the Triton kernels, and programs fused with them, from the same formulas without them?

    python -m benchmarks.kernel_errors            # from the repository's root; no GPU: Triton's interpreter, minutes
    python -m benchmarks.kernel_errors --quick    # tiny shapes, one model

Kernels: each at odd shapes and in three dtypes against its formula in fp64; a row says at how many shapes, and the
largest ||out - exact|| / ||exact|| over results and gradients beside what is allowed. (Not those of e4m3, whose
rounding the interpreter has wrong: tests/codegen/kernels mends that and compares them with torch's.)

Programs: every example model, compiled with kernels and without for four ranks under data and under tensor parallelism;
a row says which kernels the program calls, and the largest error of a gradient against the single-process model beside
what is allowed: EXACT, or FLOORS times what that gradient of the single-process model itself is off in fp32
(autopar/verify.py), in two steps of SGD with momentum, which does not magnify round-off as AdamW does.

Rows are appended to benchmarks/results/kernel_errors.csv. Exits with 1 if an error is beyond what is allowed.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import itertools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Before anything imports Triton's kernels.
os.environ["TRITON_INTERPRET"] = "1"

import torch

import autopar
from autopar.settings.fp8 import EXACT
from autopar.verify import sgd_with_momentum, verify_program
from autopar.verify_report import FLOORS
from benchmarks.gpu.cases.case import TOLERANCE
from benchmarks.gpu.cases.every import KERNELS, make_case
from benchmarks.gpu.kernels import relative_error
from benchmarks.table import append
from codegen.program import Call
from examples.models import EXAMPLES

RESULTS = Path(__file__).parent / "results" / "kernel_errors.csv"
IDEAL = str(Path(__file__).parents[1] / "examples" / "clusters" / "ideal.toml")
SIZES = {"layers": 2, "num_heads": 4, "batch_size": 4}
LARGEST = 200_000
"""Sizes of a shape, multiplied: larger ones take the interpreter too long."""
Row = dict[str, Any]


def kernel_rows(quick: bool) -> Iterator[Row]:
    """One row per kernel and dtype."""
    for name, kernel in KERNELS.items():
        if not kernel.interpreted:
            continue
        every = kernel.interpreted if quick else (*kernel.interpreted, *kernel.checked)
        shapes = [shape for shape in dict.fromkeys(every) if math.prod(shape) <= LARGEST]
        for dtype in TOLERANCE:
            cases = [make_case(name, shape, dtype, "cpu") for shape in shapes]
            allowed = max(TOLERANCE[dtype] if case.tolerance is None else case.tolerance for case in cases)
            yield _row("kernel", name, str(dtype), len(cases), max(map(relative_error, cases)), allowed)


def program_rows(models: Sequence[str]) -> Iterator[Row]:
    """Two rows per model and axis: with kernels and without."""
    for name in models:
        for axis in ("dp", "tp"):
            for kernels in ("on", "off"):
                example = EXAMPLES[name](**SIZES)
                compiled = autopar.compile(
                    example.model,
                    IDEAL,
                    example_inputs=example.inputs,
                    loss_fn=example.loss_fn,
                    optimizer=sgd_with_momentum,
                    constraints={axis: 4},
                    kernels=kernels,
                )
                found = fused_calls(compiled)
                if kernels == "on" and not found:
                    break
                report = verify_program(compiled, example.inputs, steps=2)
                how = " ".join(f"{call}:{count}" for call, count in sorted(found.items())) or "none"
                worst = max(report.gradients, key=lambda gradient: report.gradients[gradient])
                allowed = max(EXACT, FLOORS * report.gradient_floors[worst])
                yield _row("program", f"{name} {axis}4", how, sum(found.values()), report.gradients[worst], allowed)


def fused_calls(compiled: Any) -> collections.Counter[str]:
    """Statements of the program that call a kernel of ours, by its name."""
    classes = (*compiled.program.layers, compiled.program.root)
    calls = (statement for cls in classes for statement in cls.body if isinstance(statement, Call))
    return collections.Counter(c.target.removeprefix("kernels.") for c in calls if c.target.startswith("kernels."))


def _row(kind: str, name: str, what: str, count: int, error: float, allowed: float) -> Row:
    print(f"{kind:8} {name:24} {what:40} {count:4}  {error:.1e} of {allowed:.1e}", flush=True)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "kind": kind,
        "name": name,
        "dtype_or_fused_calls": what.removeprefix("torch."),
        "count": count,
        "largest_relative_error": f"{error:.1e}",
        "allowed": f"{allowed:.1e}",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, one model")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    models = ["gpt2"] if options.quick else [name for name in EXAMPLES if name != "mlp"]  # no kernel is for an MLP
    num_failed = 0
    for row in itertools.chain(kernel_rows(options.quick), program_rows(models)):
        append([row], options.output)
        num_failed += float(row["largest_relative_error"]) > float(row["allowed"])
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
