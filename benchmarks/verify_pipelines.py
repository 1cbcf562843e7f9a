"""Pipelines of every kind on 4 and 8 gloo processes against the single-process model.

    python -m benchmarks.verify_pipelines [--models gpt2,llama] [--quick] [--only interleaved] [--csv]
    python -m benchmarks.verify_pipelines --only " on " [--csv]     pipeline ranks that are not alike

Pinned are the layout (pp2, pp4, pp2 x tp2, pp2 x dp2, and pp2 x dp2 x tp2 on eight processes with ZeRO 1, 2 and 3), the
schedule (all of autopar's), recomputation and where the optimiser's state lives. Cases "on 2 + 1" have pipeline ranks
that are not alike, on groups of so many processes that are planned as if each were half as fast as that before. Models
have three layers, four or eight, so that four pipeline ranks, and two stages per pipeline rank, have something to
compute. Three steps each of SGD with momentum, or AdamW; many cases with dropout and clipping. A case is good when
loss, gradients and parameters are within 1e-5 of single-process training (fp32; autopar/verify.py has the exceptions
for round-off) and the plan that was made is the one that was pinned. Prints a row per case; exits 1 if any is not good.
`--csv` appends the rows to benchmarks/results/verify_pipelines.csv.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.compiled import CompiledProgram
from autopar.verify import sgd_with_momentum, verify_program
from autopar.verify_report import VerifyReport
from cost_models.machine import Cluster
from cost_models.mixed_cluster import AnyCluster, MixedCluster
from cost_models.schedule import SCHEDULES
from examples.models import EXAMPLES

ROOT = Path(__file__).resolve().parent.parent
IDEAL = ROOT / "examples" / "clusters" / "ideal.toml"
RESULTS = ROOT / "benchmarks" / "results" / "verify_pipelines.csv"
TOLERANCE = 1e-5
MODELS = ("gpt2", "opt", "qwen2", "llama", "bert", "t5")
TWO_STAGES = tuple(name for name, schedule in SCHEDULES.items() if schedule.default_chunks == 2)
"""Schedules that give every pipeline rank two stages."""


@dataclass(frozen=True, slots=True)
class Case:
    """One verification. constraints: what is pinned. full: dropout and clipping. groups: processes of each group of
    nodes, where there are several."""

    model: str
    constraints: Mapping[str, Any]
    full: bool = False
    optimizer: str = "sgd"
    factory: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[int, ...] = ()

    @property
    def num_ranks(self) -> int:
        if self.groups:
            return sum(self.groups)
        pinned = self.constraints
        return math.prod(int(pinned.get(axis, 1)) for axis in ("pp", "ddp", "dp", "tp"))

    @property
    def text(self) -> str:
        pinned = " ".join(f"{key}={value}" for key, value in self.constraints.items())
        own = "".join(f" {key}={value}" for key, value in self.factory.items())
        where = f" on {' + '.join(map(str, self.groups))}" if self.groups else ""
        return f"{self.model}{own}{where}: {pinned}; {self.optimizer}" + ("; dropout, clipping" if self.full else "")

    @property
    def cluster(self) -> AnyCluster:
        return mixed_cluster(self.groups) if self.groups else cluster_of(self.num_ranks)


def _unlike(model: str, groups: tuple[int, ...], full: bool = False, layers: int = 3, **pinned: Any) -> Case:
    return Case(model, {"micro_batches": 2} | pinned, full, factory={"layers": layers}, groups=groups)


UNLIKE = (
    _unlike("llama", (2, 1), pp=2, tp=1, zero=1, schedule="1f1b"),
    _unlike("llama", (4, 2), pp=2, tp=2, schedule="1f1b"),
    _unlike("llama", (4, 2), True, pp=2, tp=1, zero=2, schedule="zero-bubble", recompute="full"),
    _unlike("llama", (2, 1), True, pp=2, tp=1, zero=3, recompute="selective"),
    _unlike("qwen2", (4, 2), True, pp=2, tp=2, zero=3, schedule="gpipe"),
    _unlike("gpt2", (4, 2), True, pp=2, tp=1, zero=2, schedule="1f1b"),
    _unlike("gpt2", (2, 1, 1), layers=4, pp=3, tp=1, zero=1, schedule="zero-bubble", micro_batches=4),
    _unlike("gpt2", (4, 2), pp=2, schedule="1f1b", micro_batches=4),
    _unlike("opt", (1, 2), True, pp=2, tp=1, zero=2, offload="optimizer"),
    _unlike("bert", (2, 1), True, pp=2, tp=1, zero=3, schedule="zero-bubble"),
    _unlike("t5", (2, 1), pp=2, tp=1, zero=1, schedule="1f1b"),
)
"""Pipeline ranks that are not alike: larger ones in one group than in the other."""


def cases(models: list[str], quick: bool) -> Iterator[Case]:
    """The matrix: every layout and schedule once per model, and the switches on the layouts that they bear on."""
    yield from (case for case in UNLIKE if case.model in models)
    for model in models:
        yield from _schedules(model, tuple(SCHEDULES) if not quick else ("1f1b", *TWO_STAGES))
        yield from _sharded(model, (1, 2, 3) if not quick else (3,))
        yield from _memory(model, quick)


def _schedules(model: str, schedules: tuple[str, ...]) -> Iterator[Case]:
    for number, schedule in enumerate(schedules):
        pinned: dict[str, Any] = {"schedule": schedule, "micro_batches": 4}
        if SCHEDULES[schedule].chooses_chunks:
            pinned["chunks"] = 2
        layers = {"layers": 8 if schedule in TWO_STAGES else 4}
        yield Case(model, {"pp": 4, "dp": 1, "tp": 1} | pinned, full=number % 2 == 0, factory=layers)
        yield Case(model, {"pp": 2, "dp": 1, "tp": 2} | pinned, full=number % 2 == 1, factory={"layers": 4})
        zero = {"zero": number % 4}
        yield Case(model, {"pp": 2, "dp": 2, "tp": 1} | zero | pinned, full=number % 2 == 0, factory={"layers": 4})
    yield Case(model, {"pp": 2, "dp": 1, "tp": 1, "micro_batches": 2}, factory={"layers": 4})


def _sharded(model: str, stages: tuple[int, ...]) -> Iterator[Case]:
    """Everything at once, on eight processes."""
    for zero in stages:
        for schedule in ("1f1b", "zero-bubble", "interleaved"):
            pinned: dict[str, Any] = {"pp": 2, "dp": 2, "tp": 2, "zero": zero, "schedule": schedule, "micro_batches": 4}
            if SCHEDULES[schedule].chooses_chunks:
                pinned["chunks"] = 2
            yield Case(model, pinned, full=zero != 2, factory={"layers": 4})


def _memory(model: str, quick: bool) -> Iterator[Case]:
    """Recomputation and offload, on pipelines and without."""
    pipeline = {"pp": 2, "dp": 2, "tp": 1, "zero": 2, "micro_batches": 2}
    for recompute in ("none", "selective", "full"):
        for schedule in ("1f1b", "zero-bubble"):
            pinned = pipeline | {"recompute": recompute, "schedule": schedule}
            yield Case(model, pinned, full=True, factory={"layers": 4})
    if not quick:
        for recompute in ("selective", "full"):
            plain = {"pp": 1, "dp": 2, "tp": 2, "zero": 3, "micro_batches": 2, "recompute": recompute}
            yield Case(model, plain, full=True, factory={"layers": 4})
    groups = {"pp": 2, "ddp": 2, "dp": 2, "tp": 1, "zero": 3, "micro_batches": 2}
    yield Case(model, groups, full=True, factory={"layers": 4})
    shards = {"pp": 2, "dp": 2, "tp": 1, "zero": 3, "micro_batches": 2, "offload": "parameters"}
    yield Case(model, shards, full=True, optimizer="adamw", factory={"layers": 4})
    held = pipeline | {"recompute": "offload", "schedule": "zero-bubble"}
    yield Case(model, held, full=True, factory={"layers": 4})
    for optimizer in ("sgd", "adamw"):
        pinned = pipeline | {"offload": "optimizer", "recompute": "full"}
        yield Case(model, pinned, full=optimizer == "sgd", optimizer=optimizer, factory={"layers": 4})


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """AdamW with an epsilon far above fp32's round-off in gradients, of which the usual 1e-8 makes whole steps.

    With that, four layers of GPT-2 on plain dp4 are off by 1e-4 of single-process training after three steps, and
    single-process training by as much of fp64.
    """
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4, weight_decay=0.1)


def compiled(case: Case, cluster: AnyCluster) -> tuple[CompiledProgram, dict[str, torch.Tensor]]:
    """The program of a case and its batch."""
    example = EXAMPLES[case.model](dropout=0.1 if case.full else 0.0, batch_size=8, **case.factory)
    program = autopar.compile(
        example.model,
        cluster,
        example_inputs=example.inputs,
        loss_fn=example.loss_fn,
        optimizer=adamw if case.optimizer == "adamw" else sgd_with_momentum,
        constraints=case.constraints,
    )
    return program, example.inputs


def not_as_pinned(case: Case, program: CompiledProgram) -> str:
    """What of the plan is not what was pinned; "" where all is."""
    plan, pinned = program.plan, case.constraints
    modes = {
        mode for stage in plan.pipeline.stages for runs in stage.recompute.values() for mode, number in runs if number
    } or {"none"}
    stage_meshes = plan.stage_meshes
    found = {
        "pp": plan.pipeline.num_pipeline_ranks,
        "ddp": plan.mesh.size("ddp"),
        "dp": plan.mesh.size("dp"),
        "tp": max(stage_mesh.mesh.size("tp") for stage_mesh in stage_meshes),
        "micro_batches": plan.num_micro_batches,
        "schedule": plan.pipeline.schedule,
        "chunks": plan.pipeline.num_chunks,
        "recompute": ", ".join(sorted(modes)),
        "offload": plan.pipeline.offload,
    }
    wrong = [f"{key} is {found[key]}" for key in found.keys() & pinned.keys() if found[key] != pinned[key]]
    zeros = {s.zero for scope in plan.scopes.values() for s in scope.parameters.values()}
    if "zero" in pinned and max(zeros) != pinned["zero"]:
        wrong.append(f"zero is {max(zeros)}")
    if case.groups and len({stage_mesh.mesh for stage_mesh in stage_meshes}) == 1:
        wrong.append(f"all pipeline ranks are {stage_meshes[0].mesh}")
    return "; ".join(sorted(wrong))


def run(case: Case, cluster: AnyCluster) -> tuple[str, VerifyReport | None]:
    """(what is wrong, the errors); a plan that is not as pinned is not run."""
    program, inputs = compiled(case, cluster)
    wrong = not_as_pinned(case, program)
    if wrong:
        return wrong, None
    report = verify_program(program, inputs, max_grad_norm=0.5 if case.full else None)
    return "" if report.ok(TOLERANCE) else "beyond the tolerance", report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--only", default="", help="cases whose text contains this")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows: list[list[Any]] = []
    chosen = [c for c in cases(options.models.split(","), options.quick) if options.only in c.text]
    for case in chosen:
        started = time.perf_counter()
        try:
            wrong, report = run(case, case.cluster)
        except Exception as error:  # one row; the others must still run
            wrong, report = f"{type(error).__name__}: {str(error)[-300:]}", None
        errors = (report.loss, report.largest_gradient, report.largest_parameter) if report else (float("nan"),) * 3
        own = [report.floors[n] for n, e in report.parameters.items() if e > TOLERANCE] if report else []
        floor = max(own, default=0.0)
        rows.append([case.text, case.num_ranks, not wrong, *(f"{e:.2e}" for e in errors), f"{floor:.2e}", wrong])
        print(
            f"{'BAD' if wrong else 'ok '} {case.text:<100} loss {errors[0]:.1e} gradient {errors[1]:.1e} "
            f"parameter {errors[2]:.1e}  {time.perf_counter() - started:.1f} s" + (f"\n    {wrong}" if wrong else ""),
            flush=True,
        )
    failed = sum(not row[2] for row in rows)
    worst = [max((float(r[i]) for r in rows if r[i] != "nan"), default=0.0) for i in (3, 4, 5)]
    print(
        f"\n{len(rows)} cases, {failed} not good; "
        f"worst loss {worst[0]:.2e}, gradient {worst[1]:.2e}, parameter {worst[2]:.2e}"
    )
    if options.csv:
        _write(rows)
    return 1 if failed else 0


def cluster_of(num_ranks: int) -> Cluster:
    """The cluster on which sharding always pays, with this many devices."""
    return replace(Cluster.from_toml(IDEAL), devices_per_node=num_ranks)


def mixed_cluster(groups: tuple[int, ...]) -> MixedCluster:
    """Groups of so many devices of that cluster, each half as fast as the last."""
    found = []
    for number, count in enumerate(groups):
        whole = cluster_of(count)
        peaks = {dtype: peak / 2**number for dtype, peak in whole.device.peak_flops_per_second.items()}
        found.append(replace(whole, device=replace(whole.device, peak_flops_per_second=peaks)))
    return MixedCluster.of(tuple(found))


def _write(rows: list[list[Any]]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            head = ["date", "torch", "case", "processes", "ok", "loss_error", "gradient_error", "parameter_error"]
            writer.writerow([*head, "reference_error", "note"])
        for row in rows:
            writer.writerow([datetime.date.today().isoformat(), torch.__version__, *row])


if __name__ == "__main__":
    sys.exit(main())
