"""The predicted peak memory of each rank against the measured one.

    python -m benchmarks.memory [--only llama] [--csv]
    python -m benchmarks.memory --only " on " [--csv]        pipeline ranks that are not alike

Every pair of a model and a plan trains four steps on real gloo processes of this machine. After the first the bytes of
all tensor storages that are alive are followed operator by operator (autopar/costs/live_bytes.py): parameters,
gradients, optimiser state, saved activations, buffers and temporaries. The largest sum of a step is its peak, the
smallest of three steps the rank's: what gloo's threads let go late can only add. Of an offloaded optimiser the host's
tensors are taken off. A row per pipeline rank compares its prediction with its fullest rank.
Exits 1 where a prediction is under by more than 3 % or over by more than 10 %. `--csv` appends the rows to
benchmarks/results/memory.csv.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import autopar
from autopar.compiled import CompiledProgram
from autopar.costs.live_bytes import LiveBytes
from autopar.costs.rates import is_cpu
from autopar.ir.stage_mesh import first_ranks
from autopar.launch import run_ranks
from cost_models.machine import Cluster
from cost_models.mixed_cluster import MixedCluster
from examples.models import EXAMPLES
from tests.autopar.optimizer_factories import Lamb, muon_by_ndim

ROOT = Path(__file__).resolve().parent.parent
IDEAL = str(ROOT / "examples" / "clusters" / "ideal.toml")
RESULTS = ROOT / "benchmarks" / "results" / "memory.csv"
UNDER, OVER = 0.03, 0.10
SETTLE = 0.003
"""Seconds that a peak must last, in which gloo's threads let go of what they have finished."""
FIXED = ("parameters", "gradients", "optimizer state")
SIZES = {"layers": 4, "width": 128, "seq_len": 64, "vocab_size": 1024, "batch_size": 8}
OPTIMIZERS = {"LAMB": Lamb, "Muon": muon_by_ndim}
IMAGES = {"layers": 4, "width": 128, "image_height": 32, "image_width": 32, "batch_size": 8}


@dataclass(frozen=True, slots=True)
class Pair:
    """A model and a pinned plan. groups: ranks of each group of nodes, where there are several. fp8: as of compile.
    optimizer: by name of OPTIMIZERS, "" for the default."""

    model: str
    constraints: Mapping[str, Any]
    precision: str = "fp32"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[int, ...] = ()
    fp8: bool = False
    optimizer: str = ""

    @property
    def text(self) -> str:
        words = [f"{k}={v}" for k, v in (*self.constraints.items(), *self.sizes.items())]
        where = f" on {' + '.join(map(str, self.groups))}" if self.groups else ""
        words += ["" if self.precision == "fp32" else self.precision, "fp8" if self.fp8 else "", self.optimizer]
        return f"{self.model}{where}: {' '.join(filter(None, words))}"


@dataclass(frozen=True, slots=True)
class Row:
    """One pipeline rank: predicted bytes by kind, measured bytes at the peak of its fullest rank, and those that
    stay."""

    pipeline_rank: int
    predicted: Mapping[str, float]
    measured: float
    fixed: float

    @property
    def ratio(self) -> float:
        return sum(self.predicted.values()) / self.measured

    @property
    def is_good(self) -> bool:
        return 1 - UNDER <= self.ratio <= 1 + OVER


def pairs() -> Iterator[Pair]:
    """All of the table."""
    for zero in (0, 1, 2, 3):
        yield Pair("gpt2", {"dp": 4, "zero": zero})
        yield Pair("llama", {"dp": 2, "zero": zero, "micro_batches": 4})
    for model in ("gpt2", "llama", "bert", "nanogpt", "vit"):
        yield Pair(model, {"dp": 2, "zero": 0})
        yield Pair(model, {"tp": 2})
    yield Pair("llama", {"tp": 4})
    yield Pair("gpt2", {"dp": 2, "tp": 2, "zero": 3})
    yield Pair("llama", {"dp": 2, "zero": 2}, sizes={"layers": 8, "width": 256})
    for mode in ("none", "selective", "full"):
        yield Pair("gpt2", {"dp": 2, "zero": 0, "recompute": mode})
        yield Pair("llama", {"tp": 2, "recompute": mode})
    for schedule in ("1f1b", "gpipe", "zero-bubble"):
        yield Pair("gpt2", {"pp": 2, "schedule": schedule, "micro_batches": 4})
    for zero in (2, 3):  # the table of tokens is shared by both stages
        yield Pair("gpt2", {"pp": 2, "dp": 2, "zero": zero, "schedule": "1f1b", "micro_batches": 4})
        yield Pair("llama", {"pp": 4, "schedule": schedule, "micro_batches": 4})
    yield Pair("llama", {"pp": 2, "dp": 2, "zero": 1, "schedule": "1f1b", "micro_batches": 4})
    yield Pair("llama", {"pp": 2, "tp": 2, "recompute": "full", "schedule": "1f1b", "micro_batches": 4})
    yield Pair("llama", {"pp": 2, "schedule": "interleaved", "chunks": 2, "micro_batches": 4})
    yield Pair("llama", {"pp": 2, "schedule": "zero-bubble-v", "micro_batches": 4})
    for constraints in ({"dp": 2, "zero": 0}, {"tp": 2}, {"dp": 2, "tp": 2, "zero": 3}):
        yield Pair("mixtral", constraints)
    yield Pair("llama", {"dp": 2, "zero": 2, "offload": "optimizer"})
    yield Pair("gpt2", {"dp": 2, "zero": 0}, sizes={"dropout": 0.1})
    yield Pair("gpt2", {"dp": 2, "zero": 0, "recompute": "full"}, sizes={"dropout": 0.1})
    yield Pair("llama", {"dp": 2, "zero": 0}, "bf16")
    yield Pair("llama", {"dp": 2, "zero": 3}, "bf16")
    for model in ("gpt2", "llama"):
        for precision in ("fp32", "bf16"):
            yield Pair(model, {"dp": 2, "zero": 0}, precision, fp8=True)
        yield Pair(model, {"dp": 2, "zero": 2, "recompute": "selective"}, fp8=True)
    yield Pair("llama", {"tp": 2}, fp8=True)
    yield Pair("gpt2", {"pp": 2, "schedule": "zero-bubble", "micro_batches": 4}, fp8=True)
    for optimizer in OPTIMIZERS:
        for constraints in ({"dp": 4, "zero": 0}, {"dp": 4, "zero": 3}, {"dp": 2, "tp": 2, "zero": 1}):
            yield Pair("llama", constraints, optimizer=optimizer)
    pinned: dict[str, Any] = {"pp": 2, "schedule": "1f1b", "micro_batches": 4}
    yield Pair("llama", pinned | {"tp": 1, "zero": 2}, groups=(2, 1))
    yield Pair("gpt2", pinned | {"tp": 2, "recompute": "selective"}, groups=(4, 2))
    yield Pair("llama", pinned | {"tp": 1, "zero": 3}, groups=(1, 2))
    yield Pair("gpt2", pinned | {"tp": 1, "zero": 3}, groups=(1, 2))


def compile_pair(pair: Pair) -> tuple[CompiledProgram, dict[str, torch.Tensor]]:
    """The program, and its global batch."""
    example = EXAMPLES[pair.model](**{**(IMAGES if pair.model == "vit" else SIZES), **pair.sizes})
    num_ranks = math.prod(pair.constraints.get(axis, 1) for axis in ("pp", "dp", "cp", "tp"))
    ideal = Cluster.from_toml(IDEAL)
    assert is_cpu(ideal)
    groups = tuple(replace(ideal, devices_per_node=count) for count in pair.groups or (num_ranks,))
    cluster = MixedCluster.of(groups) if pair.groups else groups[0]
    compiled = autopar.compile(
        example.model,
        cluster,
        example_inputs=example.inputs,
        loss_fn=example.loss_fn,
        constraints=pair.constraints,
        precision=pair.precision,
        fp8=pair.fp8,
        optimizer=OPTIMIZERS.get(pair.optimizer),
    )
    return compiled, example.inputs


def measure(pair: Pair) -> list[Row]:
    """Train on real processes; a row per pipeline rank."""
    compiled, batch = compile_pair(pair)
    prediction = compiled.plan.prediction
    pipeline_ranks = prediction.pipeline_ranks or (prediction.num_bytes,)
    found = run_ranks(_peaks, (compiled, batch), compiled.plan.num_ranks)
    rows = []
    spans = zip(first_ranks(compiled.plan.stage_meshes), compiled.plan.stage_meshes, strict=True)
    for index, (predicted, (first, stage_mesh)) in enumerate(zip(pipeline_ranks, spans, strict=True)):
        own = found[first : first + stage_mesh.mesh.num_ranks]
        rows.append(Row(index, predicted, max(peak for peak, _ in own), max(fixed for _, fixed in own)))
    return rows


def _peaks(compiled: CompiledProgram, batch: dict[str, torch.Tensor]) -> tuple[int, int]:
    """On every rank: (bytes at a step's peak, bytes that stay between steps)."""
    live = LiveBytes(SETTLE)
    peaks = []
    with live:
        step = compiled.build()
        local = compiled.local_batch(batch)
        step(local)
        for _ in range(3):
            live.reset_peak()
            fixed = live.num_bytes
            step.forward_backward(local)
            peak = live.peak_bytes
            live.reset_peak()
            step.update()
            # The host's own temporaries are not the device's.
            peaks.append(peak if step.host_optimizer is not None else max(peak, live.peak_bytes))
    host = _host_bytes(step)
    return min(peaks) - host, fixed - host


def _host_bytes(step: Any) -> int:
    """Of an offloaded optimiser: masters, staging lines and state, each storage once."""
    if step.host_optimizer is None:
        return 0
    tensors = [bucket.master for bucket in step.buckets] + list(step.host_optimizer._lines)
    states = (value for state in step.optimizer.state.values() for value in state.values())
    tensors += [value for value in states if isinstance(value, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="pairs whose text contains this")
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    table: list[tuple[Pair, Row]] = []
    print(f"{'':4}{'pair':<78}{'pos':>4}{'predicted':>11}{'measured':>10}{'ratio':>7}   MB")
    for pair in (p for p in pairs() if options.only in p.text):
        for row in measure(pair):
            table.append((pair, row))
            kinds = row.predicted
            detail = "" if row.is_good else "; ".join(f"{k} {v / 1e6:.2f}" for k, v in kinds.items())
            fixed = sum(kinds[k] for k in FIXED)
            detail += "" if row.is_good else f"; stays {fixed / 1e6:.2f}, measured {row.fixed / 1e6:.2f}"
            print(
                f"{'ok ' if row.is_good else 'BAD'} {pair.text:<78}{row.pipeline_rank:>4}"
                f"{sum(kinds.values()) / 1e6:>11.2f}{row.measured / 1e6:>10.2f}{row.ratio:>7.3f}   {detail}",
                flush=True,
            )
    ratios = [row.ratio for _, row in table]
    failed = sum(not row.is_good for _, row in table)
    plans = len({pair.text for pair, _ in table})
    print(
        f"\n{plans} pairs, {len(table)} pipeline ranks, {failed} out of bounds; {min(ratios):.3f} to {max(ratios):.3f}"
    )
    if options.csv:
        _write(table)
    return 1 if failed else 0


def _write(table: list[tuple[Pair, Row]]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.writer(file)
        kinds = [*FIXED, "activations", "transient"]
        if is_new:
            writer.writerow(["date", "torch", "pair", "position", *kinds, "predicted", "measured", "stays", "ratio"])
        today = datetime.date.today().isoformat()
        for pair, row in table:
            figures = [round(row.predicted.get(kind, 0.0)) for kind in kinds]
            total = round(sum(row.predicted.values()))
            own = [row.pipeline_rank, *figures, total, round(row.measured), round(row.fixed), f"{row.ratio:.3f}"]
            writer.writerow([today, torch.__version__, pair.text, *own])


if __name__ == "__main__":
    sys.exit(main())
