"""Every architecture of examples/zoo.py compiled, and run on four processes beside eager training, one after another.

    python -m benchmarks.zoo [--only gpt2,mixtral] [--plans free,pp2] [--plan-only] [--seconds 60] [--csv]

Plans: free choice; dp2 x tp2 with ZeRO-3; two pipeline ranks; and where a model offers them two ranks of expert
parallelism and two of context parallelism. All are planned for `examples/clusters/ideal.toml`, on which sharding always
pays, so that the programs really shard: what is replicated there could not be sharded. A row per model and plan: the
mesh chosen, the largest relative error of losses, gradients, and parameters after three steps
(benchmarks/rank_pool.py), and the operators that every rank computes whole: those without a rule, and those that hold
at least a hundredth of the work. A model that fails says why in its row, by the first line of its error. A program
that is off in fp32 is run again in fp64, where no rounding takes a ReLU or a maximum to the other side of its kink.
Prints a summary per plan; exits 1 if a program that ran is off by more than 1e-5. `--plan-only` starts no processes.
`--csv` appends each row to benchmarks/results/zoo.csv as it is found, of which `python -m benchmarks.zoo_table` makes
docs/models.md.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.compiled import CompiledProgram
from autopar.costs.contractions import contraction_flops
from autopar.ir.graph import base_name
from autopar.operators.traits import ATTENTION, MATMULS
from autopar.sharding.call_options import Operator
from autopar.sharding.scopes import scopes_of
from autopar.verify import sgd_with_momentum
from benchmarks.rank_pool import RankPool
from benchmarks.table import append
from examples.models import Example
from examples.zoo import ZOO

ROOT = Path(__file__).resolve().parent.parent
IDEAL = str(ROOT / "examples" / "clusters" / "ideal.toml")
RESULTS = ROOT / "benchmarks" / "results" / "zoo.csv"
NUM_RANKS = 4
TOLERANCE = 1e-5
NOTABLE = 0.01
"""Of the model's work: an operator that every rank computes whole is named from this share on."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is pinned. axis: of `Entry.axes`, the one that a model must offer."""

    constraints: Mapping[str, Any]
    axis: str = ""


PLANS: Mapping[str, Plan] = {
    "free": Plan({}),
    "dp2 x tp2 zero 3": Plan({"dp": 2, "tp": 2, "zero": 3}),
    "pp2": Plan({"pp": 2}),
    "ep2": Plan({"ep": 2}, axis="ep"),
    "ep2 x tp2 folded": Plan({"ep": 2, "tp": 2, "etp": 1}, axis="ep"),
    "cp2": Plan({"dp": 2, "cp": 2}, axis="cp"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one model under one plan.

    failure: the first line of an error, "" for a program that was right. seconds: of CPU, to build and to plan.
    """

    model: str
    plan: str
    mesh: str = ""
    error: float = math.nan
    dtype: str = "fp32"
    replicated: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    seconds: float = 0.0

    @property
    def replicated_text(self) -> str:
        """`aten.index.Tensor 3.1%` and so on, the largest first."""
        return ", ".join(f"{op} {share:.1%}" for op, share in self.replicated.items())


class OutOfTime(BaseException):
    """A model took longer to plan than it may. No `except Exception` of what is interrupted may take it for its own."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the main thread after so many CPU seconds of this process; 0 for no limit."""

    def stop(*_: Any) -> None:
        raise OutOfTime(f"not planned within {seconds:.0f} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def cases(models: list[str], plans: list[str]) -> Iterator[tuple[str, str]]:
    """(model, plan) where the model offers what the plan pins."""
    for model in models:
        for plan in plans:
            if PLANS[plan].axis in ("", *ZOO[model].axes):
                yield model, plan


def planned(example: Example, plan: Plan) -> CompiledProgram:
    """The example compiled under a plan's constraints, for SGD with momentum as the ranks run it."""
    return autopar.compile(
        example.model,
        IDEAL,
        example_inputs=example.inputs,
        loss_fn=example.loss_fn,
        constraints=dict(plan.constraints),
        optimizer=sgd_with_momentum,
    )


def replicated(compiled: CompiledProgram) -> dict[str, float]:
    """Operators that every rank computes whole -> their share of the forward's work, the largest first.

    Those without a rule, and those with at least NOTABLE of the work: flops of contractions, elements of all else.
    """
    best = compiled.best
    counts = {scope.name: scope.count for scope in scopes_of(best.graph)}
    whole: Counter[str] = Counter()
    unknown, total = set(), 0.0
    for key, operator in best.operators.items():
        work = _work(operator) * counts[operator.scope]
        total += work
        is_cut = any(label not in ("R", "Rp", "P") for label in best.assignment.operators[key].labels)
        if not operator.has_rule:
            unknown.add(operator.node.op)
        if not operator.has_rule or not is_cut:
            whole[operator.node.op] += work
    return {op: work / total for op, work in whole.most_common() if op in unknown or work >= NOTABLE * total}


def _work(operator: Operator) -> float:
    """Flops of a contraction, else the elements of the largest tensor that is read or made."""
    name, made = base_name(operator.node.op), operator.node.outputs
    if operator.has_rule and name in MATMULS | ATTENTION:
        return contraction_flops(operator)
    if not operator.has_rule and "mm" in name:  # rows times a matrix each, as in grouped_mm
        return 2.0 * operator.inputs[0].numel * made[0].shape[-1]
    return float(max((meta.numel for meta in (*operator.inputs, *made)), default=0))


def run(model: str, plan: str, pool: RankPool | None, seconds: float) -> Row:
    """One case; without a pool it is planned and not run."""
    started = time.process_time()
    found: dict[str, Any] = {}
    try:
        example = ZOO[model].build()
        with at_most(seconds):
            compiled = planned(example, PLANS[plan])
        found = {"mesh": compiled.plan.mesh_text, "replicated": replicated(compiled)}
        if pool is not None:
            found["error"] = pool.error(compiled, example)
            if not found["error"] <= TOLERANCE:
                example = in_fp64(example)
                found |= {"dtype": "fp64", "error": pool.error(planned(example, PLANS[plan]), example)}
            if not found["error"] <= TOLERANCE:
                found["failure"] = f"off by {found['error']:.1e}"
    except (Exception, OutOfTime) as error:
        found["failure"] = first_line(error)
    return Row(model=model, plan=plan, seconds=time.process_time() - started, **found)


def in_fp64(example: Example) -> Example:
    """The same example in double precision."""
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in example.inputs.items()}
    return replace(example, model=example.model.double(), inputs=inputs)


def first_line(error: BaseException) -> str:
    """The kind of an error and the line that says what it is: of a rank's traceback the last one, else the first."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if lines and lines[0].startswith("Traceback"):
        outer = max(i for i, line in enumerate(str(error).strip().splitlines()) if line and not line[0].isspace())
        return str(error).strip().splitlines()[outer][:200]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def show(row: Row) -> None:
    """One printed line."""
    outcome = (
        f"BAD {row.failure}"
        if row.failure
        else "ok " + (f" {row.error:.1e} {row.dtype}" if row.error == row.error else "")
    )
    whole = f"  whole on every rank: {row.replicated_text}" if row.replicated else ""
    print(f"{row.model:<20} {row.plan:<17} {row.mesh:<18} {outcome}{whole}  {row.seconds:.1f} s", flush=True)


def as_record(row: Row) -> dict[str, Any]:
    """A line of the CSV file."""
    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "family": ZOO[row.model].family,
        "model": row.model,
        "plan": row.plan,
        "mesh": row.mesh,
        "ok": not row.failure,
        "error": f"{row.error:.2e}",
        "dtype": row.dtype,
        "replicated": row.replicated_text,
        "failure": row.failure,
        "seconds": f"{row.seconds:.1f}",
    }


def summary(rows: list[Row]) -> str:
    """Per plan how many models there are and how many are right; then each failure with its models."""
    lines = []
    for plan in dict.fromkeys(row.plan for row in rows):
        mine = [row for row in rows if row.plan == plan]
        errors = [row.error for row in mine if not row.failure and row.error == row.error]
        worst = f", largest error {max(errors):.1e}" if errors else ""
        lines.append(f"{plan}: {sum(not row.failure for row in mine)} of {len(mine)} models{worst}")
    causes: dict[str, list[str]] = {}
    for row in rows:
        if row.failure:
            causes.setdefault(row.failure, []).append(f"{row.model} ({row.plan})")
    lines += [f"{len(names)} x {cause}: {', '.join(names)}" for cause, names in causes.items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ZOO), help="names of examples/zoo.py")
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--plan-only", action="store_true", help="compile, and start no processes")
    parser.add_argument("--seconds", type=float, default=60.0, help="of CPU that planning may take; 0 for no limit")
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    models, plans = options.only.split(","), options.plans.split(",")
    for chosen, known, what in ((models, ZOO, "model"), (plans, PLANS, "plan")):
        unknown = sorted(set(chosen) - set(known))
        if unknown:
            parser.error(f"no such {what}: {', '.join(unknown)}; there are {', '.join(known)}")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    pool = None if options.plan_only else RankPool(NUM_RANKS)
    rows = []
    try:
        for model, plan in cases(models, plans):
            rows.append(run(model, plan, pool, options.seconds))
            show(rows[-1])
            if options.csv:
                append([as_record(rows[-1])], RESULTS)
    finally:
        if pool is not None:
            pool.close()
    print("\n" + summary(rows))
    spent = os.times()
    print(f"{sum(spent[:4]) / max(1, len(rows)):.1f} CPU seconds per row")
    return 1 if any(row.error > TOLERANCE for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
